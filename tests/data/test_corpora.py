"""What the corpora and sources notebooks cannot hold well: broken fetches, killed builds, and properties."""
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.models import resolve as resolving
from anchor_nb.data import packages
from anchor_nb.data import corpora, packages as sources
from anchor_nb.data.packages import FetchError, Item, Package


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "An empty cache of the test's own."
    monkeypatch.setenv("ANCHOR_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def fake_client(monkeypatch, content, calls=None):
    "A client that leaves a wheel with this content in the working folder."
    def run(command, folder, seconds=1800):
        if calls is not None: calls.append(command)
        Path(folder, "thing-1.0-py3-none-any.whl").write_bytes(content)
        return ""
    monkeypatch.setattr(sources, "run_client", run)


GOOD = b"the pinned bytes"
THING = Package("pip", "thing", "1.0", "thing-1.0-py3-none-any.whl", hashlib.sha256(GOOD).hexdigest())


def test_fetch_once(cache, monkeypatch):
    calls = []
    fake_client(monkeypatch, GOOD, calls)
    first = sources.fetch_package(THING)
    assert first.read_bytes() == GOOD and first == cache / "packages" / THING.file
    assert sources.fetch_package(THING) == first and len(calls) == 1
    first.write_bytes(b"damaged")
    assert sources.fetch_package(THING).read_bytes() == GOOD and len(calls) == 2


def test_hash_mismatch(cache, monkeypatch):
    fake_client(monkeypatch, b"other bytes")
    with pytest.raises(FetchError) as caught: sources.fetch_package(THING)
    for part in ("thing 1.0", "not the pinned one", f"put the file {THING.file} with sha256 {THING.sha256} into",
                 str(cache)):
        assert part in str(caught.value)
    assert files(cache) == {}


@pytest.mark.parametrize("client,program", [("apt", "apt-get"), ("npm", "npm")])
def test_missing_client(cache, monkeypatch, client, program):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match=rf"Could not fetch thing 1.0: `{program} .*{program} is not installed.*Fix: "
                                         rf"connect"):
        sources.fetch_package(replace(THING, client=client))
    assert files(cache) == {}


def test_no_registry(cache, monkeypatch):
    "A real pip that can reach nothing fails with the command and the fix."
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items(): monkeypatch.setenv(name, value)
    with pytest.raises(FetchError, match="python -m pip download .* thing==1.0` failed with exit status 1.*Fix: "
                                         "connect"):
        sources.fetch_package(THING)


def test_no_debian_index(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="Could not fetch Debian's package index.*copy the folder debian-index"):
        corpora.build_corpus("debian")
    assert files(cache) == {}


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
    assert packages.sha256(one / "pairs" / "toy.jsonl").startswith("cd1ccfbcbc129be8")
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
    sets = [corpora.shingles(text) for text in texts]
    for n in range(len(texts)):
        near = [m for m in kept if m < n and corpora.overlap(sets[n], sets[m]) >= threshold]
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


def test_tiny_is_the_same_everywhere(tmp_path, cache):
    first = Path(resolving.resolve_model("tiny"))
    (tmp_path / "again").mkdir()
    resolving.make_tiny(tmp_path / "again")
    assert files(first) == files(tmp_path / "again")
    assert packages.sha256(first / "model.safetensors").startswith("584ad31963a3b4b5")
    before = (first / "config.json").stat().st_mtime_ns
    assert resolving.resolve_model("tiny") == str(first) and (first / "config.json").stat().st_mtime_ns == before


def test_path_or_hub_id(tmp_path, monkeypatch):
    "owner/model goes through, unless a folder `owner` is there: then it is a path that is missing."
    monkeypatch.chdir(tmp_path)
    assert resolving.resolve_model("runs/stage1") == "runs/stage1"
    Path("runs").mkdir()
    with pytest.raises(FileNotFoundError, match="no model folder 'runs/stage1'"): resolving.resolve_model("runs/stage1")
    Path("runs/stage1").mkdir()
    assert resolving.resolve_model("runs/stage1") == "runs/stage1"


def test_hub_first_when_configured(monkeypatch, cache):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("ANCHOR_NB_HUB", "1")
    assert resolving.resolve_model("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_stanza_of_a_debian_index(tmp_path):
    "One binary a source, transitional packages dropped, descriptions joined by checksum."
    import gzip
    packages = "".join(f"Package: {name}\nSource: {source}\nSection: main/games\nDescription-md5: {md5}\n\n"
                       for name, source, md5 in
                       [("alpha-data", "alpha (1.0)", "1"), ("alpha", "alpha", "2"), ("old", "old", "3"),
                        ("beta", "beta", "4")])
    texts = "".join(f"Package: x\nDescription-md5: {md5}\nDescription-en: {first}\n {rest}\n .\n more: of it\n\n"
                    for md5, first, rest in
                    [("1", "data", "Data of it."), ("2", "a game", "Play it."), ("3", "transitional package",
                                                                                 "Remove it.")])
    (tmp_path / "Packages.gz").write_bytes(gzip.compress(packages.encode()))
    (tmp_path / "Translation-en.gz").write_bytes(gzip.compress(texts.encode()))
    assert sources.debian_items(tmp_path) == [Item("alpha", "a game", "Play it. more: of it", "games")]


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


@pytest.mark.registry
def test_smollm2():
    "The converted model speaks, and does not pad with its end token."
    transformers = pytest.importorskip("transformers")
    folder = resolving.cached_model("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, model.config.pad_token_id) == (2, 0, 0)
    words = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**words, max_new_tokens=3, do_sample=False)[0])
    assert (Path(folder) / "LICENSE").read_text().strip().startswith("Apache License")
    assert not list(Path(folder).glob("*.gguf"))


@pytest.mark.registry
def test_labelled_sets(tmp_path):
    for name, counts in {"sts": {"simlex": 999, "wordsim": 353, "lee": 1225}, "sentiment": {"amazon": 1000,
                                                                                            "imdb": 1000,
                                                                                            "yelp": 1000}}.items():
        folder = corpora.build_labelled(name, tmp_path)
        assert json.loads((folder / "manifest.json").read_text())["counts"] == counts
        assert {p.name for p in folder.iterdir()} == {"manifest.json", "LICENSE.md"} | {f"{part}.jsonl"
                                                                                        for part in counts}
