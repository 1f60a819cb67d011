"""The launcher where a notebook cell cannot show it: dying parents, spawned processes, other launchers, papermill."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook
import nbformat

from anchor_nb.runs import launch as launching
from anchor_nb.runs.launch import LaunchError, first_failure, launch
from anchor_nb.experiments.stages import StageError, run_stage

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def sum_of_ranks(start):
    "What each rank adds to."
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([float(start + accelerator.process_index)]), "sum").item()
    return dict(total=total, precision=accelerator.mixed_precision, threads=torch.get_num_threads())


def fail_on(rank):
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"row 7 is bad, says {rank}")
    time.sleep(60)


def alive(pid):
    "Is a process there, and no zombie?"
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError): return False


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)


def test_spawned_processes_give_the_same_as_forked_ones(tmp_path, monkeypatch):
    results = {}
    for method in ("spawn", "fork"):
        monkeypatch.setattr(launching, "choose_start", lambda *_: method)
        results[method] = launch(sum_of_ranks, 5, processes=2, run_dir=tmp_path)
    assert [result["total"] for result in results.values()] == [11.0, 11.0]
    assert results["fork"]["threads"] == 1, "more would hang after a fork"
    assert not (tmp_path/".launch").exists()


def test_a_folder_named_launch_is_left_alone(tmp_path):
    (tmp_path/"launch").mkdir()
    (tmp_path/"launch"/"notes.txt").write_text("mine")
    assert launch(sum_of_ranks, 5, processes=2, run_dir=tmp_path)["total"] == 11.0
    assert [path.name for path in tmp_path.rglob("*")] == ["launch", "notes.txt"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failing_rank_is_named_and_the_others_are_ended(tmp_path, rank):
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=f"rank {rank} failed first: ValueError: row 7 is bad, says {rank}") as caught:
        launch(fail_on, rank, processes=2, run_dir=tmp_path)
    assert time.monotonic() - begin < 40
    assert "in fail_on" in str(caught.value)
    assert first_failure(tmp_path/".launch").rank == rank


def who_is_there(folder): return sorted(path.name for path in Path(folder, ".launch").glob("started-*"))


def test_no_rank_goes_on_before_all_have_started(tmp_path):
    "Or its first connection meets a fork, and a lock of the C library is copied held."
    assert launch(who_is_there, str(tmp_path), processes=3, run_dir=tmp_path) == ["started-0", "started-1", "started-2"]


def needs_less(folder):
    note = Path(folder)/"micro_tokens.json"
    if note.exists(): return note.read_text()
    if os.environ["RANK"] == "0": time.sleep(60)
    note.write_text("150")
    raise MemoryError("out of memory with 300 tokens")


def test_ranks_that_lack_memory_are_started_once_more(tmp_path, capsys):
    assert launch(needs_less, str(tmp_path), processes=2, run_dir=tmp_path) == "150"
    assert ((("rank 1 failed first: MemoryError: out of memory with 300 tokens\nstarted once more with half the "
              "tokens" in capsys.readouterr().out)))


SLEEPERS = """
import os, sys, time
from pathlib import Path
from anchor_nb.runs.launch import launch

def sleep(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(120)

launch(sleep, sys.argv[1], processes=2, run_dir=sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tie to the parent is Linux's")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
def test_no_process_outlives_its_kernel(tmp_path, how):
    parent = subprocess.Popen([sys.executable, "-c", SLEEPERS, tmp_path], stderr=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL)
    pids = lambda: [int(path.read_text() or 0) for path in (tmp_path/"0", tmp_path/"1") if path.exists()]
    wait_for(lambda: len(pids()) == 2 and all(pids()))
    assert all(map(alive, pids()))
    parent.send_signal(how)
    parent.wait(60)
    wait_for(lambda: not any(map(alive, pids())))


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from anchor_nb.runs.launch import launch
from test_launch import sum_of_ranks
result = launch(sum_of_ranks, 10, processes=7, run_dir=sys.argv[2])
if result["total"] == 21.0: print("sum 21.0\\n", end="", flush=True)
"""


def test_the_same_call_runs_under_torchrun(tmp_path):
    script = tmp_path/"script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0"]
    result = subprocess.run([*torchrun, script, HERE, tmp_path], capture_output=True, text=True, timeout=120)
    assert result.stdout.count("sum 21.0") == 2, result.stderr[-2000:]


def test_two_runs_at_once_do_not_collide(tmp_path):
    import warm  # here, since the scripts import this file from elsewhere
    code = SCRIPT.replace("processes=7", "processes=2")
    runs = [warm.Popen([sys.executable, "-c", code, HERE, tmp_path/str(i)], stdout=warm.PIPE, text=True)
            for i in range(2)]
    assert all("sum 21.0" in run.communicate(timeout=120)[0] for run in runs)


CELL = """
import torch
torch.randn(400, 400) @ torch.randn(400, 400)
from anchor_nb.runs.launch import launch

def rank_and_more(fail):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    if fail and accelerator.process_index == 1: raise ValueError("no such dataset")
    return accelerator.num_processes

one = launch(rank_and_more, False, processes=1, run_dir=out)
print("processes", one, launch(rank_and_more, fail, processes=2, run_dir=out))
"""


@pytest.mark.parametrize("fail", [False, True])
def test_in_a_kernel_under_papermill(tmp_path, fail):
    notebook = new_notebook(metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")),
                            cells=[
        new_code_cell('out: str = ""  # folder\nfail: bool = False  # whether', metadata=dict(tags=["parameters"])),
                                new_code_cell(CELL)])
    nbformat.write(notebook, tmp_path/"two.ipynb")
    if fail:
        with pytest.raises(StageError, match="two failed: rank 1 failed first: ValueError: no such dataset\n"
                                             "the notebook"):
            run_stage(tmp_path/"two.ipynb", dict(out=str(tmp_path/"run"), fail=True), log=False)
    else:
        executed = run_stage(tmp_path/"two.ipynb", dict(out=str(tmp_path/"run")), log=False)
        assert "processes 1 2" in executed.read_text()
