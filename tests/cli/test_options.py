"Settings as options, the names that other libraries use, and what is refused before a notebook starts."
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import warm
from anchor_nb.cli.main import app
from anchor_nb.core.recipe import RECIPES
from anchor_nb.experiments import stages
from anchor_nb.experiments.stages import stage_folder
from anchor_nb.runs.manifest import start_run
from common import recipe

COMMAND = Path(sys.executable).with_name("anchor-nb")


def invoke(*words): return CliRunner().invoke(app, [str(word) for word in words], prog_name="anchor-nb")


def settings(*words) -> dict:
    "What a stage would run with."
    found = invoke(*words, "--dry-run")
    assert found.exit_code == 0, found.output
    return yaml.safe_load(found.stdout)


@pytest.mark.parametrize("stage", list(RECIPES))
def test_every_setting_is_an_option(stage):
    "A value other than the default arrives, whichever way it is typed."
    given = dict(mine=dict(data="x"), evaluate=dict(benchmark="local"), analyse=dict(a="x", b="y", data="z"))
    basic = [f"--{name}={value}" for name, value in given.get(stage, {}).items()]
    for name, value in dict(seed=7, max_length=33, model="tiny", instructions="none").items():
        if name not in {f for f in RECIPES[stage].__dataclass_fields__}: continue
        for words in ([f"--{name}", value], [f"--{name.replace('_', '-')}={value}"], ["-p", f"{name}={value}"]):
            assert settings(stage, *basic, "--out", "x", *words)[name] == value


def test_lists_mappings_and_flags():
    shown = settings("stage2", "pairs.csv", "--trackers", "wandb", "--trackers", "trackio", "--matryoshka-dims", "64,8",
                     "--ratios", "wiki=2", "--ratios", "toy=0.5", "--compile", "--mask-false-negatives", "false")
    assert shown["trackers"] == ["wandb", "trackio"] and shown["matryoshka_dims"] == [64, 8]
    assert shown["ratios"] == {"wiki": 2, "toy": 0.5} and shown["data"] == "pairs.csv"
    assert shown["compile"] is True and shown["mask_false_negatives"] is False
    assert settings("stage2", "--data", "pairs.csv", "--no-mask-false-negatives")["mask_false_negatives"] is False
    shown = settings("evaluate", "--models", "a=tiny", "--models", "b=runs/x", "--task", "2024")
    assert shown["models"] == dict(a="tiny", b="runs/x") and shown["tasks"] == ["2024"]


@pytest.mark.parametrize("stage", list(RECIPES))
def test_every_option_that_the_help_lists_is_there(stage):
    params = get_command(app).commands[stage].params
    known = {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    known |= {f"--{param.name}" for param in params if param.param_type_name == "argument" and param.nargs == 1}
    shown = invoke(stage, "--help").output + invoke(stage, "--help-all").output
    assert set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.M)) <= known


@pytest.mark.parametrize("words", [("--lr", "1e-4"), ("-p", "lr=1e-4"), ("--learning_rate", "1e-4")])
def test_names_of_other_libraries_are_understood(words):
    found = invoke("stage1", *words, "--max_seq_length", "33", "--dry-run")
    shown = yaml.safe_load(found.stdout)
    assert (shown["learning_rate"], shown["max_length"]) == (1e-4, 33)
    said = ["lr means learning_rate here"]*("lr" in words[0] + words[1]) + ["max_seq_length means max_length here"]
    assert sorted(found.stderr.splitlines()) == said


def test_what_no_shell_makes_of_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = settings("report", "--out=~/runs", "-p", "title=~/mine", "--note", "~/as it is")
    assert shown == dict(out=f"{tmp_path}/runs", title=f"{tmp_path}/mine", note="~/as it is")
    assert settings("report", "--note", "what does x =~/y/ do")["note"] == "what does x =~/y/ do"


def test_a_command_to_copy_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"Who is {n}00{n}?,It is number {n}11\n" for n in range(60))
    Path("faq.csv").write_text(f"query,positive\n{rows}")
    assert "next: anchor-nb stage2 --data 'my split/pairs' --out" in invoke("split", "faq.csv", "-o", "my split").output


@pytest.mark.parametrize("words, message", [
    (["stage2", "--learning-rat", "1"], "stage2 has no option --learning-rat\ndid you mean --learning-rate?"),
    (["stage2", "--qqq", "red"], "stage2 has no option --qqq\n`anchor-nb stage2 --help` shows how it is used"),
    (["mine", "--relative-margin", "0.1"], "mine has no option --relative-margin\nit was removed; 0.0 always holds"),
    (["stag2"], "No such command 'stag2'\nDid you mean"),
    (["plan", "--gpus", "-1"], "Invalid value for '--gpus': Input should be greater than or equal to 0"),
    (["serve", "tiny", "toy", "--k", "0"], "Input should be greater than or equal to 1"),
    (["filter", "x", "--data", "y", "--out", "z", "--min-margin", "0", "--max-margin", "1"], "data is given twice"),
    (["stage1", "--steps"], "Option '--steps' requires an argument\n")])
def test_a_mistyped_command_is_two_lines(words, message):
    found = invoke(*words)
    assert found.exit_code == 2 and message in found.stderr and len(found.stderr.splitlines()) == 2, found.output


def test_data_commands_take_their_words_as_stages_do(tmp_path, monkeypatch):
    from anchor_nb.data import inspection
    from anchor_nb.inference import filtering
    calls = []
    monkeypatch.setattr(filtering, "filter_pairs", lambda *words: calls.append(words) or {})
    monkeypatch.setattr(inspection, "unread", lambda *_: [])
    rest = ["--out", "kept", "--max_margin", "1"]
    for words in (["x", "--min-margin", "0"], ["--data", "x", "-p", "min_margin=0"]):
        assert invoke("filter", *words, *rest).exit_code == 0
    assert calls[0] == calls[1] and calls[0][:4] == ("x", "kept", 0.0, 1.0)


def test_an_unknown_name_is_short():
    found = invoke("stage2", "-p", "colour=red")
    assert found.stderr == ("anchor-nb: stage2 has no parameter 'colour'\n"
                            "`anchor-nb stage2 --help-all` lists all that there are\n")


def test_what_can_be_known_is_checked_before_a_kernel_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "execute", lambda *_: pytest.fail("a kernel was started"))
    done = tmp_path/"done"
    start_run(str(done), recipe(RECIPES["stage2"], done))
    data = recipe(RECIPES["stage2"], tmp_path).data
    usual = ["stage2", "--preset", "smoke", "--data", data, "--out", tmp_path/"out"]
    for words, message in ((["--model", "tyni"], "tiny"), (["--model", "tiny", "--data", "no.csv"], "no.csv"),
                           (["--model", "tiny", "--out", done], "holds another run")):
        found = invoke(*usual, *words)
        assert found.exit_code == 1 and message in found.stderr and len(found.stderr.splitlines()) == 2, found.output
    assert not (tmp_path/"out").exists()


@pytest.mark.parametrize("words, message", [
    (["stage2", "--model", "bm25"], "bm25 ranks by words and makes no vectors\nit is a yardstick"),
    (["stage2", "lr=3"], "lr=3 is not a table\noptions are written --lr 3"),
    (["stage2", "-p", "lr", "3"], "-p learning_rate: write -p name=value"),
    (["stage2", "--preset", "laptop", "-p", "preset=paper"], "the preset is given twice, as laptop and as paper\n"),
    (["evaluate", "tiny", "--task", "SciFcat"], "there is no task 'SciFcat'\ndid you mean SciFact"),
    (["evaluate", "tyni", "--benchmark", "local-quick"], "did you mean tiny?"),
    (["evaluate", "no/such/model", "--benchmark", "local-quick"], "no model folder"),
    (["evaluate", "tiny", "--benchmark", "BIER"], "There is no benchmark 'BIER'\ndid you mean 'BEIR'"),
    (["evaluate", "tiny", "--task", "half"], "half has 2 faults: half/corpus.jsonl is missing; half/qrels"),
    (["evaluate", "tiny", "--tasks", "[a, b]", "--tasks", "c"], "--tasks is given 2 times, once in brackets\n"),
    (["compare", "runs/a", "runs/a/", "--task", "half"], "runs/a and runs/a/ are one model\nname two"),
    (["report", "runs/evalaute"], "out='runs/evalaute' is no folder\nname the folder of ledger.jsonl"),
    (["sweep", "alpha", "--at-once", "0"], "at_once=0: nothing would run\ngive 1 or more"),
    (["check", "faq.csv", "--columns", "query=Fragen,positive=Antwort"], "columns names Fragen, which no row has\n"
                                                                         "the fields are Frage, Antwort")])
def test_what_a_newcomer_mistypes_is_said_before_a_kernel_starts(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "execute", lambda *_: pytest.fail("a kernel was started"))
    (tmp_path/"half").mkdir()
    (tmp_path/"half"/"queries.jsonl").write_text('{"_id": "q", "text": "Who?"}\n')
    (tmp_path/"faq.csv").write_text("Frage,Antwort\nWo ist es?,Hier.\n")
    if words[:2] == ["stage2", "--model"]: words = [*words, "--data", recipe(RECIPES["stage2"], tmp_path).data]
    found = invoke(*words)
    assert found.exit_code == 1 and message in found.stderr, found.output


@pytest.mark.parametrize("name", ["paper", "laptop", "smoke"])
def test_a_preset_is_the_same_as_an_option_and_as_a_parameter(name):
    assert settings("stage2", "--preset", name) == settings("stage2", "-p", f"preset={name}")


def test_papermill_stops_at_a_name_that_the_recipe_lacks(tmp_path):
    words = [sys.executable, "-m", "papermill", stage_folder()/"stage2.ipynb", tmp_path/"out.ipynb", "-p", "lr", "3",
             "--no-progress-bar"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert found.returncode and "stage2 has no parameter 'lr'; did you mean learning_rate?" in found.stderr
    assert not (tmp_path/"runs").exists()


def test_a_failing_notebook_is_two_lines_and_a_run_shows_no_parameters(tmp_path):
    data = recipe(RECIPES["stage2"], tmp_path).data
    words = [COMMAND, "stage2", "--preset", "smoke", "--model", "tiny", "--data", data, "--out", tmp_path/"out"]
    found = warm.run([*words, "--global-batch", "4096"], capture_output=True, text=True, timeout=300)
    lines = [line for line in found.stderr.splitlines() if not line.endswith(" ...")] # what is being done
    assert len(lines) == 2, found.stderr
    what, fix = lines
    assert found.returncode == 1 and what.startswith("anchor-nb: stage2 failed: ") and "Error" not in what
    assert "the notebook with the traceback: " in fix and found.stdout == ""
    closed = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = closed.stdout.readline()
    closed.stdout.close()
    _, said = closed.communicate(timeout=300)
    assert "toy: " in first and (tmp_path/"out"/"model").is_dir(), said
    assert "Warning" not in said and "shards" not in said and "Traceback" not in said


def test_ctrl_c_while_it_is_importing_is_two_lines():
    code = "import signal; from anchor_nb.cli import main; "
    code += "main.be_quiet = lambda: signal.raise_signal(signal.SIGINT); main.main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 130 and len(found.stderr.splitlines()) == 2 and "Traceback" not in found.stderr


@pytest.mark.parametrize("text, said", [("page{n}.txt", True), ("My page {n}.docx", True),
                                        ("the answer number {n}.", False)])
def test_split_says_that_it_takes_names_for_texts(text, said, tmp_path):
    rows = [dict(query=f"question {n} of year{n}?", positive=text.format(n=n)) for n in range(60)]
    rows[0]["positive"] = "An answer of another kind."
    (tmp_path/"rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["split", str(tmp_path/"rows.jsonl"), "-o", str(tmp_path/"out")])
    assert done.exit_code == 0 and ("look like names of files" in done.output) == said


def test_what_is_searched_with_bm25_is_scored_with_it_too(tmp_path):
    from anchor_nb.cli.scoring import evaluate_parameters
    for name, text in (("a", '{"bm25": 0.2}'), ("b", '{"bm25": 0}')):
        (tmp_path/name).mkdir()
        (tmp_path/name/"config.json").write_text("{}")
        (tmp_path/name/"search.json").write_text(text)
    given = evaluate_parameters([str(tmp_path/"a"), str(tmp_path/"b"), "minilm"], "", ["x"], "", {}, {})["models"]
    assert list(given) == ["a", "b", "minilm", "a + BM25", "minilm + BM25"], "the last is what it has to beat"
    assert given["a + BM25"] == dict(model=str(tmp_path/"a"), bm25=0.2)
    assert given["minilm + BM25"] == dict(model="minilm", bm25=0.2)


def test_a_file_s_snapshots_hold_for_models_that_are_named(tmp_path):
    "A preset's are of its own models."
    (tmp_path/"mine.yaml").write_text("snapshots: true\n")
    words = ("evaluate", "tiny", "--benchmark", "local")
    assert settings(*words, "-f", tmp_path/"mine.yaml")["snapshots"] is True
    assert settings(*words)["snapshots"] is False
