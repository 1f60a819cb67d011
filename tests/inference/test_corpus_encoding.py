"""Encoding of big corpora where a notebook cell cannot show it: kills, several processes, memory, full disks."""
import errno
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import tracemalloc

import numpy as np
import pandas
import pytest

import warm
from anchor_nb.inference import corpus_encoding as encoding
from anchor_nb.models.resolve import resolve_model
from anchor_nb.inference.corpus_encoding import encode_corpus, Encoded, shard_file

ENCODE = """
import json, sys
from anchor_nb.inference.corpus_encoding import encode_corpus
print(json.dumps(encode_corpus(**json.loads(sys.argv[1]))))
"""
WORDS = "moon tide bread flour compiler code sea water baker moonlight".split()


def write_corpus(path, rows):
    "Short texts, a few of them empty, ids in no order."
    draw = random.Random(rows)
    with open(path, "w", encoding="utf-8") as file:
        for n in range(rows):
            file.write(json.dumps(dict(_id=f"{n*7919 % rows}ü", title=draw.choice(WORDS)*(n % 3 > 0),
                                       text=" ".join(draw.choices(WORDS, k=draw.randrange(6))))) + "\n")
    return str(path)


def start(environment={}, **settings):
    "Encode in another process, on one thread, so that its numbers are those of any other."
    return warm.Popen([sys.executable, "-c", ENCODE, json.dumps(dict(model="tiny", **settings))], text=True,
                      stdout=warm.PIPE, stderr=warm.PIPE,
                      env=os.environ | dict(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="1") | environment)


def ended(process) -> dict:
    "What a process says at its end."
    output, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def killed(process, out, shards: int):
    "Kill a process when it has written so many shards; its ranks go with it."
    while process.poll() is None and len(list(out.glob("shard-*.json"))) < shards: time.sleep(0.002)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


def content(out) -> dict:
    "All that an encoding consists of."
    return {path.name: path.read_bytes() for path in out.glob("[!.]*") if path.is_file()}


class Fake:
    "An embedder that costs nothing: the vector of a text is made of its length."
    def encode(self, texts, instruction="", role="document"):
        found = np.array([[len(text), 1, -2, 3] for text in texts], np.float32)
        return found/np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(encoding.AnchorEmbedder, "from_pretrained", lambda *_, **__: Fake())


@pytest.fixture(scope="module", params=[pytest.param((3000, 100, "int8"), id="thousands"),
                                        pytest.param((10**6, 16384, "float16"), marks=pytest.mark.soak, id="million")])
def uninterrupted(request, tmp_path_factory):
    "A corpus, and what one process makes of it."
    rows, shard_rows, dtype = request.param
    folder = tmp_path_factory.mktemp("uninterrupted")
    settings = dict(corpus=write_corpus(folder/"corpus.jsonl", rows), shard_rows=shard_rows, dtype=dtype)
    whole = ended(start(out=str(folder/"out"), **settings))
    assert (whole["rows"], whole["made_rows"], whole["shards"]) == (rows, rows, -(-rows//shard_rows))
    return settings, rows, whole["shards"], content(folder/"out")


def test_killed_twice_is_the_uninterrupted_run(tmp_path, uninterrupted):
    "One process is killed, then two, then two others end it: the same bytes as from one that nobody stopped."
    settings, rows, shards, whole = uninterrupted
    stops = sorted(random.sample(range(1, shards - 10), 2))
    print("killed at shard", stops)
    for stop, processes in zip(stops, (1, 2)):
        killed(start(out=str(tmp_path/"killed"), processes=processes, **settings), tmp_path/"killed", stop)
    with pytest.raises(ValueError, match="lacks"): Encoded(tmp_path/"killed")
    last = ended(start(out=str(tmp_path/"killed"), processes=2, **settings))
    assert content(tmp_path/"killed") == whole
    assert (last["rows"], last["complete"]) == (rows, True) and stops[1] <= shards - last["made_shards"] < shards
    assert [name for ids, _ in Encoded(tmp_path/"killed") for name in ids] == [f"{n*7919 % rows}ü"
                                                                                    for n in range(rows)]
    print(json.dumps(last))


def test_two_nodes_are_one(tmp_path, uninterrupted):
    "The same command on each, here both on this machine."
    settings, _, _, whole = uninterrupted
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = [start(dict(NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
                   out=str(tmp_path/"two"), **settings) for rank in (0, 1)]
    assert any([ended(node)["complete"] for node in nodes])
    assert content(tmp_path/"two") == whole


def rank(number, world=3):
    "What a launcher sets; ranks without an address are left over from another command."
    return dict(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")


def test_processes_that_others_have_started_need_only_the_folder(tmp_path, fake, monkeypatch):
    "As torchrun or a scheduler does; in whatever order they come."
    settings = dict(corpus=write_corpus(tmp_path/"corpus.jsonl", 350), model="tiny", shard_rows=50)
    encode_corpus(out=str(tmp_path/"one"), **settings)
    found = []
    for number in (2, 0, 1):
        for name, value in rank(number).items(): monkeypatch.setenv(name, value)
        found.append(encode_corpus(out=str(tmp_path/"three"), **settings))
    assert [(part["made_shards"], part["complete"]) for part in found] == [(2, False), (3, False), (2, True)]
    assert content(tmp_path/"three") == content(tmp_path/"one")


def test_others_may_come_before_the_first(tmp_path):
    settings = dict(corpus=write_corpus(tmp_path/"corpus.jsonl", 100), out=str(tmp_path/"out"), shard_rows=20)
    other = start(rank(1, 2), **settings)
    assert ended(start(rank(0, 2), **settings))["rows"] >= 60
    ended(other)
    assert [len(ids) for ids, _ in Encoded(tmp_path/"out")] == [20]*5


def test_shards_without_their_manifest_are_made_again(tmp_path, fake):
    "A run that was aborted, or another version, may have left them there, of any corpus and model."
    for name in ("one", "other"):
        rows = (dict(_id=str(n), text=name) for n in range(100))
        (tmp_path/f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        encode_corpus(str(tmp_path/f"{name}.jsonl"), "tiny", str(tmp_path/name), shard_rows=10)
    (tmp_path/"one"/"manifest.json").unlink()
    result = encode_corpus(str(tmp_path/"other.jsonl"), "tiny", str(tmp_path/"one"), shard_rows=10)
    assert result["made_shards"] == 10 and content(tmp_path/"one") == content(tmp_path/"other")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_file_edited_meanwhile_is_noticed(tmp_path, fake, monkeypatch, suffix):
    "What is kept is of the content that the manifest names."
    def write(word):
        table = pandas.DataFrame(dict(id=[f"{n}" for n in range(200)], text=[f"{word} {n}" for n in range(200)]))
        draft = tmp_path/"draft" # put in place at once: a shard may be read at the same time
        if suffix == "csv": table.to_csv(draft, index=False)
        elif suffix == "parquet": table.to_parquet(draft)
        else: table.to_json(draft, orient="records", lines=True)
        draft.replace(tmp_path/f"corpus.{suffix}")
    settings = dict(corpus=str(tmp_path/f"corpus.{suffix}"), model="tiny", shard_rows=10)
    write("bread")
    encode_corpus(out=str(tmp_path/"whole"), **settings)
    usual = Fake.encode
    def edited(*args, **how):
        write("breads")
        return usual(*args, **how)
    with monkeypatch.context() as patch:
        patch.setattr(Fake, "encode", edited)
        with pytest.raises(ValueError, match="corpus.* has changed while it was read; run the command again"):
            encode_corpus(out=str(tmp_path/"out"), **settings)
    made, whole = content(tmp_path/"out"), content(tmp_path/"whole")
    assert 3 <= len(made) < len(whole) and made.items() <= whole.items()
    with pytest.raises(ValueError, match="differs in the content of the corpus"):
        encode_corpus(out=str(tmp_path/"out"), **settings)


@pytest.mark.parametrize("text", ['{"name": "an app", "version": 3}', "[]", "no JSON"])
def test_a_manifest_of_another_program_is_refused(tmp_path, fake, text):
    (tmp_path/"out").mkdir()
    (tmp_path/"out"/"manifest.json").write_text(text)
    message = "manifest.json does not belong to an encoded corpus; choose another folder"
    with pytest.raises(ValueError, match=message):
        encode_corpus(write_corpus(tmp_path/"corpus.jsonl", 20), "tiny", str(tmp_path/"out"))
    with pytest.raises(ValueError, match=message): Encoded(tmp_path/"out")
    assert (tmp_path/"out"/"manifest.json").read_text() == text


@pytest.mark.parametrize("wrong", ["true", "1.5", '["a"]', '{"a": 1}'])
def test_an_id_is_text_or_a_whole_number(tmp_path, fake, wrong):
    (tmp_path/"corpus.jsonl").write_text(f'{{"_id": 7, "text": "x"}}\n{{"_id": {wrong}, "text": "y"}}\n')
    with pytest.raises(ValueError) as caught: encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"out"))
    assert f"corpus.jsonl, line 2, field '_id' is {wrong}, neither text nor a whole number" in str(caught.value)


def test_memory_does_not_grow_with_the_corpus(tmp_path, fake):
    "Ten times the rows in shards of one size, and the same peak, written and read."
    peaks = {}
    for rows in (5_000, 50_000):
        corpus = write_corpus(tmp_path/f"{rows}.jsonl", rows)
        tracemalloc.start()
        encode_corpus(corpus, "tiny", str(tmp_path/str(rows)), shard_rows=1000)
        total = sum(len(ids) for ids, _ in Encoded(tmp_path/str(rows)))
        peaks[rows], _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
        assert total == rows
    assert peaks[50_000] < 1.2*peaks[5_000] + 300_000, peaks # what is noted of a shard takes some hundred bytes


def test_a_full_disk_leaves_whole_shards(tmp_path, fake, monkeypatch):
    settings = dict(corpus=write_corpus(tmp_path/"corpus.jsonl", 100), model="tiny", out=str(tmp_path/"out"),
                    shard_rows=10)
    written, fsync = [], os.fsync
    def full(handle):
        written.append(handle)
        if len(written) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)
    with monkeypatch.context() as patch:
        patch.setattr(encoding.os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device: .*out") as caught:
            encode_corpus(**settings)
    assert caught.value.errno == errno.ENOSPC and not list((tmp_path/"out").glob("*.part"))
    # the manifest and three shards with their records were written before
    assert encode_corpus(**settings)["made_shards"] == 7


def test_a_vector_that_is_no_number_is_named(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(Fake, "encode", lambda self, texts, *_, **__: np.array([[1.0], [np.nan]]*(len(texts)//2)))
    (tmp_path/"corpus.jsonl").write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "text": "y"}\n')
    with pytest.raises(ValueError, match="the vector of 'b' is not finite"):
        encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"out"))
    assert not list((tmp_path/"out").glob("shard*"))


def test_two_at_once_in_one_folder_are_refused(tmp_path, fake):
    corpus = write_corpus(tmp_path/"corpus.jsonl", 20)
    with encoding.locked(tmp_path/"out"), pytest.raises(ValueError, match="another process is running in"):
        encode_corpus(corpus, "tiny", str(tmp_path/"out"))


def test_another_model_under_the_same_name_is_refused(tmp_path, fake):
    shutil.copytree(resolve_model("tiny"), tmp_path/"model")
    settings = dict(corpus=write_corpus(tmp_path/"corpus.jsonl", 20), model=str(tmp_path/"model"),
                    out=str(tmp_path/"out"))
    encode_corpus(**settings)
    (tmp_path/"model"/"more.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="differs in the content of the model"): encode_corpus(**settings)


def test_a_corpus_that_has_moved_is_the_same(tmp_path, fake):
    corpus = write_corpus(tmp_path/"corpus.jsonl", 20)
    encode_corpus(corpus, "tiny", str(tmp_path/"out"), shard_rows=10)
    (tmp_path/"elsewhere").mkdir()
    os.rename(corpus, tmp_path/"elsewhere"/"corpus.jsonl")
    shard_file(tmp_path/"out", 1).unlink()
    with pytest.warns(UserWarning, match="has 0 bytes"):
        assert encode_corpus(str(tmp_path/"elsewhere"), "tiny", str(tmp_path/"out"), shard_rows=10)["made_rows"] == 10


def test_an_id_that_comes_twice_is_found_before_a_model_is_loaded(tmp_path):
    "In another shard and another file; a row without an id is called by its number."
    (tmp_path/"corpus").mkdir()
    (tmp_path/"corpus/a.jsonl").write_text('{"_id": 1, "text": "x"}\n{"text": "y"}\n{"text": "z"}\n')
    (tmp_path/"corpus/b.jsonl").write_text('{"_id": "b", "text": "x"}\n\n{"_id": "2", "text": "y"}\n')
    settings = dict(corpus=str(tmp_path/"corpus"), model="tiny", out=str(tmp_path/"out"), shard_rows=2)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the id '1' is already used at .*a.jsonl, line 1; give "
                                         r"every text a unique id, or name another column"):
        encode_corpus(**settings)
    (tmp_path/"corpus/a.jsonl").write_text('{"_id": 1, "text": "x"}\n{"_id": "2", "text": "y"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl, line 3: the id '2' is already used at .*a.jsonl, line 2"):
        encode_corpus(**settings)
    assert not (tmp_path/"out/manifest.json").exists()


def test_no_rows_and_wrong_rows(tmp_path, fake):
    (tmp_path/"corpus.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no row"):
        encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"out"))
    (tmp_path/"corpus.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(ValueError, match="corpus.jsonl, line 2, field 'text' is missing"):
        encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"other"))
