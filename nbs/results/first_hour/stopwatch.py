"""From a clean clone to the first useful picture, with a stopwatch: the README's own commands in an empty folder.

    export PIP_CONSTRAINT=$PWD/constraints.txt
    python nbs/results/first_hour/stopwatch.py nbs/benchmarks/results/clean_clone.jsonl

A new clone and a new environment, with the versions of constraints.txt and the build of torch that pip finds (in the
rows kept here, for a CPU). The archives that pip and `hello` fetch may be in their caches (pip's own, and `packages` of
this package's); the models are unpacked anew. A row says how long each part took and what ran beside it.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLONE = "git clone -q {repository} anchor_nb"
PARTS = {"clone": CLONE, "environment": "python3 -m venv .venv", "install": ".venv/bin/pip install -q .",
         "hello": ".venv/bin/anchor-nb hello"}


def timed(command: str, where: Path, **variables) -> dict:
    "Run a command; seconds of the clock and of the processor."
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, shell=True, cwd=where, env=os.environ | variables, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode: sys.exit(f"{command}\n{done.stderr}")
    return dict(seconds=round(time.monotonic() - began, 1),
                cpu_seconds=round(sum(after[:2]) - sum(before[:2]), 1), last=done.stdout.strip().splitlines()[-1:])


def main(out: Path, repository: str):
    from anchor_nb.data.packages import cache_dir
    own = [name for name in os.environ if name.startswith(("PYTHON", "VIRTUAL_ENV"))]
    for name in own: del os.environ[name]
    os.environ["PATH"] = os.defpath if ".venv" in os.environ["PATH"] else os.environ["PATH"]
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place)/"cache"
        cache.mkdir()
        if (cache_dir()/"packages").is_dir(): (cache/"packages").symlink_to(cache_dir()/"packages")
        parts = {}
        for name, command in PARTS.items():
            where = Path(place)/"anchor_nb" if parts else Path(place)
            parts[name] = timed(command.format(repository=repository), where, ANCHOR_NB_CACHE=str(cache))
            print(name, parts[name], flush=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(place)/"anchor_nb",
                                capture_output=True, text=True).stdout.strip()
    row = dict(commit=commit, cores=os.cpu_count(), load=round(os.getloadavg()[1], 1),
               seconds=round(sum(part["seconds"] for part in parts.values()), 1),
               cpu_seconds=round(sum(part["cpu_seconds"] for part in parts.values()), 1), parts=parts)
    with open(out, "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")


if __name__ == "__main__": main(Path(sys.argv[1]).resolve(), str(Path((sys.argv[2:] or ["."])[0]).resolve()))
