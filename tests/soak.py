"""Kill training again and again, and hold what comes out against runs that nobody touched.

    python tests/soak.py [--kills 20] [--seed 0] [--folder runs/soak]

Both stages on the tiny model, two processes, a checkpoint every second step. At a random moment one rank or the whole
tree is killed with SIGKILL, then the same call is made again, until the run is done; this is repeated, in several run
folders, until as many kills are made as were asked for. Prints one JSON object last; the exit code is 1 when any weight
or row differs.
"""
import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

from anchor_nb.runs.launch import launch
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.runs.checkpoints import checkpoints, number_of
from common import recipe, rows

STAGES = {"stage1": (Stage1, {}), "stage2": (Stage2, dict(negatives=2, lora_dropout=0.1))}
# a process that has imported everything, and done nothing, forks each run
FRESH = multiprocessing.get_context("forkserver")


def training(stage, out):
    "One start of a run, in a process of its own."
    from anchor_nb.training.trainer import train
    os.environ["ACCELERATE_USE_CPU"] = "1"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    logging.disable()
    kind, settings = STAGES[stage]
    settings = recipe(kind, out, steps=24, save_steps=2, processes=2, **settings)
    launch(train, settings, processes=2, run_dir=out)


def start(stage, out):
    process = FRESH.Process(target=training, args=(stage, str(out)))
    process.start()
    return process


def count(out): return len((out/"metrics.jsonl").read_text().splitlines()) if (out/"metrics.jsonl").exists() else 0


def kill_sometime(process, out, dice) -> bool:
    """SIGKILL to a rank or to the launcher: while it starts, or some steps after its checkpoint.

    False when the run was done before."""
    row = max([number_of(folder) for folder in checkpoints(out)], default=0) + dice.randint(1, 8)
    moment, late = time.monotonic() + dice.uniform(0, 3), dice.uniform(0, 0.1)
    soon = dice.random() < 0.3
    while process.is_alive() and not (time.monotonic() > moment if soon else count(out) >= row): time.sleep(0.002)
    time.sleep(late)
    ranks = psutil.Process(process.pid).children() if process.is_alive() else []
    victim = dice.choice(ranks).pid if ranks and dice.random() < 0.5 else process.pid
    if not process.is_alive(): return False
    os.kill(victim, signal.SIGKILL)
    process.join(120)
    assert process.exitcode, "a run whose rank was killed says that it is fine"
    gone(ranks)
    return True


def gone(processes, seconds=10):
    "Fail when a process of a killed run is still there."
    left = psutil.wait_procs(processes, timeout=seconds)[1]
    left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"orphans: {left}"


def differences(one, other) -> tuple:
    "The largest difference of final weights and of metrics rows; infinite when they do not even match."
    a, b = [load_file(out/"model"/"model.safetensors") for out in (one, other)]
    weights = max((a[k] - b[k]).abs().max().item() for k in a) if a.keys() == b.keys() else math.inf
    a, b = rows(one), rows(other)
    if [sorted(x) for x in a] != [sorted(y) for y in b]: return weights, math.inf
    return weights, max(abs(x[k] - y[k]) for x, y in zip(a, b) for k in x)


def soak(kills, seed, folder, say=print) -> dict:
    "The outcome, as it is printed."
    FRESH.set_forkserver_preload(["soak", "anchor_nb.training.trainer"])
    dice, begin, folder = random.Random(seed), time.monotonic(), Path(folder)
    done = dict(kills=0, resumes=0, runs=0, largest_weight_difference=0.0, largest_metric_difference=0.0)
    for stage in STAGES:
        process = start(stage, folder/stage)
        process.join(300)
        assert process.exitcode == 0, f"{stage} fails without being killed"
    while done["kills"] < kills or done["runs"] < len(STAGES):
        stage = list(STAGES)[done["runs"] % len(STAGES)]
        out, most = folder/f"{stage}-{done['runs']}", done["kills"] + max(1, kills//4)
        while True:
            done["resumes"] += bool(checkpoints(out))
            process = start(stage, out)
            if done["kills"] < min(kills, most) and kill_sometime(process, out, dice):
                done["kills"] += 1
                say(f"{out.name}: kill {done['kills']} after row {count(out)}, checkpoints "
                    f"{[c.name for c in checkpoints(out)]}", file=sys.stderr, flush=True)
                continue
            process.join(300)
            assert process.exitcode == 0, f"{out} could not be resumed"
            break
        weights, metrics = differences(folder/stage, out)
        done["runs"] += 1
        done["largest_weight_difference"] = max(done["largest_weight_difference"], weights)
        done["largest_metric_difference"] = max(done["largest_metric_difference"], metrics)
    return done | dict(seed=seed, seconds=round(time.monotonic() - begin, 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="", help="keep the runs here")
    asked = parser.parse_args()
    outcome = soak(asked.kills, asked.seed, asked.folder or tempfile.mkdtemp())
    print(json.dumps(outcome))
    sys.exit(bool(outcome["largest_weight_difference"] or outcome["largest_metric_difference"]))
