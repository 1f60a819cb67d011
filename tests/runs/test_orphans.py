"""Kernels, notebooks and commands that are interrupted, killed or told to stop: nothing of theirs is left running, and
what they say is the cause."""
import os
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbformat.v4 import new_code_cell, new_notebook

from anchor_nb.runs.launch import LaunchError, environment, launch
from anchor_nb.runs.checkpoints import checkpoints, number_of
from anchor_nb.core.recipe import Stage1
from anchor_nb.core.settings import as_yaml
from common import recipe, rows
from soak import count, gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tie to the parent is Linux's")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def wait_for(what, seconds=90):
    "What a function returns as soon as it is true."
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "took too long"
        time.sleep(0.02)
    return found


def family(pid): return psutil.Process(pid).children(recursive=True)


def partner_of_a_dead_rank():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1: os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()


def test_a_killed_rank_is_named_although_its_partner_complains_too(tmp_path):
    before = set(family(os.getpid()))
    with pytest.raises(LaunchError, match="rank 1 failed first: was ended by SIGKILL; the system does that when memory "
                                          "runs out"):
        launch(partner_of_a_dead_rank, processes=2, run_dir=tmp_path)
    gone(set(family(os.getpid())) - before)


def test_a_port_in_use_is_named(tmp_path):
    import socket
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with environment(nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port), pytest.raises(
                OSError, match=f"MASTER_PORT={port} cannot be used here: Address already in use; another launch may "
                               "have it, set another one on all nodes"):
            launch(partner_of_a_dead_rank, processes=2, run_dir=tmp_path)


SLEEPERS = """
import os, signal, time
from pathlib import Path
from anchor_nb.runs.launch import launch

def sleep():
    Path(out, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(120)

def rank(): return int(os.environ["WORLD_SIZE"])

def train():
    from anchor_nb.runs.fault_tolerance import Stopping, listening
    with listening(stopping := Stopping()):
        Path(out, os.environ["RANK"]).write_text(str(os.getpid()))
        while not stopping.signal: time.sleep(0.01)
        time.sleep(0.5) # the step goes on, and the launcher's echo of the signal comes
        stopping.stopped = "stopped by SIGINT after step 5"
"""


def ranks_in(folder):
    "Both ranks, once they sleep."
    pids = wait_for(lambda: [file.read_text() for file in (folder/"0", folder/"1") if file.exists()
                             and file.read_text()] if (folder/"1").exists() and (folder/"0").exists() else None)
    found = [psutil.Process(int(pid)) for pid in pids]
    for file in (folder/"0", folder/"1"): file.unlink()
    return found


def test_a_kernel_is_interrupted_and_works_on_and_is_killed(tmp_path):
    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--log-level=ERROR"])
    try:
        def run(code): return client.execute_interactive(code, timeout=90, output_hook=lambda message: None)["content"]
        assert run(f"out = {str(tmp_path)!r}\n{SLEEPERS}")["status"] == "ok"
        # or the kernel, stopped by an error, refuses what comes in the next moment
        client.execute("launch(sleep, processes=2, run_dir=out)", stop_on_error=False)
        ranks = ranks_in(tmp_path)
        manager.interrupt_kernel()
        gone(ranks, 20)
        reply = wait_for(lambda: client.get_shell_msg(timeout=30))["content"]
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
        client.execute("launch(train, processes=2, run_dir=out)", stop_on_error=False)
        ranks = ranks_in(tmp_path)
        manager.interrupt_kernel()
        reply = wait_for(lambda: client.get_shell_msg(timeout=30))["content"]
        assert (reply["ename"], reply["evalue"]) == ("Stopped", "stopped by SIGINT after step 5")
        gone(ranks, 20)
        assert run("assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL; assert launch(rank, processes=2, "
                   "run_dir=out) == 2")["status"] == "ok"
        client.execute("launch(sleep, processes=2, run_dir=out)")
        ranks = ranks_in(tmp_path)
        manager.signal_kernel(signal.SIGKILL) # to the group, as Jupyter does
        gone(ranks, 10)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def sleeping_notebook(folder):
    notebook = new_notebook(metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")),
                            cells=[
        new_code_cell('out: str = ""  # folder', metadata=dict(tags=["parameters"])),
                                new_code_cell(SLEEPERS + "launch(sleep, processes=2, run_dir=out)")])
    nbformat.write(notebook, folder/"sleeping.ipynb")
    return folder/"sleeping.ipynb"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_papermill_is_killed(how, tmp_path):
    "papermill itself, without our command around it."
    command = [sys.executable, "-m", "papermill", sleeping_notebook(tmp_path), tmp_path/"out.ipynb", "-p", "out",
               tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks_in(tmp_path)
    everyone = family(process.pid)
    assert len(everyone) >= 3
    process.send_signal(how)
    gone(everyone, 40)
    process.wait(40)
    assert process.returncode


def test_ctrl_c_on_the_command(tmp_path):
    "`anchor-nb stage1` with two ranks: they write a checkpoint of their last step, and the command says so."
    out = tmp_path/"run"
    (tmp_path/"recipe.yaml").write_text(as_yaml(recipe(Stage1, out, steps=5000, processes=2, save_steps=1000)))
    process = subprocess.Popen([sys.executable, "-c", "from anchor_nb.cli.main import main; main()", "stage1", "-f",
                                tmp_path/"recipe.yaml", "--quiet"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: count(out) > 2)
    everyone = family(process.pid)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=90)[1]
    gone(everyone, 20)
    last = rows(out)[-1]["step"]
    assert process.returncode == 130, said
    assert f"stopped by SIGINT after step {last} of 5000, with a checkpoint\nrun the same command to resume" in said
    assert number_of(checkpoints(out)[-1]) == last
