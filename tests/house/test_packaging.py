"""What a pip user gets: wheel and sdist carry stage notebooks, presets and tables, and work away from the checkout."""
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from anchor_nb.experiments import stages as stage_runs
from anchor_nb import __version__
from anchor_nb.experiments.pipeline import full_preset

ROOT = Path(__file__).resolve().parent.parent.parent


def build(kind, source, target):
    "Build with what is installed, so that nothing is downloaded."
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", target, source],
                   check=True, capture_output=True, text=True)
    return next(Path(target).glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory): return build("wheel", project, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(project, tmp_path_factory): return build("sdist", project, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    "The wheel unpacked by pip into a folder of its own."
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder,
                    wheel], check=True)
    return folder


def away(installed, cwd, *command):
    "Run a command far from the checkout, with the installed copy first in line."
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=600)


def contents(wheel): return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_all_modules_notebooks_presets_and_tables(wheel):
    names = contents(wheel)
    patterns = ("**/*.py", "*.json", "page/*", "presets/*/*.yaml", "py.typed")
    wanted = {f"anchor_nb/{path.relative_to(ROOT/'anchor_nb')}" for pattern in patterns
              for path in (ROOT/"anchor_nb").glob(pattern) if path.name != "_modidx.py"}
    wanted |= {f"anchor_nb/notebooks/{path.name}" for path in (ROOT/"nbs/stages").glob("*.ipynb")}
    assert wanted <= names, wanted - names
    assert "anchor_nb/_modidx.py" not in names, "4,000 lines that only nbdev reads"
    tutorials = "".join(path.read_text(encoding="utf-8") for path in (ROOT/"nbs/tutorials").glob("*.ipynb"))
    read = set(re.findall(r"\.\./((?:results|benchmarks)/[\w./-]*\w)", tutorials))
    missing = [place for place in read if not any(name.startswith(f"anchor_nb/notebooks/{place}") for name in names)]
    assert len(read) > 2 and not missing, missing
    foreign = {name for name in names if not name.startswith(("anchor_nb/", f"anchor_nb-{__version__}.dist-info/"))}
    assert not foreign


def test_the_metadata_are_those_of_settings_ini(wheel):
    text = zipfile.ZipFile(wheel).read(f"anchor_nb-{__version__}.dist-info/METADATA").decode()
    for line in (f"Version: {__version__}", "License-Expression: Apache-2.0", "License-File: LICENSE",
                 "Requires-Python: >=3.11", "Requires-Dist: torch>=2.11",
                 "Provides-Extra: flash", "Provides-Extra: dev",
                 "Requires-Dist: smalldocs==0.5.4; extra == \"docs\""):
        assert line in text, line
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any(name in line for line in required for name in ("nbdev", "fastcore", "jupytext", "pytest"))
    entry_points = zipfile.ZipFile(wheel).read(f"anchor_nb-{__version__}.dist-info/entry_points.txt").decode()
    assert "anchor-nb = anchor_nb.cli.main:main" in entry_points


def test_the_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive: archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.iterdir())
    assert (source/"Makefile").exists() and (source/"constraints.txt").exists()
    assert list((source/"tests").rglob("test_*.py"))
    assert contents(build("wheel", source, tmp_path/"again")) == contents(wheel)


def test_an_installed_copy_works_away_from_the_checkout(installed, tmp_path):
    where = away(installed, tmp_path, sys.executable, "-c", "import anchor_nb; print(anchor_nb.__file__, "
                                                            "anchor_nb.__version__)")
    assert where.stdout.split() == [str(installed/"anchor_nb/__init__.py"), __version__], where.stderr
    listed = away(installed, tmp_path, sys.executable, installed/"bin/anchor-nb", "stages")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(stage_runs.stages()), listed.stderr
    shown = away(installed, tmp_path, sys.executable, installed/"bin/anchor-nb", "stage1", "--preset", "smoke",
                 "--dry-run")
    assert yaml.safe_load(shown.stdout) == full_preset("smoke", "stage1"), shown.stderr


def test_an_installed_copy_runs_a_stage(installed, tmp_path):
    result = away(installed, tmp_path, sys.executable, installed/"bin/anchor-nb", "prepare", "--preset", "smoke", "-p",
                  "out=data")
    assert result.returncode == 0, result.stderr[-3000:]
    assert list((tmp_path/"data/pairs").glob("*.jsonl")) and (tmp_path/"data/prepare.ipynb").exists()


def test_make_says_which_python_it_needs(project):
    result = subprocess.run(["make", "venv", "VENV=.venv-test", "PYTHON=no-such-python"], cwd=project,
                            capture_output=True, text=True)
    assert result.returncode != 0 and "needs Python 3.11 or later; no-such-python is not" in result.stderr


def test_make_without_a_goal_explains_itself():
    shown = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "make demo" in shown and "make test" in shown
