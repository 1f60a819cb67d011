"""One folder with everything that `make gpu` needs on a machine that can fetch nothing: `make gpu-kit`.

    source-000      the source tree of the commit, as git has it
    wheels-000 ...  what such a machine may lack; torch and what comes with it are never touched
    cache-000 ...   models and corpora, as the package's own cache has them
    kit.json        the pieces and their hashes, the commit, what the wheels are for
    unpack.py       joins and checks the pieces, unpacks them, adds the wheels that are missing; needs Python alone
    start.sh        unpacks, then runs; what stands behind it goes to gpu.py

Pieces have at most 40 MiB, for ways of copying that take no large files.

    python nbs/benchmarks/gpu_kit.py runs/gpu-kit            wheels for training and for the comparisons
    python nbs/benchmarks/gpu_kit.py runs/gpu-kit --lean     wheels for training alone
    python nbs/benchmarks/gpu_kit.py runs/gpu-kit --python 3.12   wheels for one Python, not for 3.11 to 3.13
"""
import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PIECE = 40*2**20  # so that one travels beside a copy of the source tree where 64 MiB may
GIVEN = ["torch", "transformers", "numpy", "safetensors", "tokenizers"]  # what such a machine has
TRAIN = ["accelerate", "peft", "psutil", "xxhash"]  # xxhash: checkpoints
COMPARE = ["sentence-transformers", "datasets"]  # the peers, and tables that are larger than memory
PYTHONS = ["3.11", "3.12", "3.13"]
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64"]
MODELS, CORPORA = ["smollm2-135m", "tiny"], ["wiki", "wordnet", "toy"]

# ---- wheels ----


def with_dependencies(names: list) -> dict:  # name -> version, of what is installed here
    "These packages and all that they need."
    known, left = {}, list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in known: continue
        try: found = distribution(name)
        except PackageNotFoundError: continue  # for another platform
        known[name] = found.version
        needs = map(Requirement, found.requires or [])
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate(dict(extra=""))]
    return known


def lacking(names: list) -> dict:  # name -> version
    "What a machine with `GIVEN` lacks of these packages and their dependencies."
    given = with_dependencies(GIVEN)
    return {name: version for name, version in sorted(with_dependencies(names).items()) if name not in given}


def fetch_wheels(names: list, folder: Path, pythons: list):
    "The wheels, for every Python asked for; a package with one wheel for all of them comes once."
    for python in pythons:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--only-binary=:all:", "--python-version", python, *platforms, "--dest", str(folder),
                        *[f"{name}=={version}" for name, version in lacking(names).items()]], check=True)


# ---- models and corpora ----


def cache_files() -> list:  # of (path, name in the kit)
    "The built models and corpora, from the user's cache."
    from anchor_nb.data.corpora import build_corpus
    from anchor_nb.models.resolve import resolve_model
    folders = [("models", Path(resolve_model(name))) for name in MODELS]
    folders += [("corpora", build_corpus(name)) for name in CORPORA]
    return [(path, f"{kind}/{folder.name}/{path.relative_to(folder)}") for kind, folder in folders
            for path in sorted(folder.rglob("*")) if path.is_file()]


# ---- pieces ----


class Pieces(io.RawIOBase):
    "A file that is written as pieces, each with its hash."
    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.piece, self.made = folder, name, None, []

    def writable(self): return True

    def write(self, data) -> int:
        data, whole = memoryview(data).cast("B"), len(data)
        while data:
            if self.piece is None:
                path = self.folder/f"{self.name}-{len(self.made):03d}"
                self.piece, self.left, self.hash = open(path, "wb"), PIECE, hashlib.sha256()
                self.made.append(dict(file=path.name))
            part = data[:self.left]
            self.piece.write(part)
            self.hash.update(part)
            self.left -= len(part)
            data = data[len(part):]
            if not self.left: self.end_piece()
        return whole

    def end_piece(self):
        self.piece.close()
        self.made[-1]["sha256"], self.piece = self.hash.hexdigest(), None

    def close(self):
        if self.piece is not None: self.end_piece()
        super().close()


def write_pieces(folder: Path, name: str, files: list) -> list:  # files: of (path, name); -> of dict(file, sha256)
    "Files as a compressed archive in pieces; the same files give the same bytes."
    pieces = Pieces(folder, name)
    with gzip.GzipFile(fileobj=pieces, mode="wb", compresslevel=3, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path, place in files:
                entry = archive.gettarinfo(path, place)
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                with open(path, "rb") as file: archive.addfile(entry, file)
    pieces.close()
    return pieces.made


# ---- the kit ----

# Both run where nothing of ours is installed, so they import nothing but the standard library, and packaging if it is
# there, to tell which wheel fits.
UNPACK = '''"""Join, check and unpack the pieces of this kit: `python unpack.py KIT WORK`; needs nothing but Python."""
import hashlib, io, json, sys, sysconfig, tarfile, zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


class Joined(io.RawIOBase):
    "Pieces read as one file; ends the program at a piece that is missing or damaged."
    def __init__(self, kit, pieces): self.parts, self.rest = (checked(kit, piece) for piece in pieces), b""
    def readable(self): return True
    def readinto(self, into):
        self.rest = self.rest or next(self.parts, b"")
        part, self.rest = self.rest[:len(into)], self.rest[len(into):]
        into[:len(part)] = part
        return len(part)


def checked(kit, piece):
    path = kit/piece["file"]
    if not path.is_file(): sys.exit(f"unpack.py: {path} is missing\\ncopy it from the kit again")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != piece["sha256"]:
        sys.exit(f"unpack.py: {path} is damaged\\ncopy it from the kit again")
    return content


def fitting(wheels):
    "The wheels that fit this Python and are not installed."
    try: from packaging.tags import sys_tags
    except ModuleNotFoundError: from pip._vendor.packaging.tags import sys_tags
    tags = [str(tag) for tag in sys_tags()]
    best = {}
    for wheel in sorted(wheels):
        name, version, *_, python, abi, platform = wheel.stem.split("-")
        places = [tags.index(f"{p}-{a}-{s}") for p in python.split(".") for a in abi.split(".")
                  for s in platform.split(".") if f"{p}-{a}-{s}" in tags]
        if places and (name not in best or min(places) < best[name][0]): best[name] = (min(places), wheel)
    return {name: wheel for name, (_, wheel) in best.items() if not installed(name)}


def installed(name):
    try: return bool(distribution(name.replace("_", "-")))
    except PackageNotFoundError: return False


def extracted(archive, into):
    "Unpack; lines that are only in a file of results that lies there already are kept, since a GPU measured them."
    how = dict(filter="data") if hasattr(tarfile, "data_filter") else {}
    for entry in archive:
        place = into/entry.name
        kept = place.read_bytes().splitlines(True) if entry.name.endswith(".jsonl") and place.is_file() else []
        archive.extract(entry, into, **how)
        if not kept: continue
        told = place.read_bytes().splitlines(True)
        known = set(told)
        place.write_bytes(b"".join(told + [line for line in kept if line not in known]))


def main(kit, work):
    about = json.loads((kit/"kit.json").read_text())
    done = work/"done.json"
    if done.is_file() and json.loads(done.read_text()) == about: return
    for name, pieces in about["pieces"].items():
        into = work/name
        into.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BufferedReader(Joined(kit, pieces), 2**20), mode="r|gz") as archive:
            extracted(archive, into)
    for name, wheel in fitting((work/"wheels").glob("*.whl")).items():
        print(f"adding {wheel.name}")
        with zipfile.ZipFile(wheel) as archive: archive.extractall(work/"site-packages")
    done.write_text(json.dumps(about))


if __name__ == "__main__": main(Path(sys.argv[1]), Path(sys.argv[2]))
'''
START = '''#!/bin/sh
# Check a GPU machine with what lies in this folder; nothing is fetched and nothing is installed into its Python.
#   PYTHON=python3.12   the interpreter that has torch and transformers
#   WORK=/fast/disk     where the kit is unpacked, and where rows and runs go; default: the folder work beside this file
# What stands behind the command goes to gpu.py, such as --device cpu (a dry run), --minutes 60, --stages a.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=${WORK:-$kit/work}
lacks() { echo "start.sh: $python $1" >&2; echo "say PYTHON=/path/to/one that has it" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || lacks "is not Python 3.11 or later"
"$python" -c 'import torch, transformers' || lacks "lacks torch or transformers"
mkdir -p "$work"
work=$(cd "$work" && pwd)
"$python" "$kit/unpack.py" "$kit" "$work"
export PYTHONPATH="$work/source:$work/site-packages${PYTHONPATH:+:$PYTHONPATH}"  # dill looks for a folder of this name
export ANCHOR_NB_CACHE="$work/cache" HF_DATASETS_CACHE="$work/tables" HF_HUB_OFFLINE=1
cd "$work/source"
exec "$python" nbs/benchmarks/gpu.py "$@"
'''


def tracked() -> list:  # of (path, name)
    "The files that git tracks."
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True)
    return [(ROOT/name, name) for name in sorted(names.stdout.split("\0")) if name and (ROOT/name).is_file()]


def make_kit(out: Path, wheels: list, cache: bool = True, pythons: list = PYTHONS) -> dict:  # what kit.json says
    "Write the folder; it appears when it is whole. SystemExit where there is one already."
    from anchor_nb.runs.provenance import code_version
    if out.exists():
        raise SystemExit(f"gpu_kit.py: {out} exists\ngive another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as work:
        part, told, fetched = Path(work)/"kit", Path(work)/"commit.json", Path(work)/"wheels"
        part.mkdir(), fetched.mkdir()
        told.write_text(json.dumps(code_version()))
        if wheels: fetch_wheels(wheels, fetched, pythons)
        sources = dict(source=[*tracked(), (told, "commit.json")],
                       wheels=[(path, path.name) for path in sorted(fetched.iterdir())],
                       cache=cache_files() if cache else [])
        about = dict(code=code_version(), wheels=[name for _, name in sources["wheels"]],
                     pieces={name: write_pieces(part, name, files) for name, files in sources.items()})
        (part/"kit.json").write_text(json.dumps(about, indent=1))
        (part/"unpack.py").write_text(UNPACK)
        (part/"start.sh").write_text(START)
        os.chmod(part/"start.sh", 0o755)
        shutil.move(part, out)
    return about


def main():
    "The command."
    parser = argparse.ArgumentParser(prog="gpu_kit.py", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--lean", action="store_true", help="wheels for training alone, none for the comparisons")
    parser.add_argument("--python", choices=PYTHONS, help="wheels for this one; default: for all of these")
    asked = parser.parse_args()
    about = make_kit(asked.out, TRAIN if asked.lean else TRAIN + COMPARE,
                     pythons=[asked.python] if asked.python else PYTHONS)
    size = sum(path.stat().st_size for path in asked.out.iterdir())
    print(f"{asked.out}: {sum(map(len, about['pieces'].values()))} pieces, {size/2**20:.0f} MiB, "
          f"{len(about['wheels'])} wheels; copy it there and run: sh start.sh")


if __name__ == "__main__": main()
