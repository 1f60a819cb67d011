"""Faults injected into training: each stops it with a plain word, and the same command afterwards ends where a run
without faults ends."""
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import soak
from anchor_nb.runs.fault_tolerance import NotFinite, Stopped
from anchor_nb.runs.launch import launch
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.runs.checkpoints import checkpoints
from anchor_nb.losses.carry import Carried
from anchor_nb.training import callbacks, trainer
from anchor_nb.training.steps import ReconstructionStep
from anchor_nb.training.inputs import check_inputs
from anchor_nb.training.trainer import AnchorTrainer, train
from common import recipe, rows

USUAL = dict(steps=10, save_steps=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The run that nothing happens to."
    out = tmp_path_factory.mktemp("whole")/"run"
    train(recipe(Stage1, out, **USUAL))
    return out


@pytest.fixture
def settings(tmp_path): return recipe(Stage1, tmp_path/"run", **USUAL)


@contextmanager
def before_each_step(what):
    "In the block, `what(trainer, step)` is called before each step is computed."
    usual = AnchorTrainer.training_step
    def training_step(self, *args, **kwargs):
        what(self, self.state.global_step + 1)
        return usual(self, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnchorTrainer, "training_step", training_step)
        yield


def at_step(number, what): return before_each_step(lambda trainer, step: what(trainer) if step == number else None)


def fail(*anything):
    raise RuntimeError("pulled the plug")


def assert_goes_on(settings, whole, step):
    "The same call again starts at this step and ends as the other run, bit for bit."
    taken = []
    with before_each_step(lambda trainer, step: taken.append(step)): train(settings)
    assert taken == list(range(step, settings.steps + 1))
    assert rows(settings.out) == rows(whole)
    assert soak.differences(Path(settings.out), whole) == (0, 0)


# ---- numbers ----

def poison_weights(trainer):
    for weight in trainer.model.parameters(): weight.data.fill_(float("nan"))


def poison_gradient(trainer):
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient*float("inf"))


@pytest.mark.parametrize("what, name", [(poison_weights, "loss is nan"), (poison_gradient, "norm of the gradient is")])
def test_not_a_number_names_its_rows_and_keeps_the_good_checkpoint(what, name, settings, whole):
    with at_step(6, what), pytest.raises(NotFinite, match=f"the {name}.* in step 6, whose batch is 8 rows of toy: "
                                                          ".*lower learning_rate"):
        train(settings)
    batch = check_inputs(settings).batches(5)
    assert json.loads(Path(settings.out, "not_finite.json").read_text())["rows"] == batch.rows.tolist()
    assert [c.name for c in checkpoints(settings.out)] == ["checkpoint-2", "checkpoint-4"]
    assert len(rows(settings.out)) == 5, "no row of the step that failed"
    assert_goes_on(settings, whole, 5)


# ---- files ----

def shorten(file): os.truncate(file, file.stat().st_size//2)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content)//2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage, name", [(flip, "model.safetensors"), (Path.unlink, "files.json")])
def test_a_damaged_checkpoint_is_named_and_left_aside(damage, name, settings, whole):
    with at_step(8, fail), pytest.raises(RuntimeError, match="plug"): train(settings)
    damage(checkpoints(settings.out)[-1]/name)
    with pytest.warns(UserWarning, match=f"checkpoint-6 is damaged and is left aside.*{name}"):
        assert_goes_on(settings, whole, 5)


def test_without_a_good_checkpoint_the_run_starts_over(settings, whole):
    with at_step(8, fail), pytest.raises(RuntimeError, match="plug"): train(settings)
    for folder in checkpoints(settings.out): flip(folder/"optimizer.pt")
    with pytest.warns(UserWarning) as said: assert_goes_on(settings, whole, 1)
    assert {name for name in ("checkpoint-4", "checkpoint-6") if any(name in str(one.message)
                                                                     for one in said)} == {"checkpoint-4",
                                                                                           "checkpoint-6"}


@pytest.mark.parametrize("damage", [shorten, flip])
def test_a_damaged_arrow_cache_is_built_anew(damage, settings, whole, tmp_path, monkeypatch):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path/"cache")
    table = next(iter(check_inputs(settings).tables.values()))
    damage(Path(table.cache_files[0]["filename"]))
    del table
    with pytest.warns(UserWarning, match="damaged; rebuilding"): assert_goes_on(settings, whole, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_inputs(settings)


@pytest.fixture
def small_disk(tmp_path):
    "A disk of some megabytes; skips where nobody may mount one."
    folder = tmp_path/"disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder],
                             capture_output=True) if sys.platform == "linux" else None
    if not mounted or mounted.returncode: pytest.skip("a disk can only be mounted on Linux, by root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(small_disk, whole):
    "A real one: the checkpoint that does not fit is not there, the one before is whole, and the error says what to do."
    settings, ballast = recipe(Stage1, small_disk/"run", **USUAL), small_disk/"ballast"
    def fill(trainer):
        ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail*os.statvfs(small_disk).f_frsize - 200_000))
    with at_step(6, fill), pytest.raises(OSError, match="disk is full: checkpoint-6 could not be written.*free some "
                                                        "space") as caught:
        train(settings)
    assert caught.value.errno == errno.ENOSPC
    assert [c.name for c in checkpoints(settings.out)] == ["checkpoint-2", "checkpoint-4"]
    ballast.unlink()
    assert_goes_on(settings, whole, 5)


def test_a_full_disk_by_another_name(settings, whole, monkeypatch):
    "Where no disk can be mounted: a library's own error for the same."
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk is full: checkpoint-2 could not be "
                                                                      "written"):
        patch.setattr(torch, "save", full)
        train(settings)
    assert not checkpoints(settings.out)
    assert_goes_on(settings, whole, 1)


# ---- memory ----

def out_of_memory(monkeypatch, times):
    "The step fails so often for want of memory, each time its budget is still too large."
    left, before = [None]*times, ReconstructionStep.run
    def run(self, *args):
        if left and self.budget <= 300: # the probe has no budget
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory (as a test has it)")
        return before(self, *args)
    monkeypatch.setattr(ReconstructionStep, "run", run)


def test_want_of_memory_halves_the_budget_once_and_goes_on(settings, whole, monkeypatch, capsys):
    out_of_memory(monkeypatch, 1)
    launch(train, settings, run_dir=settings.out)
    said = capsys.readouterr().out
    assert "out of memory with 300 tokens" in said and "150 tokens after memory ran out" in said
    assert not Path(settings.out, "micro_tokens.json").exists()
    assert [row["loss"] for row in rows(settings.out)] == pytest.approx([row["loss"] for row in rows(whole)], rel=1e-4)


def test_want_of_memory_twice_is_an_error(settings, monkeypatch):
    out_of_memory(monkeypatch, 2)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory again, with 150 tokens.*max_length.*=fsdp2"):
        launch(train, settings, run_dir=settings.out)


# ---- signals ----

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_writes_a_last_checkpoint(number, settings, whole):
    with at_step(5, lambda trainer: os.kill(os.getpid(), number)), pytest.raises(Stopped,
                                                                                 match=f"stopped by {number.name} "
                                                                                       "after step 5 .*same command"):
        train(settings)
    assert checkpoints(settings.out)[-1].name == "checkpoint-5"
    assert_goes_on(settings, whole, 6)


def test_ctrl_c_is_answered_once_although_it_reaches_the_workers_too(tmp_path, capfd):
    settings = recipe(Stage1, tmp_path/"run", steps=10, workers=2)
    def to_all(trainer):
        for worker in multiprocessing.active_children(): os.kill(worker.pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    with at_step(3, to_all), pytest.raises(Stopped, match="after step 3"): train(settings)
    assert capfd.readouterr().err.count("SIGINT: stopping after this step") == 1


def test_a_run_whose_anchors_carry_enough_has_ended(tmp_path, monkeypatch):
    "Whatever happens in its last step: no checkpoint invites the next start to go on."
    enough = Carried(own=1.0, other=2.0, none=3.0, gap=1.0, margin=0.1, identified=1.0)
    measured = dict(q2d=enough, d2q=enough), torch.ones(2, 4, 3)
    monkeypatch.setattr(callbacks, "carried", lambda run, anchor, pairs: measured)
    settings = recipe(Stage1, tmp_path/"run", steps=10, save_steps=2, carry_pairs=4, carry_steps=4, until_carried=0.5)
    with monkeypatch.context() as patch, at_step(4, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)):
        patch.setattr(trainer, "write_model", fail)
        with pytest.raises(RuntimeError, match="plug"): train(settings)
    assert [c.name for c in checkpoints(settings.out)] == ["checkpoint-2"]
    assert train(settings)["steps"] == 4


def test_a_run_at_home_is_found_there_again(settings, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    at_home = replace(settings, out="~/run")
    with at_step(6, fail), pytest.raises(RuntimeError, match="plug"): launch(train, at_home, run_dir=at_home.out)
    taken = []
    with before_each_step(lambda trainer, step: taken.append(step)): train(at_home)
    assert taken[0] == 5 and rows(settings.out) == rows(whole) and not Path("~").exists()


@pytest.mark.parametrize("stage, how", [(Stage2, {}), (Stage1, dict(objectives=dict(simcse=1.0), lora_rank=4))])
def test_added_tokens_train_beside_adapters_and_are_gone_on_from(stage, how, tmp_path):
    usual = dict(USUAL, steps=5, pooling="tokens", pooling_tokens=2, lora_dropout=0.1) | how
    runs = [recipe(stage, tmp_path/name, **usual) for name in ("whole", "run")]
    train(runs[0])
    with at_step(4, fail), pytest.raises(RuntimeError, match="plug"): train(runs[1])
    added = {name: value for name, value in load_file(checkpoints(runs[1].out)[-1]/"adapter_model.safetensors").items()
             if ".lora_" not in name}
    assert {value.shape for value in added.values()} == {(2, 64)}, "the rows that train, and not the whole table"
    assert_goes_on(runs[1], tmp_path/"whole", 3)
    after = load_file(tmp_path/"run"/"model"/"model.safetensors")["model.embed_tokens.weight"][-2:]
    assert all((value != after).all() for value in added.values()), "they moved after the checkpoint too"


def test_two_kills_at_random_moments(tmp_path):
    """The soak in small, two processes: SIGKILL of a rank or of all, in both stages. `make soak KILLS=20` is the large
    one."""
    done = soak.soak(2, seed=int.from_bytes(os.urandom(2), "big"), folder=tmp_path)
    print(done)
    assert (done["kills"], done["largest_weight_difference"], done["largest_metric_difference"]) == (2, 0, 0)
