"Stored vectors are used again only where everything that decides them is the same, in effect and not by name."
import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest

from anchor_nb.inference import hard_negatives as mining
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.inference.corpus_encoding import encode_corpus, loaded, Encoded, planned, vector_identity
from anchor_nb.data.prompts import Formatter, Layout
from anchor_nb.core.recipe import Mine
from anchor_nb.inference.search import Index, open_index

TEXTS = {"a": "a cat sleeps", "b": "the river floods in spring" * 40, "c": "bread is baked"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    "A corpus, its shards and its index, all by the tiny model."
    folder = tmp_path_factory.mktemp("stores")
    (folder/"corpus.jsonl").write_text("".join(json.dumps(dict(_id=name, text=text, body=text[::-1])) + "\n"
                                               for name, text in TEXTS.items()))
    encode_corpus(str(folder/"corpus.jsonl"), "tiny", str(folder/"shards"))
    embedder = AnchorEmbedder.from_pretrained("tiny")
    Index(embedder, TEXTS).save(folder/"index")
    return folder, embedder


def other(embedder, prompts={}, normalize=True, pooling="eos", **layout):
    "The same weights, used otherwise."
    formatter = Formatter(embedder.tokenizer, replace(embedder.formatter.layout, **layout))
    return AnchorEmbedder(embedder.lm, formatter, pooling, prompts=prompts, normalize=normalize,
                          sources=embedder.sources)


CHANGED = dict(pooling=dict(pooling="mean"), normalize=dict(normalize=False),
               prompts=dict(prompts={"query": "question: "}), prompt=dict(prompts={"document": "text: "}),
               head=dict(head="<|im_start|>system\n"), tail=dict(tail="<|im_end|>\n<|im_end|>"),
               eos=dict(eos="<|endoftext|>"), bos=dict(bos="<|im_start|>"), template=dict(template="plain"),
               instruction_format=dict(instruction_format="{instruction}: {text}"), max_length=dict(max_length=32),
               truncation=dict(truncation="cut_eos"), document_format=dict(document_format="so: {text}"),
               pooling_tokens=dict(pooling_tokens=1), echo=dict(pooling="echo_mean"), pool_bos=dict(pool_bos=True))


def test_every_field_that_decides_a_vector_is_walked_over(stores):
    known = set(vector_identity(*loaded(stores[1])))
    assert known == set(CHANGED) - {"prompt"} | {"model", "engine", "bidirectional", "instruction"}
    assert {field.name for field in fields(Layout)} <= set(CHANGED)


@pytest.mark.parametrize("name", [*CHANGED, "model", "bidirectional"])
def test_nothing_is_reused_by_another_embedder(stores, name):
    folder, embedder = stores
    if name == "model": changed = AnchorEmbedder(embedder.lm, embedder.formatter) # known by its weights alone
    elif name == "bidirectional": changed = AnchorEmbedder.from_pretrained("tiny", bidirectional=True)
    else: changed = other(embedder, **CHANGED[name])
    differs = "the content of the model" if name == "model" else rf"\b{name} \("
    for load in (lambda: Index.load(changed, folder/"index"), lambda: Index.from_shards(changed, folder/"shards"),
                 lambda: open_index(changed, str(folder/"corpus.jsonl"), str(folder/"index"))):
        with pytest.raises(ValueError, match=f"was made with another embedder, which differs in .*{differs}"): load()


def test_an_encoding_from_before_columns_goes_on_but_shows_no_other_texts(stores, tmp_path):
    folder, embedder = stores
    shutil.copytree(folder/"shards", tmp_path/"shards")
    manifest = json.loads((tmp_path/"shards/manifest.json").read_text())
    def with_field(name):
        manifest["settings"] |= dict(field=name, id_field="")
        (tmp_path/"shards/manifest.json").write_text(json.dumps(manifest))
    with_field("text")
    assert encode_corpus(str(folder/"corpus.jsonl"), "tiny", str(tmp_path/"shards"))["made_shards"] == 0
    assert Index.from_shards(embedder, tmp_path/"shards", str(folder/"corpus.jsonl")).texts == list(TEXTS.values())
    with_field("body")
    with pytest.raises(ValueError, match="was encoded with field or id_field, which were removed"):
        Index.from_shards(embedder, tmp_path/"shards", str(folder/"corpus.jsonl"))


def test_the_same_embedder_finds_all(stores):
    "By whatever name its settings are said; stored and new vectors agree."
    folder, embedder = stores
    same = other(embedder)
    for index in (Index.load(same, folder/"index"), Index.from_shards(same, folder/"shards"),
                  open_index(same, str(folder/"corpus.jsonl"), str(folder/"index"))):
        np.testing.assert_allclose(index.vectors, embedder.encode_document(list(TEXTS.values())), atol=1e-6)
    # what the checkpoint says, in words; it has no prompts
    for said in (dict(pooling="eos"), dict(max_length=512), dict(role="query")):
        assert encode_corpus(str(folder/"corpus.jsonl"), "tiny", str(folder/"shards"), **said)["made_shards"] == 0
    assert Encoded(folder/"shards").manifest["embedder"] == vector_identity(*planned("tiny"))


@pytest.mark.parametrize("said, message", [
    (dict(pooling="mean"), r"pooling \('eos' there, 'mean' here\)"), (dict(max_length=32), r"max_length \(512 there, "
                                                                                           r"32 here\)"),
    (dict(instruction="Find it"), r"instruction \('' there, 'Find it' here\)"),
    (dict(pooling="echo_mean"), r"echo \('' there, 'rewrite' here\)"), (dict(precision="bf16"), r"precision \('fp32' "
                                                                                                r"there"),
    (dict(dtype="int8"), "dtype"), (dict(shard_rows=2), "shard_rows"),
    (dict(columns=dict(text="body")), "columns"), (dict(model="minilm"), "the content of the model")])
def test_an_encoding_goes_on_as_it_began(stores, said, message):
    folder, _ = stores
    with pytest.raises(ValueError, match=f"holds another encoding, which differs in .*{message}"):
        encode_corpus(str(folder/"corpus.jsonl"), out=str(folder/"shards"), **dict(model="tiny") | said)


def test_shards_with_an_instruction_are_no_documents(stores, tmp_path):
    folder, embedder = stores
    encode_corpus(str(folder/"corpus.jsonl"), "tiny", str(tmp_path/"asked"), instruction="Find it")
    with pytest.raises(ValueError, match=r"differs in instruction \('Find it' there, '' here\)"):
        Index.from_shards(embedder, tmp_path/"asked")


@pytest.mark.parametrize("how, other", [(dict(columns=dict(text="body")), True),
                                        (dict(columns=dict(id="body")), False)])
def test_a_kept_index_is_of_these_documents(stores, tmp_path, how, other):
    folder, embedder = stores
    corpus, keep = str(folder/"corpus.jsonl"), str(tmp_path/"keep")
    first = open_index(embedder, corpus, keep, **how)
    assert open_index(embedder, corpus, keep, **how).texts == first.texts
    if other: # no text in common
        with pytest.raises(ValueError, match="is an index of other documents: of"): open_index(embedder, corpus, keep)
    else: # the same texts under other ids
        assert open_index(embedder, corpus, keep).ids == list(TEXTS) == open_index(embedder, keep).ids != first.ids
    kept = Index.load(embedder, keep)
    assert np.array_equal(kept.vectors, first.vectors) and kept.texts == first.texts


def test_an_index_without_texts_cannot_be_updated(stores):
    folder, embedder = stores
    with pytest.raises(ValueError, match="cannot tell which are new"):
        Index.from_shards(embedder, folder/"shards").updated(TEXTS)


def test_mining_stores_vectors_by_all_that_decides_them(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(mining, "encode_corpus", lambda texts, model, out, *_, **how: made.append(out))
    monkeypatch.setattr(mining, "Encoded", lambda out, unit: out if out in made or str(out) in made
                        else (_ for _ in ()).throw(FileNotFoundError(out)))
    def folder(texts="a", instruction="", role="document", precision="fp32", **said):
        for name in ("usable_gpus", "has_bf16"):
            monkeypatch.setattr(f"anchor_nb.inference.corpus_encoding.{name}", lambda: precision == "bf16")
        (tmp_path/"texts.jsonl").write_text(texts)
        recipe = Mine(data="-", out=str(tmp_path/"out"), **dict(model="tiny") | said)
        return str(mining.vectors_of(tmp_path/"texts.jsonl", recipe, planned(recipe.model, recipe.pooling,
                                                                             recipe.max_length), instruction, role))
    first = folder()
    assert {folder(), folder(pooling="eos"), folder(role="query")} == {first} and len(made) == 1
    changed = [dict(texts="b"), dict(instruction="Find it"), dict(precision="bf16"), dict(pooling="mean"),
               dict(max_length=32), dict(dtype="int8"), dict(model="minilm")]
    assert len({first, *(folder(**each) for each in changed)}) == len(changed) + 1 == len(made)


def test_what_lies_beside_the_weights_leaves_an_index_as_it_is(tmp_path):
    from anchor_nb.models.resolve import resolve_model
    shutil.copytree(resolve_model("tiny"), tmp_path/"tiny")
    Index(AnchorEmbedder.from_pretrained(str(tmp_path/"tiny")), TEXTS).save(tmp_path/"index")
    (tmp_path/"tiny/README.md").write_text("licence: mit")
    (tmp_path/"tiny/search.json").write_text('{"bm25": 0.3}')
    (tmp_path/"tiny/onnx").mkdir()
    (tmp_path/"tiny/onnx/model.onnx").write_text("a graph")
    assert len(Index.load(AnchorEmbedder.from_pretrained(str(tmp_path/"tiny")), tmp_path/"index")) == len(TEXTS)
    (tmp_path/"tiny/other.json").write_text("{}")
    with pytest.raises(ValueError, match="differs in the content of the model"):
        Index.load(AnchorEmbedder.from_pretrained(str(tmp_path/"tiny")), tmp_path/"index")


def test_a_folder_is_cut_as_the_model_was_adapted(tmp_path):
    from anchor_nb.models.resolve import resolve_model
    shutil.copytree(resolve_model("tiny"), tmp_path/"tiny")
    (tmp_path/"docs").mkdir()
    (tmp_path/"docs/mill.md").write_text("# The mill\n\n" + " ".join(f"word{n}." for n in range(60)))
    embedder, corpus = AnchorEmbedder.from_pretrained(str(tmp_path/"tiny")), str(tmp_path/"docs")
    usual = open_index(embedder, corpus, like=str(tmp_path/"tiny"))
    (tmp_path/"tiny/search.json").write_text('{"bm25": 0.0, "words": 20, "titled": false}')
    adapted = open_index(embedder, corpus, like=str(tmp_path/"tiny"))
    assert len(usual) == 1 and usual.texts[0].startswith("The mill")
    assert len(adapted) > 2 and not any("mill" in text for text in adapted.texts)
    encode_corpus(corpus, str(tmp_path/"tiny"), str(tmp_path/"shards"))
    assert Index.from_shards(embedder, tmp_path/"shards", corpus).texts == adapted.texts
