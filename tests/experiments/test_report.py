"Figures, tables and whole reports with missing pieces and broken files."
import json
from dataclasses import replace

import pytest

from anchor_nb.runs import ledger as ledgers
from anchor_nb.experiments import stages as stage_runs
from anchor_nb.experiments import figures, report
from anchor_nb.evaluation.comparison import load_per_query, scoreboard_text
from anchor_nb.evaluation.encoders import Candidate
from anchor_nb.evaluation.measure import METRICS, Evaluation, save_evaluation
from anchor_nb.evaluation.scores import evaluation_file, ledger_rows
from anchor_nb.data.retrieval_sets import Retrieval

TASK = Retrieval("toy", "", {f"d{n}": word for n, word in enumerate("moon tide bread flour sea".split())},
                 {"q1": "moon", "q2": "sea salt"}, {"q1": {"d0": 1}, "q2": {"d4": 1}})
FOUND = Evaluation("toy", "Retrieval", "ndcg_at_10", dict.fromkeys(METRICS, 0.5), "1", 2, 5, 1.0,
                   dict(statistic="mean", values={"q1": 1.0, "q2": 0.0}))
LABELS = {"untrained": 0, "stage1": 0, "baseline": 4, "anchor": 4, "bm25": 0}


def write_set(folder):
    "The toy task on disk."
    folder.mkdir(parents=True)
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    (folder/"corpus.jsonl").write_text(lines({"_id": i, "title": "", "text": t} for i, t in TASK.corpus.items()))
    (folder/"queries.jsonl").write_text(lines({"_id": i, "text": t} for i, t in TASK.queries.items()))
    (folder/"qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td0\t1\nq2\td4\t1\n")
    (folder/"task.json").write_text(json.dumps(dict(name="toy", instruction="", license="CC0", source="made up")))
    return str(folder)


def write_pipeline(folder, labels):
    "What a pipeline leaves behind, for some of its systems."
    for label in labels:
        rows = ledger_rows(FOUND, Candidate(label, label, LABELS[label], library="bm25" if label == "bm25"
                                            else "anchor_nb"), label, "paper", seed=0, max_length=64)
        save_evaluation(FOUND, folder/"per_query"/evaluation_file(rows[0]))
        ledgers.append_rows(folder/"ledger.jsonl", rows)
        if label in ("untrained", "bm25"): continue
        stage = "stage1" if label == "stage1" else "stage2"
        ledgers.write_json(folder/label/"run.json", dict(stage=stage, status="complete", starts=["2026-01-01"],
                                                         command=f"anchor-nb {stage}",
                                                         recipe=dict(steps=4, global_batch=2, seed=1)))
        ledgers.append_rows(folder/label/"metrics.jsonl", [dict(step=n, loss=1.0, loss_q2d=2.0, loss_d2q=3.0, tokens=9)
                                                           for n in (1, 2)])
        ledgers.append_rows(folder/label/"speed.jsonl", [dict(step=n, seconds=0.5, tokens=9) for n in (1, 2)])
    return ledgers.read_rows(folder/"ledger.jsonl") if labels else []


@pytest.mark.parametrize("labels", [[], ["untrained"], ["bm25"], ["anchor", "baseline"], ["stage1", "anchor"],
                                    list(LABELS)])
def test_every_figure_and_table_stands_missing_pieces(tmp_path, labels):
    ledger = write_pipeline(tmp_path, labels)
    per_query = load_per_query(ledger, tmp_path/"per_query")
    manifests = report.read_manifests(tmp_path)
    assert per_query.keys() == {(label, LABELS[label], "toy") for label in labels}
    for values in (per_query, None):
        figures.early_stage(ledger, values)
        stages = figures.stages_compared(ledger, values)
        assert sum(text.get_text() == "not run"
                   for text in stages.axes[0].texts) == 4 - len(set(labels) & figures.PAPER_NAMES.keys())
        table = report.comparison_table(ledger, values)
        assert [name for name, cell in table.iloc[:, 0].items() if cell == "not run"] == [
            figures.system(label)[0] for label in LABELS if label not in labels]
        report.can_show(ledger, values or {})
    assert len(report.runs_table(manifests).columns) == len(manifests)
    assert report.cannot_show(manifests, ledger)


def test_a_report_of_nothing_says_so(tmp_path):
    (tmp_path/"empty").mkdir()
    executed = stage_runs.run_stage("report", dict(out=str(tmp_path/"empty"), title="Empty & new", note="Nothing yet."),
                                    log=False)
    page = report.report_html(executed, tmp_path/"report.html").read_text(encoding="utf-8")
    assert "Empty &amp; new" in page and "Nothing yet." in page
    assert "there is no ledger.jsonl" in page.split("<details>")[1] and page.count("<h2") == 1
    assert f"anchor-nb evaluate MODEL --task FOLDER -p out={tmp_path/'empty'}" in page
    assert "<script" not in page and "import" not in page


def test_a_report_of_half_a_pipeline(tmp_path):
    write_pipeline(tmp_path, ["untrained", "stage1", "bm25"])
    page = report.report_html(stage_runs.run_stage("report", dict(out=str(tmp_path)), log=False),
                              tmp_path/"report.html").read_text(encoding="utf-8")
    assert "four systems: stage II only, stage I + II not scored." in page.split("<details>")[1]
    assert "anchor-nb stage1" in page and "One training seed (1)" in page and "Beside the paper" in page


def test_a_report_of_ones_own_ledger(tmp_path):
    "Five systems of any names, on the same queries: the page compares them, and leaves the paper out."
    labels = ["mine", "rival", "third", "bm25", "minilm"]
    for label, value in zip(labels, (0.9, 0.5, 0.4, 0.6, 0.7)):
        values = {f"q{n}": value + n / 1000 for n in range(-9, 10)}
        hits = {query: dict(text=f"Where is {query}?", hits=[["d1", f"{label} found this", 1]]) for query in values}
        found = replace(FOUND, queries=19, metrics=dict.fromkeys(METRICS, value), hits=hits,
                        items=dict(statistic="mean", values=values))
        rows = ledger_rows(found, Candidate(label, label, library="bm25" if label == "bm25" else "anchor_nb"), label,
                           "paper", seed=0, max_length=64)
        save_evaluation(found, tmp_path/"per_query"/evaluation_file(rows[0]))
        ledgers.append_rows(tmp_path/"ledger.jsonl", rows)
    page = report.report_html(stage_runs.run_stage("report", dict(out=str(tmp_path)), log=False),
                              tmp_path/"report.html").read_text(encoding="utf-8")
    assert "<em>mine</em> is 20.0 points above <em>all-MiniLM-L6-v2</em>" in page and "Beside the paper" not in page
    assert page.count('<h3 class="query">') == 5 and page.count(">✓ mine found this") == 5
    assert "anchor-nb search mine" in page and "prefers-color-scheme: dark" in page


def test_a_broken_ledger_is_named(tmp_path):
    write_pipeline(tmp_path, ["untrained"])
    text = (tmp_path/"ledger.jsonl").read_text()
    (tmp_path/"ledger.jsonl").write_text("{broken\n" + text)
    with pytest.raises(stage_runs.StageError, match="ledger.jsonl, line 1"):
        stage_runs.run_stage("report", dict(out=str(tmp_path)), log=False)


@pytest.mark.parametrize("change, error, message", [
    (dict(tasks=["no/such/folder"]), FileNotFoundError, "no/such/folder"),
    (dict(tasks=[]), ValueError, "tasks and benchmark are empty"),  # the recipe refuses it before a notebook starts
    (dict(models={"anchor": "UNFINISHED"}), stage_runs.StageError, r"without a finished model \(running\)"),
])
def test_evaluation_refuses_bad_input_before_it_loads_a_model(tmp_path, change, error, message):
    ledgers.write_json(tmp_path/"unfinished"/"run.json", dict(stage="stage2", status="running", recipe=dict(steps=3)))
    good = dict(tasks=[write_set(tmp_path/"eval")], models={}, yardsticks=["bm25"], out=str(tmp_path/"out"))
    change = json.loads(json.dumps(change).replace("UNFINISHED", str(tmp_path/"unfinished")))
    with pytest.raises(error, match=message): stage_runs.run_stage("evaluate", {**good, **change}, log=False)
    assert not (tmp_path/"out"/"ledger.jsonl").exists()


def test_yardsticks_that_cannot_be_had_or_that_fail_on_a_task_are_named_and_nothing_fails(tmp_path, monkeypatch):
    "MiniLM cannot be fetched; BM25 finds no word to index in a corpus of stop words."
    for name, value in dict(ANCHOR_NB_CACHE=tmp_path/"cache", HF_HUB_CACHE=tmp_path/"hub", HF_HUB_OFFLINE=1,
                            PIP_RETRIES=0, PIP_INDEX_URL="http://127.0.0.1:9", PIP_EXTRA_INDEX_URL="").items():
        monkeypatch.setenv(name, str(value))
    sets = [write_set(tmp_path/name) for name in ("good", "bare")]
    (tmp_path/"bare"/"corpus.jsonl").write_text("".join(json.dumps({"_id": name, "title": "", "text": "the of"}) + "\n"
                                                        for name in TASK.corpus))
    (tmp_path/"bare"/"task.json").write_text(json.dumps(dict(name="bare", instruction="", license="CC0", source="-")))
    parameters = dict(tasks=sets, models={}, out=str(tmp_path/"out"), yardsticks=["bm25", "minilm"])
    stage_runs.run_stage("evaluate", parameters, log=False)
    summary = ledgers.read_json(tmp_path/"out"/"summary.json")
    assert (list(summary["models"]), summary["failed"], set(summary["not_scored"])) == (["bm25"], [],
                                                                                        {"bm25", "minilm"})
    assert summary["not_scored"]["bm25"].startswith("bare: ")
    assert [(line["task"], line["model"]) for line in summary["table"]] == [("toy", "bm25")]
    shown = scoreboard_text(summary["table"], summary["not_scored"])
    assert "all-MiniLM-L6-v2: not scored (" in shown and max(map(len, shown.split("\n"))) <= 100
