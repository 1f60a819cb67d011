"The forecast before the first step: it changes nothing, it is near the truth, and it says what makes a run short."
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.training import probe, trainer
from common import assert_same_run, recipe, rows

STAGES = dict(stage1=(Stage1, {}), stage2=(Stage2, dict(lora_dropout=0.1)), cached=(Stage2, dict(micro_tokens=150)))


@pytest.fixture(params=STAGES)
def trained(request, tmp_path, capfd):
    "A run with its forecast: its folder, its facts, what it printed, and its recipe."
    stage, settings = STAGES[request.param]
    asked = recipe(stage, tmp_path/"run", steps=6, **settings)
    facts = trainer.train(asked)
    return asked, facts, capfd.readouterr()


def test_a_forecast_is_near_the_truth_and_leaves_no_trace(trained, tmp_path, monkeypatch):
    "Tokens within 5 %, memory within 15 %; without a probe the run ends in the same bits."
    asked, facts, said = trained
    kept = facts["forecast"]
    assert kept["tokens"] == pytest.approx(sum(row["tokens"] for row in rows(asked.out)), rel=0.05)
    assert kept["bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.15)
    assert kept["steps"] == 6 and kept["seconds"] > 0 and kept["actual_seconds"] > 0
    assert "forecast: about" in said.out and "for 6 steps of" in said.out
    assert said.err.index("loading tiny ...") < said.err.index("6/6 steps"), "a line before the bar"
    unknown = probe.Forecast(6, 1.0, 0.0, 0, 1.0, "nobody asked")
    monkeypatch.setattr(trainer, "foresee", lambda *_, **__: unknown)
    other = recipe(type(asked), tmp_path/"unprobed", steps=6, **{name: getattr(asked, name) for name in
                                                                 ("micro_tokens", "lora_dropout")})
    assert trainer.train(other)["forecast"]["seconds"] == 0
    assert_same_run(Path(asked.out), Path(other.out))


@pytest.mark.parametrize("name", STAGES)
def test_the_largest_micro_batch_is_foreseen(name, tmp_path):
    "What decides the activations: the largest piece of twenty steps is within a factor of 1.6."
    stage, settings = STAGES[name]
    inputs = trainer.check_inputs(asked := recipe(stage, tmp_path/"run", steps=20, **settings))
    step = trainer.make_step(inputs, trainer.planned(inputs), tmp_path)
    steps = trainer.Steps(inputs.tables, inputs.batches, inputs.instructions, step, 0, 20)
    foreseen = probe.largest_piece(probe.sample_steps(steps, 8), 8, step.budget, False)
    module, largest = trainer.build_model(inputs), []
    for k in range(20):
        step.run(module, steps[k], lambda loss: None, lambda last: nullcontext(), torch.device("cpu"))
        largest.append(step.largest)
    assert 0.6*max(largest) <= foreseen <= 1.6*max(largest)


def test_a_long_run_is_told_how_to_be_short(tmp_path, monkeypatch, capsys):
    "The command it names is one that this library takes, for another folder."
    monkeypatch.setattr(probe, "LONG", 1e-4)
    trainer.train(recipe(Stage1, tmp_path/"run", steps=4))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("That is over") for line in lines)
    long = probe.Forecast(1000, 3e4, 7.2, 0, 1e9)
    monkeypatch.setattr(probe, "LONG", 1800)
    asked = recipe(Stage2, tmp_path/"run", steps=1000, global_batch=64, warmup_steps=300)
    why, command = probe.shorter_command(asked, asked, long)
    assert "steps=225 would take about 27 and see 22% of the examples" in why
    assert "warmup_steps=67" in command and f"out={tmp_path}/run-short" in command
    from anchor_nb.cli.main import app
    shown = CliRunner().invoke(app, [*command.split()[1:], "--dry-run"])
    assert shown.exit_code == 0 and "steps: 225" in shown.stdout, shown.output
    undecided = recipe(Stage1, tmp_path/"run", steps=0, objectives=dict(anchor=1, ebae=1), anchor_after=500)
    decided = replace(undecided, steps=1000, global_batch=64)
    command = probe.shorter_command(undecided, decided, long)[1].split()
    assert {"steps=225", "anchor_after=112"} <= {*command}


def test_a_dry_run_ends_with_the_forecast(tmp_path):
    from anchor_nb.cli.main import app
    asked = recipe(Stage1, tmp_path/"run", steps=10_000)
    words = ["-p", "model=tiny", "-p", f"data={asked.data}", "-p", f"out={asked.out}", "-p", "steps=10000",
             "-p", "global_batch=8", "-p", "max_length=48", "-p", "micro_tokens=300", "--dry-run"]
    shown = CliRunner().invoke(app, ["stage1", *words])
    assert shown.exit_code == 0, shown.output
    last = [line for line in shown.stdout.splitlines() if line]
    assert next(line for line in last if line.startswith("# forecast: about")).count("10,000 steps")
    import yaml
    assert yaml.safe_load(shown.stdout)["steps"] == 10_000, "it is still a file for -f"
    assert not (tmp_path/"run").exists()
    away = CliRunner().invoke(app, ["stage1", *[word.replace("model=tiny", "model=owner/none") for word in words]])
    assert away.exit_code == 0 and "# no forecast: owner/none is not on this machine yet" in away.stdout
    (tmp_path/"bad.jsonl").write_text('{"query": 1}\n')
    bad = CliRunner().invoke(app, ["stage1", "-p", f"data={tmp_path}/bad.jsonl", "-p", "model=tiny", "--dry-run"])
    assert bad.exit_code == 1 and "steps:" in bad.stdout and "bad.jsonl, line 1" in bad.output


@pytest.mark.parametrize("settings", [dict(sharding="ddp"), dict(sharding="fsdp2")], ids=["ddp", "fsdp2"])
def test_all_ranks_take_part(settings, tmp_path):
    "Two processes end with one forecast, which counts the tokens of both."
    from common import run
    run(recipe(Stage1, tmp_path/"run", steps=4, processes=2, **settings))
    kept = json.loads((tmp_path/"run"/"model"/"facts.json").read_text())["forecast"]
    assert kept["tokens"] == pytest.approx(sum(row["tokens"] for row in rows(tmp_path/"run")), rel=0.05)
    assert kept["seconds"] > 0


def test_memory_that_runs_out_in_the_probe_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("full")
    monkeypatch.setattr(probe, "step_seconds", full)
    assert trainer.train(recipe(Stage1, tmp_path/"run", steps=4))["steps"] == 4
    assert "time unknown, since the probe ran out of memory" in capsys.readouterr().out


def test_memory_that_runs_out_in_the_probe_of_one_rank_ends_all_with_a_smaller_budget(tmp_path, monkeypatch):
    "The others wait for it in the same exchange, so it must not go on alone."
    def full(*_):
        raise torch.OutOfMemoryError("full")
    monkeypatch.setattr(probe, "step_seconds", full)
    monkeypatch.setattr(probe, "world", lambda: (0, 2))
    with pytest.raises(torch.OutOfMemoryError, match="it resumes with"):
        trainer.train(recipe(Stage1, tmp_path/"run", steps=4))
    kept = json.loads((tmp_path/"run"/"micro_tokens.json").read_text())
    assert kept["micro_tokens"] == kept["before"]//2 <= 150


def test_a_dry_run_foresees_the_processes_that_are_asked_for(tmp_path, monkeypatch):
    asked, seen = recipe(Stage1, tmp_path/"run", processes=4), []
    monkeypatch.setattr(trainer, "planned", lambda *given, real=trainer.planned: seen.append(given[2]) or real(*given))
    monkeypatch.setattr(trainer, "forecast", lambda *given: seen.append(given[3].processes) or
                        probe.Forecast(10, 1.0, 1.0, 0, 1.0))
    assert trainer.forecast_lines(asked)[0].startswith("forecast: about 10 s") and seen == [4, 4]
    sharded = trainer.forecast_lines(replace(asked, sharding="fsdp2"))
    assert sharded[0].startswith("stage1: ") and "no forecast: sharding=fsdp2 spreads the model over 4" in sharded[1]
    monkeypatch.setattr("anchor_nb.training.memory.free_memory", lambda device: 1e6)
    with pytest.raises(ValueError, match="stage1 does not fit"):
        trainer.forecast_lines(replace(asked, micro_tokens=0))
