"""The embedder as users of sentence-transformers call it, and search on top: any text, no faiss, a full disk."""
import inspect
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings, strategies as st

from anchor_nb.inference import search as searching
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder, Replicas
from anchor_nb.models.interface import Options
from anchor_nb.models.interface import TextEncoder
from anchor_nb.release.export import load_for_export
from anchor_nb.models.inputs import as_texts, in_precision
from anchor_nb.inference.search import Hit, Index, best_of, open_index, search_corpus

TEXTS = ["a cat sleeps", "the river floods in spring " * 9, "", "x", "a cat sleeps"]
PROMPTS = {"query": "question: ", "sts": "compare these:\n", "document": ""}
few = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def embedder():
    plain = AnchorEmbedder.from_pretrained("tiny", max_length=64)
    return AnchorEmbedder(plain.lm, plain.formatter, prompts=PROMPTS)


def same(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape and abs(np.asarray(found) - np.asarray(expected)).max(initial=0) <= tolerance


# ---- all ways of saying the same ----

def test_forms_of_a_prompt(embedder):
    for prompt, ways in {"compare these:\n": [dict(prompt_name="sts"), dict(instruction="sts"),
                                              dict(prompt_name="sts", role="query"), dict(instruction=["sts"]*5)],
                         "question: ": [dict(prompt_name="query"), dict(role="query"),
                                        dict(instruction=[""]*5, role="query")],
                         "": [dict(), dict(role="document"), dict(prompt_name="document")]}.items():
        for way in ways: same(embedder.encode(TEXTS, **way), embedder.encode(TEXTS, prompt=prompt))
    same(embedder.encode_query(TEXTS), embedder.encode(TEXTS, prompt="question: "))
    same(embedder.encode_query(TEXTS, "sts"), embedder.encode_query(TEXTS, prompt_name="sts"))
    same(embedder.encode_query(TEXTS, prompt="so: "), embedder.encode(TEXTS, prompt="so: "))
    same(embedder.encode_document(TEXTS), embedder.encode(TEXTS))
    mixed = embedder.encode(TEXTS[:3], ["sts", "find animals", ""], role="query")
    for k, way in enumerate([dict(prompt_name="sts"), dict(instruction="find animals"), dict(prompt_name="query")]):
        same(mixed[k], embedder.encode(TEXTS[k], **way))


def test_an_instruction_is_written_by_the_formatter_and_a_prompt_is_not(embedder):
    "Literally: what the model reads, token by token."
    joined = embedder.formatter.join("a cat", "find animals")[0]
    assert joined != "find animalsa cat"
    same(embedder.encode("a cat", "find animals"), embedder.encode(joined, prompt=""))
    same(embedder.encode("a cat", prompt="find animals"), embedder.encode("find animalsa cat", prompt=""))
    assert abs(embedder.encode("a cat", "find animals") - embedder.encode("a cat", prompt="find animals")).max() > 1e-3


def test_options_are_declared_once(embedder):
    "What an IDE shows for `encode_query` is what `encode` takes."
    named = {name: about for name, about in inspect.signature(TextEncoder.encode, eval_str=True).parameters.items()
             if about.kind is about.KEYWORD_ONLY}
    assert {name: about.annotation for name, about in named.items() if name != "role"} == Options.__annotations__
    assert all(about.annotation is not about.empty for about in named.values())
    for name in Options.__annotations__: # each is taken by all three
        value = {"prompt": "so: ", "prompt_name": "sts", "precision": "binary", "device": "cpu", "batch_size": 2,
                 "truncate_dim": 8}.get(name, False)
        for call in (embedder.encode, embedder.encode_query, embedder.encode_document):
            assert len(call(TEXTS, **{name: value})) == 5
    with pytest.raises(TypeError, match="output_value"): embedder.encode_query(TEXTS, output_value="token_embeddings")


# ---- any text ----

letters = st.text(st.characters(), max_size=40) | st.text(max_size=40) | st.sampled_from(["", " \n\t", "\x00",
                                                                                          "half \ud83d", "\udc00\ud83d",
                                                                                          "<|im_end|>", "word " * 500,
                                                                                          "e\u0301\u200b\u202e"])


@few
@given(st.lists(letters, max_size=6))
def test_a_vector_depends_on_its_text_alone(embedder, texts):
    found = embedder.encode(texts)
    assert found.shape == (len(texts), 64) and found.dtype == np.float32 and np.isfinite(found).all()
    for text, vector in zip(texts, found): same(embedder.encode(text), vector)
    same(embedder.encode(iter(texts[::-1]), batch_size=2)[::-1], found)
    if texts: assert abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


def test_very_long_and_very_many(embedder):
    long = "the river floods in spring " * 40_000 # a million letters
    same(embedder.encode(long), embedder.encode(long[:5000]))
    found = embedder.encode([str(n % 7) for n in range(700)], truncate_dim=4) # more than one part
    same(found, np.tile(found[:7], (100, 1)))


def test_texts_of_other_libraries(embedder):
    import datasets
    import pandas
    column = datasets.Dataset.from_dict(dict(text=TEXTS))["text"]
    for texts in (tuple(TEXTS), np.array(TEXTS), pandas.Series(TEXTS, index=list("vwxyz")), column,
                  (text for text in TEXTS)):
        same(embedder.encode(texts), embedder.encode(TEXTS))
    assert as_texts(np.str_("a")) == ["a"]
    with pytest.raises(ValueError, match="text 1 is float, not a string"):
        embedder.encode(pandas.Series(["a", float("nan")]))


@pytest.mark.parametrize("how, message", [
    (dict(prompt_name="stsb"), r"prompt_name='stsb'; the prompts of this checkpoint are \['document', 'query', "
                               r"'sts'\]"), (dict(prompt="a", prompt_name="sts"), "prompt_name and prompt both say"),
    (dict(instruction="a", prompt="b"), "instruction and prompt both say"), (dict(instruction=["a"]),
                                                                             "1 instructions for 5 texts"),
    (dict(batch_size=0), "batch_size=0; give 1 or more"),
    (dict(precision="float16"), "precision='float16'; choose one of float32"),
    (dict(truncate_dim=65), "truncate_dim=65; the model's vectors have 64"), (dict(truncate_dim=-1), "truncate_dim=-1"),
    (dict(role="passage"), "role='passage'; choose query, document"), (dict(device=[]), "device is an empty list"),
    (dict(truncate_dim="8"), "truncate_dim='8' is str; give a whole number"),
    (dict(truncate_dim=8.0), "truncate_dim=8.0 is float"), (dict(batch_size="2"), "batch_size='2' is str"),
    (dict(instruction=5), "instruction=5 is int; give a string"), (dict(instruction=[""]*4 + [5]), "instruction 4 is "
                                                                                                   "5, not a string"),
    (dict(prompt=5), "prompt=5 is int")])
def test_an_option_that_cannot_be_is_refused_before_work_is_spent(embedder, monkeypatch, how, message):
    monkeypatch.setattr(AnchorEmbedder, "_of_tokens", lambda *_: pytest.fail("the model was called"))
    with pytest.raises(ValueError, match=message): embedder.encode(TEXTS, **how)


def test_what_is_plainly_meant_is_taken(embedder):
    "None for no instruction, arrays without dimensions, whole numbers of any library."
    same(embedder.encode(TEXTS, None), embedder.encode(TEXTS))
    same(embedder.encode(TEXTS, [None, "so", None, "", None]), embedder.encode(TEXTS, ["", "so", "", "", ""]))
    same(embedder.encode(TEXTS, np.array("so")), embedder.encode(TEXTS, "so"))
    same(embedder.encode(np.array("a cat sleeps")), embedder.encode("a cat sleeps"))
    same(embedder.encode(TEXTS, truncate_dim=np.int64(8), batch_size=torch.tensor(2)),
         embedder.encode(TEXTS, truncate_dim=8))
    index = Index(embedder, TEXTS, truncate_dim=np.int64(8))
    assert index.search(np.array("x"), np.int64(2), None) == index.search("x", 2)
    assert AnchorEmbedder.from_pretrained(Path("tiny"), max_length=np.int64(64)).max_seq_length == 64


@pytest.mark.parametrize("call, message", [
    (lambda e: e.encode(np.array(5)), "texts is int; give a string"),
    (lambda e: best_of([[1.0, np.nan]], [[1.0, 0.0]], 1), "query 0 of queries has a number that is not finite"),
    (lambda e: Index(e, ["a"]).search("a", k="2"), "k='2' is str; give a whole number"),
    (lambda e: Index(e, ["a"], np.ones((1, 64), np.int8)), "vectors are int8; search takes floating point"),
    (lambda e: Index(e, ["a"], np.ones((1, 9))).search("a"), "queries have 64 numbers and the corpus 9; encode both"),
    (lambda e: Index(e, {1: "a", "1": "b"}), "documents has the id '1' twice, since ids are stored as strings; give "
                                             "ids "
                                             "that differ"), (lambda e: Index(e, ["a"]*64, np.ones(64)),
                                                              "vectors have 1 dimensions; give"),
    (lambda e: Index(e, None), "texts is NoneType; give"), (lambda e: Index(e, {"a": None}), "text 0 is NoneType"),
    (lambda e: Index(e, pandas.DataFrame(dict(text=["a"]))), "texts is DataFrame"),
    (lambda e: Index(e, ["a"]).search(None), "texts is NoneType"),
    (lambda e: Index(e, ["a"]).search({"q1": "cats"}), "texts is dict; give a string or a list of strings"),
    (lambda e: Index(e, ["a"]).search("a", bm25="0.5"), "bm25='0.5'; give a weight from 0"),
    (lambda e: e.similarity(np.ones((1, 3)), np.ones((1, 4))), "vectors of 3 and of 4 numbers have no cosine"),
    (lambda e: AnchorEmbedder.from_pretrained("tiny", max_length="64"), "max_length='64' is str"),
    (lambda e: AnchorEmbedder.from_pretrained("tiny", bidirectional="yes"), "bidirectional='yes'; give True, False"),
    (lambda e: AnchorEmbedder.from_pretrained("tiny", micro_tokens=-1), "micro_tokens=-1; give"),
    (lambda e: replace(e.formatter.layout, truncation="foo"), "truncation='foo'; choose keep_eos"),
    (lambda e: load_for_export("tiny", "foo"), "truncation='foo'; choose keep_eos")])
def test_what_cannot_be_is_named(embedder, call, message):
    with pytest.raises(ValueError, match=message): call(embedder)


# ---- the forms of the result ----

def test_the_result_has_the_type_that_sentence_transformers_gives():
    "minilm by both libraries; without the normalisation of single numbers, where they differ on purpose."
    from sentence_transformers import SentenceTransformer
    ours, theirs = AnchorEmbedder.from_pretrained("minilm"), SentenceTransformer(resolve_model("minilm"), device="cpu")
    for texts in (TEXTS[:2], TEXTS[0]):
        for how in (dict(), dict(convert_to_tensor=True), dict(convert_to_numpy=False), dict(precision="binary"),
                    dict(precision="ubinary", convert_to_tensor=True),
                    dict(truncate_dim=32, normalize_embeddings=True)):
            one, other = ours.encode(texts, **how), theirs.encode(texts, **how)
            assert type(one) is type(other) and len(one) == len(other)
            for mine, its in zip(one, other) if isinstance(one, list) else [(one, other)]:
                assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
                if how.get("precision") is None: same(mine, its)
    same(ours.similarity(ours.encode(TEXTS), ours.encode(TEXTS[0])), theirs.similarity(theirs.encode(TEXTS),
                                                                                       theirs.encode(TEXTS[0])))
    same(ours.similarity_pairwise(ours.encode(TEXTS), 3*ours.encode(TEXTS[::-1])),
         theirs.similarity_pairwise(theirs.encode(TEXTS), theirs.encode(TEXTS[::-1])))
    facts = lambda model: (model.max_seq_length, model.get_embedding_dimension(), model.similarity_fn_name)
    assert facts(ours) == facts(theirs)


def test_smaller_numbers_are_made_of_all_texts_of_a_call(embedder):
    "So the shares of several devices have one range."
    for precision in ("int8", "uint8", "binary"):
        raw = embedder.encode(TEXTS, truncate_dim=16)
        found = embedder.encode(TEXTS, truncate_dim=16, precision=precision)
        assert np.array_equal(found, in_precision(raw, precision)) and found.dtype == (np.uint8 if precision == "uint8"
                                                                                       else np.int8)
        spread = embedder.encode(TEXTS, truncate_dim=16, precision=precision, device=["cpu", "cpu"]).astype(int)
        assert (abs(spread - found) <= 1).mean() > 0.9 # a rounding may fall on the other side of a step
    assert embedder.encode([], precision="int8").shape == (0, 64)
    assert embedder.encode([], precision="binary", convert_to_tensor=True).shape == (0, 8)
    with pytest.raises(ValueError, match="one text does not show"): embedder.encode("a", precision="int8")


def test_tensors_can_be_trained_upon(embedder):
    "Those of inference mode could not."
    weight = torch.nn.Parameter(torch.ones(64))
    (embedder.encode(TEXTS, convert_to_tensor=True) * weight).sum().backward()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("name", ["sdpa", "eager", "packed_varlen", "flash_attention_2", "flash"])
def test_attention_that_cannot_keep_texts_apart_here_is_refused(name):
    "transformers' own lets the texts of a packed row see each other where a model looks both ways."
    with pytest.raises(ValueError, match=f"attention={name} cannot run here, where packed_sdpa can"):
        AnchorEmbedder.from_pretrained("tiny", attention=name, device="cpu")


def test_raw_states_are_raw(embedder):
    raw = embedder.encode(TEXTS, normalize_embeddings=False)
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-2
    same(raw/np.linalg.norm(raw, axis=1, keepdims=True), embedder.encode(TEXTS))
    same(embedder.encode(TEXTS, normalize_embeddings=False, truncate_dim=9), raw[:, :9])
    plain = AnchorEmbedder(embedder.lm, embedder.formatter, normalize=False)
    same(plain.encode(TEXTS), raw)
    same(plain.encode(TEXTS, normalize_embeddings=True), embedder.encode(TEXTS))


# ---- devices ----

def test_several_devices_are_one(embedder):
    two, how = Replicas(embedder, ["cpu", "cpu"]), dict(instruction=["sts", "find animals", "", "", ""], truncate_dim=8,
                                                        normalize_embeddings=False)
    same(two.encode(TEXTS, **how), embedder.encode(TEXTS, **how))
    same(two.encode_query("x"), embedder.encode_query("x"))
    assert two.encode([]).shape == (0, 64) and two.parts[0] is embedder and two.parts[1].lm is not embedder.lm
    same(two.encode(TEXTS, device="cpu"), embedder.encode(TEXTS))
    assert embedder.on("cpu").parts == [embedder] # nothing is copied where it is already
    two.max_seq_length, before = 20, embedder.max_seq_length
    assert {part.max_seq_length for part in (two, *two.parts)} == {20}
    two.max_seq_length = before
    assert embedder.max_seq_length == before


def test_a_bar_is_drawn_only_when_asked_for(embedder, capfd, monkeypatch):
    monkeypatch.setenv("ANCHOR_NB_PROGRESS", "lines")
    embedder.encode(TEXTS); embedder.encode(TEXTS, show_progress_bar=False)
    assert capfd.readouterr() == ("", "")
    embedder.encode(TEXTS, show_progress_bar=True, device=["cpu", "cpu"])
    found = capfd.readouterr().err
    assert found.count("encode") == 1 and found.endswith("\n")


# ---- search ----

@few
@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 70), st.integers(0, 2**31), st.booleans())
def test_both_libraries_find_the_same(rows, asked, k, seed, ties):
    draw = np.random.default_rng(seed)
    corpus, queries = (draw.integers(-2, 3, (n, 4)).astype(np.float32) if ties
                       else draw.normal(size=(n, 4)).astype(np.float32) for n in (rows, asked))
    scores = queries @ corpus.T
    best = -np.sort(-scores, 1)[:, :k]
    for there in (True, False):
        with mock.patch.object(searching, "find_spec", lambda name: there): found = best_of(queries, corpus, k)
        same(found.scores, best)
        same(np.take_along_axis(scores, found.numbers, 1), best) # of ties, any
        assert all(len(set(row)) == min(k, rows) for row in found.numbers)
    found, numbers = searching.by_torch(torch.from_numpy(queries), torch.from_numpy(corpus), min(k, rows),
                                        cells=7) if asked else (best, found.numbers) # one to seven documents at a time
    same(found, best)
    same(np.take_along_axis(scores, numbers, 1), best)


def test_without_faiss(monkeypatch):
    "torch takes over by itself."
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(searching, "find_spec", lambda name: None)
    assert best_of(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 1).numbers.tolist() == [[0], [1], [2]]


def test_vectors_in_any_form():
    rows = np.eye(4)
    for form in (rows, rows.astype(np.float16), torch.eye(4), torch.eye(4, dtype=torch.bfloat16), rows.T,
                 rows[::-1][::-1], list(rows), list(torch.eye(4))):
        assert best_of(form, form, 1).numbers.T.tolist() == [[0, 1, 2, 3]]


# ---- an index ----

@pytest.fixture
def corpus(tmp_path):
    (tmp_path/"corpus").mkdir()
    (tmp_path/"corpus/a.jsonl").write_text('{"text": "a cat sleeps"}\n\n{"title": "Rivers", "text": "they flood in '
                                           'spring"}\n')
    (tmp_path/"corpus/b.jsonl").write_text('{"text": "half \\ud83d"}\n')
    return str(tmp_path/"corpus")


def test_documents_of_several_files_have_names_of_their_own(embedder, corpus, tmp_path):
    index = open_index(embedder, corpus, keep=str(tmp_path/"kept"))
    assert dict(zip(index.ids, index.texts)) == {"0": "a cat sleeps", "1": "Rivers they flood in spring",
                                                 "2": "half \ud83d"}
    again = Index.load(embedder, tmp_path/"kept")
    assert (again.ids, again.texts) == (index.ids, index.texts)
    assert again.search("a cat sleeps", 1) == index.search("a cat sleeps", 1)
    assert [hit.text for hit in again.search(["half \ud83d"], 1, "")[0]] == ["half \ud83d"]


def test_parquet_and_beir_and_other_fields(embedder, tmp_path):
    import datasets
    rows = [dict(key=7, body="a cat sleeps"), dict(key=9, body="rivers")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path/"c.parquet")
    found = open_index(embedder, str(tmp_path/"c.parquet"), str(tmp_path/"kept"), columns=dict(text="body", id="key"))
    assert Index.load(embedder, tmp_path/"kept").ids == found.ids == ["7", "9"]
    (tmp_path/"beir").mkdir()
    for name, text in (("corpus", '{"_id": "7", "title": "", "text": "a cat sleeps"}\n{"_id": "9", "text": '
                                  '"rivers"}\n'), ("queries", '{"_id": "q", "text": "no document"}\n')):
        (tmp_path/f"beir/{name}.jsonl").write_text(text)
    assert open_index(embedder, str(tmp_path/"beir")).search("rivers") == found.search("rivers")
    with pytest.raises(ValueError, match="c.parquet, row 0, field 'text' is missing"):
        open_index(embedder, str(tmp_path/"c.parquet"))


def test_an_index_appears_as_a_whole_or_stays_what_it_was(embedder, tmp_path, monkeypatch):
    Index(embedder, ["old"]).save(tmp_path/"index")
    with monkeypatch.context() as patch:
        patch.setattr(searching, "seal", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError): Index(embedder, ["new"]).save(tmp_path/"index")
    assert Index.load(embedder, tmp_path/"index").texts == ["old"] and [path.name
                                                                        for path in tmp_path.iterdir()] == ["index"]


def test_an_index_names_the_document_whose_vector_is_not_finite(embedder):
    vectors = np.ones((5, 64), np.float32)
    vectors[3, 7] = np.nan
    with pytest.raises(ValueError, match=f"vector of document '3', {TEXTS[3]!r}, has a number that is not finite"):
        Index(embedder, TEXTS, vectors)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_encoded(embedder, corpus, tmp_path, monkeypatch):
    kept = tmp_path/"kept"
    monkeypatch.setattr(type(embedder), "encode_document", lambda *_, **__: pytest.fail("it was encoded"))
    for module, name, answer, message in ((os.path, "ismount", True, "is a mount point"),
                                          (os, "access", False, "kept")):
        kept.mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda path, *_: answer == (str(path) == str(kept)))
            with pytest.raises((ValueError, PermissionError), match=message): open_index(embedder, corpus, str(kept))
    (tmp_path/"file").touch()
    with pytest.raises(OSError, match="file"): open_index(embedder, corpus, str(tmp_path/"file"/"kept"))


def test_an_index_that_a_killed_process_had_moved_aside_is_used_again(embedder, corpus, tmp_path):
    open_index(embedder, corpus, str(tmp_path/"kept"))
    left = tmp_path/".kept-abcdefgh"
    left.mkdir()
    (left/".lock").touch()
    (tmp_path/"kept").rename(left/"old")
    searching.check_writable(tmp_path/"kept")
    assert searching.is_index(tmp_path/"kept") and not left.exists()


def test_an_index_that_is_up_to_date_is_searched_where_nothing_can_be_written(embedder, corpus, tmp_path, monkeypatch):
    first = open_index(embedder, corpus, str(tmp_path/"kept"))
    def refused(folder):
        raise PermissionError(folder)
    monkeypatch.setattr(searching, "check_writable", refused)
    assert open_index(embedder, corpus, str(tmp_path/"kept")).ids == first.ids
    with pytest.raises(PermissionError): open_index(embedder, corpus, str(tmp_path/"new"))


def test_an_index_that_another_process_replaces_meanwhile_is_read_again(embedder, tmp_path, monkeypatch):
    Index(embedder, ["old"]).save(tmp_path/"index")
    damage, times = searching.damage, []
    def replaced_meanwhile(folder):
        times.append(1)
        if len(times) == 1: Index(embedder, ["new"]).save(folder)
        return "changed"*(len(times) == 1) or damage(folder)
    monkeypatch.setattr(searching, "damage", replaced_meanwhile)
    assert Index.load(embedder, tmp_path/"index").texts == ["new"] and len(times) == 2


def test_what_does_not_change_a_model_does_not_change_its_identity(tmp_path):
    from anchor_nb.inference.corpus_encoding import loaded as identity_of
    AnchorEmbedder.from_pretrained("tiny").save_pretrained(tmp_path/"model")
    loaded = AnchorEmbedder.from_pretrained(str(tmp_path/"model"))
    before, weights = identity_of(loaded), tmp_path/"model/model.safetensors"
    (tmp_path/"model/.DS_Store").write_text("x")
    weights.chmod(0o600)
    os.link(weights, tmp_path/"linked") # both change the time of change alone
    assert identity_of(loaded) == before
    os.utime(weights)
    assert identity_of(loaded) != before


def test_a_home_folder_is_not_a_folder_called_tilde(embedder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    embedder.save_pretrained("~/model")
    Index(embedder, TEXTS).save("~/index")
    assert len(Index.load(embedder, "~/index")) == len(TEXTS) and list(tmp_path.iterdir()) == [tmp_path/"home"]
    assert (AnchorEmbedder.from_pretrained("~/model").encode(TEXTS) == embedder.encode(TEXTS)).all()


def test_an_index_of_other_weights_is_refused_whatever_their_path(tmp_path):
    "The same folder with other weights in it; and a copy elsewhere with the same, which is no other model."
    AnchorEmbedder.from_pretrained("tiny").save_pretrained(tmp_path/"model")
    embedder = AnchorEmbedder.from_pretrained(str(tmp_path/"model"))
    Index(embedder, TEXTS).save(tmp_path/"index")
    (tmp_path/"model").rename(tmp_path/"moved")
    assert len(Index.load(AnchorEmbedder.from_pretrained(str(tmp_path/"moved")), tmp_path/"index")) == 5
    with torch.no_grad(): embedder.lm.get_input_embeddings().weight[5] += 1
    embedder.save_pretrained(tmp_path/"model")
    with pytest.raises(ValueError, match="differs in the content of the model; load that one"):
        Index.load(AnchorEmbedder.from_pretrained(str(tmp_path/"model")), tmp_path/"index")
    with pytest.raises(ValueError, match="pooling .'eos' there, 'mean' here"):
        Index.load(AnchorEmbedder.from_pretrained(str(tmp_path/"moved"), pooling="mean"), tmp_path/"index")


def test_a_planted_pickle_is_not_read(embedder, tmp_path):
    "Vectors are numbers, or nothing."
    Index(embedder, TEXTS).save(tmp_path/"index")
    np.save(tmp_path/"index/vectors.npy", np.array([dict(a=1)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="is damaged"): Index.load(embedder, tmp_path/"index")
    searching.seal(tmp_path/"index") # by somebody who takes more trouble
    with pytest.raises(ValueError, match="(?i)object|pickle"): Index.load(embedder, tmp_path/"index")


def test_hits_are_cosines_for_checkpoints_that_do_not_normalise(embedder):
    plain = AnchorEmbedder(embedder.lm, embedder.formatter, normalize=False)
    assert Index(plain, TEXTS).search("x", 5) == Index(AnchorEmbedder(embedder.lm, embedder.formatter),
                                                       TEXTS).search("x", 5)
    assert isinstance(Index(plain, TEXTS).search("x", 1)[0], Hit) and abs(Index(plain,
                                                                                ["x"]).search("x")[0].score - 1) < 1e-5


def test_hits_are_cosines_for_given_vectors_of_any_length(embedder):
    units = embedder.encode_document(TEXTS)
    given = Index(embedder, TEXTS, 3*units)
    np.testing.assert_allclose([hit.score for hit in given.search("x", 5)],
                               [hit.score for hit in Index(embedder, TEXTS).search("x", 5)], atol=1e-6)
    assert Index(embedder, TEXTS, units).vectors is units


def test_a_model_by_a_relative_path_is_itself_elsewhere(tmp_path, monkeypatch):
    from anchor_nb.inference.corpus_encoding import loaded as identity_of
    AnchorEmbedder.from_pretrained("tiny").save_pretrained(tmp_path/"here/model")
    monkeypatch.chdir(tmp_path/"here")
    loaded = AnchorEmbedder.from_pretrained("model")
    before = identity_of(loaded)
    monkeypatch.chdir(tmp_path)
    assert identity_of(loaded) == before and repr(loaded).startswith("AnchorEmbedder('model'")


def test_what_is_saved_again_keeps_what_its_queries_were_asked_with(tmp_path):
    from anchor_nb.data.prompts import save_layout, stored_facts
    AnchorEmbedder.from_pretrained("tiny").save_pretrained(tmp_path/"trained")
    asked = dict(nq=["Find the answer"])
    save_layout(tmp_path/"trained", AnchorEmbedder.from_pretrained("tiny").formatter.layout, pooling="eos",
                instructions=asked)
    AnchorEmbedder.from_pretrained(tmp_path/"trained").save_pretrained(tmp_path/"again")
    assert stored_facts(tmp_path/"again")["instructions"] == asked
    assert searching.trained_instruction(str(tmp_path/"again")) == "Find the answer"


def test_copies_exports_and_merges_know_how_stage_one_decoded_and_that_there_were_no_instructions(tmp_path):
    from dataclasses import fields
    from anchor_nb.data.corpora import build_corpus
    from anchor_nb.data.prompts import save_layout
    from anchor_nb.inference.decoding import rules_of
    from anchor_nb.losses.reconstruction import DecodeRules
    from anchor_nb.models.loading import DECODING
    from anchor_nb.release.export import export
    from anchor_nb.release.merging import merge_models
    from anchor_nb.release.serving import find_corpus, open_rankers
    rules, plain = DecodeRules("sequence", anchor_scale=2.0, anchor_sink=True), AnchorEmbedder.from_pretrained("tiny")
    assert DECODING == tuple(part.name for part in fields(DecodeRules))
    for name, facts in dict(one=dict(recipe=vars(rules)),
                            two=dict(base=str(tmp_path/"one"), recipe=dict(instructions="none"))).items():
        plain.save_pretrained(tmp_path/name)
        save_layout(tmp_path/name, plain.formatter.layout, pooling="eos", **facts)
    AnchorEmbedder.from_pretrained(tmp_path/"two").save_pretrained(tmp_path/"saved")
    export(str(tmp_path/"two"), str(tmp_path/"exported"))
    merge_models([str(tmp_path/"two"), str(tmp_path/"saved")], str(tmp_path/"merged"))
    for name in ("two", "saved", "exported", "merged"):
        assert rules_of(str(tmp_path/name)) == rules
        assert not searching.takes_instruction(str(tmp_path/name), plain.formatter.layout, "Find it")
    ranker, = open_rankers([str(tmp_path/"exported")], find_corpus(str(build_corpus("toy")/"eval")))
    assert not ranker.takes("Find it")
    merge_models([str(tmp_path/"two"), str(tmp_path/"one")], str(tmp_path/"both"))
    assert rules_of(str(tmp_path/"both")) == rules
    assert searching.takes_instruction(str(tmp_path/"both"), plain.formatter.layout, "Find it")


def test_an_instruction_does_not_run_into_the_query_of_a_model_that_takes_none(tmp_path):
    from anchor_nb.data.prompts import save_layout
    plain = AnchorEmbedder.from_pretrained("tiny")
    plain.save_pretrained(tmp_path/"glues")
    save_layout(tmp_path/"glues", replace(plain.formatter.layout, instruction_format="{instruction}{text}"))
    (tmp_path/"docs.jsonl").write_text("".join(json.dumps(dict(_id=str(n), text=text)) + "\n"
                                               for n, text in enumerate(TEXTS) if text))
    find = lambda **how: search_corpus(str(tmp_path/"glues"), str(tmp_path/"docs.jsonl"), ["a cat"], **how)
    with pytest.warns(UserWarning, match="takes no instructions"): found = find(instruction="Find the animals")
    assert found == find()


def test_an_instruction_called_none_leaves_out_the_query_prompt_too(embedder):
    index = Index(embedder, TEXTS)
    bare = Index(AnchorEmbedder(embedder.lm, embedder.formatter), TEXTS)
    assert index.search("a cat", instruction="none") == bare.search("a cat") != index.search("a cat")


def test_a_copy_on_a_device_keeps_budget_and_origin(embedder):
    few = AnchorEmbedder(embedder.lm, embedder.formatter, micro_tokens=77, sources=embedder.sources)
    moved = few.to("cpu")
    assert (moved.asked_tokens, moved.micro_tokens, moved.read_from, moved.sources) == (
        77, 77, few.read_from, few.sources)
    whole = AnchorEmbedder.from_pretrained("tiny", precision="int8")
    with pytest.raises(ValueError, match="int8 runs on a CPU"): whole.to("meta")


def test_saved_weights_are_as_readable_as_the_other_files(embedder, tmp_path):
    embedder.save_pretrained(tmp_path/"saved")
    modes = {(tmp_path/"saved"/name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1, [oct(mode) for mode in modes]


@pytest.mark.parametrize("name", ["adapter_config.json", "modules.json", "1_Pooling", "gguf"])
def test_a_model_is_not_saved_where_files_of_another_would_win(embedder, tmp_path, name):
    for _ in range(2): embedder.save_pretrained(tmp_path)
    (tmp_path/name).mkdir()
    with pytest.raises(ValueError, match=f"holds {name} of another model, .*; choose another folder"):
        embedder.save_pretrained(tmp_path)


def test_an_index_is_of_the_embedder_that_made_it_and_not_of_what_became_of_that(tmp_path):
    changing = AnchorEmbedder.from_pretrained("tiny", max_length=64)
    index = Index(changing, TEXTS)
    changing.max_seq_length = 10
    for use in (lambda: index.save(tmp_path/"index"), lambda: index.search("x"), lambda: index.updated(TEXTS)):
        with pytest.raises(ValueError, match=r"changed after this index was made, in max_length \(64 there, 10 here"):
            use()
    changing.max_seq_length = 64
    assert index.search("x") and len(Index.load(changing, index.save(tmp_path/"index"))) == len(TEXTS)


def test_more_dimensions_than_shards_have_are_refused_before_any_search(embedder, corpus, tmp_path):
    from anchor_nb.inference.corpus_encoding import encode_corpus
    encode_corpus(corpus, "tiny", str(tmp_path/"shards"))
    with pytest.raises(ValueError, match="truncate_dim=999; the vectors in .*shards have 64 numbers"):
        open_index(AnchorEmbedder.from_pretrained("tiny"), str(tmp_path/"shards"), truncate_dim=999)
