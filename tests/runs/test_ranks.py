"How many processes compute a run, and how they share the model, leaves its trajectory alone; copies stay equal."
import re
import signal

import pytest
from safetensors.torch import load_file

from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.runs.checkpoints import checkpoints
from anchor_nb.training.trainer import train
from common import STAGES, assert_same_trajectory, interrupted, recipe, reference, rows, run, start, stop_after

SHARED = dict(processes=2, sharding="fsdp2")
HOWS = dict(copies=dict(processes=2, micro_tokens=150), pieces=dict(micro_tokens=90), shared=SHARED,
            shared_in_pieces=dict(SHARED, micro_tokens=150),
            recomputed=dict(SHARED, gradient_checkpointing="always", micro_tokens=10_000))
MORE = dict(three=dict(processes=3, micro_tokens=150), four=dict(processes=4, micro_tokens=10_000))


def difference(one, other) -> float:
    "The largest difference between two models' weights."
    first, second = [load_file(out/"model"/"model.safetensors") for out in (one, other)]
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def move(ways, stage, settings, out):
    "Start a run in one way, kill it after five rows, resume in another, kill it after ten, and finish in a third."
    for way, last in zip(ways, (5, 10)):
        process = start(recipe(stage, out, **settings | way))
        output = stop_after(last, process, out)
        assert process.returncode == -signal.SIGKILL, output[-3000:]
    run(recipe(stage, out, **settings | ways[-1]))


@pytest.mark.parametrize("how", [*HOWS, *[pytest.param(how, marks=pytest.mark.ranks) for how in MORE]])
@pytest.mark.parametrize("name", STAGES)
def test_how_a_run_is_computed_does_not_change_it(name, how, tmp_path):
    """Ten steps of nine examples in double precision: packed micro-batches, LoRA, cached gradients, negatives from the
    other ranks, a sharded model, and numbers of processes that do not divide the batch."""
    stage, settings = STAGES[name]
    settings = dict(settings, precision="fp64", global_batch=9)
    one = reference(stage, micro_tokens=10_000, **settings)
    run(recipe(stage, tmp_path/how, **settings | {**HOWS, **MORE}[how]))
    assert_same_trajectory(rows(one), rows(tmp_path/how), 1e-6)
    assert difference(one, tmp_path/how) < 1e-6


@pytest.mark.parametrize("name", STAGES)
def test_a_rank_with_fewer_texts_keeps_step(name, tmp_path):
    "Three examples on two ranks, a piece for each text: the rank with fewer repeats one, or the other would hang."
    stage, settings = STAGES[name]
    settings = dict(settings, precision="fp64", global_batch=3, steps=4)
    run(recipe(stage, tmp_path/"one", micro_tokens=10_000, **settings))
    run(recipe(stage, tmp_path/"two", processes=2, sharding="fsdp2", micro_tokens=1, **settings))
    assert_same_trajectory(rows(tmp_path/"one"), rows(tmp_path/"two"), 1e-6)


@pytest.mark.parametrize("name", STAGES)
def test_a_run_goes_on_with_other_processes(name, tmp_path):
    "Killed on two processes with copies, gone on with on one, killed, and ended on two that share the model."
    stage, settings = STAGES[name]
    settings = dict(settings, precision="fp64", steps=18, save_steps=3)
    run(recipe(stage, tmp_path/"whole", **settings))
    move([dict(processes=2), {}, dict(processes=2, sharding="fsdp2")], stage, settings, tmp_path/"moved")
    assert_same_trajectory(rows(tmp_path/"whole"), rows(tmp_path/"moved"), 1e-6)
    assert difference(tmp_path/"whole", tmp_path/"moved") < 1e-6


@pytest.mark.parametrize("name", STAGES)
def test_killed_run_that_shares_its_model(name, tmp_path):
    "SIGKILL, the same command again: the same bits, snapshots of stage II included."
    kill = lambda settings: stop_after(7, start(settings), tmp_path/"killed")
    interrupted(STAGES[name][0], STAGES[name][1] | dict(processes=2, sharding="fsdp2", micro_tokens=150, steps=14),
                tmp_path, kill)


NO_EXCHANGE = """
import anchor_nb.training.trainer as training
def without_ddp(self, *args, before=training.AnchorTrainer.__init__, **kwargs):
    before(self, *args, **kwargs)
    self.accelerator.prepare_model = lambda model, **_: model
training.AnchorTrainer.__init__ = without_ddp
from contextlib import nullcontext
import accelerate; accelerate.Accelerator.no_sync = lambda self, model: nullcontext()
"""


def test_ranks_that_do_not_exchange_gradients_are_noticed(tmp_path):
    "The defect of the authors' stage I: without DDP every rank trains a model of its own."
    process = start(recipe(Stage1, tmp_path/"run", processes=2), before=NO_EXCHANGE)
    output, _ = process.communicate(timeout=300)
    assert process.returncode and "the ranks hold different weights" in output, output[-2000:]
    assert not (tmp_path/"run"/"model").exists()


DRAWS = """
import hashlib, torch
import anchor_nb.training.trainer as training
def training_step(self, *args, before=training.AnchorTrainer.training_step, **kwargs):
    print("draws", hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), flush=True)
    return before(self, *args, **kwargs)
training.AnchorTrainer.training_step = training_step
"""


def test_dropout_draws_otherwise_on_every_rank(tmp_path):
    process = start(recipe(Stage2, tmp_path/"run", steps=1, processes=2), before=DRAWS)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and len(set(re.findall(r"draws (\w+)", output))) == 2, output[-2000:]


def test_which_checkpoints_are_kept(tmp_path):
    train(recipe(Stage2, tmp_path/"run", steps=9, save_steps=1, keep_every=4))
    assert [folder.name for folder in checkpoints(tmp_path/"run")] == ["checkpoint-4", "checkpoint-8"]
    adapter = sum(file.stat().st_size for file in (tmp_path/"run"/"checkpoint-4").rglob("adapter_model*"))
    assert adapter < 0.3*(tmp_path/"run"/"model"/"model.safetensors").stat().st_size


def test_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path, monkeypatch):
    "The run goes on behind them, and is cut off again before it has reached them."
    import anchor_nb.training.trainer as training
    def until(last):
        def stop(self, *args, before=training.AnchorTrainer.training_step, **kwargs):
            if self.state.global_step == last:
                raise KeyboardInterrupt
            return before(self, *args, **kwargs)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(training.AnchorTrainer, "training_step", stop)
            train(recipe(Stage1, tmp_path/"run", steps=14, save_steps=2, keep_last=3))
    until(13)
    for name in ("checkpoint-10", "checkpoint-12"): (tmp_path/"run"/name/"optimizer.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint-10 is damaged"): until(9)
    assert [folder.name for folder in checkpoints(tmp_path/"run")] == ["checkpoint-8"]


def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path):
    "And the same command resumes to the same bits. What each signal does inside a run is in test_faults."
    number = signal.SIGTERM
    def stop(settings):
        process = start(settings)
        output = stop_after(5, process, tmp_path/"killed", number)
        steps = len(rows(tmp_path/"killed"))
        said = f"stopped by {number.name} after step {steps} of 24, with a checkpoint"
        assert process.returncode and said in output, output[-2000:]
        assert checkpoints(tmp_path/"killed")[-1].name == f"checkpoint-{steps}"
    interrupted(*STAGES["stage1"], tmp_path, stop)


def test_no_snapshot_of_a_step_without_number(tmp_path, monkeypatch):
    import anchor_nb.training.trainer as training
    def spoil(self, *args, before=training.AnchorTrainer.training_step, **kwargs):
        loss = before(self, *args, **kwargs)
        if self.state.global_step == 3:
            next(p for p in self.model.parameters() if p.requires_grad).grad.fill_(float("inf"))
        return loss
    monkeypatch.setattr(training.AnchorTrainer, "training_step", spoil)
    with pytest.raises(RuntimeError, match="norm of the gradient"):
        train(recipe(Stage2, tmp_path/"run", snapshot_steps=2))
    assert [folder.name for folder in (tmp_path/"run"/"snapshots").iterdir()] == ["step-2"]
