"No command writes where it reads, and a folder of pairs holds what one run has written."
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from anchor_nb.analysis import analyse as analysis
from anchor_nb.data import deduplication as duplicates
from anchor_nb.inference import filtering as filters, hard_negatives as mining
from anchor_nb.models.resolve import resolve_model
from anchor_nb.data.tables import find_sources
from anchor_nb.inference.corpus_encoding import encode_corpus
from anchor_nb.release.export import export
from anchor_nb.release.merging import merge_models
from anchor_nb.core.recipe import Mine
from anchor_nb.experiments.stages import stage_notebook
from anchor_nb.inference.search import search_corpus

ROWS = [dict(query=f"question {n}", positive=f"answer {n}", negatives=[f"made by hand {n}"], positive_scores=[0.9],
             negative_scores=[0.1]) for n in range(6)]


def lines(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path):
    "my/pairs with two datasets, a corpus, a model in a run folder, and an adapter's way to it."
    for name in "ab": lines(tmp_path/f"my/pairs/{name}.jsonl")
    lines(tmp_path/"corpus/docs.jsonl", [dict(text="a text")])
    shutil.copytree(resolve_model("tiny"), tmp_path/"run/model")
    (tmp_path/"link").symlink_to(tmp_path/"my")
    (tmp_path/"linked").mkdir()
    (tmp_path/"linked/pairs").symlink_to(tmp_path/"my/pairs")
    return tmp_path


def held_out(here):
    "An evaluation set that asks all questions of the pairs."
    lines(here/"test/corpus.jsonl", [dict(_id="d", title="", text="an answer to it")])
    lines(here/"test/queries.jsonl", [dict(_id=str(n), text=row["query"]) for n, row in enumerate(ROWS)])
    (here/"test/qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{n}\td\t1\n" for n in range(6)))
    (here/"test/task.json").write_text(json.dumps(dict(name="test", instruction="")))


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


PAIRS = dict(dedup=lambda data, out: duplicates.dedup_pairs(data, out), filter=lambda data,
             out: filters.filter_pairs(data, out, -9, 9),
             mine=lambda data, out: mining.mine(Mine(data=data, out=out, model="bm25")))


@pytest.mark.parametrize("data, out", [("my/pairs", "my"), ("my/pairs", "my/pairs"), ("my/pairs", "my/pairs/new"),
                                       ("my/pairs/a.jsonl", "my"),
                                       ("my/pairs", "link"), ("link/pairs", "my"), ("my/pairs", "linked"),
                                       ("linked/pairs", "my")])
@pytest.mark.parametrize("command", PAIRS)
def test_pairs_are_not_written_where_they_are_read(command, data, out, here):
    before = content(here)
    with pytest.raises(ValueError) as caught: PAIRS[command](str(here/data), str(here/out))
    assert f"out={here/out} " in str(caught.value) and f"data={here/data}" in str(caught.value)
    assert content(here) == before and not (here/"my/pairs/new").exists()


ELSE = dict(
    against=lambda at: duplicates.dedup_pairs(at("my/pairs"), at("corpus/clean"), against=[at("corpus")]),
    filter_model=lambda at: filters.filter_pairs(at("my/pairs"), at("run/model/clean"), -9, 9, model=at("run")),
    mine_corpus=lambda at: mining.check_pairs(Mine(data=at("my/pairs"), out=at("corpus"),
                                                   corpus=at("corpus/docs.jsonl"), model="bm25")),
    mine_vectors=lambda at: mining.check_pairs(Mine(data=at("my/pairs"), out=at("mined"), vectors=at("my"),
                                                    model="bm25")),
    encode_corpus=lambda at: encode_corpus(at("corpus/docs.jsonl"), "tiny", at("corpus")),
    encode_model=lambda at: encode_corpus(at("corpus"), at("run"), at("run/vectors")),
    export=lambda at: export(at("run"), at("run/exported")),
    merge=lambda at: merge_models([at("run"), "tiny"], at("run/model/merged")),
    search=lambda at: search_corpus("tiny", at("corpus"), ["?"], keep=at("corpus/index")),
    analyse=lambda at: analysis.checkpoints_of(SimpleNamespace(a="tiny", b=at("run"), again="", data=at("corpus"),
                                                               out=at("run/analysis"), snapshots=False)))


@pytest.mark.parametrize("command", ELSE)
def test_nothing_is_written_beside_a_source(command, here):
    before = content(here)
    with pytest.raises(ValueError, match="choose an out that neither lies in a source nor holds one"):
        ELSE[command](lambda path: str(here/path))
    assert content(here) == before and sorted(os.listdir(here)) == ["corpus", "link", "linked", "my", "run"]


@pytest.mark.parametrize("command", PAIRS)
def test_pairs_are_those_of_the_last_run(command, here):
    out = here/"out"
    PAIRS[command](str(here/"my/pairs"), str(out))
    assert list(find_sources(str(out/"pairs"))) == ["a", "b"] or command == "dedup" # all of b repeats a
    PAIRS[command](str(here/"my/pairs"), str(out)) # again, over one's own
    lines(out/"pairs/older.jsonl")
    before = content(out)
    with pytest.raises(ValueError, match="holds older.jsonl, which this command would not write"):
        PAIRS[command](str(here/"my/pairs"), str(out))
    assert content(out) == before


@pytest.mark.parametrize("command", PAIRS)
def test_pairs_that_somebody_else_wrote_stay(command, here):
    lines(here/"out/pairs/a.jsonl", ROWS[:1])
    before = content(here)
    with pytest.raises(ValueError, match="neither report.json nor run.json beside it says"):
        PAIRS[command](str(here/"my/pairs"), str(here/"out"))
    assert content(here) == before


def test_a_failure_leaves_the_older_pairs(here, monkeypatch):
    out = here/"out"
    duplicates.dedup_pairs(str(here/"my/pairs"), str(out))
    before = content(out)
    lines(here/"my/pairs/a.jsonl", [dict(query="another", positive="row")])
    monkeypatch.setattr(duplicates, "contamination", lambda *_: 1/0)
    with pytest.raises(ZeroDivisionError): duplicates.dedup_pairs(str(here/"my/pairs"), str(out))
    (out/"search.duckdb").unlink() # what the same call would resume
    assert content(out) == before and sorted(os.listdir(out)) == ["pairs", "report.json"]


def test_nothing_left_is_an_error_with_its_cause(here):
    held_out(here)
    with pytest.raises(ValueError, match="none of the 12 rows of .* is left: 0 equal an earlier row, 0 nearly repeat "
                                         "one, and 12 show texts of test"): # a test's texts are looked for first
        duplicates.dedup_pairs(str(here/"my/pairs"), str(here/"out"), threshold=1.0, against=[str(here/"test")])
    assert [*content(here/"out")] == ["search.duckdb"]


def test_texts_that_differ_in_signs_are_different():
    texts = ["2+2?", "2*2?", "2-2?", "C", "C++", "C#", ":)", ":(", "🙂", "🙁",
             "?!", "...", "→", "←", "x > 0", "x < 0", "日本", "日本語"]
    rows = [dict(query=text, positives=["the same answer to all of these"], negatives=[]) for text in texts]
    rows += [dict(query="the same question for all of these", positives=[text], negatives=[]) for text in texts]
    assert not duplicates.duplicates(rows)
    spellings = ("Straße　２", "STRASSE 2", " strasse\t2\n", "Strasse 2?")
    same = [dict(query=text, positives=["x y z"], negatives=[]) for text in spellings]
    assert {n: kind for n, (_, kind) in duplicates.duplicates(same).items()} == {1: "equal", 2: "equal", 3: "near"}


@pytest.mark.parametrize("stage, parameters", [
    ("prepare", lambda at: dict(out=at("cache/corpora/toy"), corpora=["toy"])),
    ("prepare", lambda at: dict(out=at("my"), corpora=["toy"])),
    ("evaluate", lambda at: dict(models=dict(a=at("run/model")), tasks=[at("test")], out=at("run/model/scores"),
                                 yardsticks=[]))])
def test_stages_look_before_they_write(stage, parameters, here, monkeypatch):
    monkeypatch.setenv("ANCHOR_NB_CACHE", str(here/"cache"))
    (here/"cache/corpora/toy").mkdir(parents=True)
    held_out(here)
    notebook, before = json.loads(stage_notebook(stage).read_text(encoding="utf-8")), content(here)
    with pytest.raises(ValueError, match="lies in|is corpora=|which this command would not write"):
        space = {}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code": exec("".join(cell["source"]), space)
            if "parameters" in cell["metadata"].get("tags", []): space |= parameters(lambda path: str(here/path))
    assert content(here) == before
