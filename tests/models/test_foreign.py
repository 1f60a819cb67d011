"Embedders of other libraries give here the vectors that they give there, from the same files."
import json
import logging
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from anchor_nb.models import resolve as resolving
from anchor_nb.models.backbone import add_lora, check_attention, load_backbone
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.loading import training_formatter
from anchor_nb.data.rows import parsed
from anchor_nb.inference.corpus_encoding import loaded, planned
from anchor_nb.evaluation.encoders import Candidate, candidates, load, revision
from anchor_nb.inference.filtering import score_rows
from anchor_nb.models.loading import read_facts
from anchor_nb.inference.hard_negatives import mine
from anchor_nb.data.prompts import Formatter, load_formatter, resolve_layout, save_layout
from anchor_nb.core.recipe import Mine, Stage2
from anchor_nb.inference.search import Index

TEXTS = ["a cat sleeps", "the river floods in spring " * 40 + "again", "x", "naïve — 文字, twice"]
TINY = resolve_model("tiny")


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


def same(ours, theirs, within=2e-6):
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=within)


def write(folder, **files):
    for name, content in files.items():
        path = Path(folder)/(name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


# ---- sentence-transformers ----

def parts(*kinds, old=True):
    where = "sentence_transformers.models." if old else "sentence_transformers.sentence_transformer.modules."
    return [dict(idx=n, name=str(n), path="" if kind == "Transformer" else f"{n}_{kind}", type=where + kind)
            for n, kind in enumerate(kinds)]


def st_folder(folder, pooling, kinds=("Transformer", "Pooling", "Normalize"), bidirectional=False, prompts={}, **about):
    "The tiny model in the layout of sentence-transformers; its tokenizer adds [EOS]."
    shutil.copytree(TINY, folder)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    Formatter(tokenizer, resolve_layout(tokenizer, "plain")).tokenizer.save_pretrained(folder)
    config = json.loads((folder/"config.json").read_text()) | (dict(is_causal=False) if bidirectional else {})
    return write(folder, config=config, modules=parts(*kinds), **{"1_Pooling__config": dict(word_embedding_dimension=64,
                                                                                            **pooling)},
                 sentence_bert_config=dict(max_seq_length=64, do_lower_case=False),
                 config_sentence_transformers=dict(prompts=prompts, default_prompt_name=None, **about))


def theirs(folder):
    from sentence_transformers import SentenceTransformer
    return SentenceTransformer(folder, device="cpu")


OLD = ("cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken")


@pytest.mark.parametrize("mode", OLD)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_folder_of_sentence_transformers(tmp_path, mode, bidirectional):
    flags = {f"pooling_mode_{name}": name == mode for name in (*OLD, "max_tokens", "mean_sqrt_len_tokens")}
    folder = st_folder(tmp_path/"st", flags, bidirectional=bidirectional, prompts={"query": "question:\n",
                                                                                   "document": ""})
    ours, peer = AnchorEmbedder.from_pretrained(folder), theirs(folder)
    same(ours.encode(TEXTS), peer.encode(TEXTS))
    same(ours.encode_query(TEXTS), peer.encode_query(TEXTS))
    same(ours.encode_document(TEXTS), peer.encode_document(TEXTS))
    same(ours.encode(TEXTS, "query"), peer.encode(TEXTS, prompt_name="query"))
    same(ours.encode(TEXTS, "compare:\n"), peer.encode(TEXTS, prompt="compare:\n"))
    same(ours.encode(TEXTS, truncate_dim=16), peer.encode(TEXTS, truncate_dim=16, normalize_embeddings=True))


def test_prompts_are_left_out_of_the_mean(tmp_path):
    "With include_prompt=false; a prompt that ends in a line break, since they count the tokens of a prompt alone."
    folder = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True, include_prompt=False),
                       prompts={"query": "find animals:\n"})
    ours, peer = AnchorEmbedder.from_pretrained(folder), theirs(folder)
    same(ours.encode_query(TEXTS), peer.encode_query(TEXTS))
    same(ours.encode(TEXTS), peer.encode(TEXTS))
    assert abs(ours.encode_query(TEXTS) - ours.encode(TEXTS)).max() > 1e-3


def test_capitals_and_lengths_are_those_of_sentence_transformers(tmp_path):
    "A tokenizer that keeps capitals under do_lower_case, and no length but the positions of the model."
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean"))
    write(folder, sentence_bert_config=dict(do_lower_case=True))
    config = Path(folder)/"tokenizer_config.json"
    config.write_text(json.dumps({name: value for name, value in json.loads(config.read_text()).items()
                                  if name != "model_max_length"}))
    ours, peer = AnchorEmbedder.from_pretrained(folder), theirs(folder)
    assert ours.max_seq_length == peer.max_seq_length == 512
    texts = ["A Cat SLEEPS in ÄRGER", "word "*600]
    same(ours.encode(texts), peer.encode(texts), 1e-5)
    ours.save_pretrained(tmp_path/"ours")
    same(AnchorEmbedder.from_pretrained(tmp_path/"ours").encode(texts), ours.encode(texts))


def test_a_default_prompt_and_vectors_of_any_length(tmp_path):
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean"), kinds=("Transformer", "Pooling"),
                       prompts={"all": "text: ", "query": "find: "})
    config = Path(folder)/"config_sentence_transformers.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(default_prompt_name="all")))
    ours, peer = AnchorEmbedder.from_pretrained(folder), theirs(folder)
    assert abs(np.linalg.norm(ours.encode(TEXTS), axis=1) - 1).min() > 1e-3
    for name in ("encode", "encode_query", "encode_document"):
        same(getattr(ours, name)(TEXTS), getattr(peer, name)(TEXTS), 1e-5)


def test_what_is_called_a_cosine_is_one(tmp_path):
    "By the embedder, in an evaluation, a filter, a search and mining, as sentence-transformers and mteb do."
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
    from datasets import Dataset
    from torch.utils.data import DataLoader
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean"), kinds=("Transformer", "Pooling"),
                       prompts={"query": "find: "})
    ours, asked, texts = AnchorEmbedder.from_pretrained(folder), "a cat", TEXTS
    expected = ours.similarity(ours.encode_query([asked]), ours.encode_document(texts)).numpy()
    raw = ours.encode_query([asked]) @ ours.encode_document(texts).T
    assert abs(raw - expected).min() > 0.1 # what was called a cosine
    assert ours.similarity_fn_name == theirs(folder).similarity_fn_name == "cosine"

    task = TaskMetadata(name="T", type="Retrieval", description="", dataset=dict(path="local", revision="1"),
                        category="t2t", modalities=["text"],
                        eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10")
    def judged(encoder):
        def side(own, kind):
            batches = DataLoader(Dataset.from_dict(dict(text=own)), batch_size=8)
            return encoder.encode(batches, task_metadata=task, hf_split="", hf_subset="", prompt_type=kind)
        return encoder.similarity(side([asked], PromptType.query), side(texts, PromptType.document))
    encoders = [load(one, revision(one), max_length=64)
                for one in candidates(dict(ours=dict(model=folder, library="anchor_nb"), theirs=folder))]
    for encoder in (*encoders, SentenceTransformerEncoderWrapper(folder)): same(judged(encoder), expected, 1e-5)
    assert {str(encoder.mteb_model_meta.similarity_fn_name) for encoder in encoders} == {"cosine"}

    line = dict(query=asked, positives=texts[:1], negatives=texts[1:], instruction="", document_instruction="")
    (positive, negatives), = score_rows([line], ours)
    same([positive + negatives], expected, 1e-5)
    same([[hit.score for hit in sorted(Index(ours, texts).search(asked), key=lambda hit: int(hit.id))]], expected, 1e-5)
    for dtype, within in (("float32", 1e-5), ("int8", 1e-2), ("binary", 0.3)):
        (tmp_path/"pairs.jsonl").write_text(json.dumps(dict(query=asked, pos=texts[:1], neg=texts[1:])) + "\n")
        mine(Mine(data=str(tmp_path/"pairs.jsonl"), model=folder, out=str(tmp_path/dtype), instructions="none",
                  keep_existing=True, percentage=0, absolute_margin=0.1, negatives=1, max_length=64, dtype=dtype))
        row, = parsed(str(tmp_path/dtype/"pairs/pairs.jsonl"))
        same([row["positive_scores"] + row["negative_scores"]], expected, within)


def test_another_measure_than_the_cosine_is_named(tmp_path):
    "Read by sentence-transformers it is used as its makers say; read by us it is refused."
    kinds = ("Transformer", "Pooling")
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean"), kinds=kinds, similarity_fn_name="dot")
    with pytest.raises(ValueError, match="similarity_fn_name='dot', and vectors are compared by cosine here; evaluate "
                                         "it with library=sentence-transformers"):
        AnchorEmbedder.from_pretrained(folder)
    one, = candidates(dict(dotted=folder))
    encoder, peer = load(one, revision(one)), theirs(folder)
    found = encoder.embed(TEXTS, "", SimpleNamespace(name="T", type="STS"), None)
    same(encoder.similarity(found, found), peer.similarity(peer.encode(TEXTS), peer.encode(TEXTS)), 1e-4)
    assert str(encoder.mteb_model_meta.similarity_fn_name) == "dot"
    usual, = candidates(dict(usual=st_folder(tmp_path/"usual", dict(pooling_mode="mean"), kinds=kinds)))
    assert len({revision(one), revision(usual), revision(replace(usual, library="anchor_nb"))}) == 3
    same(AnchorEmbedder.from_pretrained(st_folder(tmp_path/"unit", dict(pooling_mode="mean"),
                                                  similarity_fn_name="dot")).encode(TEXTS),
         AnchorEmbedder.from_pretrained(str(tmp_path/"usual")).encode(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_what_will_be_loaded_is_known_before(tmp_path, bidirectional):
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean", include_prompt=False), bidirectional=bidirectional,
                       prompts={"query": "find: "})
    for source in (folder, adapter(tmp_path/"a", TINY), resolve_model("minilm")):
        assert planned(source) == loaded(AnchorEmbedder.from_pretrained(source))


def test_what_sentence_transformers_saves_today(tmp_path):
    peer = theirs(st_folder(tmp_path/"st", dict(pooling_mode_lasttoken=True)))
    peer.save(str(tmp_path/"again"))
    same(AnchorEmbedder.from_pretrained(str(tmp_path/"again")).encode(TEXTS[:1]), peer.encode(TEXTS[:1]))


def test_an_encoder_of_sentence_transformers():
    "BERT looks both ways by nature and has no language-model head."
    same(AnchorEmbedder.from_pretrained("minilm").encode(TEXTS), theirs(resolve_model("minilm")).encode(TEXTS))


@pytest.mark.parametrize("family, tokens", [("xlm-roberta", 68), ("roberta", 68), ("bert", 70)])
def test_positions_are_counted_as_the_family_does(tmp_path, family, tokens):
    "RoBERTa and its kin, multilingual-e5 and bge-m3 among them, number a text's tokens from behind that of padding."
    folder = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True))
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(
        family, vocab_size=1000, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=70, pad_token_id=1, initializer_range=0.5)).save_pretrained(folder)
    ours, peer = AnchorEmbedder.from_pretrained(folder), theirs(folder)
    same(ours.encode(TEXTS), peer.encode(TEXTS))
    ours.max_seq_length = 100
    with pytest.raises(ValueError, match=f"has {tokens} positions, and a text has 100 tokens; lower max_length"):
        ours.encode(TEXTS)


def test_an_adapter_of_sentence_transformers(tmp_path):
    "Its weights sit on the bare decoder."
    from peft import LoraConfig
    peer = theirs(st_folder(tmp_path/"st", dict(pooling_mode_lasttoken=True)))
    peer.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="FEATURE_EXTRACTION"))
    randomise(peer[0].model)
    peer.save(str(tmp_path/"adapter"))
    assert (tmp_path/"adapter/adapter_config.json").is_file() and not (tmp_path/"adapter/model.safetensors").is_file()
    same(AnchorEmbedder.from_pretrained(str(tmp_path/"adapter"), max_length=64).encode(TEXTS), peer.encode(TEXTS), 1e-5)


# ---- adapters ----

def randomise(model):
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(weight, std=0.2)


def adapter(folder, base, kind=AutoModelForCausalLM, said=None, **settings):
    "An adapter with random weights; `said` is what its configuration calls the base."
    from peft import LoraConfig, get_peft_model
    settings = dict(task_type="CAUSAL_LM" if kind is AutoModelForCausalLM else None, r=4, lora_alpha=8,
                    target_modules="all-linear") | settings
    model = get_peft_model(kind.from_pretrained(base), LoraConfig(**settings))
    randomise(model)
    model.peft_config["default"].base_model_name_or_path = str(said or base)
    model.save_pretrained(folder)
    return str(folder)


def plain_mean(model, tokenizer, texts, keep, is_causal):
    "The slow way: one text at a time, the mean over its last `keep(text)` states."
    out = []
    for text in texts:
        states = model(torch.tensor([tokenizer(text)["input_ids"]]), is_causal=is_causal,
                       use_cache=False).last_hidden_state[0].detach()
        out.append(F.normalize(states[-keep(text):].mean(0), dim=-1))
    return torch.stack(out).numpy()


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForCausalLM])
def test_an_adapter_on_a_local_base(tmp_path, kind):
    "Made on the bare decoder or on the model with its head; the tokenizer is the base's."
    from peft import PeftModel
    base = kind.from_pretrained(TINY)
    model = PeftModel.from_pretrained(base, adapter(tmp_path/"a", TINY, kind, bias="none"))
    trunk = model.base_model.model if kind is AutoModel else model.base_model.model.model
    ours = AnchorEmbedder.from_pretrained(str(tmp_path/"a"), pooling="mean")
    tokens = ours.formatter(TEXTS)
    expected = [F.normalize(trunk(torch.tensor([t.ids]), use_cache=False).last_hidden_state[0].mean(0),
                            dim=-1).detach().numpy() for t in tokens]
    same(ours.encode(TEXTS), expected, 1e-5)
    assert abs(ours.encode(TEXTS) - AnchorEmbedder.from_pretrained("tiny", pooling="mean").encode(TEXTS)).max() > 1e-2


def test_a_base_and_an_adapter_on_a_hub(tmp_path, monkeypatch):
    "A hub stands in the way of names only: what it hands out are folders."
    import huggingface_hub
    from anchor_nb.models import loading
    named = adapter(tmp_path/"a", TINY, said="owner/base")
    monkeypatch.setattr(resolving, "resolve_model", lambda name: TINY if name == "owner/base" else name)
    expected = AnchorEmbedder.from_pretrained(named).encode(TEXTS)
    fetched = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: fetched.append(name)
                        or named)
    assert loading.chain("owner/adapter") == loading.chain("owner/adapter") == ["owner/adapter", TINY]
    assert fetched == ["owner/adapter"], "the hub is asked once in a process"
    same(AnchorEmbedder.from_pretrained(named).encode(TEXTS), expected, 0)


@pytest.mark.parametrize("size, wrong", [(dict(num_hidden_layers=3), "layers.2"), (dict(hidden_size=32), "size")])
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, size, wrong):
    "peft would warn, load what fits and leave out the rest."
    from transformers import AutoConfig
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY, **size)).save_pretrained(tmp_path/"other")
    with pytest.raises(ValueError, match=f"the adapter does not fit LlamaForCausalLM, see .*{wrong}"):
        AnchorEmbedder.from_pretrained(adapter(tmp_path/"a", tmp_path/"other", said=TINY))


# ---- LLM2Vec ----

def llm2vec_folders(tmp_path, base=TINY, **config):
    "A base with an MNTP adapter in one folder, a supervised adapter in another, both on the bare decoder."
    first, second = adapter(tmp_path/"mntp", base, AutoModel), adapter(tmp_path/"supervised", base, AutoModel, r=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"): shutil.copy2(Path(base)/name, first)
    write(first, config=json.loads((Path(base)/"config.json").read_text())
          | dict(auto_map={"AutoModel": "modeling_llama_encoder.LlamaEncoderModel"}))
    return first, write(second, llm2vec_config=dict(pooling_mode="mean", max_length=512, doc_max_length=400,
                                                    skip_instruction=True) | config)


@pytest.mark.parametrize("instruct", [False, True])
def test_llm2vec(tmp_path, instruct):
    "Both adapters merged in order, bidirectional, mean after the instruction; a chat template where the base asks."
    from peft import PeftModel
    base = tmp_path/("Llama-Instruct" if instruct else "base")
    shutil.copytree(TINY, base)
    first, second = llm2vec_folders(tmp_path, str(base))
    model = PeftModel.from_pretrained(PeftModel.from_pretrained(AutoModel.from_pretrained(base),
                                                                first).merge_and_unload(), second).merge_and_unload()
    ours, tokenizer = AnchorEmbedder.from_pretrained(first, adapter=second), AutoTokenizer.from_pretrained(base)
    head, tail = (ours.formatter.layout.head, ours.formatter.layout.tail) if instruct else ("", "")
    assert bool(head) == instruct and ours.pooling == "rest_mean" and ours.lm.config.is_causal is False
    texts = [text for text in TEXTS if len(text) < 100]
    for instruction, start in (("", ""), ("find animals", "find animals ")):
        # as LLM2Vec counts: the text alone
        keep = lambda text: len(tokenizer(text.removeprefix(head + start))["input_ids"])
        expected = plain_mean(model, tokenizer, [head + start + text + tail for text in texts], keep, False)
        same(ours.encode(texts, instruction), expected, 1e-5)


def test_llm2vec_from_the_supervised_folder_alone_and_saved_as_ours(tmp_path):
    "Its adapter names a base, which may be the MNTP folder; what we save needs none of them."
    first, second = llm2vec_folders(tmp_path)
    config = Path(second)/"adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(base_model_name_or_path=first)))
    expected = AnchorEmbedder.from_pretrained(first, adapter=second)
    same(AnchorEmbedder.from_pretrained(second).encode(TEXTS), expected.encode(TEXTS), 0)
    expected.save_pretrained(tmp_path/"ours")
    shutil.rmtree(first); shutil.rmtree(second)
    same(AnchorEmbedder.from_pretrained(str(tmp_path/"ours")).encode(TEXTS), expected.encode(TEXTS), 1e-6)


def test_the_authors_stage_one_checkpoint(tmp_path):
    "A bare decoder in LLM2Vec's layout, with [EOS] pooling and causal attention, which nothing in the folder says."
    folder = tmp_path/"checkpoint"
    AutoModel.from_pretrained(TINY).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    write(folder, llm2vec_config=dict(pooling_mode="eos_token", max_length=512, doc_max_length=400,
                                      skip_instruction=True))
    with pytest.raises(ValueError, match="false for one of Anchor Embedding's authors"):
        AnchorEmbedder.from_pretrained(str(folder))
    ours, model = AnchorEmbedder.from_pretrained(str(folder), bidirectional=False), AutoModel.from_pretrained(TINY)
    for text, vector in zip(TEXTS, ours.encode(TEXTS)):
        ids = ours.formatter.tokenizer(text)["input_ids"]
        assert ids[-1] == ours.formatter.tokenizer.eos_token_id
        same(vector, F.normalize(model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1], dim=-1).detach())
    with pytest.raises(ValueError, match="not a causal language model"): load_backbone(str(folder))


# ---- GritLM ----

def gritlm_folder(tmp_path):
    "The bare decoder that gritlm-re saves: nothing but weights and tokenizer."
    AutoModel.from_pretrained(TINY).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    return str(tmp_path)


def test_gritlm(tmp_path):
    "Against GritLM's own library, where it is installed."
    gritlm = pytest.importorskip("gritlm", reason="pip install --no-deps gritlm==1.0.2")
    folder = gritlm_folder(tmp_path)
    peer = gritlm.GritLM(folder, mode="embedding", attn="bb", device="cpu")
    ours = AnchorEmbedder.from_pretrained(folder, kind="gritlm")
    same(ours.encode_query(TEXTS, "find animals"),
         peer.encode(TEXTS, instruction="<|user|>\nfind animals\n<|embed|>\n"), 1e-5)
    same(ours.encode_document(TEXTS), peer.encode(TEXTS, instruction="<|embed|>\n"), 1e-5)
    same(AnchorEmbedder.from_pretrained(folder, kind="gritlm-re").encode_document(TEXTS), peer.encode(TEXTS), 1e-5)


def test_gritlm_re_keeps_the_first_word_of_a_query(tmp_path):
    "`Query: ` alone is a token longer than before a word, so GritLM's mean lacks that word's token; offsets are right."
    folder = gritlm_folder(tmp_path)
    ours = AnchorEmbedder.from_pretrained(folder, kind="gritlm-re")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    query = "Instruct: find animals\nQuery: "
    assert len(tokenizer(query)["input_ids"]) > len(tokenizer(query.rstrip())["input_ids"])
    keep = lambda text: sum(end > len(query) for _, end in tokenizer(text,
                                                                     return_offsets_mapping=True)["offset_mapping"])
    texts = [text for text in TEXTS if len(text) < 100]
    same(ours.encode_query(texts, "find animals"), plain_mean(model, tokenizer, [query + text for text in texts], keep,
                                                              False), 1e-5)


def test_gritlm_is_known_by_its_code_which_is_not_run(tmp_path):
    folder = gritlm_folder(tmp_path)
    config = Path(folder)/"config.json"
    config.write_text(json.dumps(json.loads(config.read_text())
                                 | dict(auto_map={"AutoModel": "modeling_gritlm7b.MistralModel"})))
    assert AnchorEmbedder.from_pretrained(folder).formatter.layout.document_format.startswith("<|embed|>")


# ---- as a guide, in training and in an evaluation ----

def rows():
    from anchor_nb.data.rows import Example
    return [Example("a cat sleeps", "cats sleep all day", ["rivers flood"], "Find animals", ""),
            Example("the river floods", "in spring", [], "Find rivers", "")]


@pytest.mark.parametrize("kind", ["sentence-transformers", "encoder", "snapshot", "run"])
def test_a_guide_judges_as_the_embedder_that_it_is(tmp_path, kind):
    "With the pooling, prompts, adapter and layout that belong to it, whoever saved it."
    from anchor_nb.losses.negatives import Guide
    if kind == "sentence-transformers":
        source = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True), bidirectional=True,
                           prompts={"query": "question:\n", "document": "text:\n"})
    if kind == "encoder": source = "minilm"
    if kind == "snapshot": # an adapter with our layout
        source = adapter(tmp_path/"a", TINY)
        AnchorEmbedder.from_pretrained("tiny").formatter.tokenizer.save_pretrained(source)
        save_layout(source, resolve_layout(AutoTokenizer.from_pretrained(TINY), "plain"), pooling="mean", base=TINY)
    if kind == "run":
        AnchorEmbedder.from_pretrained("tiny", pooling="weighted_mean").save_pretrained(tmp_path/"run/model")
        source = str(write(tmp_path/"run", run=dict(status="complete")))
    guide, expected = Guide(source, micro_tokens=30), AnchorEmbedder.from_pretrained(source)
    instructions = ["Find animals", "Find rivers"] if kind in ("snapshot", "run") else ""
    found = F.normalize(guide.states(guide.texts(rows())), dim=-1)
    same(found[:2], expected.encode([row.query for row in rows()], instructions, role="query"), 1e-5)
    same(found[2:], expected.encode_document(["cats sleep all day", "in spring", "rivers flood"]), 1e-5)
    assert not found.requires_grad


def test_training_goes_on_in_the_layout_of_the_makers(tmp_path):
    "What the recipe leaves at its default is the checkpoint's."
    st = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True))
    ours = training_formatter(st, Stage2(pooling="mean", max_length=64))
    plain = AutoTokenizer.from_pretrained(st)
    for text in TEXTS: assert ours([text])[0].ids == plain(text, truncation=True, max_length=64)["input_ids"]
    # its own would glue the two together
    assert ours.layout.head == "" and ours.layout.instruction_format == "{instruction}; {text}"
    grit = write(gritlm_folder(tmp_path/"grit"), config=json.loads((tmp_path/"grit/config.json").read_text())
                 | dict(auto_map={"AutoModel": "modeling_gritlm7b.MistralModel"}))
    recipe = Stage2(pooling="rest_mean", bidirectional=True, max_length=64)
    for instruction in ("", "find animals"):
        theirs = AnchorEmbedder.from_pretrained(grit).formatter
        assert training_formatter(grit, recipe)(TEXTS[:1], instruction) == theirs(TEXTS[:1], instruction)
    said = training_formatter(grit, replace(recipe, instruction_format="Find: {instruction} {text}"))
    assert said.tokenizer.decode(said(["x"], "animals")[0].ids).endswith("Find: animals x")
    with pytest.raises(ValueError, match=r"no \[EOS\] after texts, which pooling=eos needs; set pooling=rest_mean"):
        training_formatter(grit, Stage2(bidirectional=True))
    assert training_formatter(grit, Stage2(template="plain")).layout == load_formatter(grit,
                                                                                       Stage2(template="plain")).layout
    assert training_formatter(TINY, Stage2()).layout == load_formatter(TINY, Stage2()).layout
    for part in (AutoModel, AutoTokenizer): part.from_pretrained(TINY).save_pretrained(tmp_path/"authors")
    authors = write(tmp_path/"authors", llm2vec_config=dict(pooling_mode="eos_token", skip_instruction=True))
    loaded = AnchorEmbedder.from_pretrained(authors, bidirectional=False)
    assert training_formatter(authors, Stage2()).layout == loaded.formatter.layout


def sides(candidate, name="Facts", kind="Retrieval"):
    "A candidate's vectors as mteb asks for them: queries, documents, and texts without a side."
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType
    from anchor_nb.evaluation.encoders import load
    task = TaskMetadata(name=name, type=kind, description="", dataset=dict(path="local", revision="1"), category="t2t",
                        modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10")
    encoder = load(candidate, "1", max_length=64, instructions={name: "find animals"})
    return [encoder.encode([{"text": TEXTS}], task_metadata=task, prompt_type=side) for side in (PromptType.query,
                                                                                                 PromptType.document,
                                                                                                 None)]


def test_an_evaluation_uses_the_prompts_that_a_checkpoint_brings(tmp_path):
    "By side, by task and by type of task, as where sentence-transformers loads the same folder."
    folder = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True), prompts={"query": "question:\n",
                                                                                    "document": "text:\n",
                                                                                    "STS": "compare:\n",
                                                                                    "Named": "named:\n"})
    for task in (("Facts", "Retrieval"), ("Named", "Retrieval"), ("Alike", "STS")):
        ours, theirs = [sides(Candidate("x", folder, library=library), *task) for library in ("anchor_nb",
                                                                                              "sentence-transformers")]
        for one, other in zip(ours, theirs): same(one, other, 1e-5)
    queries, documents, _ = sides(Candidate("x", folder))
    assert abs(queries - documents).max() > 1e-3


def test_an_evaluation_cuts_the_vectors_of_both_libraries_alike(tmp_path):
    "The first numbers, at length 1 again."
    folder = st_folder(tmp_path/"st", dict(pooling_mode_mean_tokens=True))
    whole = sides(Candidate("x", folder))
    for library in ("anchor_nb", "sentence-transformers"):
        for one, short in zip(whole, sides(Candidate("x", folder, library=library, truncate_dim=8))):
            same(short, one[:, :8]/np.linalg.norm(one[:, :8], axis=1, keepdims=True), 1e-5)


def test_how_a_checkpoint_is_loaded_can_be_said_to_an_evaluation(tmp_path):
    "What the files do not tell: its kind, which way it looks, a further adapter."
    grit, (first, second) = gritlm_folder(tmp_path/"grit"), llm2vec_folders(tmp_path)
    for model, how in ((grit, dict(kind="gritlm-re")), (TINY, dict(bidirectional=True, pooling="mean")),
                       (first, dict(adapter=second))):
        candidate, = candidates({"x": {"model": model, **how}})
        queries, documents, _ = sides(candidate)
        expected = AnchorEmbedder.from_pretrained(model, max_length=64, **how)
        same(queries, expected.encode_query(TEXTS, "find animals"), 1e-6)
        same(documents, expected.encode_document(TEXTS), 1e-6)
        assert revision(candidate) != revision(candidates({"x": {"model": model, "library": "anchor_nb",
                                                                 **{name: value for name, value in how.items()
                                                                    if name == "pooling"}}})[0])


# ---- what cannot be ----

@pytest.mark.parametrize("change, message", [
    (dict(modules=parts("Transformer", "Pooling", "Dense")), "has Dense, which is no part of an embedder here; use "
                                                             "library=sentence-transformers"),
    (dict(modules=parts("Transformer", "Pooling", "LayerNorm")), "has LayerNorm"),
    (dict(modules=[dict(parts("Transformer")[0], path="0_BERT"), *parts("Transformer", "Pooling")[1:]]),
     "has its weights in 0_BERT, as old versions wrote it; load it with sentence-transformers, save it again"),
    ({"1_Pooling__config": dict(pooling_mode="cls", include_prompt=False)}, "cls without the prompt is not supported"),
    ({"1_Pooling__config": dict(pooling_mode_max_tokens=True)}, "pooling 'max_tokens' is none of cls, "),
    ({"1_Pooling__config": dict(pooling_mode=["mean", "lasttoken"])}, "pooling 'mean, lasttoken' is none of")])
def test_a_part_that_we_have_not_is_named(tmp_path, change, message):
    folder = st_folder(tmp_path/"st", dict(pooling_mode="mean"))
    with pytest.raises(ValueError, match=re.escape(message)): AnchorEmbedder.from_pretrained(write(folder, **change))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='colbert'; there are anchor_nb, llm2vec"):
        AnchorEmbedder.from_pretrained("tiny", kind="colbert")


def test_facts_of_a_folder_of_ours_are_the_last_word(tmp_path):
    "Other files beside anchor_nb.json change nothing."
    AnchorEmbedder.from_pretrained("tiny", pooling="mean").save_pretrained(tmp_path)
    write(tmp_path, llm2vec_config=dict(pooling_mode="weighted_mean"), modules=parts("Transformer"))
    assert read_facts(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path))["pooling"] == "mean"
    check_attention(AnchorEmbedder.from_pretrained(str(tmp_path)).lm)


def test_gritlm_is_not_trained_causally_without_a_word(tmp_path):
    grit = write(gritlm_folder(tmp_path/"grit"), config=json.loads((tmp_path/"grit/config.json").read_text())
                 | dict(auto_map={"AutoModel": "modeling_gritlm7b.MistralModel"}))
    with pytest.raises(ValueError, match="set bidirectional=true"):
        training_formatter(grit, Stage2(pooling="rest_mean"))


def test_the_layout_of_a_model_on_the_hub_is_read_where_its_small_files_are(tmp_path):
    "Its tokenizer comes by its id, its record by a folder of the client's cache."
    ours = AnchorEmbedder.from_pretrained(TINY)
    ours.formatter = load_formatter(TINY, Stage2(template="plain", eos="<|endoftext|>"))
    ours.save_pretrained(tmp_path/"small")
    assert load_formatter(TINY, Stage2(), tmp_path/"small").layout.eos == "<|endoftext|>"
    assert load_formatter(TINY, Stage2()).layout.eos != "<|endoftext|>"


@pytest.mark.parametrize("beside, open_", [
    ({}, True), # as transformers alone fetches it
    ({".no_exist/a1/modules.json": ""}, False), ({"snapshots/a1/modules.json": "[]"}, False)])
def test_a_model_that_is_cached_in_part_is_told_from_a_plain_one(tmp_path, monkeypatch, beside, open_):
    from anchor_nb.models.loading import is_left_open, small_files
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path/"models--org--base"
    for name, text in {"refs/main": "a1", "snapshots/a1/config.json": "{}", **beside}.items():
        (place/name).parent.mkdir(parents=True, exist_ok=True)
        (place/name).write_text(text)
    small = small_files("org/base")
    assert small == place/"snapshots/a1" and is_left_open("org/base", small) == open_
    assert not is_left_open(str(small), small) and not is_left_open("org/other", small_files("org/other"))


def in_cache(cache, name, monkeypatch):
    "A folder that the hub's client takes for its copy of a model."
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = cache/f"models--{name.replace('/', '--')}"
    (place/"refs").mkdir(parents=True)
    (place/"refs/main").write_text("a1")
    (place/"snapshots/a1").mkdir(parents=True)
    return place/"snapshots/a1"


def test_a_model_in_several_files_is_here_once_all_of_them_are(tmp_path, monkeypatch):
    from anchor_nb.models.resolve import is_here
    folder = in_cache(tmp_path, "org/large", monkeypatch)
    parts = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    write(folder, config={})
    (folder/"model.safetensors.index.json").write_text(json.dumps(dict(weight_map=parts)))
    (folder/parts["a"]).touch()
    assert not is_here("org/large")
    (folder/parts["b"]).touch()
    assert is_here("org/large")


def test_an_adapter_is_loaded_by_its_hub_id(tmp_path, monkeypatch):
    from anchor_nb.models.resolve import model_files, start_of
    folder = in_cache(tmp_path, "org/adapter", monkeypatch)
    add_lora(load_backbone(TINY), rank=4).save_pretrained(folder)
    weights = load_file(file := folder/"adapter_model.safetensors")
    save_file({name: torch.ones_like(weight)/8 for name, weight in weights.items()}, file)
    wanted = AnchorEmbedder.from_pretrained(folder).encode("a cat")
    assert not np.allclose(wanted, AnchorEmbedder.from_pretrained(TINY).encode("a cat"), atol=1e-3)
    np.testing.assert_allclose(AnchorEmbedder.from_pretrained("org/adapter").encode("a cat"), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="org/adapter is an adapter of"): start_of("org/adapter")
    assert len(model_files("org/adapter")) == 2, "its base decides the vectors too"
