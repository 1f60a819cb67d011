"Retrieval sets: cuts of many generated ones, malformed files, and the mteb tasks made from them."
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data.retrieval_sets import (Retrieval, as_task, classification_task, clustering_task, draw, pair_task,
                                           read_retrieval, relevant, sts_task, subset)
from common import shuffle, tasks


@settings(max_examples=40, deadline=None)
@given(tasks(), st.integers(0, 99))
def test_the_order_of_the_files_does_not_change_a_cut(task, seed):
    cut, same = subset(task, 2, 3, seed), subset(shuffle(task, seed), 2, 3, seed)
    assert (cut.corpus, cut.queries, cut.qrels) == (same.corpus, same.queries, same.qrels)


@settings(max_examples=40, deadline=None)
@given(tasks(), st.integers(0, 7), st.integers(0, 32), st.integers(0, 5))
def test_a_cut_keeps_what_it_needs(task, queries, documents, seed):
    cut = subset(task, queries, documents, seed)
    needed = {d for q in cut.queries for d in relevant(task.qrels[q])}
    assert len(cut.queries) == (min(queries, len(task.queries)) or len(task.queries))
    assert needed <= cut.corpus.keys() <= task.corpus.keys()
    assert len(cut.corpus) == (max(len(needed), min(documents, len(task.corpus))) if documents else len(task.corpus))
    assert all(relevant(cut.qrels[q]) == relevant(task.qrels[q]) for q in cut.queries)


def test_a_draw_is_the_same_on_every_machine():
    assert draw([f"d{n}" for n in range(8)], 4, seed=42) == ["d4", "d7", "d1", "d5"]


@pytest.fixture
def folder(tmp_path):
    "A small set on disk in the BEIR layout."
    (tmp_path/"corpus.jsonl").write_text('{"_id": "d1", "title": "T", "text": "one"}\n\n{"_id": "d2", "title": "", '
                                         '"text": ""}\n', encoding="utf-8")
    (tmp_path/"queries.jsonl").write_text('{"_id": "q1", "text": "ein Kühlschrank"}\n', encoding="utf-8")
    (tmp_path/"qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n", encoding="utf-8")
    (tmp_path/"task.json").write_text(json.dumps(dict(name="t", instruction="", license="CC0", source="made up")),
                                      encoding="utf-8")
    return tmp_path


def test_a_folder_is_read_as_it_is(folder):
    task = read_retrieval(folder)
    assert task.corpus == {"d1": "T one", "d2": ""}
    assert task.queries == {"q1": "ein Kühlschrank"} and task.qrels == {"q1": {"d1": 1}}
    (folder/"qrels.tsv").write_bytes(b"query-id\tcorpus-id\tscore\r\nq1\td1\t1\r\n")
    assert read_retrieval(folder) == task


@pytest.mark.parametrize("name, content, message", [
    ("corpus.jsonl", '{"_id": "d1"}\n', "corpus.jsonl, line 1, field 'text' is missing"),
    ("corpus.jsonl", '{"_id": "d1", "text": null}\n', "corpus.jsonl, line 1, field 'text' is not text"),
    ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": "d1", "text": "y"}\n',
     "corpus.jsonl, line 2, field '_id' repeats"),
    ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": \n', "corpus.jsonl, line 2: not valid JSON"),
    ("corpus.jsonl", "", 'unknown document'),
    ("queries.jsonl", '{"_id": "q1", "text": "  "}\n', "queries.jsonl, line 1, field 'text' is empty"),
    ("queries.jsonl", "[1]\n", "queries.jsonl, line 1: not a JSON object"),
    ("queries.jsonl", "", "unknown query"),
    ("qrels.tsv", "", "qrels.tsv, line 1: no header"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\n", "no query has a relevant document"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", "qrels.tsv, line 2: 1 fields"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1.5\n", "qrels.tsv, line 2, field 'score'"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\tnone\t1\n", "unknown document 'none'"),
    ("task.json", "{", "task.json: not valid JSON"),
    ("task.json", "[]", "task.json, field 'name'"),
    ("task.json", '{"name": "t", "instruction": 3}', "task.json, field 'instruction'"),
])
def test_a_malformed_file_is_named_with_line_and_field(folder, name, content, message):
    (folder/name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as error: read_retrieval(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels.tsv", "task.json"])
def test_a_missing_file_is_named(folder, name):
    (folder/name).unlink()
    with pytest.raises(FileNotFoundError, match=name): read_retrieval(folder)


# ---- tasks of mteb ----

class Perfect:
    "Places each query on its relevant documents; for mteb, which may ask for any order of texts."

    def __init__(self, task):
        import mteb
        from mteb.models.abs_encoder import AbsEncoder
        documents = sorted(set(task.corpus.values()))
        places = {text: np.eye(len(documents))[n] for n, text in enumerate(documents)}
        wanted = {task.queries[q]: sum(grade * places[task.corpus[d]] for d, grade in judged.items())
                  for q, judged in task.qrels.items()}

        class Model(AbsEncoder):
            mteb_model_meta = mteb.models.ModelMeta.create_empty(dict(name="toy/perfect", revision="1"))

            def encode(self, inputs, *, prompt_type, **about):
                table = wanted if prompt_type == "query" else places
                return np.array([table[text] for batch in inputs for text in batch["text"]], dtype=np.float32)
        self.model = Model()

    def score(self, task, metric=None):
        import mteb
        result = mteb.evaluate(self.model, task, cache=None, show_progress_bar=False).task_results[0]
        return result.scores["test"][0][metric or task.metadata.main_score]


def distinct_texts(task):
    "The same task with texts that differ, so that no two documents tie."
    return Retrieval(task.name, task.instruction, {d: f"{d} {text}" for d, text in task.corpus.items()},
                     {q: f"{q} {text}" for q, text in task.queries.items()}, task.qrels)


@settings(max_examples=15, deadline=None)
@given(tasks())
def test_a_perfect_embedder_scores_1(task):
    task = distinct_texts(task)
    assert Perfect(task).score(as_task(task)) == pytest.approx(1, abs=1e-5)
    everything = {query: list(task.corpus) for query in task.queries}
    assert Perfect(task).score(as_task(task, everything)) == pytest.approx(1, abs=1e-5)


def test_equal_ids_of_query_and_document_count():
    task = Retrieval("same", "", {"a": "one", "b": "two"}, {"a": "first"}, {"a": {"a": 1}})
    assert Perfect(task).score(as_task(task), "recall_at_1") == 1


def test_the_revision_follows_the_data():
    def revision(task): return task.metadata.dataset["revision"]
    one = Retrieval("t", "", {"a": "one"}, {"q": "first"}, {"q": {"a": 1}})
    same, other = (Retrieval("t", "", {"a": text}, {"q": "first"}, {"q": {"a": 1}}) for text in ("one", "two"))
    assert revision(as_task(one)) == revision(as_task(same)) != revision(as_task(other))
    rows = [dict(text=f"{n}", label=n % 2) for n in range(8)]
    fewer = classification_task("c", rows, rows, experiments=2)
    assert revision(classification_task("c", rows, rows)) != revision(fewer)


@pytest.mark.parametrize("make, rows, message", [
    (sts_task, [], "t: no rows"),
    (sts_task, [dict(sentence1="a", sentence2="b")], "t: row 1 has None in column 'score'"),
    (sts_task, [dict(sentence1="a", sentence2=None, score=1)], "column 'sentence2'"),
    (pair_task, [dict(sentence1="a", sentence2="b", labels=0)], "must hold both 0 and 1"),
    (pair_task, [dict(sentence1="", sentence2="b", labels=0)], "t: row 1 is empty in column 'sentence1'"),
    (clustering_task, [dict(sentences="a", labels="x"), dict(sentences="b", labels="x")], "one label only"),
    (lambda name, rows: classification_task(name, rows, rows), [dict(text="a", label="good")],
     "row 1 has 'good' in column 'label'"),
])
def test_bad_rows_are_named(make, rows, message):
    with pytest.raises(ValueError) as error: make("t", rows)
    assert message in str(error.value)
