"One set of defaults, the same from the command line, papermill and Python; a resumed run keeps what was decided."
import json
from dataclasses import asdict

import pytest
import yaml
from typer.testing import CliRunner

from anchor_nb.cli.main import app
from anchor_nb.core.presets import presets
from anchor_nb.core.recipe import LEFT_OPEN, RECIPES
from anchor_nb.experiments.pipeline import full_preset
from anchor_nb.experiments.stages import check_out, checked, declared, stage_notebook
from anchor_nb.runs.manifest import start_run
from anchor_nb.training import defaults
from anchor_nb.training.inputs import check_inputs
from anchor_nb.training.trainer import train
from common import toy_pairs

NEEDED = dict(mine=dict(data="pairs"), evaluate=dict(benchmark="local"), analyse=dict(data="pairs", a="tiny", b="tiny"))
OWN = dict(data="pairs", epochs=2, learning_rate="1e-3", max_length=64)


@pytest.mark.parametrize("stage, given", [*((stage, NEEDED.get(stage, {})) for stage in RECIPES), ("stage1", OWN),
                                          ("stage2", OWN), ("stage2", dict(preset="paper", data="pairs"))])
def test_the_same_file_is_the_same_recipe_everywhere(stage, given, tmp_path):
    file = tmp_path/"mine.yaml"
    file.write_text(yaml.safe_dump(given))
    notebook = stage_notebook(stage)
    papermill = {name: value for name, (_, value) in declared(notebook).items()} | checked(notebook, given)
    shown = CliRunner().invoke(app, [stage, "-f", str(file), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert RECIPES[stage](**given) == RECIPES[stage](**papermill) == RECIPES[stage](**yaml.safe_load(shown.stdout))


@pytest.mark.parametrize("name", [name for name in presets() if name != "laptop"])
def test_a_preset_leaves_nothing_open(name):
    for stage in {"stage1", "stage2"} & set(presets()[name]):
        recipe = RECIPES[stage](**full_preset(name, stage))
        assert defaults.decide(recipe, []) == (recipe, "")


def open_recipe(stage, out, **given):
    return RECIPES[stage](model="tiny", data=toy_pairs(), out=str(out), instructions="none", precision="fp32", **given)


def test_what_training_runs_is_what_was_decided_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, capsys):
    recipe = open_recipe("stage2", tmp_path/"run", preset="laptop", epochs=0.1, global_batch=4)
    decided = check_inputs(recipe).recipe
    assert not decided.left_open() and check_inputs(decided).recipe == decided
    facts = train(recipe)
    assert facts["steps"] == decided.steps == round(0.1*facts["data"]["toy"]["rows"]/4)
    record = json.loads((tmp_path/"run/model/anchor_nb.json").read_text())
    assert all(record["recipe"][name] == asdict(decided)[name] for name in LEFT_OPEN)
    assert record["layout"]["max_length"] == decided.max_length
    assert "preset laptop (as asked for): 4 pairs a step" in capsys.readouterr().out

    changed = defaults.read_preset("laptop", "stage2") | dict(learning_rate=0.5, max_length=16)
    monkeypatch.setattr(defaults, "read_preset", lambda name, stage: changed)
    assert train(open_recipe("stage2", tmp_path/"run")) == facts
    assert "resumed as it began: 4 pairs a step" in capsys.readouterr().out
    with pytest.raises(ValueError, match="learning_rate is .* there and 0.5 here"): train(recipe)


def test_the_machine_decides_between_the_two_presets(tmp_path, monkeypatch):
    cases = [(True, 10**6, "paper", 512), (True, 300, "laptop", 96), (False, 10**6, "laptop", 96)]
    for gpu, rows, name, length in cases:
        monkeypatch.setattr(defaults, "usable_gpus", lambda: int(gpu))
        decided, why = defaults.decide(open_recipe("stage1", tmp_path), [rows], lambda most: [20]*9 + [90])
        assert (decided.preset, why.split()[1]) == (name, name) and decided.max_length == length


def test_looking_for_a_gpu_leaves_cuda_asleep_so_that_ranks_can_be_forked(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("asked the driver"))
    assert defaults.preset_of(open_recipe("stage1", tmp_path), 10**6)[0] in ("laptop", "paper")


def test_the_same_command_finds_the_run_that_the_preset_decided(tmp_path):
    asked = RECIPES["stage1"](model="tiny", data=toy_pairs(), out=str(tmp_path/"run"))
    start_run(asked.out, check_inputs(asked).recipe)
    check_out("stage1", asdict(asked), tmp_path/"run")
    for change in (dict(alpha=0.5), dict(steps=7)):
        with pytest.raises(ValueError, match="holds another run: " + next(iter(change))):
            check_out("stage1", asdict(asked) | change, tmp_path/"run")


@pytest.mark.parametrize("settings, match", [
    (dict(pooling="echo_mean", decode_from="sequence"), "copied from the first"),
    (dict(pooling="echo_mean", objectives=dict(mntp=1.0), bidirectional=True), "would read in the first"),
    (dict(until_carried=1.0, carry_pairs=16, carry_steps=5, epochs=2), "would stop on pairs that are trained on")])
def test_what_would_be_learned_by_copying_is_refused(settings, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        check_inputs(RECIPES["stage1"](model="tiny", data=toy_pairs(), out=str(tmp_path/"run"), preset="laptop",
                                       **settings))


def test_few_shot_needs_an_instruction_that_says_something(tmp_path):
    (tmp_path/"none.yaml").write_text('"*": ""\n')
    with pytest.raises(ValueError, match="few_shot needs queries with instructions"):
        check_inputs(RECIPES["stage2"](model="tiny", data=toy_pairs(), out=str(tmp_path/"run"), few_shot=1,
                                       instructions=str(tmp_path/"none.yaml")))


def test_the_dataset_that_makes_a_batch_small_is_named(tmp_path):
    from anchor_nb.data.writers import write_lines
    (tmp_path/"data").mkdir()
    for name, count in dict(few=2, many=40).items():
        write_lines(tmp_path/"data"/f"{name}.jsonl", [dict(query=f"q{n}", positive=f"d{n}") for n in range(count)])
    recipe = RECIPES["stage1"](model="tiny", data=str(tmp_path/"data"), out=str(tmp_path/"run"), preset="laptop",
                               instructions="none", carry_pairs=0)
    inputs = check_inputs(recipe)
    assert inputs.recipe.global_batch == 2 and "few has no more; put its rows into another file" in inputs.why
