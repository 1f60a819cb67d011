"Properties of the evaluation over many generated tasks; the notebook holds the examples and the naive references."
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.evaluation import (METRICS, Retrieval, bm25, bootstrap, checkpoints, draw, evaluate, measure, paired_bootstrap, rank,
                                  read_retrieval, relevant, scores, subset)

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
    return Retrieval("generated", "", {d: build(text) for d in documents}, {q: build(text) for q in queries}, qrels)


class Letters:
    "Letter counts: crude, so that many documents tie."

    def encode_document(self, texts):
        vectors = np.array([[text.count(letter) for letter in "aeio"] for text in texts], dtype=np.float32) + 0.01
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_query(self, texts, instruction=""): return self.encode_document(texts)


class Perfect:
    "Places each query on its relevant documents."

    def __init__(self, task): self.task = task

    def encode_document(self, texts): return np.eye(len(texts), dtype=np.float32)

    def encode_query(self, texts, instruction=""):
        return np.array([[self.task.qrels[q].get(d, 0) for d in sorted(self.task.corpus)] for q in sorted(self.task.queries)], dtype=np.float32)


def shuffle(task, seed):
    "The same task with its files in another order."
    def mixed(d):
        items = list(d.items())
        random.Random(seed).shuffle(items)
        return dict(items)
    return Retrieval(task.name, task.instruction, mixed(task.corpus), mixed(task.queries), {q: mixed(j) for q, j in mixed(task.qrels).items()})


@settings(max_examples=60, deadline=None)
@given(tasks())
def test_metrics_lie_between_0_and_1(task):
    for found in (evaluate(Letters(), task), measure(bm25(task), task)):
        assert found.per_query.keys() == METRICS.keys()
        for values in found.per_query.values():
            assert values.keys() == task.queries.keys()
            assert all(0 <= value <= 1 for value in values.values())
        means = found.means
        assert means["recall_at_1"] <= means["recall_at_10"] <= means["recall_at_100"]


@settings(max_examples=40, deadline=None)
@given(tasks(), st.integers(0, 99))
def test_the_order_of_the_files_changes_nothing(task, seed):
    other = shuffle(task, seed)
    assert evaluate(Letters(), task) == evaluate(Letters(), other)
    assert bm25(task) == bm25(other)
    cut, same = subset(task, 2, 3, seed), subset(other, 2, 3, seed)
    assert (cut.corpus, cut.queries, cut.qrels) == (same.corpus, same.queries, same.qrels)


@settings(max_examples=40, deadline=None)
@given(tasks())
def test_a_perfect_embedder_scores_1(task):
    means = evaluate(Perfect(task), task).means
    assert means["mrr_at_10"] == 1 and means["recall_at_10"] == 1
    assert means["ndcg_at_10"] == pytest.approx(1, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(tasks(), st.integers(0, 7), st.integers(0, 32), st.integers(0, 5))
def test_a_cut_keeps_what_it_needs(task, queries, documents, seed):
    cut = subset(task, queries, documents, seed)
    needed = {d for q in cut.queries for d in relevant(task.qrels[q])}
    assert len(cut.queries) == (min(queries, len(task.queries)) or len(task.queries))
    assert needed <= cut.corpus.keys() <= task.corpus.keys()
    assert len(cut.corpus) == (max(len(needed), min(documents, len(task.corpus))) if documents else len(task.corpus))
    assert all(relevant(cut.qrels[q]) == relevant(task.qrels[q]) for q in cut.queries)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 45), st.integers(1, 50), st.integers(0, 10**6))
def test_blocks_and_depth_never_show(documents, queries, k, block, seed):
    generator = np.random.default_rng(seed)
    q, d = generator.integers(-1, 2, (queries, 3)).astype(np.float32), generator.integers(-1, 2, (documents, 3)).astype(np.float32)
    positions, values = rank(q, d, k, block)
    whole = rank(q, d, documents)
    assert np.array_equal(positions, whole[0][:, :k]) and np.array_equal(values, whole[1][:, :k])
    assert (np.diff(values) <= 0).all()


def test_copies_of_a_document_tie_whatever_their_place():
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(300, 64)).astype(np.float32)
    vectors[[17, 133, 299]] = vectors[5]
    positions, values = rank(vectors[5:6], vectors, k=4, block=37)
    assert positions.tolist() == [[5, 17, 133, 299]] and len(set(values[0])) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 5))
def test_a_bootstrap_interval_holds_the_mean(values, seed):
    found = bootstrap(values, seed, samples=500)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found == bootstrap(values, seed, samples=500)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator, hits = np.random.default_rng(0), 0
    for trial in range(200):
        found = bootstrap(generator.normal(0.3, 0.2, 60), seed=trial, samples=500)
        hits += found.low <= 0.3 <= found.high
    assert 180 <= hits <= 199


def test_a_draw_is_the_same_on_every_machine():
    assert draw([f"d{n}" for n in range(8)], 4, seed=42) == ["d4", "d7", "d1", "d5"]


def test_a_silent_system_gains_nothing():
    qrels = {"a": {"d": 1}, "b": {"d": 1}}
    assert scores({"a": ["d"]}, qrels)["ndcg_at_10"] == {"a": 1.0, "b": 0.0}


@pytest.fixture
def folder(tmp_path):
    "A small set on disk in the BEIR layout."
    (tmp_path/"corpus.jsonl").write_text('{"_id": "d1", "title": "T", "text": "one"}\n\n{"_id": "d2", "title": "", "text": ""}\n', encoding="utf-8")
    (tmp_path/"queries.jsonl").write_text('{"_id": "q1", "text": "ein Kühlschrank"}\n', encoding="utf-8")
    (tmp_path/"qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n", encoding="utf-8")
    (tmp_path/"task.json").write_text(json.dumps(dict(name="t", instruction="", license="CC0", source="made up")), encoding="utf-8")
    return tmp_path


def test_a_folder_is_read_as_it_is(folder):
    task = read_retrieval(folder)
    assert task.corpus == {"d1": "T one", "d2": ""} and task.queries == {"q1": "ein Kühlschrank"} and task.qrels == {"q1": {"d1": 1}}
    (folder/"qrels.tsv").write_bytes(b"query-id\tcorpus-id\tscore\r\nq1\td1\t1\r\n")
    assert read_retrieval(folder) == task


@pytest.mark.parametrize("name, content, message", [
    ("corpus.jsonl", '{"_id": "d1"}\n', 'corpus.jsonl:1: field "text" is missing'),
    ("corpus.jsonl", '{"_id": "d1", "text": null}\n', 'corpus.jsonl:1: field "text" is no text'),
    ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": "d1", "text": "y"}\n', 'corpus.jsonl:2: field "_id" repeats'),
    ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": \n', "corpus.jsonl:2: no JSON"),
    ("corpus.jsonl", "", 'unknown document'),
    ("queries.jsonl", '{"_id": "q1", "text": "  "}\n', 'queries.jsonl:1: field "text" is empty'),
    ("queries.jsonl", "[1]\n", "queries.jsonl:1: no JSON object"),
    ("queries.jsonl", "", "unknown query"),
    ("qrels.tsv", "", "qrels.tsv:1: no header"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\n", "no query has a relevant document"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", "qrels.tsv:2: 1 fields"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1.5\n", 'qrels.tsv:2: field "score"'),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\tnone\t1\n", "unknown document 'none'"),
    ("task.json", "{", "task.json: no JSON"),
    ("task.json", "[]", 'task.json: field "name"'),
    ("task.json", '{"name": "t", "instruction": 3}', 'task.json: field "instruction"'),
])
def test_a_malformed_file_is_named_with_line_and_field(folder, name, content, message):
    (folder/name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as error: read_retrieval(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels.tsv", "task.json"])
def test_a_missing_file_is_named(folder, name):
    (folder/name).unlink()
    with pytest.raises(FileNotFoundError, match=name): read_retrieval(folder)


def test_different_queries_cannot_be_paired():
    with pytest.raises(ValueError, match="same cut"): paired_bootstrap({"a": 1.0}, {"b": 1.0})


def test_an_unfinished_run_is_not_evaluated(tmp_path):
    (tmp_path/"run.json").write_text('{"stage": "stage1", "status": "running", "recipe": {"steps": 3}}')
    with pytest.raises(ValueError, match="run.json: the run is running"): checkpoints(str(tmp_path))
