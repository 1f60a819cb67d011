"Invariants of a training run: ranks, micro-batches, kills and time leave its trajectory alone."
import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anchor_nb.recipe import Stage1, Stage2
from anchor_nb.training import checkpoints
from common import STAGES, recipe, rows, run, start

PINNED = Path(__file__).with_name("trajectories.json")


def assert_same_trajectory(one, other, tolerance):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        for name in ("loss", "grad_norm", "learning_rate"): assert a[name] == pytest.approx(b[name], rel=tolerance), (a["step"], name)
        for name in ("tokens", "step"): assert a[name] == b[name]


@pytest.mark.parametrize("name", STAGES)
def test_two_processes_are_one(name, tmp_path):
    "Ten steps in double precision: packed micro-batches, LoRA, cached gradients, negatives from the other rank."
    stage, settings = STAGES[name]
    settings = dict(settings, precision="fp64")
    run(recipe(stage, tmp_path/"one", micro_tokens=10_000, **settings))
    run(recipe(stage, tmp_path/"two", micro_tokens=150, processes=2, **settings))
    assert_same_trajectory(rows(tmp_path/"one"), rows(tmp_path/"two"), 1e-6)
    one, two = [load_file(tmp_path/which/"model"/"model.safetensors") for which in ("one", "two")]
    assert max((one[k] - two[k]).abs().max().item() for k in one) < 1e-6


@pytest.mark.parametrize("name", STAGES)
def test_killed_run_is_the_uninterrupted_run(name, tmp_path):
    "SIGKILL at a random moment, the same command again: metrics and weights are the same bits."
    stage, settings = STAGES[name]
    settings = dict(settings, steps=24, save_steps=2, micro_tokens=10_000)
    if stage is Stage2: settings |= dict(lora_dropout=0.1, snapshot_steps=5)
    run(recipe(stage, tmp_path/"whole", **settings))
    process, metrics = start(recipe(stage, tmp_path/"killed", **settings)), tmp_path/"killed"/"metrics.jsonl"
    wanted = random.randint(2, 12)
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= wanted): time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path/"killed"/"model").exists(), "the run was faster than its killer; give it more steps"
    run(recipe(stage, tmp_path/"killed", **settings))
    assert rows(tmp_path/"killed") == rows(tmp_path/"whole")
    whole, killed = [load_file(tmp_path/which/"model"/"model.safetensors") for which in ("whole", "killed")]
    assert all(torch.equal(whole[k], killed[k]) for k in whole)
    assert sorted(p.name for p in (tmp_path/"killed").iterdir()) == sorted(p.name for p in (tmp_path/"whole").iterdir())


def test_half_written_checkpoint_is_never_found(tmp_path):
    "A checkpoint has its name only when it is complete, so a folder left behind by a kill is not resumed from."
    (tmp_path/".writing"/"checkpoint-4").mkdir(parents=True)
    (tmp_path/"checkpoint-2").mkdir()
    (tmp_path/"checkpoint-10").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]


@pytest.mark.parametrize("name", STAGES)
def test_pinned_trajectory(name, tmp_path):
    "Twenty steps of the tiny model have not changed since the file was written (delete its entry to write it anew)."
    stage, settings = STAGES[name]
    run(recipe(stage, tmp_path/name, steps=20, precision="fp64", **settings))
    found = [row["loss"] for row in rows(tmp_path/name)]
    pinned = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    if name not in pinned: PINNED.write_text(json.dumps(pinned | {name: found}, indent=1) + "\n"); pytest.fail(f"wrote {PINNED.name}; look at it and commit it")
    assert found == pytest.approx(pinned[name], rel=1e-6)


@pytest.mark.parametrize("switch", [dict(truncation="cut_eos"), dict(target_eos=False), dict(decode_from="sequence"), dict(decode_from="sequence", target_template=True),
                                    dict(decode_from="sequence", hide_template=True), dict(schedule_steps=100), dict(precision="pure_bf16"), dict(alpha=0.8),
                                    dict(instruction_format="{instruction}: {text}", instructions="INSTRUCTIONS")], ids=str)
def test_every_switch_of_stage1_changes_the_run(switch, tmp_path):
    "A switch that leaves the trajectory alone is not wired."
    (tmp_path/"instructions.yaml").write_text("toy: Find the text\n")
    usual = dict(steps=5, max_length=24)
    if "instructions" in switch: usual["instructions"] = switch["instructions"] = str(tmp_path/"instructions.yaml")
    from anchor_nb.training import train
    train(recipe(Stage1, tmp_path/"usual", **usual))
    train(recipe(Stage1, tmp_path/"switched", **usual | switch))
    assert [row["loss"] for row in rows(tmp_path/"usual")] != [row["loss"] for row in rows(tmp_path/"switched")]


@pytest.mark.parametrize("switch", [dict(temperature=0.02), dict(mask_false_negatives=False), dict(lora_dropout=0.05), dict(lora_rank=4), dict(negatives=0)], ids=str)
def test_every_switch_of_stage2_changes_the_run(switch, tmp_path):
    from anchor_nb.training import train
    usual = dict(steps=4, global_batch=64, negatives=2, micro_tokens=10_000)
    train(recipe(Stage2, tmp_path/"usual", **usual))
    train(recipe(Stage2, tmp_path/"switched", **usual | switch))
    assert [row["loss"] for row in rows(tmp_path/"usual")] != [row["loss"] for row in rows(tmp_path/"switched")]


def test_stage1_learns(tmp_path):
    "The loss of both directions falls."
    from anchor_nb.training import train
    train(recipe(Stage1, tmp_path/"run", steps=40))
    found = rows(tmp_path/"run")
    for name in ("loss_q2d", "loss_d2q"): assert found[-1][name] < found[0][name] - 1


def test_tracker_by_name(tmp_path):
    "TensorBoard finds the losses of both directions below the run folder."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from anchor_nb.training import train
    train(recipe(Stage1, tmp_path/"run", steps=3, trackers=["tensorboard"]))
    events = EventAccumulator(str(next((tmp_path/"run").rglob("events.out.tfevents*")).parent)).Reload()
    assert [event.step for event in events.Scalars("train/loss_q2d")] == [1, 2, 3]


def test_paper_and_authors_presets_differ_where_the_notes_say():
    from anchor_nb.recipe import preset
    ours, theirs = [Stage1(**preset(name, "stage1")) for name in ("paper", "authors-code")]
    assert (theirs.truncation, theirs.decode_from, theirs.target_eos, theirs.hide_template) == ("cut_eos", "sequence", False, True)
    assert (ours.steps, ours.learning_rate, ours.global_batch, ours.warmup_steps, ours.alpha) == (2000, 4e-5, 512, 300, 0.2)
    ours, theirs = [Stage2(**preset(name, "stage2")) for name in ("paper", "authors-code")]
    assert (ours.temperature, theirs.temperature) == (0.05, 0.02)
    assert (ours.steps, ours.learning_rate, ours.lora_rank, ours.global_batch) == (1000, 2e-4, 16, 512)
