"Near-duplicates and contamination, beside the slow search that compares everything with everything."
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data import deduplication
from anchor_nb.data.deduplication import (Watch, alike, database, dedup_pairs, duplicates, near_texts,
                                          plain, seen_part, word_runs)
from anchor_nb.data.retrieval_sets import Retrieval
from common import WORDS, toy_pairs


def row(query, positive):
    return dict(query=query, positives=[positive], negatives=[], instruction="", document_instruction="",
                positive_scores=[], negative_scores=[])


SENTENCE = st.lists(st.sampled_from(WORDS[:5]), min_size=1, max_size=14).map(" ".join)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=20), st.sampled_from([0.3, 0.5, 0.8, 1.0]),
       st.sampled_from([1, 8, deduplication.CELLS]))
def test_duplicates_are_those_of_the_slow_search(texts, threshold, counters):
    "Also where many runs share a counter."
    sets, kept = [tuple(map(word_runs, pair)) for pair in texts], []
    for n, row_sets in enumerate(sets):
        if not any(all(alike(*parts) >= threshold for parts in zip(row_sets, sets[k])) for k in kept): kept.append(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplication, "CELLS", counters)
        found = duplicates([row(*pair) for pair in texts], threshold)
    assert [n for n in range(len(texts)) if n not in found] == kept
    assert all(earlier in kept for earlier, _ in found.values())


# several scripts: letters with and without case, digits, marks, signs, and what NFKC changes
LETTERS = "aBzéß ıİΣςσ дЖ 日本語 ाि कख ١٢ ⅷ½² _ .,!? +*# 🙂 ﬁ\u0300\u200b\u00a0\n"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(LETTERS, min_size=1, max_size=14).filter(lambda text: plain(text)), min_size=2, max_size=8))
def test_the_database_finds_the_words_that_python_finds(texts):
    texts = list(dict.fromkeys(map(plain, texts)))
    for threshold in (0.2, 1.0):
        slowly = {(a, b) for b in range(len(texts)) for a in range(b)
                  if alike(word_runs(texts[a]), word_runs(texts[b])) >= threshold}
        assert set(near_texts(texts, threshold)) == slowly


def test_many_near_copies_are_searched_in_smaller_blocks(monkeypatch):
    "The result is the same, whatever the blocks."
    draw = random.Random(0)
    base = draw.choices(WORDS, k=30)
    rows = [row("the same question", " ".join(base[:29] + [f"x{n}"])) for n in range(1000)]
    expected = duplicates(rows)
    assert expected == {n: (0, "near") for n in range(1, 1000)}
    monkeypatch.setattr(deduplication, "MOST", 10)
    assert duplicates(rows) == expected


@settings(deadline=None, max_examples=30)
@given(st.lists(SENTENCE, min_size=1, max_size=12), st.lists(SENTENCE, min_size=1, max_size=12),
       st.sampled_from([0.3, 0.8, 1.0]))
def test_what_was_seen_is_what_the_slow_search_sees(tests, trains, threshold):
    texts = {str(n): text for n, text in enumerate(tests)}
    test = Retrieval("t", "", {"d": ""}, texts, {n: {"d": 1} for n in texts})
    with database() as db: found = Watch(db, [test], threshold)(trains)
    for train, keys in zip(trains, found):
        assert keys == [("t", "queries", n) for n, text in texts.items()
                        if seen_part(word_runs(text), word_runs(train)) >= threshold]


def test_a_passage_inside_a_longer_one_was_seen():
    passage = " ".join(random.Random(0).choices(WORDS, k=40))
    watch = Watch(database(), [Retrieval("t", "", {"d": passage}, {"q": ""}, {"q": {"d": 1}})])
    inside, half = watch(["Before it. " + passage.upper() + ", and after it. " + "More " * 200,
                          passage[: len(passage)//2]])
    assert inside == [("t", "documents", "d")] and not half


def content(folder: Path) -> dict:
    "The bytes of every file."
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def planted(folder: Path, rows=4000) -> Path:
    "Rows of which about a third repeat an earlier one."
    draw, lines = random.Random(0), []
    for number in range(rows):
        if number and draw.random() < 0.35:
            query, words = draw.choice(lines)
            words = words[:-1] + [draw.choice(WORDS)]
        else: query, words = " ".join(draw.choices(WORDS, k=8)), draw.choices(WORDS, k=30)
        lines.append((query, words))
    folder.mkdir()
    for part in range(4):
        rows = [row(query, " ".join(words)) for query, words in lines[part::4]]
        deduplication.write_pairs(folder, f"part{part}", rows)
    return folder


def test_any_number_of_threads_and_any_memory_drop_the_same_rows(tmp_path):
    data, outs = planted(tmp_path/"data"), []
    for threads, memory in ((1, "2GB"), (2, "2GB"), (4, "200MB")):
        out = tmp_path/f"{threads}"
        dedup_pairs(str(data), str(out), threads=threads, memory=memory)
        outs.append(content(out))
    assert outs[0] == outs[1] == outs[2] and len(outs[0]) == 5


KILLED = """
import os, signal, sys
from anchor_nb.data import deduplication
real, calls = deduplication.feed, []
def feed(db, name, *rest):
    if name == "found":
        calls.append(name)
        if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return real(db, name, *rest)
deduplication.feed = feed
deduplication.find_near.__defaults__ = (500,)
deduplication.dedup_pairs(sys.argv[1], sys.argv[2])
"""


def test_a_search_that_was_killed_resumes(tmp_path, monkeypatch):
    data = planted(tmp_path/"data")
    dedup_pairs(str(data), str(tmp_path/"whole"))
    command = [sys.executable, "-c", KILLED, str(data), str(tmp_path/"out")]
    killed = subprocess.run(command, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with database(tmp_path/"out/search.duckdb") as db:
        assert deduplication.rows_of(db, "SELECT max(rows) FROM finished") == [(1000,)]
    monkeypatch.setattr(deduplication, "plain_rows", lambda rows, _: (1/0 for _ in rows)) # nothing is read again
    dedup_pairs(str(data), str(tmp_path/"out"))
    assert content(tmp_path/"out") == content(tmp_path/"whole")


def test_a_database_of_somebody_else_stays(tmp_path):
    data = planted(tmp_path/"data", 20)
    (tmp_path/"out").mkdir()
    with database(tmp_path/"out/search.duckdb") as db: db.execute("CREATE TABLE mine AS SELECT 1 AS x")
    with pytest.raises(ValueError, match="did not make"): dedup_pairs(str(data), str(tmp_path/"out"))
    with database(tmp_path/"out/search.duckdb") as db: assert deduplication.rows_of(db, "FROM mine") == [(1,)]


def test_other_data_begins_anew(tmp_path, monkeypatch):
    data = planted(tmp_path/"data", 200)
    monkeypatch.setattr(deduplication, "contamination", lambda *_: 1/0)
    with pytest.raises(ZeroDivisionError): dedup_pairs(str(data), str(tmp_path/"out"))
    assert os.listdir(tmp_path/"out") == ["search.duckdb"]
    monkeypatch.undo()
    (data/"part1.jsonl").unlink()
    dedup_pairs(str(data), str(tmp_path/"out"))
    dedup_pairs(str(data), str(tmp_path/"new"))
    assert content(tmp_path/"out") == content(tmp_path/"new")


@pytest.mark.parametrize("given, message", [(dict(against=["nowhere"]), "nowhere is missing"),
                                            (dict(remove="some"), "choose one of none"),
                                            (dict(threshold=-1), "threshold=-1"),
                                            (dict(format="csv"), "choose one of anchor_nb"),
                                            (dict(memory="lots"), "memory='lots'"),
                                            (dict(threads=-1), "threads=-1"),
                                            (dict(out=""), "out is empty"), (dict(data="nowhere"), "neither a folder "
                                                                                                   "nor a file")])
def test_bad_input_of_deduplication(tmp_path, given, message):
    with pytest.raises((ValueError, OSError), match=message):
        dedup_pairs(**dict(data=toy_pairs(), out=str(tmp_path/"out")) | given)


def test_columns_that_would_lose_a_negative_are_refused_before_the_search(tmp_path):
    text = "the old mill by the river burned down twice in one winter"
    rows = [dict(query=f"q{n}", positive=f"the answer number {n}", negative=text if n else "another text")
            for n in range(2)]
    (tmp_path/"rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path/"test").mkdir()
    (tmp_path/"test/corpus.jsonl").write_text(json.dumps(dict(_id="d", title="", text=text)))
    (tmp_path/"test/queries.jsonl").write_text(json.dumps(dict(_id="q", text="what burned?")))
    (tmp_path/"test/qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    given = dict(against=[str(tmp_path/"test")], remove="documents")
    with pytest.raises(ValueError, match="rows, row 1 would lose a negative"):
        dedup_pairs(str(tmp_path/"rows.jsonl"), str(tmp_path/"out"), format="columns", **given)
    assert not (tmp_path/"out").exists()
    assert dedup_pairs(str(tmp_path/"rows.jsonl"), str(tmp_path/"out"), **given)["datasets"]["rows"]["written"] == 2
