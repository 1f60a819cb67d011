"The stage notebooks through papermill: the tiny model with two processes, and the real SmolLM2-135M."
import json
from pathlib import Path

import pytest

from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.runs.ledger import frame, read_json
from anchor_nb.experiments.stages import run_stage
from common import rows, toy_pairs


def stages(out: Path, model: str, corpus: str, common: dict, evaluate: dict):
    "Prepare, stage I, stage II from it, scores and report, each an executed notebook."
    run_stage("prepare", dict(corpora=[corpus], model=model, out=f"{out}/data"), log=False)
    usual = dict(common, data=f"{out}/data/pairs")
    run_stage("stage1", dict(usual, model=model, out=f"{out}/stage1"), log=False)
    run_stage("stage2", dict(usual, model=f"{out}/stage1/model", out=f"{out}/anchor", snapshot_steps=1), log=False)
    models = dict(untrained=model, stage1=f"{out}/stage1", anchor=f"{out}/anchor")
    run_stage("evaluate", dict(evaluate, models=models, tasks=[f"{out}/data/eval/{corpus}"], out=str(out)), log=False)
    return run_stage("report", dict(out=str(out)), log=False)


def check(out: Path, steps: int):
    "Whole runs, finite losses, a score for every model, and a report with figures."
    for stage, names in (("stage1", ("loss_q2d", "loss_d2q")), ("anchor", ("loss", "accuracy"))):
        found = rows(out/stage)
        assert [row["step"] for row in found] == list(range(1, steps + 1))
        assert all(0 <= row[name] < 20 for row in found for name in names)
        manifest = read_json(out/stage/"run.json")
        assert manifest["status"] == "complete" and manifest["data"] and manifest["wall_seconds"] > 0
    ledger = frame(out/"ledger.jsonl")
    assert {"untrained", "stage1", "anchor", "bm25"} <= set(ledger.label)
    assert ledger.value.between(0, 1).all()
    report = json.loads((out/"report.ipynb").read_text())
    pictures = sum(any(kind.startswith("image/") for kind in output.get("data", {})) for cell in report["cells"]
                   for output in cell.get("outputs", []))
    assert pictures >= 3


@pytest.mark.ranks
def test_tiny_model_on_two_processes(tmp_path):
    stages(tmp_path, "tiny", "toy", dict(processes=2, steps=4, global_batch=8, warmup_steps=1, max_length=48,
                                         save_steps=2), dict(queries=20, documents=40, max_length=48))
    check(tmp_path, 4)
    again = (tmp_path/"stage1"/"model"/"model.safetensors").stat().st_mtime_ns
    run_stage("stage1", dict(processes=2, steps=4, global_batch=8, warmup_steps=1, max_length=48, save_steps=2,
                             model="tiny", data=f"{tmp_path}/data/pairs", out=f"{tmp_path}/stage1"), log=False)
    assert (tmp_path/"stage1"/"model"/"model.safetensors").stat().st_mtime_ns == again, ("a finished run must be a "
                                                                                         "cache hit")


def test_stage_one_runs_to_its_last_cell_with_other_objectives(tmp_path):
    "The notebook's figure draws whatever losses there are."
    how = dict(objectives={"mntp": 1.0, "ebar": 0.2}, bidirectional=True, steps=2, global_batch=4, warmup_steps=1,
               max_length=32, save_steps=0)
    run_stage("stage1", dict(how, model="tiny", data=toy_pairs(), out=f"{tmp_path}/run"), log=False)
    assert len(rows(tmp_path/"run")) == 2


@pytest.mark.registry
def test_real_model_on_real_text(tmp_path):
    "SmolLM2-135M and encyclopedia text: two steps of each stage on one pair of short texts after the other."
    stages(tmp_path, "smollm2-135m", "wiki", dict(steps=2, global_batch=4, warmup_steps=1, max_length=24, save_steps=0),
           dict(queries=10, documents=20, max_length=24))
    check(tmp_path, 2)
    first = rows(tmp_path/"stage1")[0]
    assert 3 < first["loss_q2d"] < 8, "an instruct model predicts English far better than chance, log 49152 = 10.8"
    vectors = AnchorEmbedder.from_pretrained(str(tmp_path/"anchor")).encode(["a city in France",
                                                                             "the capital of France"])
    assert vectors.shape == (2, 576)
