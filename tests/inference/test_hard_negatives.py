"""Mining on many small cases, beside the slow rule and sentence-transformers' own miner, and as a stage."""
import json
import unicodedata
import weakref
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from anchor_nb.inference import hard_negatives as mining, search
from anchor_nb.data.deduplication import database
from anchor_nb.data.rows import parsed
from anchor_nb.data.tables import find_sources
from anchor_nb.inference.hard_negatives import (Pool, by_row, ceiling, choose, draw, find_answers, key_of, mine,
                                              nearest, pool_texts)
from anchor_nb.core.recipe import Mine
from anchor_nb.experiments.stages import run_stage
from anchor_nb.data.writers import write_pairs
from common import toy_pairs

datasets.disable_progress_bars()


def rules(**given): return Mine(**dict(data="pairs", out="mined") | given)


def row(query, *positives, negatives=(), **more):
    return dict(query=query, positives=list(positives), negatives=list(negatives), instruction="",
                document_instruction="", positive_scores=[], negative_scores=[]) | more


def write(path, *rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)


# ---- the rule ----

@st.composite
def asked(build):
    "Any rules that a recipe accepts."
    first, negatives = build(st.integers(0, 4)), build(st.integers(1, 5))
    margin = st.one_of(st.just(0.0), st.floats(0.01, 3))
    return rules(negatives=negatives, first_rank=first, last_rank=first + negatives + build(st.integers(0, 30)),
                 percentage=build(st.sampled_from([0, 50, 95, 100])),
                 absolute_margin=build(margin), choose=build(st.sampled_from(["top", "random"])),
                 seed=build(st.integers(0, 3)))


def choose_slowly(scores, known, limit, rules, key):
    "The rule, for one query and the scores of all documents."
    ranked = sorted((n for n in range(len(scores)) if n not in known), key=lambda n: -scores[n])
    allowed = [n for n in ranked[rules.first_rank:rules.last_rank] if scores[n] <= limit]
    return [allowed[n] for n in draw(len(allowed), rules, key)]


@settings(deadline=None, max_examples=150)
@given(asked(), st.integers(0, 10**6), st.integers(1, 6), st.integers(6, 40), st.integers(1, 200))
def test_the_search_is_the_slow_one_however_documents_are_cut(rules, seed, queries, documents, cells):
    # Whole numbers, so that sums are exact in any order. Many scores are equal: numbers may differ, scores may not.
    random = np.random.default_rng(seed)
    asking, vectors = [random.integers(-2, 3, (rows, 4)).astype(np.float32) for rows in (queries, documents)]
    known = [random.choice(documents, random.integers(1, 4)).tolist() for _ in range(queries)]
    cuts = sorted(random.integers(0, documents + 1, 3).tolist())
    near = nearest(asking, np.split(vectors, cuts), known, rules.last_rank, cells)
    full = asking @ vectors.T
    noted = near.known.split([len(numbers) for numbers in known])
    for n in range(queries): assert noted[n].tolist() == full[n, known[n]].tolist()
    limit = ceiling(torch.stack([scores.min() for scores in noted]), rules)
    chosen = choose(near, limit, rules, [("t", n) for n in range(queries)])
    for n, (numbers, scores) in enumerate(chosen):
        slow = choose_slowly(full[n].tolist(), known[n], limit[n].item(), rules, ("t", n))
        assert scores == full[n, slow].tolist() == full[n, numbers].tolist()
        assert len(set(numbers)) == len(numbers) and not set(numbers) & set(known[n])


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(0.1, 100), st.floats(0.01, 2))
def test_a_limit_is_never_above_the_positive(positive, percentage, absolute):
    limit = lambda **given: ceiling(torch.tensor([positive], dtype=torch.float64),
                                    rules(**dict(percentage=0) | given)).item()
    assert limit(percentage=percentage) <= positive
    assert limit(percentage=percentage) == pytest.approx(positive - (1 - percentage/100)*abs(positive))
    assert limit(percentage=percentage, absolute_margin=absolute) == min(limit(percentage=percentage),
                                                                         limit(absolute_margin=absolute))


class Fake:
    "What the miner of sentence-transformers needs of a model: vectors by text."
    def __init__(self, vectors): self.vectors = vectors
    def encode_query(self, texts, **_): return np.stack([self.vectors[text] for text in texts])
    encode_document = encode = encode_query
    device, model_card_data = torch.device("cpu"), SimpleNamespace(base_model="fake")
    def similarity(self, a, b): return torch.as_tensor(a) @ torch.as_tensor(b).T
    def similarity_pairwise(self, a, b): return (torch.as_tensor(a)*torch.as_tensor(b)).sum(1)


@pytest.mark.parametrize("choice", [dict(percentage=95.0), dict(percentage=70.0),
                                    dict(percentage=0, absolute_margin=0.1), dict(percentage=0, first_rank=2)])
def test_the_same_negatives_as_sentence_transformers(choice):
    from sentence_transformers.util import mine_hard_negatives
    random = np.random.default_rng(1)
    unit = lambda v: (v/np.linalg.norm(v)).astype(np.float32)
    texts = {f"d{n}": unit(random.standard_normal(6)) for n in range(60)}
    asking = {f"q{n}": unit(texts[f"d{n}"] + 0.6*random.standard_normal(6)) for n in range(30)}
    recipe = rules(**choice, last_rank=20)
    known = [[n] for n in range(30)]
    near = nearest(np.stack(list(asking.values())), [np.stack(list(texts.values()))], known, recipe.last_rank)
    found = choose(near, ceiling(near.known, recipe), recipe, [("t", n) for n in range(30)])
    margin = dict(relative_margin=1 - recipe.percentage/100 if recipe.percentage else None,
                  absolute_margin=recipe.absolute_margin or None)
    pairs = datasets.Dataset.from_dict(dict(query=list(asking), answer=[f"d{n}" for n in range(30)]))
    theirs = mine_hard_negatives(pairs, Fake(texts | asking), corpus=list(texts), num_negatives=3,
                                 range_min=recipe.first_rank, range_max=recipe.last_rank, output_format="n-tuple",
                                 verbose=False, **margin)
    # theirs leaves out the others
    ours = {f"q{n}": [f"d{k}" for k in numbers] for n, (numbers, _) in enumerate(found) if len(numbers) == 3}
    assert {each["query"]: [each[f"negative_{k}"] for k in (1, 2, 3)] for each in theirs} == ours and ours


def test_shards_are_let_go():
    alive = []
    def shards():
        for n in range(50):
            assert sum(each() is not None for each in alive) <= 2
            shard = np.full((100, 4), float(n), np.float32)
            alive.append(weakref.ref(shard))
            yield shard
    # the last shard scores highest
    assert (nearest(np.ones((3, 4), np.float32), shards(), [[0]]*3, 2).numbers >= 4900).all()


def test_a_row_with_many_positives_has_as_many_candidates():
    vectors = np.arange(30, 0, -1, dtype=np.float32)[:, None]
    near = nearest(np.ones((1, 1), np.float32), [vectors], [list(range(20))], 10)
    assert near.numbers.tolist() == [list(range(20, 30))]


# ---- what is a candidate ----

@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 6), min_size=1, max_size=3),
                          st.lists(st.integers(0, 6), max_size=2)), min_size=1, max_size=8), st.booleans())
def test_nothing_that_answers_a_query_becomes_its_negative(tmp_path_factory, parts, keep):
    text = lambda n: f"The {n}th document"
    spelt = lambda n, k: f"  the {n}TH\tdocument " if k % 2 else text(n)
    table = [row(f"{'Query' if k % 2 else 'query'} {q}", *[spelt(n, k) for n in own],
                 negatives=[spelt(n, k) for n in negatives]) for k, (q, own, negatives) in enumerate(parts)]
    pool = Pool(tmp_path_factory.mktemp("pool")/"p.jsonl")
    with database() as db:
        find_answers(db, dict(table=table))
        known = pool_texts(db, table, pool, rules(keep_existing=keep))
    answers, others = {}, by_row(known.others(np.arange(len(parts))))
    for q, own, _ in parts: answers.setdefault(q, set()).update(own)
    for k, ((q, own, negatives), numbers) in enumerate(zip(parts, known)):
        keys, count = [key_of(pool[number]) for number in numbers], known.own[k]
        assert keys[:count] == [key_of(text(n)) for n in own]
        assert {*keys[:count], *(key_of(pool[n]) for n in others.get(k, ()))} == {key_of(text(n)) for n in answers[q]}
        assert keys[count:] == ([key_of(text(n)) for n in negatives] if keep else [])
    assert len({key_of(pool[n]) for n in range(len(pool))}) == len(pool)


def test_a_corpus_adds_candidates_and_existing_negatives_stay(tmp_path):
    data = write(tmp_path/"pairs.jsonl", dict(query="which bird swims", positive="A penguin is a bird that swims.",
                                              negatives=["Old negative bird."]),
                 dict(query="what is bread", positive="Bread is baked from flour."))
    corpus = write(tmp_path/"corpus.jsonl", dict(_id="1", title="Swan", text="a bird that swims well"),
                   dict(_id="2", text="a PENGUIN is a bird that swims."), dict(_id="3", text="Nothing here."))
    report = mine(rules(data=data, corpus=corpus, out=str(tmp_path/"out"), model="bm25", keep_existing=True,
                        format="gritlm", instructions="none"))["pairs"]
    first, second = [json.loads(line) for line in (tmp_path/"out/pairs/pairs.jsonl").read_text().splitlines()]
    assert first["neg"] == ["Old negative bird.", "Swan a bird that swims well"]
    assert len(first["neg_scores"]) == 2 and first["neg_scores"][0] > 0
    assert second["neg"] == [] and report["documents"] == 5 and report["without"] == 1


def test_a_corpus_edited_between_its_two_readings_is_refused(tmp_path, monkeypatch):
    "Or the numbers of its texts would be those of others, and a positive become a negative."
    data = write(tmp_path/"pairs.jsonl", *[dict(query=f"which bird swims {n}", positive=f"penguin {n} is a bird")
                                           for n in range(3)])
    documents = [dict(_id=str(n), text=f"a bird number {n}") for n in range(3)]
    corpus, usual = write(tmp_path/"corpus.jsonl", *documents), mining.find_known
    def edited(*given):
        usual(*given)
        write(tmp_path/"corpus.jsonl", dict(_id="new", text="penguin 0 is a bird"), *documents)
    monkeypatch.setattr(mining, "find_known", edited)
    with pytest.raises(ValueError, match="corpus.jsonl has changed while it was read"):
        mine(rules(data=data, corpus=corpus, out=str(tmp_path/"out"), model="bm25", percentage=0, instructions="none"))


def test_a_negative_that_answers_the_query_elsewhere_does_not_stay(tmp_path):
    answer = "It is Paris, the capital of France."
    data = write(tmp_path/"pairs.jsonl",
                 dict(query="capital of france", positive="Paris.", negatives=[answer, "Lyon is a city."]),
                 dict(query="Capital of France", positive=answer),
                 dict(query="capital of bern", positive="Bern is a capital.", negatives=["bern is a capital."]))
    mine(rules(data=data, out=str(tmp_path/"out"), model="bm25", keep_existing=True, percentage=0, negatives=1))
    rows = [json.loads(line) for line in (tmp_path/"out/pairs/pairs.jsonl").read_text().splitlines()]
    assert rows[0]["negatives"][0] == "Lyon is a city." and answer not in rows[0]["negatives"]
    assert "bern is a capital." not in rows[2]["negatives"]
    assert all(len(row["negatives"]) == len(row["negative_scores"]) for row in rows)


def test_rows_of_two_instructions_keep_their_order(tmp_path, monkeypatch):
    # vectors by text and instruction: the query of row n points at document n + 1 when its instruction is said
    seen = []
    def vectors_of(texts, recipe, content, instruction="", role="document"):
        lines = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
        seen.append((texts.name, instruction, len(lines)))
        eye = np.eye(6, dtype=np.float32)
        place = lambda text: int(text.split()[-1])
        vector = lambda n, asks: 0.5*eye[n] + eye[(n + 1) % 6] if asks else eye[n]
        vectors = [vector(place(text), "query" in text) for text in lines]
        return [(lines[k:k + 2], np.stack(vectors[k:k + 2])) for k in range(0, len(lines), 2)]
    monkeypatch.setattr(mining, "vectors_of", vectors_of)
    data = write(tmp_path/"t.jsonl", *[dict(query=["odd" if n % 2 else "even", f"query {n}"],
                                            pos=[["keep", f"document {n}"]], neg=[]) for n in range(6)])
    mine(rules(data=data, model="tiny", out=str(tmp_path/"out"), negatives=1, percentage=0))
    rows = list(parsed(str(tmp_path/"out/pairs/t.jsonl")))
    assert [(each["query"], each["negatives"]) for each in rows] == [(f"query {n}", [f"document {(n + 1) % 6}"])
                                                                     for n in range(6)]
    assert [each["instruction"] for each in rows] == ["even", "odd"]*3
    assert sorted(seen) == [("t-documents.jsonl", "keep", 6), ("t-queries-0.jsonl", "even", 3),
                            ("t-queries-1.jsonl", "odd", 3)]


def test_random_draws_do_not_depend_on_other_rows(tmp_path):
    lines = open(find_sources(toy_pairs())["toy"]).read().splitlines()
    taken = []
    for count in (30, 60):
        data = tmp_path/f"{count}/toy.jsonl"
        data.parent.mkdir()
        data.write_text("\n".join(lines[:count]))
        corpus = write(tmp_path/f"{count}/all.jsonl", *[dict(text=json.loads(line)["positive"]) for line in lines[:60]])
        mine(rules(data=str(data), corpus=corpus, out=str(tmp_path/f"out{count}"), model="bm25", choose="random",
                   percentage=0, seed=5))
        taken.append([each["negatives"] for each in parsed(str(tmp_path/f"out{count}/pairs/toy.jsonl"))][:30])
    assert taken[0] == taken[1]


def test_the_stage_leaves_a_finished_run(tmp_path):
    run_stage("mine", dict(data=toy_pairs(), model="bm25", out=str(tmp_path/"out"), negatives=2), log=False)
    manifest = json.loads((tmp_path/"out/run.json").read_text())
    assert (manifest["status"], manifest["written"]) == ("complete", {"toy": 268})
    assert len(list(parsed(str(tmp_path/"out/pairs/toy.jsonl")))) == 268


@pytest.mark.parametrize("format, file", [("columns", "t.parquet"), ("anchor_nb", "t.jsonl"), ("gritlm", "t.jsonl")])
def test_a_dataset_with_nothing_left_is_an_error_and_no_file(tmp_path, format, file):
    data = write(tmp_path/"t.jsonl", *[dict(query=f"question {n}", positive=f"answer {n}") for n in range(2)])
    with pytest.raises(ValueError, match=f"{tmp_path}/out/pairs/{file} would hold no row: none of the 2 rows of t got "
                                         "more than 0 negatives, .*negatives=3; lower negatives.*incomplete=keep"):
        mine(rules(data=data, out=str(tmp_path/"out"), model="bm25", percentage=0, negatives=3, incomplete="drop",
                   format=format))
    assert not list((tmp_path/"out").rglob("pairs/*"))
    with pytest.raises(ValueError, match=f"{tmp_path}/{file} would hold no row.*loosen"):
        write_pairs(tmp_path, "t", [], format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.jsonl"]


@pytest.mark.parametrize("name", ["report.json", "texts/a.txt"])
def test_files_of_somebody_else_stay(tmp_path, name):
    data = write(tmp_path/"t.jsonl", *[dict(query=f"question {n}", positive=f"answer {n}") for n in range(4)])
    path = tmp_path/"out"/name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out holds {name.split('/')[0]}, which this command would overwrite"):
            mine(rules(data=data, out=str(tmp_path/"out"), model="bm25"))
    assert path.read_text() == "mine" and len(list((tmp_path/"out").rglob("*.*"))) == 1


def test_a_killed_run_is_resumed_over_its_own_texts(tmp_path, monkeypatch):
    data = write(tmp_path/"t.jsonl", *[dict(query=f"question {n}", positive=f"answer {n}") for n in range(4)])
    settings = rules(data=data, out=str(tmp_path/"out"), model="bm25", percentage=0)
    with monkeypatch.context() as patch:
        patch.setattr(mining, "summary", lambda *_: 1/0)
        with pytest.raises(ZeroDivisionError): mine(settings)
    assert (tmp_path/"out/texts/t-documents.jsonl").is_file() and not (tmp_path/"out/report.json").exists()
    assert mine(settings)["t"]["written"] == mine(settings)["t"]["written"] == 4


@pytest.mark.parametrize("how", [dict(model="bm25"), dict(model="tiny"), dict(model="tiny", search="approximate")])
def test_answers_of_other_rows_and_datasets_are_no_negatives_however_they_are_spelt(tmp_path, how):
    answers = [f"le café préféré numéro {n} est près de l'élysée" for n in range(80)]
    asked = ["où est le café", unicodedata.normalize("NFD", "Où est le  café")]
    (tmp_path/"data").mkdir()
    write(tmp_path/"data/a.jsonl", *(dict(query=asked[n % 2], positive=text) for n, text in enumerate(answers[:70])),
          dict(query="une autre question", positive=unicodedata.normalize("NFD", answers[0])))
    write(tmp_path/"data/b.jsonl", *(dict(query=asked[0], positive=text) for text in answers[70:]))
    others = [f"le café numéro {n} est loin" for n in range(30)]
    corpus = write(tmp_path/"c.jsonl", *(dict(_id=str(n), text=text) for n, text in enumerate(answers + others)))
    mine(rules(data=str(tmp_path/"data"), out=str(tmp_path/"out"), corpus=corpus, percentage=0, instructions="none",
               max_length=32, **how))
    for name, count in (("a", 70), ("b", 10)):
        found = [json.loads(line) for line in (tmp_path/f"out/pairs/{name}.jsonl").read_text().splitlines()][:count]
        assert all(len(each["negatives"]) == 3 and set(each["negatives"]) <= set(others) for each in found)


def test_the_limit_is_of_the_row_itself(tmp_path):
    data = write(tmp_path/"p.jsonl", dict(query="capital of france", positive="paris is the capital of france"),
                 dict(query="capital of france", positive="the answer lies elsewhere"),
                 *(dict(query=f"filler {n}", positive=f"words {n} of no use") for n in range(6)))
    corpus = write(tmp_path/"c.jsonl", *(dict(_id=str(n), text=f"town {n} of france is old") for n in range(3)))
    mine(rules(data=data, corpus=corpus, out=str(tmp_path/"out"), model="bm25", instructions="none"))
    lines = (tmp_path/"out/pairs/p.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["negatives"]) for line in lines[:2]] == [3, 0]


def test_an_empty_document_of_a_corpus_is_no_negative(tmp_path):
    data = write(tmp_path/"p.jsonl", *(dict(query=f"q {n}", positive=f"text {n}") for n in range(2)))
    corpus = write(tmp_path/"c.jsonl", *(dict(text=text) for text in ("", "another", " \n")))
    mine(rules(data=data, corpus=corpus, out=str(tmp_path/"out"), model="tiny", percentage=0, instructions="none"))
    assert {text for row in parsed(str(tmp_path/"out/pairs/p.jsonl")) for text in row["negatives"]} == {
        "text 0", "text 1", "another"}


def test_half_a_character_in_a_corpus_is_named(tmp_path):
    data = write(tmp_path/"p.jsonl", dict(query="a", positive="b"))
    (tmp_path/"c.jsonl").write_text('{"_id": "1", "text": "fine"}\n{"_id": "2", "text": "a\\ud800"}\n')
    with pytest.raises(ValueError, match="c.jsonl, line 2: field 'text' has half a character"):
        mine(rules(data=data, corpus=str(tmp_path/"c.jsonl"), out=str(tmp_path/"out"), model="bm25"))


@pytest.mark.parametrize("model", ["bm25", "tiny"])
def test_a_killed_search_goes_on_where_it_was(tmp_path, monkeypatch, model):
    shard = 100
    monkeypatch.setattr(mining, "near_by_words", partial(mining.near_by_words, batch=shard))
    monkeypatch.setattr(mining, "encode_corpus", partial(mining.encode_corpus, shard_rows=shard))
    given = dict(data=toy_pairs(), model=model, max_length=64, vectors=str(tmp_path/"vectors"))
    search = "nearest_by_words" if model == "bm25" else "nearest"
    whole, real = mine(rules(out=str(tmp_path/"whole"), **given)), getattr(mining, search)
    stopped, rest = stop_after(1, real), stop_after(2, real)
    with monkeypatch.context() as patch:
        patch.setattr(mining, search, stopped)
        with pytest.raises(KeyboardInterrupt): mine(rules(out=str(tmp_path/"out"), **given))
        patch.setattr(mining, search, rest) # two of three shards are left
        assert mine(rules(out=str(tmp_path/"out"), **given)) == whole
        with pytest.raises(KeyboardInterrupt): # of another seed nothing is left to use
            mine(rules(out=str(tmp_path/"out"), seed=1, **given))
    assert (tmp_path/"out/pairs/toy.jsonl").read_bytes() == (tmp_path/"whole/pairs/toy.jsonl").read_bytes()


def test_a_dataset_that_was_searched_is_not_searched_again_nor_for_another_format(tmp_path, monkeypatch):
    (tmp_path/"data").mkdir()
    for name in "ab":
        write(tmp_path/f"data/{name}.jsonl", *[dict(query=f"question {n}", positive=f"a question {name} {n}")
                                               for n in range(9)])
    given = dict(data=str(tmp_path/"data"), out=str(tmp_path/"out"), model="bm25", percentage=0)
    real = mining.write_pairs
    with monkeypatch.context() as patch:
        patch.setattr(mining, "write_pairs", lambda folder, name, *rest, **how: real(folder, name, *rest, **how)
                      if name == "a" else 1/0)
        with pytest.raises(ZeroDivisionError): mine(rules(**given))
    monkeypatch.setattr(mining, "near_by_words", lambda *_, batch=9: iter([])) # finds nothing
    report = mine(rules(format="gritlm", incomplete="drop", **given))
    assert [report[name]["written"] for name in "ab"] == [9, 9]
    assert not [path for path in (tmp_path/"out/texts").iterdir() if path.suffix == ".bin"]


def test_an_approximate_search_that_looks_everywhere_is_the_exact_one(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    corpus = write(tmp_path/"corpus.jsonl", *[dict(text=f"text number {n} of many") for n in range(300)])
    given = dict(data=toy_pairs(), corpus=corpus, model="tiny", vectors=str(tmp_path/"vectors"), percentage=0)
    monkeypatch.setattr(search, "RECALL", 1.0)
    reports = {how: mine(rules(search=how, out=str(tmp_path/how), **given))["toy"] for how in ("exact", "approximate")}
    facts = reports["approximate"].pop("search")
    assert facts["recall"] == 1.0 and 1 <= facts["looked_at"] <= facts["clusters"] and facts["clusters"] > 1
    exact, approximate = [list(parsed(str(tmp_path/how/"pairs/toy.jsonl"))) for how in reports]
    for one, other in zip(exact, approximate, strict=True):
        assert np.allclose(one["negative_scores"], other["negative_scores"], atol=1e-5)
        assert np.allclose(one["positive_scores"], other["positive_scores"], atol=1e-5)
        assert not {*other["negatives"]} & {*other["positives"]}
    assert reports["exact"]["refused"] == reports["approximate"]["refused"]


def test_clusters_that_were_being_made_when_killed_are_resumed(tmp_path, monkeypatch):
    faiss = pytest.importorskip("faiss")
    from faiss.contrib import ondisk
    class Shards:
        "Vectors as `Encoded` reads them."
        manifest, records, read = dict(shards=4), {n: dict(rows=100, dimension=8) for n in range(4)}, []
        def __init__(self, folder):
            self.folder, self.vectors = folder, np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
            folder.mkdir()
        def __len__(self): return 400
        def shard(self, n):
            self.read.append(n)
            return [], self.vectors[100*n:100*n + 100]
        def __iter__(self): return (([], self.vectors[100*n:100*n + 100]) for n in range(4))
    whole, stopped = search.Clusters(Shards(tmp_path/"whole")), Shards(tmp_path/"stopped")
    with monkeypatch.context() as patch:
        patch.setattr(faiss.IndexIVF, "add_with_ids", stop_after(2, faiss.IndexIVF.add_with_ids))
        with pytest.raises(KeyboardInterrupt): search.Clusters(stopped)
    stopped.read.clear()
    resumed = search.Clusters(stopped)
    assert stopped.read == [2, 3]
    for each in (whole, resumed): each.index.nprobe = 2
    found = [each.search(stopped.vectors[:50], 10) for each in (whole, resumed)]
    assert (found[0][1] == found[1][1]).all() and (found[0][0] == found[1][0]).all()


def stop_after(count, real):
    "A function that is interrupted when it is called once more."
    calls = []
    def limited(*given, **named):
        calls.append(given)
        if len(calls) > count:
            raise KeyboardInterrupt
        return real(*given, **named)
    return limited


@pytest.mark.parametrize("lines, given, message", [
    (['{"query": "a", "positive": "b"}', '{"query": "a"}'], {}, "t.jsonl, line 2, field 'positive' is missing"),
    (['{"query": "a", "positive": "b"}'], dict(format="columns"), "incomplete=drop"),
    (['{"query": "a", "positive": "b", "negatives": ["c"]}', '{"query": "d", "positive": "e"}'],
     dict(format="columns", incomplete="drop", keep_existing=True), "the same number of negatives"),
    (['{"query": "a", "positive": "b"}'], dict(model="bm25", search="approximate"), "needs vectors"),
    (['{"query": "a", "positive": "b"}'], dict(instructions="somewhere"), "instructions='somewhere'"),
    (['{"query": "a", "positive": "b"}'], dict(model="./nowhere"), "no model folder './nowhere'"),
    (['{"query": "a", "positive": "b"}'], dict(corpus="./nowhere"), "corpus='./nowhere'"),
    (['{"query": "the", "positive": "of"}'], dict(model="bm25"), "a model alone"),
    (["{}"], dict(last_rank=2), "last_rank=2 leaves fewer than negatives=3"),
    (["{}"], dict(percentage=120), "percentage must lie in"),
])
def test_bad_input_of_mining(tmp_path, lines, given, message):
    (tmp_path/"t.jsonl").write_text("\n".join(lines))
    with pytest.raises((ValueError, OSError), match=message.replace("[", r"\[").replace(".", r"\.")):
        mine(rules(**dict(data=str(tmp_path/"t.jsonl"), out=str(tmp_path/"out"), model="tiny") | given))
