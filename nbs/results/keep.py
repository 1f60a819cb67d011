"""Keep what a page shows of a run: manifests, metrics, speed, ledger, evaluations; no weights, no values of queries.

    .venv/bin/python nbs/results/keep.py runs/demo nbs/results/demo

The folder is replaced as a whole, so that nothing of an earlier run stays in it.
"""
import json
import shutil
import sys
from pathlib import Path

from anchor_nb.release.hub import told_place

KEPT = ("run.json", "metrics.jsonl", "speed.jsonl", "ledger.jsonl", "evaluations.jsonl", "pipeline.json")


def keep(run: Path, out: Path) -> list: # paths relative to both
    "Copy the records of a pipeline's folder; ValueError where a run is not finished, or names a place of this machine."
    found = sorted(path.relative_to(run) for path in [*run.glob("*"), *run.glob("*/*")] if path.name in KEPT)
    for path in found:
        text = (run/path).read_text(encoding="utf-8")
        if path.name == "run.json" and json.loads(text)["status"] != "complete":
            raise ValueError(f"{run/path} is not of a finished run; run `make demo` again")
        if place := told_place(text):
            raise ValueError(f"{run/path} names a place of this machine, {place}; run it in the checkout, in runs/")
    if not found:
        raise ValueError(f"{run} has no records of a run; run `make demo` first")
    shutil.rmtree(out, ignore_errors=True)
    for path in found:
        (out/path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run/path, out/path)
    return found


if __name__ == "__main__":
    for path in keep(Path(sys.argv[1]), Path(sys.argv[2])): print(path)
