"The same training by other ways than the notebook: torchrun, accelerate launch, several nodes."
import os
import subprocess
import sys

import pytest

import warm
from anchor_nb.core.recipe import Stage1
from anchor_nb.core.settings import as_yaml
from anchor_nb.runs.manifest import read_manifest
from anchor_nb.training.trainer import train
from common import recipe, rows

MODULE = ["-m", "anchor_nb.experiments.torchrun", "stage1", "-f"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
              "--main_process_port=0", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def settings(out, **changes): return recipe(Stage1, out, steps=6, precision="fp64", save_steps=0, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")/"run"
    train(settings(out))
    return rows(out)


def arguments(tmp_path, **changes):
    (tmp_path/"recipe.yaml").write_text(as_yaml(settings(tmp_path/"run", **changes)))
    return [*MODULE, str(tmp_path/"recipe.yaml")]


def assert_same(found, expected):
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-9)


@pytest.mark.parametrize("launcher", [pytest.param(TORCHRUN, id="torchrun"), pytest.param(ACCELERATE, id="accelerate",
                                                                                          marks=pytest.mark.soak)])
def test_under_another_launcher(launcher, alone, tmp_path):
    done = subprocess.run([*launcher, *arguments(tmp_path)], capture_output=True, text=True, timeout=200)
    assert "stage1: 6 steps in 2 processes" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("stage1: 6 steps") == 1
    assert_same(rows(tmp_path/"run"), alone)
    assert read_manifest(tmp_path/"run")["status"] == "complete"


def node(tmp_path, rank, port, **changes):
    where = dict(os.environ, NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return warm.Popen([sys.executable, *arguments(tmp_path, **changes)], env=where, stdout=warm.PIPE, stderr=warm.PIPE,
                      text=True)


def free_port():
    import socket
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def test_two_nodes(alone, tmp_path):
    "Two nodes on the loopback, one process each, in one run folder."
    port = free_port()
    nodes = [node(tmp_path, rank, port) for rank in (1, 0)]
    said = [one.communicate(timeout=200) for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], said
    assert "6 steps in 2 processes" in said[1][0] and "steps" not in said[0][0].partition("micro-batch")[2]
    assert_same(rows(tmp_path/"run"), alone)
    assert read_manifest(tmp_path/"run")["status"] == "complete"
    assert not list((tmp_path/"run").glob("launch*"))


def test_what_is_wrong_is_in_the_last_two_lines(tmp_path, capsys):
    from anchor_nb.experiments.torchrun import main
    (tmp_path/"bad.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    with pytest.raises(SystemExit) as ended: main(arguments(tmp_path, data=str(tmp_path/"bad.jsonl"))[2:])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-2].startswith("anchor_nb.experiments.torchrun: global_batch=8 is "
                                                               "larger than bad (1 rows)")


def test_a_failure_is_on_record(tmp_path, monkeypatch):
    from anchor_nb.experiments.torchrun import main
    from anchor_nb.training.steps import ReconstructionStep
    def break_down(*args):
        raise RuntimeError("the disk has gone")
    monkeypatch.setattr(ReconstructionStep, "run", break_down)
    with pytest.raises(SystemExit): main(arguments(tmp_path)[2:])
    manifest = read_manifest(tmp_path/"run")
    assert (manifest["status"], manifest["failures"][0]["reason"]) == ("failed", "RuntimeError: the disk has gone")
