"""Every number on the front page and the pages behind it is made by the present code, or says which commit made it.

A results folder that fails here was made with other settings or another state of the code. Make it again: for the demo
`rm -r runs/demo; make demo` and `nbs/results/keep.py`, then run nbs/index.ipynb and nbs/pages, and `python setup.py
readme`. Or, where it is to stay as a record, name it with its commits in nbs/results/kept.json, and print that with
`kept` on the page.
"""
import ast
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest

from anchor_nb.runs.identity import ENGINE
from anchor_nb.runs.ledger import append_rows, read_rows, write_json
from anchor_nb.experiments.pipeline import plan
from anchor_nb.core.recipe import RECIPES
from anchor_nb.models.resolve import resolve_model
from anchor_nb.runs.manifest import new_manifest, other_settings

ROOT = Path(__file__).resolve().parent.parent.parent
NBS = ROOT/"nbs"
PAGES = {path.stem: [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
                     if cell["cell_type"] == "code"]
         for path in [NBS/"index.ipynb", *sorted((NBS/"pages").glob("*.ipynb"))]}
CELLS = [cell for cells in PAGES.values() for cell in cells]
README = (ROOT/"README.md").read_text(encoding="utf-8")
KEPT = json.loads((NBS/"results/kept.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def away(tmp_path, monkeypatch):
    "The runs that lie in a checkout are not those of the manifests."
    monkeypatch.chdir(tmp_path)


# ---- what the page reads ----

def read_by(source):
    "The results folders that code names, as a string or as the beginning of one."
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    strings = [text.removeprefix("../") for text in constants if isinstance(text, str)]
    paths = [Path(text) for text in strings if re.match(r"(results|benchmarks/results)/?", text)]
    return {(path if (NBS/path).is_dir() else path.parent).as_posix() for path in paths} - {"results"}


def source_of(cell): return "".join(cell["source"])


READ = {folder for cell in CELLS for folder in read_by(source_of(cell))}
PLANNED = "results/carry" # its rows name their code themselves
FOLDERS = sorted(folder for folder in READ if folder.startswith("results/") and folder != PLANNED)


def shown_by(cell):
    "What a cell has printed on the page."
    return "".join("".join(output.get("data", {}).get("text/markdown", [])) for output in cell.get("outputs", []))


def test_the_folders_of_the_page_are_found():
    assert FOLDERS == ["results/demo", "results/demo-rounding", "results/experiment", "results/experiment/local",
                       "results/five_thousand", "results/local"]
    assert READ == {*FOLDERS, PLANNED, "benchmarks/results"}


def test_the_rows_of_the_plan_say_which_commit_made_them():
    rows = [row for row in read_rows(NBS/PLANNED/"again.jsonl") if row["rung"].startswith(("gpu", "desc", "wiki"))]
    assert rows and all(row["code"]["commit"] and not row["code"]["dirty"] for row in rows)


# ---- whose state a folder is ----

def of_today(manifest):
    "A manifest with today's settings: yardsticks was the switch bm25."
    recipe = dict(manifest["recipe"])
    if "bm25" in recipe: recipe["yardsticks"] = ["bm25"]*recipe.pop("bm25")
    return manifest | dict(recipe=recipe)


def manifests(folder):
    "Name -> manifest: those of runs, and those that an evaluation appends, of each the last state."
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/run.json")}
    evaluations = folder/"evaluations.jsonl"
    if evaluations.is_file():
        found |= {f"evaluation of {', '.join(row['recipe']['models'])}": of_today(row)
                  for row in read_rows(evaluations)}
    return found


def stale(manifest):
    "Why the present code and recipe would not make this run; empty where they would."
    found = [] if manifest["status"] == "complete" else [f"its status is {manifest['status']}"]
    if manifest["code"].get("dirty"): found.append("its code had changes that were not committed")
    cls = RECIPES[manifest["stage"]]
    try: recipe = cls(**{name: value for name, value in manifest["recipe"].items() if name not in cls.fixed})
    except (TypeError, ValueError) as error: return [*found, f"its recipe is none today: {error}"]
    return found + other_settings(manifest, recipe)


def faults(folder):
    "All that makes a folder the record of another state."
    found = manifests(folder)
    if not found: return [f"{folder} has no manifests"]
    return [f"{folder}: {name}: {why}" for name, manifest in found.items() for why in stale(manifest)]


def unlike_demo(folder):
    "Where the preset `demo` asks for something else than what a folder holds."
    found = manifests(folder)
    scored = next((manifest for manifest in found.values() if manifest["stage"] == "evaluate"), None)
    if scored is None: return [f"{folder} has no evaluation"]
    steps = {step.name: step for step in plan("demo", Path(scored["recipe"]["out"])) if step.stage != "report"}
    there = {name: found.get(name) for name in steps} | dict(prepare=found.get("data"), evaluate=scored)
    missing = [f"{folder}: {name} is missing" for name in steps if not there[name]]
    return missing + [f"{folder}: {name}: {why}" for name, step in steps.items() if there[name]
                      for why in other_settings(there[name], RECIPES[step.stage](**step.parameters))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_of_the_present_state_or_says_whose(folder):
    if folder not in KEPT:
        assert not faults(NBS/folder), "\n".join(faults(NBS/folder))
        return
    commits = {manifest["code"]["commit"] for manifest in manifests(NBS/folder).values()}
    assert commits == set(KEPT[folder]["commits"]) and KEPT[folder]["why"]
    for cell, following in chain.from_iterable(pairwise([*cells, {}]) for cells in PAGES.values()):
        if folder not in read_by(source_of(cell)) or "#| hide" in source_of(cell): continue
        beside = shown_by(cell) + shown_by(following) # a figure cannot print it itself
        assert all(commit[:7] in beside for commit in commits), f"{folder}: print kept({folder!r}) beside its numbers"


def test_what_is_kept_is_shown_and_the_demo_is_not_kept():
    assert set(KEPT) <= set(FOLDERS) and "results/demo" not in KEPT


def test_the_demo_is_what_the_preset_asks_for():
    assert not unlike_demo(NBS/"results/demo"), "\n".join(unlike_demo(NBS/"results/demo"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_score_belongs_to_a_manifest(folder):
    "A row names the manifest of its model; the run lies in this folder, or in that of the experiment or a demo."
    runs = {name for other in ("results/demo", "results/first-demo", "results/experiment", "results/five_thousand")
            for name in manifests(NBS/other)}
    for row in read_rows(NBS/folder/"ledger.jsonl"):
        assert not row["manifest"] or Path(row["manifest"]).parent.name in runs, row["manifest"]


def test_speeds_say_where_and_with_which_code_they_were_measured():
    cell, = [cell for cell in PAGES["speed"] if "benchmarks/results" in read_by(source_of(cell))]
    for name in ("stage1", "stage2", "encode"):
        for row in read_rows(NBS/"benchmarks/results"/f"{name}.jsonl"):
            assert row["machine"]["cpus"] and row["machine"]["platform"] and row["code"]["commit"] and row["at"]
    last = row["code"]["commit"][:7]
    assert f"commit `{last}`" in shown_by(cell) and f"{row['machine']['cpus']} CPU cores" in shown_by(cell)


# ---- the page is of these files ----

def test_the_tables_are_made_of_the_rows_that_lie_there(monkeypatch):
    "Results that were made again and a page that was not run again since then would disagree."
    for page, cells in PAGES.items():
        monkeypatch.chdir(NBS if page == "index" else NBS/"pages")
        names = {}
        for cell in cells:
            wanted = shown_by(cell)
            if not wanted and "import Markdown" not in source_of(cell): continue
            *body, last = ast.parse(source_of(cell)).body
            if not wanted: body.append(last)
            exec(compile(ast.Module(body, []), page, "exec"), names)
            if wanted: assert eval(compile(ast.Expression(last.value), page, "eval"), names).data == wanted, page


# ---- the page itself ----

def test_the_front_page_is_short():
    text = re.sub(r"<!--.*?-->", "", README, flags=re.S)
    words = lambda part: [word for word in part.split() if re.search(r"\w", word)]
    assert len(words(text)) <= 900 and len(words(text.partition("```")[0])) <= 150


def test_the_code_on_the_front_page_runs(capsys):
    "Offline: the model is drawn at random. What is printed below the code is what it gives."
    code, = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    *body, last = ast.parse(code).body
    names = {}
    exec(compile(ast.Module(body, []), "README.md", "exec"), names)
    shape = eval(compile(ast.Expression(last.value), "README.md", "eval"), names)
    assert f"```text\n{shape!r}\n```" in README and len(code.splitlines()) <= 7


@pytest.mark.registry
def test_hello_draws_its_picture_in_three_minutes(tmp_path):
    "The stopwatch of the first look: processor time, which other work on the machine does not change."
    for model in ("minilm", "smollm2-135m"): resolve_model(model) # the models are in the cache
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from anchor_nb.cli.main import main; main()", "hello", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
                          capture_output=True, text=True, check=True)
    after, facts = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(done.stdout)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180
    assert (tmp_path/facts["picture"]).read_bytes().startswith(b"\x89PNG") and facts["passages"] > 400


def test_the_first_link_is_the_first_hour_and_the_first_command_the_first_look():
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)]+)\)", README)
    assert links[0] == "nbs/tutorials/documents.ipynb"
    here = [link.partition("#")[0] for link in links if not link.startswith("http")]
    assert all((ROOT/link).is_file() for link in here), "as GitHub shows it"
    assert README.index("anchor-nb hello") < README.index("```python")
    *_, took = read_rows(NBS/"benchmarks/results/hello.jsonl")
    assert f"{took['cpu_seconds']:.0f} CPU seconds" in README and took["threads"] == 1


def test_the_commands_on_the_pages_are_there():
    "Every command and option that the pages name is one of the command line's."
    from typer.main import get_command

    from anchor_nb.cli.main import app
    commands = get_command(app).commands
    told = *(NBS/"pages").glob("*.ipynb"), *(NBS/"tutorials").glob("*.ipynb"), NBS/"paper/reproduce.ipynb"
    texts = [README] + ["".join(cell["source"]) for path in told
                        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    used = re.findall(r"anchor-nb ([a-z]\w*)([^#`\n]*)", "\n".join(texts))
    assert len(used) > 25
    for command, rest in used:
        assert command in commands, command
        known = {name for option in commands[command].params for name in option.opts} | {"--help"}
        assert set(re.findall(r"(?<= )--?[a-z][\w-]*", rest)) <= known, (command, rest)


# ---- what `from anchor_nb import ...` offers ----

def test_the_lazy_names_resolve():
    import anchor_nb
    from anchor_nb import Stage1, train
    for name in anchor_nb.__all__:
        assert getattr(anchor_nb, name).__name__ == name and name in dir(anchor_nb)
    assert train.__module__ == "anchor_nb.training.trainer" and Stage1.__module__ == "anchor_nb.core.recipe"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"): anchor_nb.nothing


# ---- the check itself, and the way to new results ----

spec = importlib.util.spec_from_file_location("keep", NBS/"results/keep.py")
keeping = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keeping)


@pytest.fixture
def demo(tmp_path, monkeypatch):
    "What `make demo` leaves, without models: manifests of today, and a file that is not to be kept."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anchor_nb.runs.manifest.code_version", lambda: dict(version="0", commit="c" * 40,
                                                                               dirty=False))
    places = dict(prepare="data", stage1="stage1", anchor="anchor", baseline="baseline")
    for name in ("stage1", "anchor", "baseline"): write_json(Path("runs/demo")/name/"model/config.json", {})
    for step in plan("demo", Path("runs/demo")):
        if step.stage == "report": continue
        manifest = new_manifest(RECIPES[step.stage](**step.parameters), {}) | dict(status="complete")
        if step.name == "evaluate": append_rows("runs/demo/evaluations.jsonl", [manifest])
        else: write_json(Path("runs/demo")/places[step.name]/"run.json", manifest)
    append_rows("runs/demo/ledger.jsonl", [dict(label="bm25", manifest="")])
    return Path("runs/demo")


def test_a_demo_of_today_that_was_kept_passes(demo):
    (Path("kept")/"old").mkdir(parents=True)
    kept = [path.as_posix() for path in keeping.keep(demo, Path("kept"))]
    assert sorted(path.relative_to("kept").as_posix() for path in Path("kept").rglob("*") if path.is_file()) == kept
    assert kept == ["anchor/run.json", "baseline/run.json", "data/run.json", "evaluations.jsonl", "ledger.jsonl",
                    "stage1/run.json"]
    assert faults(Path("kept")) == unlike_demo(Path("kept")) == []


def changed(path, **values):
    manifest = json.loads(path.read_text())
    manifest["recipe"] |= values
    recipe = {name: value for name, value in manifest["recipe"].items() if value is not None}
    write_json(path, manifest | dict(recipe=recipe))


@pytest.mark.parametrize("setting, value, message", [("learning_rate", 0.5, "learning_rate is 0.5 there"),
                                                     ("steps", None, "steps is 0 there"),
                                                     ("gone", 1, "its recipe is none today")])
def test_another_recipe_is_stale(demo, setting, value, message):
    "A value that the preset has not; one that a younger setting has beside its default; a setting that is gone."
    changed(demo/"stage1/run.json", **{setting: value})
    assert message in "".join(faults(demo) + unlike_demo(demo))


def test_other_code_is_stale(demo, monkeypatch):
    monkeypatch.setitem(ENGINE, "training", 99)
    assert len(faults(demo)) == 3 and "it was made by training code 1, and this is 99" in "".join(faults(demo))
    monkeypatch.setitem(ENGINE, "scoring", 99)
    assert len(faults(demo)) == 4 and "it was made by scoring code 1, and this is 99" in "".join(faults(demo))
    changed(demo/"data/run.json")
    manifest = json.loads((demo/"data/run.json").read_text())
    write_json(demo/"data/run.json", manifest | dict(code=manifest["code"] | dict(dirty=True), status="running"))
    said = {line.partition(": data: ")[2] for line in faults(demo)}
    assert {"its status is running", "its code had changes that were not committed"} <= said


def test_what_is_not_finished_or_names_a_place_is_not_kept(demo, tmp_path):
    with pytest.raises(ValueError, match="run `make demo` first"): keeping.keep(tmp_path/"nowhere", tmp_path/"kept")
    changed(demo/"anchor/run.json", note=str(tmp_path))
    with pytest.raises(ValueError, match="names a place of this machine"): keeping.keep(demo, tmp_path/"kept")
    changed(demo/"anchor/run.json", note=None)
    write_json(demo/"anchor/run.json", json.loads((demo/"anchor/run.json").read_text()) | dict(status="running"))
    with pytest.raises(ValueError, match="not of a finished run"): keeping.keep(demo, tmp_path/"kept")
    assert not (tmp_path/"kept").exists()
