"Corpora: failed and killed builds, the same bytes everywhere, a fair split, and properties over generated texts."
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data import corpora
from anchor_nb.data.deduplication import alike, word_runs
from anchor_nb.data.packages import Item, sha256
from common import files


def test_failed_build_leaves_what_was_there(cache, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "write_notice", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError): corpora.build_corpus("toy")
        assert files(cache) == {}
    before = files(corpora.build_corpus("toy"))
    monkeypatch.setattr(corpora, "write_notice", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError): corpora.build_corpus("toy", seed=1)
    assert files(cache / "corpora" / "toy") == before
    assert [p.name for p in (cache / "corpora").iterdir()] == ["toy"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_build_is_not_taken_for_a_finished_one(cache):
    "The process dies in the middle of writing; the next one builds as if nothing had been."
    script = ("import time, sys\nfrom anchor_nb.data import corpora\n"
              "corpora.write_notice = lambda *_: (print('writing', flush=True), "
              "time.sleep(60))\ncorpora.build_corpus('toy')")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parent.parent.parent)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (cache / "corpora" / "toy").exists()
    assert (corpora.build_corpus("toy") / "manifest.json").is_file()


def test_toy_is_the_same_everywhere(tmp_path):
    one, two = corpora.build_corpus("toy", tmp_path / "a"), corpora.build_corpus("toy", tmp_path / "b")
    assert files(one) == files(two)
    # Pinned: a change here changes every test that was recorded on the toy corpus.
    assert sha256(one / "pairs" / "toy.jsonl").startswith("cd1ccfbcbc129be8")
    other = json.loads((corpora.build_corpus("toy", tmp_path / "c", negatives=2, seed=1) / "manifest.json").read_text())
    same = json.loads((one / "manifest.json").read_text())
    assert other["sha256"]["pairs/toy.jsonl"] != same["sha256"]["pairs/toy.jsonl"]
    for file in ("eval/corpus.jsonl", "eval/queries.jsonl", "eval/qrels.tsv"):
        assert other["sha256"][file] == same["sha256"][file]


def test_layout(tmp_path):
    "The files are what readers of the two formats expect."
    folder = corpora.build_corpus("toy", tmp_path, negatives=3)
    pairs = [json.loads(line) for line in (folder / "pairs" / "toy.jsonl").open()]
    assert all(set(pair) == {"query", "positive", "negatives", "id"} and len(pair["negatives"]) <= 3 for pair in pairs)
    documents = {row["_id"]: row for row in map(json.loads, (folder / "eval" / "corpus.jsonl").open())}
    queries = {row["_id"]: row["text"] for row in map(json.loads, (folder / "eval" / "queries.jsonl").open())}
    head, *lines = (folder / "eval" / "qrels.tsv").read_text().splitlines()
    assert head == "query-id\tcorpus-id\tscore"
    relevant = [line.split("\t") for line in lines]
    assert {q for q, _, _ in relevant} == set(queries) and {d for _, d, _ in relevant} <= set(documents)
    assert set(json.loads((folder / "eval" / "task.json").read_text())) == {"name", "instruction", "license", "source"}
    assert "Apache-2.0" in (folder / "LICENSE.md").read_text()


def assert_fair(folder):
    "No test document or test question was in training, not even nearly."
    name, corpus = folder.name, corpora.CORPORA[folder.name]
    pairs = [json.loads(line) for line in (folder / "pairs" / f"{name}.jsonl").open()]
    documents = [json.loads(line) for line in (folder / "eval" / "corpus.jsonl").open()]
    queries = [json.loads(line) for line in (folder / "eval" / "queries.jsonl").open()]
    seen = sorted({text for pair in pairs for text in [pair["positive"], *pair["negatives"]]})
    tested = [row["text"] for row in documents]
    assert not {pair["id"] for pair in pairs} & {row["_id"] for row in documents}
    assert not {corpora.normalise(pair["query"]) for pair in pairs} & {corpora.normalise(row["text"])
                                                                       for row in queries}
    assert corpora.distinct(seen + tested, corpus.threshold) == list(range(len(seen) + len(tested)))
    assert all(pair["positive"] not in pair["negatives"] and len(set(pair["negatives"])) == len(pair["negatives"])
               for pair in pairs)


def test_toy_split_is_fair(tmp_path):
    assert_fair(corpora.build_corpus("toy", tmp_path))


WORDS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=12), st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_distinct(texts, threshold):
    "What is kept has no near-duplicates, and what is dropped has one among the kept before it."
    kept = corpora.distinct(texts, threshold)
    sets = [word_runs(corpora.normalise(text)) for text in texts]
    for n in range(len(texts)):
        near = [m for m in kept if m < n and alike(sets[n], sets[m]) >= threshold]
        assert (n in kept) == (not near)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["what is it", "who", "Who?", ""]), WORDS, st.sampled_from("xy")),
                max_size=20))
def test_clean_and_split(rows):
    "Queries left are unique; the two sides share no document and together hold all."
    corpus = replace(corpora.CORPORA["toy"], shortest=1)
    items = corpora.clean([Item(str(n), *row) for n, row in enumerate(rows)], corpus)
    asked = [corpora.normalise(item.query) for item in items if item.query]
    assert len(asked) == len(set(asked))
    train, queries, documents = corpora.split(items, corpus)
    assert sorted(train + documents) == sorted(items) and set(queries) <= set(documents)
    for item, texts in zip(train, corpora.hard_negatives(train, 3, 0)):
        assert item.text not in texts and set(texts) <= {other.text for other in train if other.group == item.group}


@pytest.mark.registry
@pytest.mark.parametrize("name", ["wiki", "foldoc", "wordnet", "debian"])
def test_real_corpora(name, tmp_path):
    "Built from the real packages twice: the same bytes, and a fair split."
    one, two = (corpora.build_corpus(name, tmp_path / part) for part in "ab")
    assert files(one) == files(two)
    counts = json.loads((one / "manifest.json").read_text())["counts"]
    assert counts["pairs"] > 5000 and counts["queries"] == 1000 and counts["documents"] > 2000
    if name != "wordnet": assert_fair(one)


@pytest.mark.registry
def test_wiki_is_pinned(tmp_path):
    manifest = json.loads((corpora.build_corpus("wiki", tmp_path) / "manifest.json").read_text())
    assert manifest["counts"] == {"pairs": 6743, "queries": 1000, "documents": 2561, "negatives": 26972}
    assert manifest["sha256"]["pairs/wiki.jsonl"].startswith("ba1c8b5764be88e5")
