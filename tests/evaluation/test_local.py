"The local suite: the same everywhere, balanced, free of training texts, and real tasks of mteb."
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.evaluation import local_suite as local
from anchor_nb.data.corpora import CORPORA, normalise
from anchor_nb.data.deduplication import alike, word_runs
from anchor_nb.evaluation.local_suite import (LOCAL, SUITES, bm25_order, build_local, leaks, local_task,
                                              read_parts, sides)
from anchor_nb.data.packages import Item

every_quick_task = pytest.mark.parametrize("name", SUITES["local-quick"])
every_task = pytest.mark.parametrize("name", [*SUITES["local-quick"], *(pytest.param(name, marks=pytest.mark.registry)
                                                                        for name in SUITES["local"])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("local")


def files(folder): return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def score(task):
    "The main score of letter counts: crude and deterministic."
    import mteb
    from mteb.models.abs_encoder import AbsEncoder

    class Letters(AbsEncoder):
        mteb_model_meta = mteb.models.ModelMeta.create_empty(dict(name="toy/letters", revision="1"))

        def encode(self, inputs, **about):
            return np.array([[text.count(letter) + 0.1 for letter in "abcdefghiklmnoprstuvwy"] for batch in inputs
                             for text in batch["text"]], dtype=np.float32)
    return mteb.evaluate(Letters(), task, cache=None, show_progress_bar=False).task_results[0].get_score()


# ---- leaks ----

TEXTS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=10).map(" ".join), max_size=8)


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_all_leaks_are_found(test, train, threshold):
    shingles = lambda text: word_runs(normalise(text))
    near = lambda text: any(alike(shingles(text), shingles(other)) >= threshold for other in train)
    assert leaks(test, train, threshold) == [n for n, text in enumerate(test) if near(text)]


def training_leaks(name: str, parts: dict) -> tuple: # (test texts, training texts, which test texts leak)
    "A task's test texts that nearly occur in its corpus's training side or in its own pool; a pair counts as one text."
    train = [row["text"] for row in parts.get("train", ())]
    corpus = CORPORA.get(LOCAL[name].corpus)
    for item in sides(LOCAL[name].corpus)[0] if corpus else (): train += filter(None, (item.text, item.query))
    rows = [row for part in ("corpus", "queries", "test") for row in parts.get(part, ())]
    test = [f"{row['sentence1']} {row['sentence2']}" if "sentence1" in row else row.get("text") or row["sentences"]
            for row in rows]
    return test, train, leaks(test, train, corpus.threshold if corpus else 0.5) if train else []


@every_task
def test_no_test_text_is_nearly_a_training_text(name):
    test, train, found = training_leaks(name, read_parts(name))
    assert found == [] and test
    assert train or LOCAL[name].corpus == "sts"


def test_the_check_can_fail(folder):
    known = sides("toy")[0][0]
    parts = read_parts("LocalToyRetrieval", folder)
    parts["corpus"].append({"_id": "x", "text": known.text.upper()})
    test, _, (leak,) = training_leaks("LocalToyRetrieval", parts)
    assert test[leak] == known.text.upper()


# ---- the makers ----

@settings(max_examples=100, deadline=None)
@given(st.text("abc ", max_size=8), st.lists(st.text("abc ", min_size=1, max_size=12).filter(str.strip), min_size=1,
                                             max_size=8))
def test_bm25_orders_all_texts_and_puts_matches_first(query, texts):
    order = bm25_order(query, texts)
    assert sorted(order) == list(range(len(texts)))
    matches = [bool(set(query.split()) & set(texts[n].split())) for n in order]
    assert matches == sorted(matches, reverse=True)


@every_task
def test_parts_are_sound(name):
    "Ids exist, relevant documents are candidates, classes are balanced, no text or pair is there twice."
    parts, card = read_parts(name), LOCAL[name]
    if card.type in ("Retrieval", "Reranking"):
        documents, queries = ({row["_id"]: row for row in parts[part]} for part in ("corpus", "queries"))
        assert len(documents) == len(parts["corpus"]) and queries.keys() == {row["query-id"] for row in parts["qrels"]}
        for row in parts["qrels"]:
            assert row["corpus-id"] in documents
            if card.type == "Reranking":
                candidates = queries[row["query-id"]]["candidates"]
                assert (row["corpus-id"] in candidates and len(set(candidates)) == len(candidates) > 3
                        and set(candidates) <= documents.keys())
    elif card.type == "PairClassification":
        pairs = [frozenset((row["sentence1"], row["sentence2"])) for row in parts["test"]]
        assert len(set(pairs)) == len(pairs) and len(set(Counter(row["labels"] for row in parts["test"]).values())) == 1
    elif card.type in ("Classification", "Clustering"):
        for rows in parts.values():
            assert len(set(Counter(row.get("label", row.get("labels")) for row in rows).values())) == 1
            assert len({row.get("text", row.get("sentences")) for row in rows}) == len(rows)


def test_synonyms_never_share_another_set():
    items = [Item("n1", "car, auto", "", "v"), Item("n2", "truck, lorry", "", "v"), Item("n3", "auto, car", "", "w"),
             Item("n4", "truck, barrow", "", "y")]
    assert local.synonym_parts(items, items, 5) == {"test": []}


# ---- building ----

@every_quick_task
def test_a_rebuild_is_the_same(name, tmp_path):
    assert files(build_local(name, tmp_path/"a")) == files(build_local(name, tmp_path/"b"))


def test_the_order_of_sets_plays_no_part(tmp_path):
    "Python orders the members of a set by a hash that is drawn at its start."
    code = ("from anchor_nb.evaluation.local_suite import build_local; [build_local(name, "
            f"__import__('pathlib').Path(__import__('sys').argv[1])) for name in {SUITES['local-quick']}]")
    for seed in "12":
        subprocess.run([sys.executable, "-c", code, tmp_path/seed], env=os.environ | {"PYTHONHASHSEED": seed},
                       check=True)
    for name in SUITES["local-quick"]: assert files(tmp_path/"1"/name) == files(tmp_path/"2"/name)


def test_a_cached_task_is_read_and_a_damaged_one_built_anew(tmp_path):
    built = build_local("LocalToyPairs", tmp_path)
    before, stamp = files(built), (built/"test.jsonl").stat().st_mtime_ns
    assert (build_local("LocalToyPairs", tmp_path)/"test.jsonl").stat().st_mtime_ns == stamp
    (built/"test.jsonl").write_text("{}\n")
    assert files(build_local("LocalToyPairs", tmp_path)) == before


@every_quick_task
def test_licence_and_source_travel_along(name, folder):
    built = build_local(name, folder)
    assert LOCAL[name].license in (built/"LICENSE.md").read_text()
    assert json.loads((built/"manifest.json").read_text())["source"]["name"] == "anchor_nb"


# ---- scoring ----

@every_quick_task
def test_every_task_evaluates_twice_alike(name, folder):
    import mteb
    task = local_task(name, folder)
    assert isinstance(task, mteb.AbsTask) and task.metadata.main_score == LOCAL[name].metric
    first = score(task)
    assert -1 <= first <= 1 and first == score(task) == score(local_task(name, folder))


def test_the_quick_suite_has_the_kinds_of_the_real_one():
    kinds = [{LOCAL[name].type for name in names} for names in SUITES.values()]
    assert kinds[0] == kinds[1] == {"Retrieval", "Reranking", "STS", "PairClassification", "Classification",
                                    "Clustering"}
    assert set(SUITES["local"]) | set(SUITES["local-quick"]) == LOCAL.keys() == local.REFERENCE.keys()


SIZES = {"LocalWikiRetrieval": dict(corpus=2561, queries=500), "LocalVerbRetrieval": dict(corpus=3131, queries=300),
         "LocalDebianReranking": dict(queries=80),
         "LocalLeeSTS": dict(test=1225), "LocalSimLexSTS": dict(test=999), "LocalSynonymPairs": dict(test=400),
         "LocalSentimentClassification": dict(test=480, train=120), "LocalTopicClassification": dict(test=396,
                                                                                                     train=352)}


@pytest.mark.registry
@pytest.mark.parametrize("name", SUITES["local"])
def test_real_tasks_have_their_sizes_and_evaluate(name, tmp_path):
    built = build_local(name, tmp_path)
    counts = json.loads((built/"manifest.json").read_text())["counts"]
    assert SIZES.get(name, {}).items() <= counts.items()
    if LOCAL[name].corpus in CORPORA and LOCAL[name].type == "Retrieval": assert counts["corpus"] > 2000
    assert -1 <= score(local_task(name, tmp_path)) <= 1
