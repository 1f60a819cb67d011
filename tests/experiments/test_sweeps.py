"""Sweeps: the file, the graph, and a real sweep that is killed in the middle and resumed."""
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import yaml
from common import toy_pairs

import warm
from anchor_nb.runs import ledger as ledgers
from anchor_nb.cli.training import outcome
from anchor_nb.experiments import sweeps
from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.tables import content_hash
from anchor_nb.core.presets import methods
from anchor_nb.core.recipe import Prepare
from anchor_nb.runs.manifest import finish_run, start_run
from anchor_nb.runs.provenance import file_facts

SMALL = {"stage1.steps": 6, "stage1.global_batch": 4, "stage2.global_batch": 4, "stage1.max_length": 32,
         "stage2.max_length": 32, "stage2.steps": 4, "stage2.snapshot_steps": 0,
         "evaluate.documents": 20, "evaluate.queries": 8, "evaluate.max_length": 32, "evaluate.instructions": "none",
         "stage1.save_steps": 2, "stage2.save_steps": 2,
         "prepare.corpora": [], "stage1.data": toy_pairs(), "stage2.data": toy_pairs()}


def write(path, **said):
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return str(path)


# ---- the file ----

@pytest.mark.parametrize("text, message", [
    ("arms: [1]", "arms is list; give dict"),
    ("presets: smoke", "unknown field 'presets'"),
    ("base: {steps: 3}", "write stage.parameter"),
    ("base: {stage1.out: x}", "a sweep chooses stage1.out itself"),
    ("base: {stage1.stepz: 3}", "did you mean steps"),
    ("- a", "has no fields; write preset"), ("", "has no fields; write preset"),
    ("preset: [", "not YAML"),
    ("arms:\n  a: {stage2.temperature: 0.02}\n  a: {stage2.temperature: 0.05}", "line 3: not YAML .'a' is there twice"),
])
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    (tmp_path/"mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught: sweeps.read_sweep(str(tmp_path/"mine.yaml"))
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize("said, message", [
    (dict(preset="smok"), "no preset 'smok'"),
    (dict(arms={"e5": {"preset": "e6"}}), "arm e5: no preset 'e6'"),
    (dict(grid={"stage1.alpha": [0.2, 2]}), r"alpha must lie in \[0, 1\]"),
    (dict(arms={"a": {"stages": ["stage9"]}}), r"arm a: stages is \['stage9'\]; write"),
    (dict(arms={"a": {"stages": ["stage2", "stage1"]}}), r"arm a: stages is \['stage2', 'stage1'\]; write"),
    (dict(arms={"a": {"stages": 2}}), r"arm a: stages is \[2\]; write"),
    (dict(arms={"a": {"preset": ["smoke"]}}), r"arm a: no preset \['smoke'\]"),
    (dict(arms={"bm25": {}}), "arm bm25: this is the name of the yardstick BM25"),
    (dict(arms={"a": {"stages": ["stage2"], "stage1.alpha": 0.5}}), "arm a: it has no stage1, so stage1.alpha changes"),
    (dict(base={"stage2.model": "tiny"}, arms={"a": {"stages": []}}), "arm a: stage2.model has no effect"),
    (dict(arms={"a": {"stage1.alpha": "2o"}}), "arm a: alpha='2o' is not a number"),
    (dict(seeds=[1, 1]), "seeds has 1 twice"),
    (dict(arms={"alpha=0.2": {}}, grid={"stage1.alpha": [0.2]}), "two arms are called"),
])
def test_wrong_arms_are_refused_before_anything_runs(tmp_path, said, message):
    with pytest.raises(ValueError, match=message): sweeps.run_sweep(write(tmp_path/"s.yaml", **said), tmp_path/"root")
    assert not (tmp_path/"root").exists()


def test_a_setting_that_an_arm_has_itself_is_not_given_for_all(tmp_path):
    said = write(tmp_path/"s.yaml", base=SMALL, arms={"a": {"stage2.temperature": 0.1}, "b": {}})
    with pytest.raises(ValueError, match="-p stage2.temperature: arm a sets it too"):
        sweeps.run_sweep(said, tmp_path/"root", dry_run=True, given={"stage2.temperature": 0.5})


def test_a_root_inside_the_data_is_refused(tmp_path, monkeypatch):
    "Each log would be a change of the data, and all would be trained again."
    monkeypatch.chdir(tmp_path)
    (tmp_path/"pairs.jsonl").write_text(json.dumps(dict(query="a", positive="b")) + "\n")
    said = write(tmp_path/"s.yaml", base=SMALL | {"stage2.data": "."}, arms={"a": {"stages": ["stage2"]}})
    with pytest.raises(ValueError, match="the sweep's folder runs lies in ., whose content decides"):
        sweeps.run_sweep(said, "runs", dry_run=True)


def test_the_usual_root_is_no_data(tmp_path, monkeypatch):
    "Where nothing is named as data_root, that is not the current folder."
    monkeypatch.chdir(tmp_path)
    assert sweeps.run_sweep(write(tmp_path/"s.yaml", base=SMALL), dry_run=True)["waiting"] == 3


def test_an_unknown_name_lists_the_known():
    with pytest.raises(FileNotFoundError, match="ablation, alpha"): sweeps.read_sweep("alfa")


@pytest.mark.parametrize("name", list(sweeps.sweeps()))
def test_the_sweeps_of_the_paper_are_valid(name, tmp_path):
    nodes, arms = sweeps.plan_sweep(sweeps.read_sweep(name), tmp_path)
    assert arms and all(need in nodes for node in nodes.values() for need in node.needs)
    seeds = Counter(arm.label for arm, _ in arms)
    assert all(len({arm.seed for arm, _ in arms if arm.label == label}) == count for label, count in seeds.items())


# ---- the graph ----

def test_what_arms_share_is_one_node(tmp_path):
    nodes, arms = sweeps.plan_sweep(dict(preset="smoke", base={}, seeds=[], arms={"baseline": {"stages": ["stage2"]},
                                                                                  "untrained": {"stages": []}},
                                         grid={"stage1.alpha": [0.2, 0.5], "stage2.steps": [2, 3]}), tmp_path)
    assert Counter(node.stage for node in nodes.values()) == dict(prepare=1, stage1=2, stage2=5, evaluate=6)
    at = {name: position for position, name in enumerate(nodes)}
    assert all(at[need] < at[name] for name, node in nodes.items()
               for need in node.needs), "a node comes after those it needs"


@pytest.mark.parametrize("name", ["relatives", "relatives-demo"])
def test_methods_are_compared_on_equal_terms(name, tmp_path):
    nodes, arms = sweeps.plan_sweep(sweeps.read_sweep(name), tmp_path)
    assert {arm.label for arm, _ in arms} == {*methods(), "untrained", "baseline"}
    of = lambda label, stage: next(nodes[n].parameters for arm, names in arms if arm.label == label for n in names
                                   if nodes[n].stage == stage)
    second = {label: of(label, "stage2") for label in {*methods(), "baseline"}}
    for setting in ("steps", "global_batch", "max_length", "negatives", "data", "seed", "instructions",
                    "mask_false_negatives", "warmup_steps"):
        assert len({settings[setting] for settings in second.values()}) == 1, setting
    assert (second["llm2vec"]["bidirectional"], second["e5"]["pooling"], second["gritlm-re"]["lora_rank"],
            second["anchor"]["temperature"]) == (True, "last", 0, 0.05)
    assert of("llm2vec", "stage1")["objectives"] == {"mntp": 1.0} and of("anchor", "stage1")["objectives"] == {}


def test_inputs_from_outside_count_with_their_content(tmp_path):
    (tmp_path/"pairs").mkdir()
    (tmp_path/"pairs/a.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    sweep = dict(preset="smoke", base={"prepare.corpora": [], "stage1.data": str(tmp_path/"pairs"),
                                       "evaluate.tasks": ["toy"]}, seeds=[], arms={}, grid=[])
    def name():
        return next(name for name in sweeps.plan_sweep(sweep, tmp_path/"root")[0] if name.startswith("stage1"))
    first = name()
    assert name() == first
    (tmp_path/"pairs/a.jsonl").write_text('{"query": "a", "positive": "c"}\n')
    assert name() != first


def test_the_root_can_be_moved(tmp_path):
    sweep = dict(preset="smoke", base={}, seeds=[1], arms={}, grid=[])
    first, second, third = (list(sweeps.plan_sweep(sweep, tmp_path/place)[0]) for place in ("a", "b", "läufe"))
    assert first == second == third


def test_an_evaluation_that_lacks_a_yardstick_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "is_done", lambda node: True)
    node = sweeps.Node("run", "evaluate", dict(out=str(tmp_path)), ())
    for missing, state in (({}, "done"), (dict(minilm="no network"), "waiting")):
        ledgers.write_json(tmp_path/"summary.json", dict(failed=[], not_scored=missing))
        assert sweeps.state_before(node) == state


def test_a_node_is_done_only_with_its_weights_and_of_the_data_that_is_there(tmp_path):
    pairs, out = tmp_path/"pairs.jsonl", tmp_path/"run"
    pairs.write_text(json.dumps(dict(query="a", positive="b")) + "\n")
    (out/"model").mkdir(parents=True)
    (out/"model"/"model.safetensors").write_text("")
    ledgers.write_json(out/"run.json", dict(stage="stage2", status="complete",
                                            data=dict(pairs=dict(sha256=content_hash(str(pairs)), rows=1))))
    node = sweeps.Node("run", "stage2", dict(out=str(out), data=str(pairs)), ())
    assert sweeps.is_done(node)
    (out/"model"/"model.safetensors").unlink()
    assert not sweeps.is_done(node)
    (out/"model"/"model.safetensors").write_text("")
    pairs.write_text(json.dumps(dict(query="a", positive="c")) + "\n")
    assert not sweeps.is_done(node), "the file was another while it trained, or since"


def test_prepared_pairs_that_were_edited_or_removed_are_not_taken_for_finished(tmp_path):
    recipe, file = Prepare(out=str(tmp_path/"data"), corpora=["toy"]), tmp_path/"data"/"pairs"/"toy.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("{}\n")
    start_run(recipe.out, recipe)
    finish_run(recipe.out, data={"pairs/toy.jsonl": file_facts(file)})
    node = sweeps.Node("data", "prepare", dict(out=recipe.out), ())
    assert sweeps.is_done(node) and start_run(recipe.out, recipe) == "done"
    file.write_text("{} \n")
    assert not sweeps.is_done(node)
    with pytest.raises(ValueError, match="toy.jsonl has changed since it was written"): start_run(recipe.out, recipe)
    file.unlink()
    assert not sweeps.is_done(node) and start_run(recipe.out, recipe) == "resume"


# ---- a real one ----

SWEEP = ("import sys, json; from anchor_nb.experiments.sweeps import run_sweep; print('RESULT', "
         "json.dumps(run_sweep(sys.argv[1], sys.argv[2], at_once=int(sys.argv[3]), every=0.2)))")


def start(path, root, at_once=1):
    return warm.Popen([sys.executable, "-c", SWEEP, path, str(root), str(at_once)], stdout=warm.PIPE,
                      stderr=warm.STDOUT, text=True, env=os.environ | dict(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1"))


def finish(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    return json.loads(said.rpartition("RESULT ")[2]), said


def test_a_sweep_that_is_killed_goes_on_and_stage_one_ran_once(tmp_path):
    "Two arms of stage II on one stage I; the driver is killed with all it has started."
    root, grid = tmp_path/"root", {"stage2.temperature": [0.05, 0.1]}
    path = write(tmp_path/"s.yaml", preset="smoke", base=SMALL, evaluate=False, grid=grid)
    nodes, arms = sweeps.plan_sweep(sweeps.read_sweep(path), root)
    assert Counter(node.stage for node in nodes.values()) == dict(stage1=1, stage2=2)
    process = start(path, root)
    deadline = time.monotonic() + 200
    while not any(root.glob("stage2-*/metrics.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: ledgers.read_json(path) for path in root.glob("*/run.json")}
    assert len(before) == 2, "killed in the middle"
    result, said = finish(start(path, root))
    assert (result["done"], result["failed"]) == (3, {}), said
    after = {path.parent.name: ledgers.read_json(path) for path in root.glob("*/run.json")}
    done = [name for name, manifest in before.items() if manifest["status"] == "complete"]
    assert any(name.startswith("stage1") for name in done) and all(after[name] == before[name]
                                                                   for name in done), "something ran again"
    assert len(after) == 3 and all(manifest["status"] == "complete" for manifest in after.values())
    again, said = finish(start(path, root))
    assert (again["done"], ": running" in said) == (3, False), "all of it was there"


def test_scores_are_gathered_in_one_ledger_and_a_failed_arm_is_reported(tmp_path):
    root = tmp_path/"root"
    base = SMALL | {"evaluate.tasks": [str(build_corpus("toy")/"eval")]}
    result, said = finish(start(write(tmp_path/"s.yaml", preset="smoke", base=base,
                                      arms={"broken": {"stages": ["stage2"], "stage2.few_shot": 2},
                                            "untrained": {"stages": []}}), root))
    (name, reason), = result["failed"].items()
    assert name.startswith("stage2") and "few_shot" in reason and (result["done"], result["skipped"]) == (1, 1), said
    ledger = ledgers.read_rows(result["ledger"])
    assert {row["label"] for row in ledger} == {"untrained", "bm25"} and {row["arm"] for row in ledger} == {"untrained"}
    assert {row["settings"]["stages"] == [] for row in ledger} == {True} and any((root/"per_query").iterdir())


def test_scores_of_an_arm_before_its_settings_changed_are_named(tmp_path):
    steps = dict(changed=2, same=3, new=4)
    arms = {label: {"stages": ["stage2"], "stage2.steps": count} for label, count in steps.items()}
    nodes, arms = sweeps.plan_sweep(dict(preset="smoke", base=SMALL, seeds=[], grid=[], arms=arms), tmp_path)
    same, = ([nodes[name] for name in names] for arm, names in arms if arm.label == "same")
    assert sweeps.outdated(nodes, arms, dict.fromkeys(nodes, "skipped"), tmp_path) == []
    for node in nodes.values(): ledgers.write_json(Path(node.parameters["out"])/"run.json", {}) # they have begun
    experiments = dict(changed="another", same=sweeps.experiment_of(same, tmp_path))
    ledgers.append_rows(tmp_path/"ledger.jsonl", [dict(label=label, arm=label, experiment=experiment)
                                                  for label, experiment in experiments.items()])
    for now, labels in (("skipped", ["changed"]), ("done", [])):
        assert sweeps.outdated(nodes, arms, dict.fromkeys(nodes, now), tmp_path) == labels
    said = outcome(dict(done=0, failed={"stage2-1": "no memory"}, skipped=1, outdated=["changed"], ledger="l"), False)
    assert said[1].startswith("changed: its scores in l are of other settings")
    assert said[2] == "0 done, 1 failed, 1 skipped"


def test_what_is_not_there_is_said_before_anything_runs(tmp_path):
    none = str(tmp_path/"none")
    for changes, said in (({"stage2.guide": f"{none}/model", "stage2.margin": "absolute"}, "none/model"),
                          ({"stage2.data": "no-such.csv"}, "no-such.csv"),
                          ({"evaluate.benchmark": "papr15", "evaluate.tasks": []}, "papr15"),
                          ({"stage2.instructions": f"{none}.yaml"}, "none.yaml"),
                          ({"evaluate.data_root": none}, "data_root"),
                          ({"stage2.model": "tiny"}, "stage2.model has no effect"),
                          ({"evaluate.models": {"mine": "tiny"}}, "a sweep chooses evaluate.models itself")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            sweeps.run_sweep(dict(preset="smoke", base={}, seeds=[], arms={"late": changes, "first": {}}, grid=[]),
                             tmp_path/"root")
    assert not (tmp_path/"root").exists()


def test_ctrl_c_has_the_running_stage_write_a_checkpoint(tmp_path):
    root = tmp_path/"root"
    path = write(tmp_path/"s.yaml", preset="smoke", base=SMALL | {"stage1.steps": 100000, "stage1.save_steps": 0},
                 evaluate=False, arms={"anchor": {"stages": ["stage1"]}})
    process = start(path, root)
    deadline = time.monotonic() + 100
    while not any(root.glob("stage1-*/metrics.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert "Stopped: stopped by SIGINT; what ran was told to write a checkpoint; run the same command to resume" in said
    assert [path.name.startswith("checkpoint-") for path in root.glob("stage1-*/checkpoint-*")], "no checkpoint"
    manifest, = [ledgers.read_json(path) for path in root.glob("stage1-*/run.json")]
    assert manifest["status"] == "stopped"


@pytest.mark.parametrize("address, said", [("stage2.model", "write stage1.model"), ("anchor.model", "baseline.model"),
                                           ("stage1.out", "name that folder")])
def test_a_pipeline_s_steps_are_not_parted(address, said):
    from anchor_nb.experiments.pipeline import plan
    with pytest.raises(ValueError, match=said): plan("smoke", Path("runs/x"), {address: "tiny"})
    steps = {step.name: step.parameters for step in plan("smoke", Path("runs/x"), {"baseline.model": "smollm2-135m"})}
    assert steps["baseline"]["model"] == "smollm2-135m" and steps["anchor"]["model"] == "runs/x/stage1/model"


def test_a_sweep_of_the_paper_on_another_backbone():
    given = dict(preset="llama-3.2-3b", given={"stage2.temperature": 0.1})
    with mock.patch.object(sweeps, "plan_sweep", side_effect=lambda sweep, root: (_ for _ in ()).throw(Seen(sweep))):
        with pytest.raises(Seen) as seen: sweeps.run_sweep("stages", "runs/x", dry_run=True, **given)
    sweep = seen.value.args[0]
    assert (sweep["preset"], sweep["base"]["stage2.temperature"]) == ("llama-3.2-3b", 0.1)
    assert sweep["base"]["evaluate.benchmark"] == "paper15", "the rest is the file's"


class Seen(Exception): "Carries what a call was given."
