"""Run notebooks and their assertions, as `nbdev-test` does, each in a fresh fork of one warm process.

    python tests/notebooks.py [--save] [NOTEBOOK or FOLDER ...]      default: all of nbs/, but for `LONG`

Every notebook of a module runs, and every other one in a folder without `.notest`. A tutorial runs on the CPU in a
temporary folder, since it writes into `runs` below the folder that it runs in. As many run at once as there are
cores, the longest first. Failures are shown with their trace, then the slowest ten; the exit status is 1 if any failed.
`--save` keeps the outputs of those that passed, for a commit after `nbdev-clean`.
"""
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
SAVE = [word for word in sys.argv[1:] if word == "--save"]
RUN = """
import os, sys
sys.path[0] = os.path.dirname(sys.executable) # as for nbdev-test: neither its folder nor this one
from nbdev.config import get_config
from nbdev.test import test_nb
config = get_config(sys.argv[1])
flags = config.tst_flags.split() if isinstance(config.tst_flags, str) else config.tst_flags
os.environ["ANCHOR_NB_PROGRESS"] = "off"
if len(sys.argv) > 2 and sys.argv[2] != "--save": # a tutorial, as a reader runs it, but elsewhere and without a GPU
    import contextlib, datasets, logging, transformers, warnings
    os.environ |= {"ACCELERATE_USE_CPU": "1", "TQDM_DISABLE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    sys.modules["nbdev.test"].working_directory = lambda _: contextlib.chdir(sys.argv[2])
passed, _ = test_nb(sys.argv[1], skip_flags=flags, basepath=config.config_path,
                    cell_timeout=config.cell_timeout or None, save="--save" in sys.argv)
sys.exit(not passed)
"""


# Tutorials that train for a minute or more; `make test` leaves them to `make test-all`.
LONG = {f"nbs/tutorials/{name}.ipynb" for name in ("ablations", "own_data", "search_page", "village")}


def chosen(paths) -> list:
    "The notebooks to run."
    found = [book for path in paths for book in ([path] if path.is_file() else sorted(path.rglob("*.ipynb")))]
    found = [book for book in found if "runs" not in book.relative_to(ROOT).parts[2:]] # not what a reader has run
    return [book for book in found if not any(part.startswith((".", "_")) for part in book.relative_to(ROOT).parts)
            and (re.match(r"\d+_", book.name) or not (book.parent/".notest").exists())]


def weight(book: Path) -> int:
    "How long a notebook is likely to run: those that start runs and processes come first."
    return len(re.findall(r"run_stage|run_sweep|launch\(|execute\(|\btrain\(|subprocess|!anchor-nb|pipeline",
                          book.read_text(encoding="utf-8")))


@contextmanager
def elsewhere(book: Path):
    "Where a tutorial runs, as words of the command: a folder of its own, with the same neighbours. Others: nothing."
    if book.parent.name != "tutorials":
        yield []
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for place in (ROOT/"nbs").iterdir(): (Path(name)/place.name).symlink_to(place)
        (Path(name)/"tutorials").unlink()
        (Path(name)/"tutorials").mkdir()
        yield [str(Path(name)/"tutorials")]


def run(book: Path) -> tuple:
    "The notebook, whether it passed, its seconds, and what it said."
    began = time.monotonic()
    with elsewhere(book) as folder:
        done = warm.run([sys.executable, "-c", RUN, str(book), *folder, *SAVE], cwd=ROOT/"nbs", stdin=warm.DEVNULL,
                        stdout=warm.PIPE, stderr=warm.STDOUT, text=True)
    seconds = time.monotonic() - began
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {seconds:6.1f} s  {book.relative_to(ROOT)}", flush=True)
    return book.relative_to(ROOT), done.returncode == 0, seconds, done.stdout


def main(paths) -> int:
    books = sorted(chosen([Path(path).resolve() for path in paths] or [ROOT/"nbs"]), key=weight, reverse=True)
    if not paths and os.environ.get("ANCHOR_NB_TUTORIALS") != "1":
        print(f"left out: {', '.join(sorted(LONG))}; set ANCHOR_NB_TUTORIALS=1")
        books = [book for book in books if str(book.relative_to(ROOT)) not in LONG]
    began = time.monotonic()
    with ThreadPoolExecutor(CORES) as pool: results = list(pool.map(run, books))
    failed = [result for result in results if not result[1]]
    for book, _, _, said in failed: print(f"\n==== {book} ====\n{said.rstrip()}")
    print("\nthe slowest:")
    for book, _, seconds, _ in sorted(results, key=lambda result: -result[2])[:10]: print(f"{seconds:6.1f} s  {book}")
    print(f"{len(books) - len(failed)} of {len(books)} notebooks passed in {time.monotonic() - began:.0f} s, "
          f"{CORES} at once")
    return bool(failed) or not books


if __name__ == "__main__":
    warm.LIBRARIES += ("nbdev.test", "execnb.shell")
    sys.exit(main([word for word in sys.argv[1:] if word not in SAVE]))
