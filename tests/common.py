"What several test files need: a small training recipe, and its run in a process of its own."
import json
import subprocess
import sys
from pathlib import Path

from anchor_nb.corpora import build_corpus
from anchor_nb.recipe import Stage1, Stage2, as_dict

RUN = """
import json, sys
from anchor_nb.launch import launch
from anchor_nb.recipe import RECIPES
from anchor_nb.training import train
stage, settings = json.loads(sys.argv[1])
recipe = RECIPES[stage](**settings)
launch(train, recipe, processes=recipe.processes, run_dir=recipe.out)
"""


def toy_pairs() -> str:
    return str(build_corpus("toy")/"pairs")


def recipe(stage, out, **changes):
    "A run of seconds on the tiny random model."
    usual = dict(model="tiny", data=toy_pairs(), out=str(out), steps=10, global_batch=8, warmup_steps=2, learning_rate=1e-3,
                 max_length=48, micro_tokens=300, save_steps=0)
    return stage(**usual | changes)


def start(recipe, before="") -> subprocess.Popen:
    "Train in another process, as a script would; `before` is code to run there first."
    arguments = json.dumps([type(recipe).__name__.lower(), as_dict(recipe)])
    return subprocess.Popen([sys.executable, "-c", before + RUN, arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(recipe):
    "Train in another process and wait; fails with its output."
    process = start(recipe)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


def rows(out) -> list:
    return [json.loads(line) for line in (Path(out)/"metrics.jsonl").read_text().splitlines()]


STAGES = {"stage1": (Stage1, {}), "stage2": (Stage2, {"negatives": 2})}
