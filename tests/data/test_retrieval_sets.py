"Retrieval sets: cuts of many generated ones, malformed files, and the mteb tasks made from them."
import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data.retrieval_sets import Retrieval, as_task, draw, read_retrieval, relevant, rows_task, subset
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
    ("corpus.jsonl", '{"_id": "d1", "text": "x \\ud83d"}\n', "line 1, field 'text' has half a character, '\\ud83d'"),
    ("corpus.jsonl", "", 'unknown document'),
    ("queries.jsonl", '{"_id": "q1", "text": "  "}\n', "queries.jsonl, line 1, field 'text' is empty"),
    ("queries.jsonl", "[1]\n", "queries.jsonl, line 1: not a JSON object"),
    ("queries.jsonl", "", "unknown query"),
    ("qrels.tsv", "", "no query has a relevant document"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\n", "no query has a relevant document"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1,d1,1\n", "qrels.tsv, line 2: 1 fields"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1.5\n", "qrels.tsv, line 2, field 'score'"),
    ("qrels.tsv", "query-id\tcorpus-id\tscore\nq1\tnone\t1\n", "unknown document 'none'"),
    ("task.json", "{", "task.json: not valid JSON"),
    ("task.json", "[]", "task.json: no JSON object"),
    ("task.json", '{"name": "t", "instruction": 3}', "task.json, field 'instruction'"),
])
def test_a_malformed_file_is_named_with_line_and_field(folder, name, content, message):
    (folder/name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as error: read_retrieval(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels.tsv"])
def test_a_missing_file_is_named(folder, name):
    (folder/name).unlink()
    with pytest.raises(FileNotFoundError, match="test.tsv" if "qrels" in name else name): read_retrieval(folder)


# ---- what others ship ----

ROWS = dict(corpus=[dict(_id="d1", title="T", text="one"), dict(_id="2", title="", text="two")],
            queries=[dict(_id="q1", text="first"), dict(_id="q2", text="second")])
HEADED = "query-id\tcorpus-id\tscore\n"
TABLES = {"qrels/test.tsv": HEADED + "q1\td1\t1\nq2\t2\t0\nq2\td1\t2\n",
          "qrels.tsv": "q1\td1\t1\nq2\t2\t0\nq2\td1\t2\n", "qrels.txt": "q1 0 d1 1\nq2 0 2 0\nq2 0 d1 2",
          "qrels/dev.tsv": "q1\t0\td1\t1.0\nq2\t0\t2\t0.0\nq2\t0\td1\t2.0\n",
          "qrels/test.txt.gz": "q1 0 d1 1\nq2 0 2 0\nq2 0 d1 2",
          "qrels/test.tsv.gz": "\ufeff" + HEADED.replace("-", "_") + "q1\td1\t1\r\nq2\t2\t0\r\nq2\td1\t2\r\n"}


def write_beir(folder, form=".jsonl", qrels="qrels/test.tsv"):
    "A set as others ship it: no task.json."
    import gzip
    from datasets import Dataset
    (folder/"qrels").mkdir(parents=True)
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if form == ".jsonl.numbers": text = text.replace('"2"', "2").replace("_id", "id")
        if form == ".parquet": Dataset.from_list(rows).to_parquet(folder/f"{name}.parquet")
        elif form == ".jsonl.gz": (folder/f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else: (folder/f"{name}.jsonl").write_text(text)
    content = TABLES[qrels].encode()
    (folder/qrels).write_bytes(gzip.compress(content) if qrels.endswith(".gz") else content)
    return folder


@pytest.mark.parametrize("form", [".jsonl", ".jsonl.gz", ".parquet", ".jsonl.numbers"])
@pytest.mark.parametrize("qrels", TABLES)
def test_standard_folders_need_no_task_json(tmp_path, form, qrels):
    task = read_retrieval(write_beir(tmp_path/"test", form, qrels))
    assert (task.corpus, task.queries) == ({"d1": "T one", "2": "two"}, {"q1": "first", "q2": "second"})
    assert task.qrels == {"q1": {"d1": 1}, "q2": {"2": 0, "d1": 2}} and task.instruction == ""
    assert task.name == ("test-dev" if "dev" in qrels else "test") and task.source.endswith(qrels)


def test_the_split_is_test_or_the_only_one_or_asked_for(tmp_path):
    folder = write_beir(tmp_path/"test")
    (folder/"qrels/dev.tsv").write_text(HEADED + "q1\td1\t1\n")
    assert [list(read_retrieval(f"{folder}{split}").queries) for split in ("", ":test", ":dev")] == [
        ["q1", "q2"], ["q1", "q2"], ["q1"]]
    (folder/"qrels/test.tsv").rename(folder/"qrels/train.tsv")
    with pytest.raises(ValueError, match=f"has no split 'test'; there are dev, train, choose one as {folder}:dev"):
        read_retrieval(folder)
    with pytest.raises(ValueError, match="has no split 'tset'; there are dev, train"): read_retrieval(f"{folder}:tset")


def test_all_faults_come_in_one_message(tmp_path):
    folder = write_beir(tmp_path/"test")
    more = {"corpus.jsonl": '{"_id": "d1", "text": "again"}\n{"_id": "d3"}\n{"_id"\n',
            "queries.jsonl": '{"_id": "q3", "text": " "}\n',
            "qrels/test.tsv": "".join(f"q1\tx{n}\t1\n" for n in range(20)) + "q9\td1\t1\n"}
    for name, text in more.items():
        with open(folder/name, "a") as file: file.write(text)
    with pytest.raises(ValueError) as error: read_retrieval(folder)
    text = str(error.value)
    assert text.startswith(f"{folder} has 25 faults:") and text.count("unknown document") == 3
    for part in ("corpus.jsonl, line 3, field '_id' repeats 'd1'", "corpus.jsonl, line 4, field 'text' is missing",
                 "corpus.jsonl, line 5: not valid JSON", "queries.jsonl, line 3, field 'text' is empty",
                 "and 17 more like the last one", "qrels/test.tsv, line 25, field 'query-id' names unknown query 'q9'"):
        assert part in text
    for name in ("corpus.jsonl", "queries.jsonl"): (folder/name).unlink()
    with pytest.raises(FileNotFoundError) as error: read_retrieval(folder)
    assert all(f"{name} is missing" in str(error.value) for name in ("corpus.jsonl", "queries.jsonl"))


def test_queries_without_judgements_are_told_only_where_there_is_one_split(tmp_path):
    folder = write_beir(tmp_path/"test")
    (folder/"qrels/test.tsv").write_text("q1\td1\t1\n")
    with pytest.warns(UserWarning, match="1 of 2 queries have no relevant document and are left out, q2 first"):
        read_retrieval(folder)
    (folder/"qrels/dev.tsv").write_text("q2\td1\t1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_retrieval(folder).queries) == ["q1"]


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
    classes = lambda **how: rows_task("Classification", "c", dict(train=rows, test=rows), settings=how)
    assert revision(classes()) == revision(classes(n_experiments=10)) != revision(classes(n_experiments=2))
