"Files and folders that several threads, processes or machines write at once, and that killed processes leave behind."
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from anchor_nb.core.files import keep_apart, new_folder, write_text
from anchor_nb.data.writers import write_pairs

ROW = dict(query="a", positives=["b"], negatives=[], instruction="", document_instruction="")


def at_once(function, times=64):
    "Call a function from several threads; the first error is raised."
    with ThreadPoolExecutor(8) as pool: return list(pool.map(function, range(times)))


def test_threads_write_one_file(tmp_path):
    texts = {f"{n} " * 5000 for n in range(64)}
    at_once(lambda n: write_text(tmp_path/"facts", f"{n} " * 5000))
    assert (tmp_path/"facts").read_text() in texts and [path.name for path in tmp_path.iterdir()] == ["facts"]


def test_threads_write_one_dataset(tmp_path):
    at_once(lambda n: write_pairs(tmp_path, "t", [ROW] * 500))
    assert len((tmp_path/"t.jsonl").read_text().splitlines()) == 500 and len(list(tmp_path.iterdir())) == 1


def test_threads_make_one_folder(tmp_path):
    def make(n):
        with new_folder(tmp_path/"made") as work:
            for name in "ab": (work/name).write_text(str(n))
    at_once(make)
    assert len({(tmp_path/"made"/name).read_text() for name in "ab"}) == 1 and len(list(tmp_path.iterdir())) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from anchor_nb.core.files import new_folder
with new_folder(Path(sys.argv[1])) as work:
    (work/"half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_cleared_away(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path/"toy"])
    assert (killed.returncode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 1
            and os.listdir(tmp_path)[0].startswith(".toy-"))
    with new_folder(tmp_path/"toy-two") as work: (work/"whole").touch() # another folder, though its name begins alike
    assert len(os.listdir(tmp_path)) == 2
    with new_folder(tmp_path/"toy") as work: (work/"whole").touch()
    assert sorted(os.listdir(tmp_path)) == ["toy", "toy-two"] and os.listdir(tmp_path/"toy") == ["whole"]


def test_a_refusal_names_both_places(tmp_path):
    (tmp_path/"my/pairs").mkdir(parents=True)
    (tmp_path/"link").symlink_to(tmp_path/"my")
    with pytest.raises(ValueError) as caught: keep_apart(tmp_path/"link", data=tmp_path/"my/pairs")
    for said in (f"out={tmp_path/'link'} holds data={tmp_path/'my/pairs'}", f"({tmp_path/'my'} and "
                                                                            f"{tmp_path/'my/pairs'})"):
        assert said in str(caught.value)
