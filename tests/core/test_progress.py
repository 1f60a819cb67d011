"""Bars as real front ends see them: a kernel with a person, papermill, a terminal, a log, several processes."""
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

LOOP = """
import time
from anchor_nb.core.progress import kind, progress
print(kind())
for _ in progress(range(4), "encode", unit="text"): time.sleep(0.3)
"""
RANKS = """
import time
from anchor_nb.runs.launch import environment, launch
from anchor_nb.core.progress import progress

def train():
    with progress(total=6, desc="Stage1") as bar:
        for step in range(6):
            time.sleep(0.02)
            bar.set_postfix_str("loss " + str(step), refresh=False)
            bar.update()
    return type(bar).__name__

with environment(accelerate_use_cpu=1): print(launch(train, processes=2, run_dir={folder!r}))
"""


def quiet_environment(**variables):
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "ANCHOR_NB_PROGRESS")} | variables


@pytest.fixture(scope="module")
def kernel():
    "A kernel, asked as JupyterLab asks it or as a batch does."
    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                                       env=quiet_environment(OMP_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1"))

    def ask(code, person):
        messages = []
        client.allow_stdin = person
        client.execute_interactive(code, timeout=120, output_hook=messages.append, stdin_hook=lambda _: None)
        return messages

    yield ask
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def printed(messages, stream):
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream"
                   and m["content"]["name"] == stream)


def bar_values(messages):
    "The values that a progress widget went through."
    states = [m["content"]["data"].get("state", {}) for m in messages if m["msg_type"] in ("comm_open", "comm_msg")]
    return [state["value"] for state in states if isinstance(state.get("value"), (int, float))]


def texts(messages):
    states = [m["content"]["data"].get("state", {}) for m in messages if m["msg_type"] in ("comm_open", "comm_msg")]
    return " ".join(state["value"] for state in states if isinstance(state.get("value"), str)).replace("\u2007", " ")


def views(messages):
    return [m for m in messages if m["msg_type"] == "display_data"
            and "application/vnd.jupyter.widget-view+json" in m["content"]["data"]]


def test_a_person_sees_a_widget_that_moves(kernel):
    messages = kernel(LOOP, person=True)
    assert printed(messages, "stdout") == "bar\n" and printed(messages, "stderr") == ""
    assert len(views(messages)) == 1
    values = bar_values(messages)
    assert values == sorted(values) and len(set(values)) > 2 and values[-1] == 4, values
    assert "encode: 100%" in texts(messages) and "4/4" in texts(messages)


def test_a_batch_gets_lines_from_the_same_kernel(kernel):
    messages = kernel(LOOP, person=False)
    assert printed(messages, "stdout") == "lines\n" and not views(messages)
    line, = printed(messages, "stderr").splitlines()
    assert line.startswith("encode: 4/4 texts (100%)") and "\r" not in line


@pytest.mark.parametrize("person", [True, False])
def test_processes_that_a_notebook_launches_write_lines(kernel, person, tmp_path):
    messages = kernel(RANKS.format(folder=str(tmp_path)), person=person)
    assert printed(messages, "stdout") == "Lines\n" and not views(messages)
    assert printed(messages, "stderr").count("Stage1: 6/6 steps (100%)") == 1, "one process of two writes"


@pytest.mark.parametrize("way", ["papermill", "nbconvert"])
def test_notebooks_that_run_in_a_batch_hold_lines(way, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LOOP)],
                                        metadata=dict(kernelspec=dict(name="python3", display_name="python3",
                                                                      language="python")))
    nbformat.write(notebook, tmp_path/"in.ipynb")
    words = dict(papermill=["-m", "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar"],
                 nbconvert=["-m", "nbconvert", "--to", "notebook", "--execute", "in.ipynb", "--output",
                            "out.ipynb"])[way]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True,
                   env=quiet_environment(JPY_SESSION_NAME="a/notebook.ipynb", PYDEVD_DISABLE_FILE_VALIDATION="1"),
                   timeout=120)
    outputs = nbformat.read(tmp_path/"out.ipynb", 4).cells[0].outputs
    assert "widget" not in json.dumps(outputs)
    streams = {name: "".join(output["text"] for output in outputs if output.get("name") == name) for name in ("stdout",
                                                                                                              "stderr")}
    assert (streams["stdout"] == "lines\n" and "encode: 4/4 texts (100%)" in streams["stderr"]
            and "\r" not in streams["stderr"])


def in_a_process(stderr, **variables):
    return subprocess.run([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=stderr,
                          env=quiet_environment(**variables), text=True, timeout=60)


def test_a_log_gets_a_line(tmp_path):
    with open(tmp_path/"log", "w") as log: assert in_a_process(log).stdout == "lines\n"
    assert (tmp_path/"log").read_text().startswith("encode: 4/4 texts (100%)")
    assert len((tmp_path/"log").read_text().splitlines()) == 1


def in_a_terminal(columns):
    "What appears in a terminal of this width; 0: it does not say."
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kind = in_a_process(theirs).stdout.strip()
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    return kind, shown


def test_a_terminal_gets_a_bar_that_is_drawn_over():
    kind, shown = in_a_terminal(80)
    assert kind == "bar" and shown.replace("\r\n", "").count("\r") > 3 and "encode: 100%" in shown and "4/4" in shown
    kind, shown = in_a_terminal(0)
    assert kind == "lines" and shown.startswith("encode: 4/4 texts (100%)"), "tqdm would write nothing"


@pytest.mark.parametrize("variables", [dict(RANK="1"), dict(ANCHOR_NB_PROGRESS="off")])
def test_silence(variables):
    found = in_a_process(subprocess.PIPE, **variables)
    assert (found.stdout, found.stderr) == ("off\n", "")


def test_training_draws_through_this_one_function():
    "No other module of the package imports tqdm."
    import anchor_nb
    modules = Path(anchor_nb.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if "import tqdm" in path.read_text(encoding="utf-8")] == ["progress.py"]
