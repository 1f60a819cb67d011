"Evaluation on generated tasks, on every task type of mteb, and through kills, failures and retrained models."
import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings, strategies as st

import warm
from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.evaluation.encoders import Candidate, Encoder, candidates, load, meta, revision
from anchor_nb.evaluation.local_suite import local_task
from anchor_nb.evaluation.measure import METRICS, evaluate_task
from anchor_nb.evaluation.significance import interval_of
from anchor_nb.runs.ledger import read_rows
from anchor_nb.data.retrieval_sets import Retrieval, as_task
from common import WORDS, shuffle, tasks

COMMAND = Path(sys.executable).with_name("anchor-nb")


def letters(texts, instruction="", task=None, side=None):
    "Letter counts."
    vectors = np.array([[text.count(letter) for letter in "aeiontbdlu"] for text in texts], dtype=np.float32) + 0.01
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def unlike(texts, *_):
    "A direction of its own for each text."
    vectors = np.array([np.random.default_rng(list(text.encode())).normal(size=8) for text in texts], dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def crude(): return Encoder(letters, meta(Candidate("letters", "letters"), "1"))


@settings(max_examples=15, deadline=None)
@given(task=tasks(), seed=st.integers(0, 99))
def test_metrics_lie_between_0_and_1_and_order_changes_nothing(tmp_path_factory, task, seed):
    encoder = Encoder(unlike, crude().mteb_model_meta)
    found, other = [evaluate_task(encoder, as_task(t), tmp_path_factory.mktemp("cache")) for t in (task,
                                                                                                   shuffle(task, seed))]
    assert set(found.metrics) == set(METRICS) and all(0 <= value <= 1 for value in found.metrics.values())
    assert found.metrics["recall_at_1"] <= found.metrics["recall_at_10"] <= found.metrics["recall_at_100"]
    assert found.metrics == pytest.approx(other.metrics, abs=1e-9) and found.items == other.items
    assert len(found.items["values"]) == len(task.queries)
    assert np.mean(list(found.items["values"].values())) == pytest.approx(found.score, abs=1e-4)


@pytest.fixture(scope="module")
def tiny():
    embedder = AnchorEmbedder.from_pretrained("tiny", max_length=64)
    return Encoder(lambda texts, instruction, task, side: embedder.encode(texts, instruction),
                   meta(Candidate("tiny", "tiny"), "1", n_parameters=1))


def test_mteb_finds_nothing_wrong_with_our_encoder(tiny):
    import mteb
    result = mteb.mock_run(tiny)
    assert result.all_passed, result


def test_texts_are_cut_where_the_checkpoint_says_unless_asked_otherwise(tmp_path):
    AnchorEmbedder.from_pretrained("tiny", max_length=12).save_pretrained(str(tmp_path/"short"))
    candidate, embedder = Candidate("short", str(tmp_path/"short")), AnchorEmbedder.from_pretrained(tmp_path/"short")
    text = ["one text with many more words than twelve tokens can hold, and so it must be cut somewhere"]
    same = lambda length: np.allclose(load(candidate, "", length).embed(text, "", None, None), embedder.encode(text),
                                      atol=1e-5)
    assert load(candidate, "").mteb_model_meta.max_tokens == 12 and same(0) and not same(48)


def test_home_is_meant_as_in_a_shell(tmp_path, monkeypatch):
    AnchorEmbedder.from_pretrained("tiny", max_length=12).save_pretrained(str(tmp_path/"run/model"))
    (tmp_path/"run/run.json").write_text(json.dumps(dict(stage="stage2", status="complete",
                                                         recipe=dict(steps=4, seed=1))), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert candidates({"mine": "~/run"}) == candidates({"mine": str(tmp_path/"run")})
    with pytest.raises(ValueError, match="neither a folder with adapter_config.json"):
        candidates({"mine": dict(model="tiny", adapter="~/run")})


def test_every_type_of_text_task_is_measured(tiny, tmp_path):
    from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
    seen = {}
    for task in ALL_MOCK_TASK_TEST_GRID:
        if task.metadata.modalities != ["text"]: continue
        found = evaluate_task(tiny, task, tmp_path)
        seen[found.type] = bool(found.items)
        assert found.queries > 0 and np.isfinite(found.score)
    assert len(seen) > 8 and all(seen[kind] for kind in ("Retrieval", "Reranking", "STS", "PairClassification",
                                                         "Classification")), seen


def test_pairs_have_an_interval_whichever_way_of_comparing_them_is_best(tmp_path):
    task = local_task("LocalToyPairs")
    encoder = load(Candidate("tiny", "tiny"), "1", instructions={"LocalToyPairs": task.metadata.prompt})
    result = evaluate_task(encoder, task, tmp_path) # its best is the Manhattan distance
    assert interval_of(result.items).mean == pytest.approx(result.score, abs=1e-6)
    path = next(tmp_path.rglob("LocalToyPairs.json"))
    assert (scores := json.loads(path.read_text())["scores"]["test"][0])["max_ap"] > scores["similarity_ap"]


def test_a_task_that_keeps_its_data_the_old_way(tmp_path):
    "BRIGHT and others fill `corpus` and `queries`, which mteb converts when it evaluates."
    modern = as_task(Retrieval("Old", "", {"d1": "moon tide", "d2": "bread flour"}, {"q1": "moon"}, {"q1": {"d1": 1}}))
    class Old(type(modern)):
        def load_data(self, *args, **kwargs):
            if self.data_loaded: return
            self.corpus = {"test": {"d1": {"text": "moon tide", "title": ""}, "d2": {"text": "bread flour",
                                                                                     "title": ""}}}
            self.queries, self.relevant_docs = {"test": {"q1": "moon"}}, {"test": {"q1": {"d1": 1}}}
            self.data_loaded = True
    for _ in range(2):
        found = evaluate_task(crude(), Old(), tmp_path)
        assert (found.queries, found.documents, found.score) == (1, 2, pytest.approx(1, abs=1e-4))


def test_prompts_of_a_sentence_transformer_go_where_its_makers_meant_them(tmp_path, monkeypatch):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    calls = []
    class Fake:
        prompts, max_seq_length, default = {"query": "query: ", "document": "", "Named": "named: "}, 64, "query"
        similarity_fn_name = "cosine"
        def __init__(self, *args, **kwargs): pass
        def get_embedding_dimension(self): return 10
        def note(self, way):
            return lambda texts, prompt=None, prompt_name=None, **_: calls.append((way, prompt,
                                                                                   prompt_name)) or letters(texts)
        encode, encode_query, encode_document = [property(lambda self, way=way: self.note(way)) for way in ("encode",
                                                                                                            "query",
                                                                                                            "document")]
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Fake)
    def asked(name, **how):
        calls.clear()
        task = as_task(Retrieval(name, "Find it", {"d1": "moon", "d2": "sea"}, {"q1": "moon"}, {"q1": {"d1": 1}}))
        evaluate_task(load(Candidate("fake", "tiny", library="sentence-transformers", **how), "1",
                           instructions={name: "Find it"}), task, tmp_path/str(len(how))/name)
        return set(calls)
    assert asked("Plain") == {("query", None, None), ("document", None, None)}
    assert asked("Named") == {("query", None, "Named"), ("document", None, "Named")}
    assert asked("Plain", template="Instruct: {instruction}\nQuery: ") == {("query", "Instruct: Find it\nQuery: ",
                                                                            None), ("document", None, None)}


@pytest.mark.registry
def test_peers_get_the_score_that_mteb_gives_them(tmp_path):
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    rows = [json.loads(line) for line in (build_corpus("toy")/"eval"/"corpus.jsonl").read_text().splitlines()]
    corpus = {row["_id"]: row["text"] for row in rows[:60]}
    task = as_task(Retrieval("toy", "", corpus, {i: text.split(".")[0] for i, text in list(corpus.items())[:20]},
                             {i: {i: 1} for i in list(corpus)[:20]}))
    one = candidates({"minilm": "minilm"})[0]
    ours = evaluate_task(load(one, revision(one)), task, tmp_path/"ours")
    theirs = evaluate_task(SentenceTransformerEncoderWrapper(resolve_model("minilm")), task, tmp_path/"theirs")
    assert one.library == "sentence-transformers" and ours.metrics == pytest.approx(theirs.metrics, abs=1e-9)


# ---- through the command line ----

def write_set(folder, name, instruction=""):
    "A set of ten documents in the BEIR layout."
    folder.mkdir(parents=True)
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    (folder/"corpus.jsonl").write_text(lines({"_id": f"d{n}", "title": "", "text": f"{word} {name}"}
                                             for n, word in enumerate(WORDS)))
    (folder/"queries.jsonl").write_text(lines({"_id": f"q{n}", "text": word} for n, word in enumerate(WORDS[:3])))
    (folder/"qrels").mkdir()
    (folder/"qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(3)))
    if not instruction: return str(folder)
    (folder/"task.json").write_text(json.dumps(dict(name=name, instruction=instruction, license="CC0",
                                                    source="made up")))
    return str(folder)


def evaluate(folder, *words):
    "The command in a process of its own."
    return warm.run([COMMAND, "evaluate", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=600)


def main_rows(folder):
    return [(row["label"], row["task"]) for row in read_rows(folder/"runs/evaluate/ledger.jsonl") if row["main"]]


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory):
    "Two tasks, one of which has an instruction too long for the length."
    folder = tmp_path_factory.mktemp("half")
    good, bad = write_set(folder/"good", "good"), write_set(folder/"bad", "bad", "word " * 200)
    return folder, ["tiny", "--task", bad, "--task", good, "-p", "max_length=64", "-p", "yardsticks=[]", "--json"]


def test_one_failing_task_is_reported_and_the_others_are_scored(half_failed):
    folder, words = half_failed
    result = evaluate(folder, *words)
    last = json.loads(result.stdout)
    assert result.returncode == 1 and "bad: FAILED, ValueError: max_length=64: the instruction" in result.stderr
    assert last["mean"] is None and last["tasks"]["bad"] is None and 0 <= last["tasks"]["good"] <= 1
    assert len(last["failed"]) == 1 and "tiny, step 0, bad" in last["failed"][0]
    assert "good (Retrieval): no instruction" in result.stderr and "3 queries of" in result.stderr
    assert main_rows(folder) == [("tiny", "good")]


def test_the_same_command_tries_only_what_is_missing(half_failed):
    folder, words = half_failed
    if not (folder/"runs").exists(): evaluate(folder, *words)
    (folder/"bad"/"task.json").write_text(json.dumps(dict(name="bad", instruction="short", license="CC0",
                                                          source="made up")))
    result = evaluate(folder, *words)
    last = json.loads(result.stdout)
    assert result.returncode == 0 and "to compute: 1 of" in result.stderr and last["failed"] == []
    assert main_rows(folder) == [("tiny", "good"), ("tiny", "bad")]
    assert {row["tokens"] for row in read_rows(folder/"runs/evaluate/ledger.jsonl")} == {64}
    assert (last["mean"] == pytest.approx(sum(last["tasks"].values()) / 2)
            and last["by_type"] == {"Retrieval": last["mean"]})


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path):
    words = ["tiny", "--benchmark", "local-quick", "-p", "max_length=64", "-p", "yardsticks=[]"]
    process = warm.Popen([COMMAND, "evaluate", *words], cwd=tmp_path, stdout=warm.DEVNULL, stderr=warm.DEVNULL,
                         start_new_session=True)
    ledger, deadline = tmp_path/"runs/evaluate/ledger.jsonl", time.monotonic() + 300
    while not (ledger.exists() and ledger.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in psutil.Process(process.pid).children(recursive=True): child.kill() # the kernel first, in mid-task
    process.kill()
    process.wait()
    before = main_rows(tmp_path)
    result = evaluate(tmp_path, *words, "--json")
    last = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr[-2000:]
    assert 0 < len(before) < len(last["tasks"]) and main_rows(tmp_path)[:len(before)] == before
    assert f"to compute: {len(last['tasks']) - len(before)} of" in result.stderr
    assert len(main_rows(tmp_path)) == len(set(main_rows(tmp_path))) == len(last["tasks"])
    assert last["mean"] == pytest.approx(np.mean(list(last["tasks"].values())))
