"A machine with torch, transformers, accelerate and peft and nothing else of ours trains the same models."
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import warm
from anchor_nb.data.corpora import build_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
GIVEN = ["torch", "transformers", "numpy", "safetensors", "tokenizers"]  # what the machine has
BROUGHT = ["accelerate", "peft", "xxhash"]  # what `make gpu-kit` adds for training; xxhash is for checkpoints
MISSING = ["datasets", "pyarrow", "pandas", "mteb", "papermill", "sentence_transformers", "seaborn", "matplotlib",
           "scipy", "sklearn"]
TRAIN = """
import importlib.util, json, pkgutil, sys
import anchor_nb
from anchor_nb import AnchorEmbedder, Stage1, Stage2, train
data, out, *names = sys.argv[1:]
found = [name for name in names if importlib.util.find_spec(name)]
for module in pkgutil.walk_packages(anchor_nb.__path__, "anchor_nb.") if names else (): __import__(module.name)
how = dict(data=data, steps=3, global_batch=8, warmup_steps=1, learning_rate=1e-3, max_length=48, micro_tokens=256,
           save_steps=2, workers=0, precision="fp32")
train(Stage1(model="tiny", out=out + "/1", **how))
train(Stage2(model=out + "/1", out=out + "/2", negatives=2, **how))
vectors = AnchorEmbedder.from_pretrained(out + "/2").encode(["a cat sleeps", "the river floods"])
print(json.dumps(dict(vectors=vectors.tolist(), found=found)))
"""


def with_dependencies(names: list) -> dict:
    "Distributions by name: these and all that they need."
    known, left = {}, list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in known: continue
        try: known[name] = distribution(name)
        except PackageNotFoundError: continue  # for another platform
        needs = map(Requirement, known[name].requires or [])
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate(dict(extra=""))]
    return known


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "A folder of links to the few packages."
    folder = tmp_path_factory.mktemp("site")
    for found in with_dependencies([*GIVEN, *BROUGHT]).values():
        tops = {file.parts[0] for file in found.files} - {"..", "bin", "__pycache__"}
        for top in tops: (folder/top).exists() or (folder/top).symlink_to(found.locate_file(top))
    return folder


def bare(code: str, *arguments, cwd: Path, site: Path):
    "Run code in an interpreter that sees these packages and no others."
    path = os.pathsep.join(map(str, (site, ROOT)))
    return subprocess.run([sys.executable, "-S", "-c", code, *map(str, arguments)], cwd=cwd, timeout=600, text=True,
                          capture_output=True, env=os.environ | dict(PYTHONPATH=path, ANCHOR_NB_PROGRESS="off"))


def test_all_modules_are_imported_and_both_stages_train_the_same_without_the_other_packages(site, tmp_path):
    data = build_corpus("toy")/"pairs"
    lean = bare(TRAIN, data, tmp_path/"lean", *MISSING, cwd=tmp_path, site=site)
    assert lean.returncode == 0, lean.stderr[-3000:]
    answer = json.loads(lean.stdout.splitlines()[-1])
    assert answer["found"] == [], "the packages are not missing, so nothing is shown"
    whole = warm.run([sys.executable, "-c", TRAIN, data, tmp_path/"whole"], cwd=tmp_path, stdout=warm.PIPE, text=True)
    assert answer["vectors"] == json.loads(whole.stdout.splitlines()[-1])["vectors"]
    for stage in "12":
        rows = [(tmp_path/place/stage/"metrics.jsonl").read_text() for place in ("lean", "whole")]
        assert rows[0] == rows[1]


def test_what_needs_a_missing_package_names_it(site, tmp_path):
    code = "import sys; sys.argv[0] = 'anchor-nb'; from anchor_nb.cli.main import main; main()"
    done = bare(code, "evaluate", "-p", "model=tiny", cwd=tmp_path, site=site)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("the package papermill is not installed\npip install papermill"), done.stderr
