"""The commands of "Five thousand pairs, one hour", as they are typed there, on a table of seconds.

What is added to a command makes it small: a model drawn at random, few steps, and BM25 in the place of MiniLM, which
takes a package registry.
"""
import csv
import json
import re
import shlex
import sys

import pytest

import warm
from anchor_nb.experiments.hello import documentation
from conftest import ROOT

PAGE = ROOT/"nbs/tutorials/five_thousand.ipynb"
SMALL = {"stage2": "--model tiny --steps 4 --global-batch 8", "evaluate": "--yardsticks bm25"}


def commands() -> list:
    "The `anchor-nb` lines of the page's shell blocks, in their order."
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("anchor-nb ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with glossary.csv, and the test set without which the search would have nothing to read."
    folder = tmp_path_factory.mktemp("five_thousand")
    with open(folder/"glossary.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("question", "article"))
        table.writerows((f"What is {name}?", text) for name, text in list(documentation().items())[:200])
    return folder


@pytest.mark.parametrize("command", [line for line in commands() if "anchor-nb serve" not in line])
def test_every_command_of_the_page_works_as_typed(place, command):
    words = shlex.split(command.replace(" minilm ", " bm25 "))
    done = warm.run([sys.executable.replace("python3", "python"), "-c", warm.MAIN, *words[1:],
                     *shlex.split(SMALL.get(words[1], ""))], capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr


def test_the_page_has_its_commands():
    assert [line.split()[1] for line in commands()] == ["check", "split", "stage2", "evaluate", "compare", "search",
                                                        "export", "serve"]
