"What several test files need: a small training recipe, and its run in a process of its own."
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import strategies as st
from safetensors.torch import load_file

import warm
from anchor_nb.data.corpora import build_corpus
from anchor_nb.runs.identity import ENGINE
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.core.settings import default
from anchor_nb.data.retrieval_sets import Retrieval

RUN = """
import json, sys
from anchor_nb.runs.launch import launch
from anchor_nb.core.recipe import RECIPES
from anchor_nb.training.trainer import train
stage, settings = json.loads(sys.argv[1])
recipe = RECIPES[stage](**settings)
launch(train, recipe, processes=recipe.processes, run_dir=recipe.out)
"""


def toy_pairs() -> str:
    return str(build_corpus("toy")/"pairs")


def defaults(cls) -> dict:
    "The default of every setting of a recipe."
    return {f.name: default(f) for f in fields(cls)}


def recipe(stage, out, **changes):
    "A run of seconds on the tiny random model."
    usual = dict(model="tiny", data=toy_pairs(), out=str(out), steps=10, global_batch=8, warmup_steps=2,
                 learning_rate=1e-3, max_length=48, micro_tokens=300, save_steps=0)
    if stage is Stage1: usual["carry_pairs"] = 0 # what anchors carry has tests of its own
    return stage(**usual | changes)


def start(recipe, before="") -> warm.Popen:
    "Train in another process, as a script would; `before` is code to run there first."
    arguments = json.dumps([type(recipe).__name__.lower(), asdict(recipe)])
    return warm.Popen([sys.executable, "-c", before + RUN, arguments], stdout=warm.PIPE, stderr=warm.STDOUT, text=True)


def stop_after(count, process, out, number=signal.SIGKILL) -> str:
    "Send a signal when so many rows are written, or the process has ended; what it printed."
    metrics = Path(out)/"metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= count):
        time.sleep(0.002)
    process.send_signal(number)
    return process.communicate(timeout=300)[0] # its ranks hold the pipe until they are gone


def run(recipe):
    "Train in another process and wait; fails with its output."
    process = start(recipe)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


def reference(stage, **settings) -> Path:
    "The folder of the uninterrupted run of a recipe, which all tests of a session share; it is made once."
    name = sha256(json.dumps([stage.__name__, settings], sort_keys=True).encode()).hexdigest()[:16]
    out = Path(os.environ["ANCHOR_NB_TEST_RUNS"])/name
    with FileLock(f"{out}.lock"):
        if not (out/"model").exists(): run(recipe(stage, out, **settings))
    return out


def files(folder) -> dict:
    "Every file below a folder and its bytes."
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def rows(out) -> list:
    return [json.loads(line) for line in (Path(out)/"metrics.jsonl").read_text().splitlines()]


STAGES = {"stage1": (Stage1, {}), "stage2": (Stage2, {"negatives": 2})}


def assert_same_trajectory(one, other, tolerance):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=tolerance), (a["step"], name)
        for name in ("tokens", "step"): assert a[name] == b[name]


def weights(out) -> dict:
    "Every tensor below a run folder, by file and name."
    return {(str(file.relative_to(out)), name): value for file in sorted(out.rglob("*.safetensors"))
            for name, value in load_file(file).items()}


def assert_same_run(one, other):
    "The same metrics, the same bits in model and snapshots, and nothing left lying about."
    assert rows(one) == rows(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())


def interrupted(stage, settings, tmp_path, kill):
    "The same recipe uninterrupted, and killed by `kill(process, folder)` and started again."
    settings = dict(steps=24, save_steps=2) | settings
    if stage is Stage2: settings |= dict(lora_dropout=0.1, snapshot_steps=5)
    kill(recipe(stage, tmp_path/"killed", **settings))
    assert not (tmp_path/"killed"/"model").exists(), "the run was faster than its killer; give it more steps"
    run(recipe(stage, tmp_path/"killed", **settings))
    assert_same_run(reference(stage, **settings), tmp_path/"killed")


WORDS = "moon tide bread flour compiler code sea water baker moonlight".split()


@st.composite
def tasks(build):
    "A small task with graded judgements, some of them 0."
    documents = [f"d{n}" for n in range(build(st.integers(2, 30)))]
    queries = [f"q{n}" for n in range(build(st.integers(1, 6)))]
    text = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
    qrels = {}
    for query in queries:
        judged = build(st.dictionaries(st.sampled_from(documents), st.integers(0, 3), max_size=5))
        qrels[query] = judged | {build(st.sampled_from(documents)): build(st.integers(1, 3))}
    return Retrieval("generated", "", {d: f"{build(text)} {d}" for d in documents}, {q: build(text) for q in queries},
                     qrels) # no two alike: ties go by the last bit


def shuffle(task, seed):
    "The same task with its documents and queries in another order."
    def mixed(d):
        items = list(d.items())
        random.Random(seed).shuffle(items)
        return dict(items)
    return Retrieval(task.name, task.instruction, mixed(task.corpus), mixed(task.queries),
                     {q: mixed(j) for q, j in mixed(task.qrels).items()})


PINNED = Path(__file__).with_name("pinned.json")


def check_pinned(part: str, name: str, found: list, **tolerance):
    "Compare with the numbers that this part of the engine gives; another result is another engine."
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    own = pinned.setdefault(f"{part} {ENGINE[part]}", {})
    if name not in own:
        own[name] = found
        PINNED.write_text(json.dumps(pinned, indent=1) + "\n", encoding="utf-8")
        pytest.fail(f"wrote {name} of {part} {ENGINE[part]} into {PINNED.name}; look at it and commit it")
    where = f"raise ENGINE[{part!r}] in runs/05_identity if this change is meant: older results are not today's"
    assert found == pytest.approx(own[name], **tolerance), where
