"""The command line, and the whole pipeline through it on a tiny model."""
import json
import re
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import typer
import yaml
from typer.testing import CliRunner

import warm
from anchor_nb.runs import ledger as ledgers
from anchor_nb.experiments import stages as stage_runs
from anchor_nb.experiments import pipeline
from anchor_nb.runs import manifest as runs
from anchor_nb.cli.main import app
from anchor_nb.runs.launch import LAUNCHERS
from anchor_nb.core.presets import presets
from anchor_nb.core.recipe import RECIPES
from anchor_nb.core.settings import GROUPS, grouped
from common import defaults, toy_pairs

COMMAND = Path(sys.executable).with_name("anchor-nb")


def invoke(*words):
    "The command inside this process."
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="anchor-nb")


def shell(*words, cwd=None):
    "The command in a process of its own."
    return warm.run([COMMAND, *map(str, words)], capture_output=True, text=True, cwd=cwd, timeout=900)


def rows(path): return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ---- listing and checking ----

def test_the_help_says_that_a_stopped_export_is_not_resumed():
    text = " ".join(invoke("--help").output.split())
    assert "the same command resumes, but an export that was stopped needs a new folder" in text


def test_stages_and_presets_are_listed():
    assert [line.split()[0] for line in invoke("stages").output.splitlines()] == list(stage_runs.stages())
    assert all(len(line.split()) > 3 for line in invoke("stages").output.splitlines()), "each with what it does"
    assert [line.split()[0] for line in invoke("presets").output.splitlines()] == list(presets())


@pytest.mark.parametrize("stage", list(RECIPES))
def test_help_lists_six_settings_and_help_all_every_one(stage):
    shown, every = (invoke(stage, option).output for option in ("--help", "--help-all"))
    groups = grouped(RECIPES[stage])
    names = [f.name for members in groups.values() for f in members]
    listed = lambda text: [name.replace("-", "_") for name in re.findall(r"^  (?:-o, )?--([a-z0-9-]+)", text, re.M)]
    assert listed(every) == names
    assert re.findall(r"^(\S.+):$", every, re.M) == [GROUPS[group] for group in groups]
    basic = listed(shown[shown.index(GROUPS["first"]):shown.index("`anchor-nb")])
    assert 2 <= len(basic) <= 6 and set(basic) <= {f.name for f in groups["first"]}


def test_o_means_out_in_every_command():
    options = {name: [parameter.opts for parameter in command.params]
               for name, command in typer.main.get_command(app).commands.items()}
    for name, found in options.items():
        assert all(("-o" in words) == ("--out" in words) for words in found), name
    assert sum(["--out", "-o"] in found for found in options.values()) > 15


@pytest.mark.parametrize("name, stage", [(name, stage) for name, stages in presets().items() for stage in stages])
def test_dry_run_prints_the_whole_recipe_and_starts_nothing(name, stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(stage, "--preset", name, "--dry-run")
    assert result.exit_code == 0 and yaml.safe_load(result.output) == pipeline.full_preset(name, stage)
    assert list(tmp_path.iterdir()) == []


def test_later_sources_beat_earlier_ones(tmp_path):
    (tmp_path/"mine.yaml").write_text("steps: 11\nalpha: 1e-1\nseed: 5\n")
    shown = yaml.safe_load(invoke("stage1", "--preset", "paper", "-f", tmp_path/"mine.yaml", "-p", "seed=6", "-p",
                                  "trackers=[wandb]", "--dry-run").output)
    assert (shown["steps"], shown["alpha"], shown["seed"], shown["trackers"], shown["max_length"]) == (11, 0.1, 6,
                                                                                                       ["wandb"], 512)
    assert yaml.safe_load(invoke("stage1", "--dry-run").output) == defaults(RECIPES["stage1"])


def test_dry_run_prints_what_the_preset_decides(tmp_path):
    output = invoke("stage2", toy_pairs(), "--model", "tiny", "--dry-run").stdout
    shown = yaml.safe_load(output)
    assert min(shown[name] for name in ("max_length", "global_batch", "steps", "learning_rate", "warmup_steps")) > 0
    assert "# preset laptop (no GPU here)" in output and "# forecast: about" in output
    assert "decided from data and model before the first step: max_length" in invoke("stage2", "--dry-run").output


def test_dry_run_reads_the_evaluation_sets(tmp_path):
    for name in ("corpus", "queries"): (tmp_path/f"{name}.jsonl").write_text('{"_id": "a", "text": "b"}\n')
    (tmp_path/"qrels.tsv").write_text("a\tnone\t1\n")
    result = invoke("evaluate", "tiny", "--task", tmp_path, "--dry-run")
    assert result.exit_code and "unknown document 'none'" in result.stderr
    (tmp_path/"qrels.tsv").write_text("a\ta\t1\n")
    assert str(tmp_path) in invoke("evaluate", "tiny", "--task", tmp_path, "--dry-run").stdout


def test_what_dry_run_prints_can_be_given_back(tmp_path):
    first = invoke("stage2", "--preset", "paper", "-p", "instructions=none", "--dry-run").output
    (tmp_path/"again.yaml").write_text(first)
    assert invoke("stage2", "-f", tmp_path/"again.yaml", "--dry-run").output == first


@pytest.mark.parametrize("words, message", [
    (["stage1", "-p", "step=5"], "no parameter 'step'\ndid you mean steps?"),
    (["stage1", "-p", "steps=many"], "steps='many' is not a whole number\nwrite it like steps=8"),
    (["stage2"], "stage2 has no data\nname your pairs, `anchor-nb stage2 --data pairs.csv`, or try all stages"),
    (["mine"], "data is empty\nname a folder of pairs"),
    (["evaluate"], "tasks and benchmark are empty\nname a benchmark"),
    (["evaluate", "tiny", "--tasks", "2024"], "tasks=[2024] must be names and folders\nput a number in quotes"),
    (["stage1", "--objectives", "anchor=.inf"], "objectives={'anchor': inf}\ngive each a weight over 0"),
    (["stage1", "-p", "alpha=2"], "alpha must lie in [0, 1]"),
    (["stage1", "-p", "steps"], "write -p name=value"),
    (["stage1", "--preset", "smok"], "no preset 'smok'\nthere are"),
    (["stage1", "-f", "no.yaml"], "there is no no.yaml\ngive the path of something that exists"),
    (["stage1", "-f", "."], ". is a folder, where a file is needed\ngive a file"),
    (["stage1", "-p", "objectives={anchor: 1"], "objectives={anchor: 1 is not valid YAML (expected ',' or '}', but "
                                                "got '<stream end>')\nclose every bracket"),
    (["stage1", "-p", "trackers=[x"], "trackers=[x is not valid YAML"),
    (["merge", "tiny", "tiny", "--out", "soup", "--policy", "x=[1"], "x=[1 is not valid YAML"),
    (["export", "tiny", "out", "-p", "pooling=[x"], "pooling=[x is not valid YAML"),
    (["export", "tiny", "/etc/hostname/out"], "/etc/hostname is a file, where a folder is needed\ngive another path"),
    (["tables", "nosuch"], "there is no nosuch\ngive the path"),
    (["pipeline", "--preset", "smoke", "-p", "steps=5"], "write STEP.PARAMETER=VALUE"),
    (["pipeline", "--preset", "smoke", "-p", "report.titel=x"], "did you mean title?"),
    (["pipeline", "--preset", "nope"], "no preset 'nope'"),
    (["sweep", "nope.yml"], "there is no file nope.yml\ngive a YAML file, or one of ablation"),
    (["recipe", "e6"], "no recipe 'e6'\nthere are anchor"),
    (["recipe", "e5", "-p", "steps=5"], "write stage.parameter, such as stage1.alpha"),
    (["recipe", "e5", "-p", "stage1.steps=5"], "stage1.steps: e5 has no stage1\nit has stage2"),
    (["analyse", "tiny"], "one model alone cannot be compared"),
    (["analyse", "tiny", "tiny"], "data is empty\nname a folder or file of rows"),
    (["filter", "nowhere", "--out", "kept", "--min-margin", "0.5", "--max-margin", "0.1"], "0.5"),
    (["dedup", "nowhere", "--out", "kept", "--remove", "some"], "some"),
    (["merge", "tiny", "--out", "soup"], "two"),
    (["plan", "--sharding", "fsdp"], "sharding='fsdp'\nchoose one of ddp, fsdp2"),
    (["plan", "--rank", "-1"], "lora_rank must not be negative"),
    (["submit", "stage1", "-p", "step=5"], "did you mean steps?"),
    (["encode", "nowhere", "--out", "vectors", "-p", "shard_row=9"], "did you mean shard_rows?"),
    (["encode", "nowhere", "--out", "vectors", "-p", "shard_rows=many"], "write it like shard_rows=16384"),
    (["search", "tiny", "nowhere.jsonl", "who?"], "nowhere.jsonl"),
    (["decode", "tiny", "a text", "--direction", "sideways"], "choose q2d"),
    (["export", "runs/no/such", "out"], "runs/no/such"),
    (["export", "tiny", "out", "-p", "length=5"], "there are pooling, max_length, bidirectional, kind"),
    (["card", "runs/no/such"], "runs/no/such"),
    (["push", "nowhere", "me/mine"], "nowhere"),
    (["serve", "tiny", "nowhere"], "nowhere"),
    (["encode", "nowhere", "--out", "vectors", "--dtype", "int4"], "choose one of float32, float16, int8, binary"),
])
def test_a_mistake_is_one_message_and_nothing_starts(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage_runs, "execute", lambda *_: pytest.fail("it started"))
    result = invoke(*words)
    assert result.exit_code == 1 and message in result.output, result.output
    assert result.stdout == "" and len(result.stderr.strip().splitlines()) == 2
    assert "traceback" not in result.stderr, "the message says it all"
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_shell_is_no_traceback(tmp_path):
    result = subprocess.run([COMMAND, "stage1", "-p", "alpha=2"], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    what, fix = result.stderr.splitlines()
    assert what == "anchor-nb: alpha must lie in [0, 1], it is 2.0"
    assert fix == "fix that and run the same command again"


def test_a_fault_of_ours_says_so(monkeypatch):
    from anchor_nb.training import plan as planning
    def broken(*_, **__):
        raise KeyError("layers")
    monkeypatch.setattr(planning, "report", broken)
    result = invoke("plan", "--gpus", "1")
    what, fix = result.stderr.splitlines()
    assert (result.exit_code, what) == (1, "anchor-nb: KeyError: 'layers'")
    assert fix.startswith("this is a fault of anchor_nb: please report it with the traceback; traceback: ")
    assert "Traceback (most recent call last)" in Path(fix.rpartition(": ")[2]).read_text()


def test_an_extra_that_is_missing_is_named(monkeypatch):
    from anchor_nb.training import plan as planning
    def lacking(*_, **__):
        raise ModuleNotFoundError("No module named 'submitit'", name="submitit")
    monkeypatch.setattr(planning, "report", lacking)
    result = invoke("plan", "--gpus", "1")
    assert result.stderr.startswith('anchor-nb: the package submitit is not installed\n'
                                    'pip install "anchor_nb[slurm]"\n')


def test_a_rank_that_was_left_behind_is_named_and_forgotten(monkeypatch):
    for name in LAUNCHERS: monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    shown = invoke("stages")
    assert shown.stderr.startswith("RANK=3: left over in the environment") and "RANK" not in os.environ
    assert invoke("stages").stderr == ""


# ---- JSON ----

WITH_JSON = ["analyse", "check", "compare", "decode", "dedup", "doctor", "encode", "evaluate", "export", "filter",
             "hello", "merge", "plan", "push", "recipe", "recipes", "search", "split", "sweep", "testset"]


def noisy(found):
    "Stands in for the work of a command: prints as libraries do, also past Python and from another process."
    def work(*_, **__):
        print("Launching training on CPU.")
        os.write(1, b"[IPKernelApp] ERROR | caught in kernel\n")
        subprocess.run(["echo", "from a process"])
        return found
    return work


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    "Every command that has --json, with its work replaced, and with the words that it needs."
    import importlib
    def stub(place, found):
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(importlib.import_module(f"anchor_nb.{module}"), name, noisy(found))
    facts = dict(rows=3, written=2, below=1, above=0, equal=1, near=0, contaminated=0)
    stub("inference.decoding.decode_from_anchor", [])
    stub("data.deduplication.dedup_pairs", dict(datasets={"a": facts}, tests={}))
    stub("data.inspection.inspect_pairs", dict(unit="words", max_length=8, datasets={}))
    stub("data.splitting.split_pairs", dict(rows=3, groups=3, by="", pairs=dict(a=2), queries=1, documents=3,
                                            interval=98.0, largest_group=1, test_groups=1, file_names=False))
    stub("inference.own_pairs.question_set", dict(queries=1, documents=3, lost=["who?"]))
    stub("cli.doctor.checks", [])
    stub("inference.corpus_encoding.encode_corpus",
         dict(rows=1, shards=1, bytes=8, made_rows=1, seconds=1.0, complete=True))
    stub("release.certificate.export_everywhere",
         dict(bytes=8, dimension=4, dtype="float32", card="out/README.md", readers={}))
    stub("inference.filtering.filter_pairs", {"a": facts})
    stub("experiments.hello.first_look", dict(passages=["a: b"], questions=["who?"], cosines={"tiny": numpy.eye(1)}))
    stub("release.merging.merge_models", dict(tensors=5, bytes=8))
    stub("data.inspection.unread", ["doc"])
    stub("training.plan.report", [])
    stub("training.plan.table", "nothing")
    files = [dict(bytes=8, path="README.md", sha256="ab")]
    stub("release.hub.push", dict(files=files, bytes=8, left_out=[], plan="ab"))
    stub("inference.search.search_corpus", [dict(query="who?", hits=[])])
    stub("experiments.sweeps.run_sweep", dict(done=1, failed={}, skipped=0, waiting=0, ledger="ledger.jsonl"))
    stub("cli.scoring.run_stage", tmp_path/"x.ipynb")
    stub("cli.scoring.side_of", None)
    stub("evaluation.comparison.comparison", dict(names=["a", "b"], tasks=[], left_out=["toy"]))
    (tmp_path/"summary.json").write_text(json.dumps(dict(models={}, failed=[])))
    out = ["-p", f"out={tmp_path}", "-p", "data=pairs"]
    words = dict(check=["x"], split=["x", "--out", "y"], compare=["a", "b"], decode=["tiny", "a"],
                 dedup=["x", "--out", "y"], doctor=["--quick"],
                 encode=["x", "--out", "y"], export=["tiny", "y"],
                 filter=["x", "--out", "y", "--min-margin", "0", "--max-margin", "1"],
                 hello=["--out", str(tmp_path/"x.png")], merge=["a", "b", "--out", "y"],
                 push=["x", "me/x"], recipe=["e5"],
                 search=["tiny", "x", "who?"], sweep=["alpha"], analyse=out, evaluate=out[:2],
                 testset=["x", "--pairs", "y", "--out", "z"])
    return {name: [name, *words.get(name, [])] for name in WITH_JSON}


def test_what_to_type_after_a_split_can_be_copied(stubbed):
    shown = invoke("split", "x", "--out", "my split").stdout
    assert "--data 'my split/pairs' --out" in shown and "--task 'my split/test'\n" in shown


@pytest.mark.parametrize("name", WITH_JSON)
def test_an_answer_is_one_json_object_if_asked_for_and_a_few_lines_if_not(name, stubbed, capfd):
    found = invoke(*stubbed[name], "--json")
    assert found.exit_code == 0, found.output
    assert isinstance(json.loads(found.stdout), dict)
    past_python = capfd.readouterr()
    assert past_python.out == "" and ("from a process" in past_python.err) == (name != "recipes")
    shown = invoke(*stubbed[name])
    assert shown.exit_code == 0 and not any(line.startswith("{") for line in shown.stdout.splitlines()), shown.output
    assert ("which have no such field: doc" in shown.stdout) == (name in ("dedup", "filter", "split"))


@pytest.mark.parametrize("rank", ["0", "1", None])
def test_a_rank_that_is_done_first_does_not_fail(stubbed, monkeypatch, rank):
    "torchrun ends all others when one fails."
    for name, value in dict(RANK=rank, MASTER_ADDR="127.0.0.1").items() if rank else (): monkeypatch.setenv(name, value)
    given = {}
    def encode(**settings):
        given.update(settings)
        return dict(rows=1, shards=1, bytes=8, made_rows=1, seconds=1.0, complete=False)
    monkeypatch.setattr("anchor_nb.inference.corpus_encoding.encode_corpus", encode)
    result = invoke("encode", "x", "--out", "y", "-p", "dtype=int8", "-p", "out=z", "-p", "processes=2")
    assert result.exit_code == 0 and ("in z; the other processes" in result.output) == (rank != "1"), result.output
    assert given == dict(corpus="x", model="smollm2-135m", out="z", processes=2, dtype="int8", columns={})


def test_every_command_that_has_json_is_tried():
    from typer.main import get_command
    having = [name for name, command in get_command(app).commands.items() if any("--json" in one.opts
                                                                                 for one in command.params)]
    assert sorted(having) == WITH_JSON


def test_two_labels_two_ledgers_and_a_model_are_found_for_a_comparison(tmp_path, monkeypatch):
    from anchor_nb.cli.scoring import side_of
    monkeypatch.chdir(tmp_path)
    for folder, labels in dict(one=["mine", "bm25"], two=["a", "b"]).items():
        ledgers.append_rows(tmp_path/folder/"ledger.jsonl", [
            dict(label=label, step=0, task="t", metric="ndcg_at_10", main=True, value=0.5, seed=0)
            for label in labels])
    found = lambda text: (side_of(text, Path("two")).label, str(side_of(text, Path("two")).folder))
    assert [found(text) for text in ("a", "one", "one:bm25", "runs/b/model")] == [
        ("a", "two"), ("mine", "one"), ("bm25", "one"), ("b", "two")]
    with pytest.raises(ValueError, match="two holds the scores of a, b; write two:LABEL"): side_of("two", Path("one"))
    for name in ("x/b", "runs/b"): ledgers.write_json(tmp_path/name/"run.json", {})
    ledgers.append_rows(tmp_path/"two/ledger.jsonl", [dict(label="b", step=0, task="t", metric="ndcg_at_10", main=True,
                                                          value=0.5, seed=0, manifest="x/b/run.json")])
    assert found("x/b") == ("b", "two")
    with pytest.raises(ValueError, match="the scores of b in two are those of .*x/b, not of runs/b"): found("runs/b")
    shown = invoke("compare", "x/b", "b", "--ledger", "two")
    assert shown.exit_code == 1 and "both are b in two\nname two models" in shown.stderr
    shown = invoke("compare", "mine", "nosuch", "--ledger", "one")
    assert shown.exit_code == 1 and "it has mine, bm25" in shown.stderr


def test_scores_of_a_run_from_before_it_was_trained_again_are_not_compared(tmp_path, monkeypatch):
    from anchor_nb.cli.scoring import check_scored
    monkeypatch.chdir(tmp_path)
    ledgers.write_json(tmp_path/"runs/b/run.json", dict(starts=["tuesday"]))
    row = dict(label="b", step=0, task="t", metric="ndcg_at_10", value=0.5, seed=0, manifest="runs/b/run.json")
    ledgers.append_rows(tmp_path/"two/ledger.jsonl", [row | dict(run="monday")])
    with pytest.raises(ValueError, match="from before runs/b was trained again"): check_scored("runs/b", Path("two"))
    ledgers.append_rows(tmp_path/"two/ledger.jsonl", [row | dict(run="tuesday", manifest="elsewhere/b/run.json")])
    check_scored("runs/b", Path("two"))


def test_scores_of_another_delivered_model_of_that_name_are_not_compared(tmp_path, monkeypatch):
    "What adapt delivers is no run, and is called adapt wherever it lies."
    from anchor_nb.cli.scoring import check_scored
    from anchor_nb.runs.identity import run_content
    monkeypatch.chdir(tmp_path)
    for folder in ("mine/adapt/model", "other/adapt/model"):
        ledgers.write_json(tmp_path/folder/"config.json", dict(of=folder))
    row = dict(label="adapt", step=0, task="t", metric="ndcg_at_10", value=0.5, seed=0, manifest="")
    ledgers.append_rows(tmp_path/"two/ledger.jsonl", [row])
    check_scored("other/adapt/model", Path("two")) # nothing is known of it
    ledgers.append_rows(tmp_path/"two/ledger.jsonl", [row | dict(evaluation="first")])
    facts = dict(id="first", inputs={"models.adapt": run_content("mine/adapt/model")})
    ledgers.append_rows(tmp_path/"two/evaluations.jsonl", [facts])
    check_scored("mine/adapt/model", Path("two"))
    with pytest.raises(ValueError, match="are not those of other/adapt/model, whose files are others"):
        check_scored("other/adapt/model", Path("two"))


# ---- jobs, sweeps, corpora ----

def test_dry_runs_of_jobs_and_sweeps_show_what_would_be_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = invoke("submit", "stage1", "--slurm", "partition=gpu", "--slurm", "time=240", "--gpus", "8", "-p",
                 "out=runs/mine", "--dry-run")
    assert job.exit_code == 0, job.output
    for words in ("#SBATCH --partition=gpu", "#SBATCH --time=240", "'processes': 8"): assert words in job.output
    assert "there are prepare, mine" in invoke("submit", "stage9", "--gpus", "2", "--dry-run").stderr
    shown = invoke("sweep", "alpha", "--dry-run")
    assert shown.exit_code == 0 and "stage1-" in shown.output and "waiting" in shown.output, shown.output
    assert list(tmp_path.iterdir()) == []


def test_methods_are_listed_and_one_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed, cards = invoke("recipes").output.splitlines(), json.loads(invoke("recipes", "--json").output)
    assert [line.split()[0] for line in listed] == list(cards) and set(cards) == {"anchor", "llm2vec", "echo",
                                                                                  "llama2vec", "gritlm-re", "e5",
                                                                                  "bge-icl"}
    assert all(card["differs"] for card in cards.values())
    shown = invoke("recipe", "llm2vec", "-p", "stage1.steps=7", "--dry-run").output
    assert all(f"{stage}-" in shown for stage in ("prepare", "stage1", "stage2", "evaluate"))
    assert "stage1-" not in invoke("recipe", "e5", "--dry-run").output
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_is_encoded_from_a_shell_and_gone_on_with(tmp_path):
    "Parameters arrive as text and count as numbers; stdout is one JSON object; the second call finds all shards there."
    (tmp_path/"corpus.jsonl").write_text("".join(json.dumps(dict(_id=f"d{n}", text=f"text number {n}")) + "\n"
                                                 for n in range(10)))
    for made in (3, 0):
        result = shell("encode", "corpus.jsonl", "--model", "tiny", "--out", "vectors", "--dtype", "int8", "-p",
                       "shard_rows=4", "--json", cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        found = json.loads(result.stdout)
        assert (found["rows"], found["shards"], found["made_shards"], found["complete"]) == (10, 3, made, True)


# ---- the pipeline ----

@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    "The whole pipeline on a tiny model and toy text, from a shell; stage1.yaml has the settings of its stage I."
    folder = tmp_path_factory.mktemp("smoke")
    result = shell("pipeline", "--preset", "smoke", "--out", "runs/all", "-p", "stage2.steps=4", "-p", "stage1.steps=4",
                   cwd=folder)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    step = next(step for step in pipeline.plan("smoke", "runs/all", {"stage1.steps": 4}) if step.name == "stage1")
    (folder/"stage1.yaml").write_text(yaml.safe_dump(step.parameters))
    return folder, result.stdout


def test_the_pipeline_runs_and_prints_the_report_last(smoke):
    folder, shown = smoke
    page = Path(shown.splitlines()[-1])
    assert page == folder/"runs/all/report.html" and page.stat().st_size > 100_000
    assert [line.split()[2] for line in shown.splitlines() if line.startswith("== ")
            and "/6" in line] == list(pipeline.STEPS)
    assert list(ledgers.read_json(folder/"runs/all/pipeline.json")["seconds"]) == list(pipeline.STEPS)


def test_every_training_run_is_complete_and_its_steps_are_counted(smoke):
    folder, _ = smoke
    for name in ("stage1", "anchor", "baseline"):
        assert runs.read_manifest(folder/"runs/all"/name)["status"] == "complete"
        assert [row["step"] for row in rows(folder/"runs/all"/name/"metrics.jsonl")] == [1, 2, 3, 4]
        assert "image/png" in (folder/"runs/all/notebooks"/f"{name}.ipynb").read_text(), ("the executed notebook shows "
                                                                                          "its figure")
    assert {"untrained", "stage1", "anchor", "baseline", "bm25"} <= {row["label"]
                                                                     for row in rows(folder/"runs/all/ledger.jsonl")}


def test_a_finished_stage_is_not_run_again(smoke):
    folder, _ = smoke
    metrics = folder/"runs/all/stage1/metrics.jsonl"
    before = metrics.stat().st_mtime_ns, runs.read_manifest(folder/"runs/all/stage1")
    assert shell("stage1", "-f", "stage1.yaml", cwd=folder).returncode == 0
    assert (metrics.stat().st_mtime_ns, runs.read_manifest(folder/"runs/all/stage1")) == before


def test_the_folder_of_another_run_is_refused_with_what_differs(smoke):
    folder, _ = smoke
    before = (folder/"runs/all/stage1/run.json").read_bytes()
    result = shell("stage1", "-f", "stage1.yaml", "-p", "steps=9", "--output", "other.ipynb", cwd=folder)
    assert (result.returncode == 1 and "steps is 4 there and 9 here" in result.stderr
            and "Traceback" not in result.stderr)
    assert (folder/"runs/all/stage1/run.json").read_bytes() == before
