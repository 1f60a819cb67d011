"""The command line as a shell sees it: help by task, completion, exit codes."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("anchor-nb")


def shell(*words, **environment):
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, env={**os.environ, **environment},
                          timeout=120)


def completed(words, shell_name="bash"):
    "What a shell is offered behind these words, the last of which is being typed."
    found = shell(_ANCHOR_NB_COMPLETE=f"complete_{shell_name}", COMP_WORDS=" ".join(words),
                  COMP_CWORD=str(len(words) - 1))
    return found.stdout.split()


def test_help_names_every_kind_of_work_and_the_exit_codes():
    shown = shell("--help").stdout
    panels = ["Start here:", "Texts and pairs:", "Train:", "Score and look inside:", "Use a model:",
              "Plan, measure, scale:"]
    places = [shown.index(panel) for panel in panels]
    assert places == sorted(places) and "Exit codes: 0 done" in shown
    assert "..." not in shown[places[0]:], "no description is cut"


@pytest.mark.parametrize("words, expected", [
    (["anchor-nb", "eva"], "evaluate"),
    (["anchor-nb", "stage1", "--preset", "smo"], "smoke"),
    (["anchor-nb", "recipe", "llm"], "llm2vec"),
    (["anchor-nb", "stage1", "--alph"], "--alpha"),
    (["anchor-nb", "stage1", "--dr"], "--dry-run"),
])
def test_a_shell_completes_commands_options_and_our_own_names(words, expected):
    assert expected in completed(words)


@pytest.mark.parametrize("words, code", [(["--version"], 0), (["stage1", "-p", "alpha=2"], 1), (["stage7"], 2),
                                         (["stage1", "--no-such-option"], 2), ([], 2)])
def test_exit_codes(words, code):
    found = shell(*words)
    assert found.returncode == code and "Traceback" not in found.stderr
