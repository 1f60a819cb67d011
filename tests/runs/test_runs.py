"""Manifests, ledger and the strict stage runner where a notebook cell cannot show it: kills, races, properties, broken
notebooks."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import nbformat
import papermill
import pytest
from hypothesis import given, settings, strategies as st
from nbformat.v4 import new_code_cell, new_notebook

import warm
from common import toy_pairs
from anchor_nb.runs import ledger as ledgers
from anchor_nb.experiments import stages as stage_runs
from anchor_nb.core.redaction import without_secrets
from anchor_nb.core import errors
from anchor_nb.core import presets as preset_files
from anchor_nb.runs import provenance, manifest as runs
from anchor_nb.core.recipe import RECIPES
from anchor_nb.experiments.pipeline import full_preset
from anchor_nb.runs.checkpoints import check_places

KERNEL = dict(kernelspec=dict(name="python3", display_name="python3", language="python"))
PARAMETERS = ('steps: int = 3  # steps\nrate: float = 0.1  # rate\nflag: bool = False  # flag\nname: str = "a"  # '
              'name\nitems: list = []  # items\nmap: dict = {}  # map')


def notebook(path, *code, tags=("parameters",), parameters=PARAMETERS):
    "A stage of a test's own."
    cells = [new_code_cell(parameters, metadata=dict(tags=list(tags))), *map(new_code_cell, code)]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), path)
    return path


def stage(name, **values): return RECIPES[name](**{**full_preset("smoke", name), **values})


# ---- files that are whole or absent ----

def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = ledgers.write_json(tmp_path/"run.json", dict(a=1))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError): ledgers.write_json(path, dict(a=2))
    assert ledgers.read_json(path) == dict(a=1)


WRITER = """
import sys
from pathlib import Path
from anchor_nb.runs.ledger import append_rows, write_json
folder, number = Path(sys.argv[1]), 0
while True:
    number += 1
    write_json(folder/"run.json", dict(number=number, filler="x"*20000))
    append_rows(folder/"rows.jsonl", [dict(number=number, filler="y"*20000)])
"""


@pytest.mark.parametrize("delay", [0.2, 0.35, 0.5])
def test_a_kill_at_any_moment_leaves_readable_files(tmp_path, delay):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path])
    while not (tmp_path/"rows.jsonl").exists(): time.sleep(0.01)
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    written = ledgers.read_json(tmp_path/"run.json")["number"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = ledgers.read_rows(tmp_path/"rows.jsonl")
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert written - len(rows) in (0, 1)
    ledgers.append_rows(tmp_path/"rows.jsonl", [dict(number=len(rows) + 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(ledgers.read_rows(tmp_path/"rows.jsonl")) == len(rows) + 1


def test_processes_that_append_at_once_lose_nothing(tmp_path):
    code = ("import sys; from anchor_nb.runs.ledger import append_rows\nfor i in range(50): append_rows(sys.argv[1], "
            "[dict(who=sys.argv[2], i=i, filler='z'*3000)])")
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path/"rows.jsonl", str(who)]) for who in range(8)]
    assert [writer.wait() for writer in writers] == [0]*8
    rows = ledgers.read_rows(tmp_path/"rows.jsonl")
    assert sorted((row["who"], row["i"]) for row in rows) == [(str(who), i) for who in range(8) for i in range(50)]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
                      | st.text(st.characters(exclude_categories=["Cs"])),
                      lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
                      max_leaves=5)
rows_of_anything = st.lists(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=4),
                            max_size=5)


@settings(max_examples=60, deadline=None)
@given(first=rows_of_anything, second=rows_of_anything,
       torn=st.binary(max_size=12).filter(lambda text: b"\n" not in text))
def test_rows_come_back_as_they_went_in(tmp_path_factory, first, second, torn):
    path = tmp_path_factory.mktemp("rows")/"rows.jsonl"
    ledgers.append_rows(path, first)
    with open(path, "ab") as file: file.write(b'{"torn": ' + torn)
    ledgers.append_rows(path, second)
    assert ledgers.read_rows(path) == without_secrets(first + second)


def test_a_complete_last_row_without_line_end_is_kept(tmp_path):
    (tmp_path/"rows.jsonl").write_text('{"a": 1}')
    assert ledgers.read_rows(tmp_path/"rows.jsonl") == [{"a": 1}]
    assert ledgers.read_rows(ledgers.append_rows(tmp_path/"rows.jsonl", [{"a": 2}])) == [{"a": 1}, {"a": 2}]


# ---- manifests ----

def test_a_failing_run_stays_running_and_resumes(tmp_path):
    assert runs.start_run(tmp_path/"r", stage("stage1")) == "new"
    assert runs.read_manifest(tmp_path/"r")["status"] == "running"
    assert runs.start_run(tmp_path/"r", stage("stage1")) == "resume"
    (tmp_path/"r/model").mkdir()
    (tmp_path/"r/model/model.safetensors").touch()
    runs.finish_run(tmp_path/"r", loss=1.0)
    assert runs.start_run(tmp_path/"r", stage("stage1")) == "done"
    assert runs.read_manifest(tmp_path/"r")["loss"] == 1.0


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_command_in_the_manifest_gives_the_recipe_back(name, tmp_path):
    import shlex
    from anchor_nb.cli.app import gather
    made = stage(name, out="runs/it's here", **({"ratios": {"wiki": 0.5}, "learning_rate": 3e-5,
                                                 "trackers": ["tensorboard"]} if name in ("stage1", "stage2") else {}))
    runs.start_run(tmp_path/"r", made)
    words = shlex.split(runs.read_manifest(tmp_path/"r")["command"])
    assert words[:2] == ["anchor-nb", name]
    assert RECIPES[name](**gather(name, "", None, words[3::2])) == made


def test_the_manifest_says_what_ran(tmp_path):
    runs.start_run(tmp_path/"r", stage("stage2", seed=7), data={"pairs.jsonl": dict(sha256="ab", rows=3)})
    manifest = runs.read_manifest(tmp_path/"r")
    assert {"python", "torch", "transformers", "peft", "accelerate", "datasets"} <= set(manifest["versions"])
    assert (manifest["stage"], manifest["seed"], manifest["world_size"],
            manifest["data"]["pairs.jsonl"]["rows"]) == ("stage2", 7, 1, 3)


def test_code_outside_a_checkout_is_known_by_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "package_folder", lambda: tmp_path)
    # somebody else's repository around an installed package
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert provenance.code_version() == dict(version=provenance.__version__)


def test_rows_that_a_benchmark_appends_are_no_changed_code(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "package_folder", lambda: tmp_path/"package")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for name in ("package/__init__.py", "nbs/results/carry/rows.jsonl"):
        (tmp_path/name).parent.mkdir(parents=True)
        (tmp_path/name).write_text("1\n")
    for words in ("init -q", "add .", "commit -q -m first"): subprocess.run([*git, *words.split()], check=True)
    (tmp_path/"nbs/results/carry/rows.jsonl").write_text("1\n2\n")
    assert not provenance.code_version()["dirty"]
    (tmp_path/"package/__init__.py").write_text("2\n")
    assert provenance.code_version()["dirty"]


def test_data_that_changed_is_noticed(tmp_path):
    data = tmp_path/"pairs.jsonl"
    data.write_text('{"query": "a"}\n')
    runs.start_run(tmp_path/"r", stage("stage1"), data={data.name: provenance.file_facts(data)})
    assert runs.start_run(tmp_path/"r", stage("stage1"), data={data.name: provenance.file_facts(data)}) == "resume"
    data.write_text('{"query": "b"}\n')
    with pytest.raises(ValueError, match="pairs.jsonl has changed since"):
        runs.start_run(tmp_path/"r", stage("stage1"), data={data.name: provenance.file_facts(data)})


def test_a_model_that_changed_is_noticed_and_one_that_is_gone_is_not(tmp_path):
    (tmp_path/"m").mkdir()
    (tmp_path/"m/config.json").write_text("{}")
    made = stage("stage2", model=str(tmp_path/"m"))
    runs.start_run(tmp_path/"r", made)
    assert runs.start_run(tmp_path/"r", made) == "resume"
    (tmp_path/"m/config.json").write_text("[]")
    with pytest.raises(ValueError, match="the content of model .* has changed since"):
        runs.start_run(tmp_path/"r", made)
    shutil.rmtree(tmp_path/"m")
    assert runs.start_run(tmp_path/"r", made) == "resume"


# ---- failures, signals, locks ----

FAILING = """
from anchor_nb.core.recipe import Prepare
from anchor_nb.runs.manifest import start_run
start_run(out, Prepare(corpora=[], model="", out=out))
"""


def prepare_like(path, *code):
    "A stand-in for the stage `prepare`, which has a run folder."
    path.mkdir(exist_ok=True)
    return notebook(path/"prepare.ipynb", FAILING, *code, parameters='corpora: list = []  # c\nmodel: str = ""  # '
                                                                     'm\nnegatives: int = 4  # n\nseed: int = 0  # '
                                                                     's\nout: str = ""  # o')


def test_a_failed_stage_is_on_record_with_its_traceback_and_goes_on(tmp_path):
    out = str(tmp_path/"run")
    path = prepare_like(tmp_path/"nb", "def deep(): raise RuntimeError('the disk is full')\ndeep()")
    with pytest.raises(stage_runs.StageError, match="prepare failed: the disk is full\nthe notebook"):
        stage_runs.run_stage(path, dict(out=out), log=False)
    manifest = runs.read_manifest(out)
    failure, = manifest["failures"]
    assert (manifest["status"], failure["reason"]) == ("failed", "RuntimeError: the disk is full")
    assert "in deep()" in failure["traceback"] and "\x1b" not in failure["traceback"]
    stage_runs.run_stage(prepare_like(tmp_path/"nb", "from anchor_nb.runs.manifest import finish_run; finish_run(out)"),
                         dict(out=out), log=False)
    manifest = runs.read_manifest(out)
    assert (manifest["status"], len(manifest["starts"]), len(manifest["failures"])) == ("complete", 2, 1)


def test_a_failure_is_not_written_into_somebody_elses_manifest(tmp_path):
    runs.start_run(tmp_path/"run", stage("prepare", out="x"))
    before = (tmp_path/"run/run.json").read_text()
    with pytest.raises(ValueError, match="holds another run"):
        stage_runs.run_stage(prepare_like(tmp_path/"nb"), dict(out=str(tmp_path/"run")), log=False)
    assert (tmp_path/"run/run.json").read_text() == before


# ---- what a finished run keeps ----

def content(folder):
    "Every file of a folder with its bytes and its time."
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


DONE = ("from anchor_nb.runs.manifest import finish_run, read_manifest\nif read_manifest(out)['status'] != 'complete': "
        "finish_run(out)")


def test_a_finished_run_is_not_touched_by_a_refused_or_a_repeated_command(tmp_path):
    path, out = prepare_like(tmp_path/"nb", DONE), tmp_path/"run"
    given = dict(out=str(out), corpora=[], model="")
    stage_runs.run_stage(path, given, log=False)
    assert runs.read_manifest(out)["notebook"] == "complete"
    before = content(out)
    assert stage_runs.run_stage(path, given, log=False) == out/"prepare.ipynb"
    assert content(out) == before
    other = prepare_like(tmp_path/"other", DONE, "raise RuntimeError('too late')")
    with pytest.raises(stage_runs.StageError, match="too late") as caught: stage_runs.run_stage(other, given, log=False)
    assert content(out) == before and "too late" in caught.value.notebook.read_text()
    other.write_text(other.read_text().replace("model=\\\"\\\"", "model=\\\"tiny\\\""))
    with pytest.raises(stage_runs.StageError, match="holds another run") as caught:
        stage_runs.run_stage(other, given, log=False)
    assert content(out) == before and "holds another run" in caught.value.notebook.read_text()


def test_a_run_whose_notebook_failed_behind_it_is_not_finished(tmp_path):
    out = tmp_path/"run"
    broken = prepare_like(tmp_path/"nb", DONE, "raise RuntimeError('no figure')")
    with pytest.raises(stage_runs.StageError, match="no figure"):
        stage_runs.run_stage(broken, dict(out=str(out)), log=False)
    manifest = runs.read_manifest(out)
    assert (manifest["status"], manifest["notebook"], stage_runs.finished(out, "prepare")) == ("complete", "failed",
                                                                                               b"")
    assert {path.name for path in out.glob("*.ipynb")} == {"prepare.failed.ipynb"}
    stage_runs.run_stage(prepare_like(tmp_path/"nb", DONE), dict(out=str(out)), log=False)
    assert runs.read_manifest(out)["notebook"] == "complete" and stage_runs.finished(out, "prepare")
    assert {path.name for path in out.glob("*.ipynb")} == {"prepare.ipynb"}


@pytest.mark.parametrize("ends, status, reason", [
    ("raise RuntimeError('no such row')", "failed", "RuntimeError: no such row"),
    ("raise KeyboardInterrupt", "stopped", "stopped by SIGINT at once; run the same command to resume"),
    ("raise Stopped('stopped by SIGINT after step 7')", "stopped", "stopped by SIGINT after step 7"),
    ("finish_run(out)", "complete", None)])
def test_a_cell_that_fails_by_hand_is_on_record(ends, status, reason, tmp_path, monkeypatch, capsys):
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell()
    monkeypatch.setattr(runs, "running_shell", lambda: shell)
    begin = (f"out = {str(tmp_path)!r}\nfrom anchor_nb.core.errors import Stopped\nfrom anchor_nb.runs.manifest import "
             f"finish_run{FAILING}")
    shell.run_cell(begin)
    assert runs.read_manifest(tmp_path)["status"] == "running"
    shell.run_cell(ends)
    shell.run_cell("raise RuntimeError('of another matter')")
    manifest = runs.read_manifest(tmp_path)
    assert (manifest["status"], [one["reason"] for one in manifest.get("failures", [])]) == (status, [reason] if reason
                                                                                             else [])


STAGE = ("import sys; from anchor_nb.experiments.stages import run_stage\ntry: run_stage(sys.argv[1], "
         "dict(out=sys.argv[2]), log=False)\nexcept Exception as e: print(type(e).__name__, e); sys.exit(143 if "
         "getattr(e, 'stopped', False) else 1)")


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline: time.sleep(0.05)
    assert path.exists(), f"{path} did not appear"


def test_two_runs_do_not_share_a_folder_and_sigterm_reaches_the_kernel(tmp_path):
    out = tmp_path/"run"
    path = prepare_like(tmp_path/"nb", "import time, signal\ndef stop(*_): raise RuntimeError('checkpoint "
                                       f"written')\nsignal.signal(signal.SIGTERM, stop)\nopen('{tmp_path}/ready', "
                                       "'w').close()\ntime.sleep(100)")
    first = warm.Popen([sys.executable, "-c", STAGE, path, out], stdout=warm.PIPE, text=True)
    wait_for(tmp_path/"ready")
    second = warm.run([sys.executable, "-c", STAGE, path, out], capture_output=True, text=True)
    assert second.returncode == 1 and "another process is running prepare in" in second.stdout
    first.terminate()
    said, _ = first.communicate(timeout=60)
    assert (first.returncode, "prepare was stopped: checkpoint written" in said) == (143, True), said
    manifest = runs.read_manifest(out)
    assert (manifest["status"], manifest["failures"][0]["reason"]) == ("stopped", "RuntimeError: checkpoint written")


def test_a_run_can_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    monkeypatch.chdir(tmp_path)
    path = prepare_like(tmp_path/"nb", DONE)
    assert stage_runs.run_stage(path, dict(out="~/run"), log=False) == tmp_path/"home"/"run"/"prepare.ipynb"
    assert stage_runs.finished(tmp_path/"home"/"run", "prepare") and not (tmp_path/"~").exists()
    assert stage_runs.finished(tmp_path/"home"/"run", "report") == b"", "a report of this folder is another stage"


# ---- strict stages ----

@pytest.mark.parametrize("name, given, message", [
    ("stage1", dict(out=""), "out is empty; name a folder"),
    ("stage1", dict(out="FILE/run"), "is a file; give another folder"),
    ("stage1", dict(data="no/pairs"), "data='no/pairs' is neither a folder nor a file"),
    ("stage2", dict(model="./no-model"), "model='./no-model': there is no such folder"),
    ("stage2", dict(model="TORN"), "model.safetensors is incomplete: it has 100 bytes"),
    ("mine", dict(model="no/such/model"), "there is no such folder"),
    ("analyse", dict(b="runs/no/model"), "there is no such folder"),
    ("report", dict(), "is no folder; name the folder of ledger.jsonl"),
])
def test_what_is_missing_is_noticed_before_a_kernel_starts(name, given, message, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runs, "execute", lambda *_: pytest.fail("it started"))
    (tmp_path/"file").touch()
    (tmp_path/"torn").mkdir()
    (tmp_path/"torn/model.safetensors").write_bytes(bytes([200, 0, 0, 0, 0, 0, 0, 0]) + b"{"*92)
    places = {"TORN": str(tmp_path/"torn"), "FILE": str(tmp_path/"file")}
    given = {key: value.replace("FILE", places["FILE"]).replace("TORN", places["TORN"]) for key, value in given.items()}
    usual = dict(out=str(tmp_path/"out"), data=toy_pairs())
    usual |= dict(a="tiny") if name == "analyse" else dict(model="tiny")
    if name == "report": usual = dict(out=usual["out"])
    with pytest.raises((ValueError, OSError), match=message): stage_runs.run_stage(name, usual | given)
    assert not (tmp_path/"out").exists()


def test_torn_weights_in_the_current_folder_are_nobodys_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"torn.safetensors").write_bytes(bytes([200, 0, 0, 0, 0, 0, 0, 0]) + b"{"*92)
    check_places("stage1", dict(model="tiny", out="run", data=toy_pairs()))


@pytest.mark.parametrize("stage, mark", [("analyse", "evaluations.jsonl"), ("evaluate", "geometry.json")])
def test_two_stages_that_write_a_summary_do_not_share_a_folder(stage, mark, tmp_path):
    (tmp_path/mark).touch()
    (tmp_path/"summary.json").write_text("{}")
    with pytest.raises(ValueError, match="whose summary.json would be lost; give another out"):
        stage_runs.check_out(stage, {}, tmp_path)
    assert stage_runs.finished(tmp_path, "evaluate") == b"" # the other's summary is none of an evaluation


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("parameters, message", [(dict(stepz=5), "no parameter 'stepz'"),
                                                 (dict(out=7), "is not text"), (dict(out=None), "is not text")])
def test_wrong_parameters_stop_a_stage_before_it_starts(name, parameters, message, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runs, "execute", lambda *_: pytest.fail("it started"))
    with pytest.raises(ValueError, match=message): stage_runs.run_stage(name, parameters, tmp_path/"out"/"x.ipynb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, parameters, message", [
    ("stage1", dict(alpha=1.5), r"alpha must lie in \[0, 1\], it is 1.5"),
    ("stage1", dict(steps=-1), "steps must not be negative"),
    ("stage1", dict(seed=2**32), r"seed must lie between 0 and 2\*\*32 - 1, it is 4294967296"),
    ("analyse", dict(seed=-1), "seed must lie between 0 and"), ("adapt", dict(seed=-1), "seed must lie between 0 and"),
    ("stage2", dict(lora_alpha=0), "lora_alpha must be over 0"), # nothing would be learned
    ("stage2", dict(snapshot_steps=-5), "snapshot_steps must not be negative"),
    ("stage1", dict(steps="ten"), "steps='ten' is not a whole number"),
    ("stage1", dict(schedule="cosin"), "choose one of linear, cosine, constant"),
    ("stage2", dict(temperature="0"), "temperature must be over 0"),
    ("stage2", dict(mask_false_negatives="maybe"), "neither true nor false"),
    ("stage1", dict(alpa=0.2), "did you mean alpha"),
    ("evaluate", dict(models="untrained"), "is not a mapping; write it like models="),
    ("prepare", dict(corpora="wiki"), "is not a list; write it like corpora="),
])
def test_values_are_judged_before_a_stage_starts(name, parameters, message, monkeypatch):
    monkeypatch.setattr(stage_runs, "execute", lambda *_: pytest.fail("it started"))
    with pytest.raises(ValueError, match=message): stage_runs.run_stage(name, parameters)


SHOW = "print('SEEN', repr((steps, rate, flag, name, items, map)))"


def test_a_notebook_does_not_replace_what_is_none(tmp_path):
    "Such as the pairs, where --output stands for --out."
    (pairs := tmp_path/"pairs.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="pairs.jsonl exists, is not a notebook.*such as pairs.ipynb"):
        stage_runs.run_stage("stage2", dict(data=str(pairs), model="tiny", out=str(tmp_path/"run")), output=pairs)
    assert pairs.read_text() == "{}\n" and not (tmp_path/"run").exists()


def test_an_evaluation_is_refused_before_it_writes_into_a_model(tmp_path):
    "Whose hash a failed notebook beside the weights would change."
    from anchor_nb.models.resolve import resolve_model
    shutil.copytree(resolve_model("tiny"), model := tmp_path/"run"/"model")
    before = sorted(path.name for path in model.iterdir())
    with pytest.raises(ValueError, match="lies in models="):
        stage_runs.run_stage("evaluate", dict(models=dict(mine=str(tmp_path/"run")), benchmark="local",
                                              out=str(model/"scores")))
    assert sorted(path.name for path in model.iterdir()) == before


def test_the_kernel_sees_the_values_and_their_types(tmp_path):
    given = dict(steps="7", rate="1e-3", flag="true", name="it's {x}", items="[1, b]", map="{a: 2.5}")
    executed = stage_runs.run_stage(notebook(tmp_path/"show.ipynb", SHOW), given, tmp_path/"out.ipynb", log=False)
    assert """SEEN (7, 0.001, True, "it's {x}", [1, 'b'], {'a': 2.5})""" in nbformat.read(executed,
                                                                                          4).cells[2].outputs[0].text
    assert stage_runs.seen(executed) == dict(steps=7, rate=0.001, flag=True, name="it's {x}", items=[1, "b"],
                                             map={"a": 2.5})


def test_a_rerun_keeps_nothing_of_the_run_before(tmp_path):
    path = notebook(tmp_path/"show.ipynb", SHOW)
    stage_runs.run_stage(path, dict(steps=7), tmp_path/"out.ipynb", log=False)
    executed = stage_runs.run_stage(path, dict(rate=0.5), tmp_path/"out.ipynb", log=False)
    assert stage_runs.seen(executed) == dict(rate=0.5)
    assert nbformat.read(executed, 4).metadata.papermill.parameters == dict(rate=0.5)


def test_a_notebook_that_lost_its_tag_is_refused_where_papermill_runs_it_with_defaults(tmp_path):
    path = notebook(tmp_path/"show.ipynb", SHOW, tags=())
    papermill.execute_notebook(str(path), str(tmp_path/"bare.ipynb"), dict(steps=7), progress_bar=False,
                               kernel_name="python3")
    assert "SEEN (3," in (tmp_path/"bare.ipynb").read_text()   # the trap: success, with the notebook's own 3
    with pytest.raises(ValueError, match="no cell tagged `parameters`"):
        stage_runs.run_stage(path, dict(steps=7), tmp_path/"out.ipynb")


@pytest.mark.parametrize("code, message", [
    ("import os; os._exit(3)", "the kernel died"),
    ("raise RuntimeError('first line\\n\\nand a long story')", "failed: first line\nthe notebook"),
    ("import no_such_module", "failed: No module named 'no_such_module'"),
], ids=["dead", "long", "import"])
def test_a_failing_notebook_is_one_short_message(tmp_path, code, message):
    with pytest.raises(stage_runs.StageError, match=message) as caught:
        stage_runs.run_stage(notebook(tmp_path/"bad.ipynb", code), dict(steps=1), tmp_path/"out.ipynb", log=False)
    assert caught.value.notebook == tmp_path/"out.failed.ipynb" and caught.value.notebook.exists()
    assert not (tmp_path/"out.ipynb").exists() and not (tmp_path/"out.running.ipynb").exists()
    assert len(str(caught.value).splitlines()) == 2


def test_what_the_cells_print_is_shown(tmp_path, capsys):
    stage_runs.run_stage(notebook(tmp_path/"show.ipynb", "import sys; print('to out'); print('to err', "
                                                         "file=sys.stderr)"), {}, tmp_path/"out.ipynb")
    shown = capsys.readouterr()
    assert ("to out" in shown.out, "to err" in shown.err, "WARNING" in shown.err) == (True, True, False)


def test_the_notebook_runs_in_the_folder_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage_runs.run_stage(notebook(tmp_path/"write.ipynb", "open('here.txt', 'w').write('x')"), {}, log=False)
    assert (tmp_path/"here.txt").exists() and (tmp_path/"runs/write/write.ipynb").exists()


def test_papermill_takes_every_preset_as_it_is():
    for name, stages in preset_files.presets().items():
        for stage_name in stages:
            parameters = preset_files.preset(name, stage_name)
            taken = stage_runs.checked(stage_runs.stage_notebook(stage_name), parameters)
            assert taken == parameters, f"{name}/{stage_name}: a value papermill would pass on with another type"


@pytest.mark.parametrize("name, stage_name", [(name, stage) for name, stages in preset_files.presets().items()
                                              for stage in stages])
def test_plain_papermill_with_a_preset_is_that_preset(name, stage_name):
    declared = stage_runs.declared(stage_runs.stage_notebook(stage_name))
    defaults = {parameter: value for parameter, (_, value) in declared.items()}
    assert defaults | preset_files.preset(name, stage_name) == full_preset(name, stage_name)


def test_no_cell_begins_after_a_signal(tmp_path):
    "A kernel ignores what comes between two cells, so the notebook stops where it is written."
    signals = []
    draft = stage_runs.Draft([], tmp_path/"draft.ipynb", signals)
    book = lambda *states: json.dumps(dict(cells=[dict(metadata=dict(papermill=dict(status=state)))
                                                  for state in states]))
    for states in (("running", "pending"), ("completed", "pending")): draft.write(book(*states))
    signals.append(signal.SIGINT)
    draft.write(book("completed", "pending"))
    with pytest.raises(errors.Stopped, match="stopped by SIGINT; run"):
        draft.write(book("completed", "running"))
    assert json.loads((tmp_path/"draft.ipynb").read_text())["cells"], "what there is was written"
    assert "stopped by SIGTERM at once" in runs.reason_of(RuntimeError("Kernel died before replying to kernel_info"),
                                                          [signal.SIGTERM])


def test_a_stage_that_had_finished_when_the_signal_came_says_so(tmp_path, monkeypatch):
    "Or the pipeline would go on with the next one."
    def execute(notebook, output, draft, *rest):
        draft.write(Path(notebook).read_text())
        draft.signals.append(signal.SIGINT)
    monkeypatch.setattr(stage_runs, "execute", execute)
    values = dict(out=str(tmp_path/"out"))
    monkeypatch.setattr(stage_runs, "seen", lambda notebook: values)
    path = prepare_like(tmp_path/"nb", "pass")
    with pytest.raises(stage_runs.StageError, match="stopped by SIGINT when it had finished") as caught:
        stage_runs.run_stage(path, values, log=False)
    assert caught.value.stopped and caught.value.notebook.exists()
