"Exports give the same vectors in other libraries: tokenizers, models, attention, adapters, dtypes, and refusals."
import json
import logging
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.release.export import BY_RULES, COMPARED, LONG, NOT_READ, SHORT, check, export, readers
from anchor_nb.release.hub import files_of
from anchor_nb.data.prompts import Formatter, fit_layout, paper_instructions, resolve_layout, save_layout
from anchor_nb.core.recipe import Stage2
from common import recipe, run

TINY = resolve_model("tiny")
TEXTS = [*SHORT, LONG*30, "x"]

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% "
          "endfor %}")
LLAMA3 = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
          "m['content'] | trim + '<|eot_id|>' }}{% endfor %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' "
           "}}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}")
TOKENIZERS = { # special tokens, BOS, [EOS], padding, template, whether it writes BOS by itself
    "llama3": (["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
               "<|begin_of_text|>", "<|eot_id|>", None, LLAMA3, True),
    "qwen2.5": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>", "<|endoftext|>", CHATML, False),
    "mistral": (["<s>", "</s>", "<unk>"], "<s>", "</s>", None, MISTRAL, True),
    "smollm2": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_start|>", "<|im_end|>", "<|im_end|>", CHATML,
                False)}
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, vocab_size=420)


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


def tokenizer_of(family, pieces=False):
    "A small tokenizer as a family has it, byte-level or with SentencePiece's spaces."
    special, bos, eos, pad, chat, adds = TOKENIZERS[family]
    raw = Tokenizer(models.BPE(unk_token="<unk>") if pieces else models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first") if pieces else byte_level
    raw.decoder = decoders.Metaspace() if pieces else decoders.ByteLevel()
    alphabet = [] if pieces else pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(["the user asked what [INST] the river floods in spring [/INST] and the mill stands still, "
                             "a cat sleeps"]*4, trainers.BpeTrainer(vocab_size=400, special_tokens=special,
                                                                    initial_alphabet=alphabet, show_progress=False))
    if adds:
        raw.post_processor = processors.TemplateProcessing(single=f"{bos} $A",
                                                           special_tokens=[(bos, raw.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos, pad_token=pad, unk_token="<unk>"
                                   if pieces else None, chat_template=chat)


def checkpoint(folder, kind="llama", family="smollm2", dtype=torch.float32, pieces=False, pooling="eos",
               bidirectional=False, said={}, **changes):
    "A model with random weights as a stage leaves it."
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes)).to(dtype)
    tokenizer = tokenizer_of(family, pieces)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_layout(folder, resolve_layout(tokenizer, max_length=128), pooling=pooling, bidirectional=bidirectional, **said)
    return str(folder)


def peer_of(folder, side="right"):
    from sentence_transformers import SentenceTransformer
    peer = SentenceTransformer(str(folder), device="cpu", model_kwargs=dict(dtype=torch.float32))
    peer.tokenizer.padding_side = side
    return peer


def read(path): return json.loads(Path(path).read_text(encoding="utf-8"))


def plainly(model, formatter, texts, instruction, peer):
    "Vectors of the weights before the export, computed by transformers in the batches of sentence-transformers."
    ids = [tokens.ids for tokens in formatter(texts, instruction)]
    batch = peer.tokenizer.pad(dict(input_ids=ids), return_tensors="pt")
    with torch.inference_mode(): states = model(**batch).last_hidden_state
    last = [-1 if peer.tokenizer.padding_side == "left" else len(row) - 1 for row in ids]
    return torch.nn.functional.normalize(states[range(len(ids)), last], dim=-1).numpy()


# ---- the same vectors ----

@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "qwen3"])
def test_the_weights_and_ids_are_the_same_to_the_last_bit(tmp_path, kind):
    "Queries, documents, truncated texts: no difference from the same computation with the weights before the export."
    family = {"llama": "llama3", "qwen2": "qwen2.5", "mistral": "mistral", "qwen3": "qwen2.5"}[kind]
    model = checkpoint(tmp_path/"m", kind, family)
    export(model, tmp_path/"out", query="Find the passage")
    before = AutoModel.from_pretrained(model)
    formatter = AnchorEmbedder.from_pretrained(model).formatter
    texts = sorted(TEXTS, key=len, reverse=True) # sentence-transformers sorts a batch so
    for side in ("right", "left"):
        peer = peer_of(tmp_path/"out", side)
        for instruction, found in (("Find the passage", peer.encode_query(texts)), ("", peer.encode_document(texts))):
            assert abs(found - plainly(before, formatter, texts, instruction, peer)).max() == 0, side
    after = AutoModel.from_pretrained(tmp_path/"out").state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.state_dict().items())


@pytest.mark.parametrize("family, pieces", [*[(name, False) for name in TOKENIZERS], ("mistral", True)])
def test_every_family_of_tokenizers(tmp_path, family, pieces):
    "The same ids for all texts and prompts, [EOS] last, also where the text was cut; gguf finds it there."
    from gguf import SpecialVocab
    model = checkpoint(tmp_path/"m", family=family, pieces=pieces)
    export(model, tmp_path/"out", prompts=dict(web="Find pages", facts="Check the claim"))
    found = check(model, tmp_path/"out")
    assert found["same"] and found["other_tokens"] == 0 and found["largest"] < 1e-6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path/"out")
    eos = AnchorEmbedder.from_pretrained(model).formatter.layout.eos
    for row in tokenizer([*TEXTS, ""], truncation=True)["input_ids"]:
        assert tokenizer.convert_ids_to_tokens(row[-1]) == eos and len(row) <= 128
    special = SpecialVocab(tmp_path/"out")
    assert (special.add_special_token["eos"] is True
            and special.special_token_ids["eos"] == tokenizer.convert_tokens_to_ids(eos))
    assert special.add_special_token.get("bos", False) == (family != "qwen2.5")


def test_white_space_around_a_text_is_the_callers(tmp_path):
    "The one difference that no file can take away, and that the notebook names."
    model = checkpoint(tmp_path/"m")
    export(model, tmp_path/"out")
    peer, ours = peer_of(tmp_path/"out"), AnchorEmbedder.from_pretrained(model).encode(" a cat sleeps\n")
    np.testing.assert_allclose(peer.encode(" a cat sleeps\n".strip()), ours, atol=1e-6)
    assert abs(peer.encode(" a cat sleeps\n") - ours).max() > 1e-4


def test_another_eos_than_the_tokenizers_own(tmp_path):
    "Qwen2.5 as the authors use it: `<|endoftext|>` behind the template."
    from gguf import SpecialVocab
    model = checkpoint(tmp_path/"m", "qwen2", "qwen2.5")
    save_layout(model, resolve_layout(AutoTokenizer.from_pretrained(model), eos="<|endoftext|>", max_length=128))
    export(model, tmp_path/"out")
    assert check(model, tmp_path/"out")["same"]
    special = SpecialVocab(tmp_path/"out")
    expected = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|endoftext|>")
    assert special.add_special_token["eos"] and special.special_token_ids["eos"] == expected


@pytest.mark.parametrize("pooling", ["eos", "last", "mean", "weighted_mean", "first"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_poolings_both_ways(tmp_path, pooling, bidirectional):
    model = checkpoint(tmp_path/"m", pooling=pooling, bidirectional=bidirectional)
    export(model, tmp_path/"out")
    found = check(model, tmp_path/"out")
    assert found["same"] and found["largest"] < 2e-6
    config = read(tmp_path/"out/config.json")
    both = config.get("is_causal") is False, config.get("use_bidirectional_attention", False)
    assert both == (bidirectional, bidirectional)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3"])
def test_other_models_look_both_ways_too(tmp_path, kind):
    model = checkpoint(tmp_path/"m", kind, pooling="mean", bidirectional=True)
    export(model, tmp_path/"out")
    assert check(model, tmp_path/"out")["same"]
    one_way = AnchorEmbedder.from_pretrained(model, bidirectional=False).encode(SHORT)
    assert abs(peer_of(tmp_path/"out").encode_document(SHORT) - one_way).max() > 1e-3


def test_what_another_library_saved_goes_through(tmp_path):
    "An encoder, with its own prompts, and vectors of any length."
    shutil.copytree(resolve_model("minilm"), tmp_path/"m")
    prompts = dict(prompts={"query": "question: ", "all": "text: "}, default_prompt_name="all")
    (tmp_path/"m/config_sentence_transformers.json").write_text(json.dumps(prompts))
    modules = [module for module in read(tmp_path/"m/modules.json") if "Normalize" not in module["type"]]
    (tmp_path/"m/modules.json").write_text(json.dumps(modules))
    export(str(tmp_path/"m"), tmp_path/"out")
    old, new = peer_of(tmp_path/"m"), peer_of(tmp_path/"out")
    for name in ("encode", "encode_query"): assert abs(getattr(old, name)(SHORT) - getattr(new, name)(SHORT)).max() == 0
    assert files_of(tmp_path/"out")[1] == []
    assert (not (tmp_path/"out/model.safetensors").is_symlink()
            and readers(tmp_path/"out")["tei"] == dict(reads=BY_RULES, note=""))


# ---- prompts ----

TRAINED = dict(instructions={name: paper_instructions()[name] for name in ("fever", "allnli")})


def test_prompts_are_the_instructions_of_training(tmp_path):
    model = checkpoint(tmp_path/"m", said=TRAINED)
    written = export(model, tmp_path/"out")["prompts"]
    assert (written["query"] == "Given a claim, retrieve documents that support or refute the claim; "
            and set(written) == {"query", "document", "fever", "allnli", "allnli_2"})
    assert check(model, tmp_path/"out")["other_tokens"] == 0
    peer, ours = peer_of(tmp_path/"out"), AnchorEmbedder.from_pretrained(model)
    again = AnchorEmbedder.from_pretrained(str(tmp_path/"out"))
    instruction = "Given a claim, retrieve documents that support or refute the claim"
    np.testing.assert_allclose(peer.encode(SHORT, prompt_name="fever"), ours.encode_query(SHORT, instruction),
                               atol=1e-6)
    for name in ("encode", "encode_query", "encode_document"):
        np.testing.assert_allclose(getattr(again, name)(SHORT), getattr(peer, name)(SHORT), atol=1e-6)
    np.testing.assert_allclose(again.encode(SHORT, prompt_name="fever"), peer.encode(SHORT, prompt_name="fever"),
                               atol=1e-6)
    np.testing.assert_allclose(again.encode_query(SHORT, instruction), ours.encode_query(SHORT, instruction), atol=1e-6)


def test_an_export_of_an_export_is_the_same(tmp_path):
    model = checkpoint(tmp_path/"m", said=TRAINED)
    first = export(model, tmp_path/"one")
    assert export(str(tmp_path/"one"), tmp_path/"two")["prompts"] == first["prompts"]
    one, two = [peer_of(tmp_path/name).encode_query(SHORT) for name in ("one", "two")]
    assert abs(one - two).max() == 0 and check(str(tmp_path/"one"), tmp_path/"two")["same"]


def test_documents_that_begin_with_something(tmp_path):
    "A plain `encode` writes it too, in ours and in theirs."
    model = checkpoint(tmp_path/"m")
    layout = resolve_layout(AutoTokenizer.from_pretrained(model), max_length=128, document_format="passage: {text}",
                            instruction_format="{instruction}: {text}")
    save_layout(model, layout)
    export(model, tmp_path/"out", query="question")
    expected = dict(prompts=dict(document="passage: ", query="question: "), default_prompt_name="document",
                    similarity_fn_name="cosine")
    assert read(tmp_path/"out/config_sentence_transformers.json") == expected
    assert check(model, tmp_path/"out")["same"]
    np.testing.assert_allclose(peer_of(tmp_path/"out").encode(SHORT),
                               AnchorEmbedder.from_pretrained(model).encode(SHORT), atol=1e-6)


# ---- weights ----

def test_types_heads_and_old_names(tmp_path):
    model = checkpoint(tmp_path/"m", dtype=torch.bfloat16, tie_word_embeddings=False,
                       rope_parameters=dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
                                            high_freq_factor=4.0, original_max_position_embeddings=64))
    assert export(model, tmp_path/"out")["dtype"] == "bfloat16" and check(model, tmp_path/"out")["same"]
    config = read(tmp_path/"out/config.json")
    assert (config["torch_dtype"], config["rope_theta"], config["rope_scaling"]["rope_type"],
            config["rope_scaling"]["factor"]) == ("bfloat16", 5e5, "llama3", 8.0)
    assert config["architectures"] == ["LlamaModel"] and "rope_scaling" in readers(tmp_path/"out")["tei"]["note"]
    export(model, tmp_path/"head", head=True, dtype="float32")
    assert check(model, tmp_path/"head")["largest"] < 1e-6
    kept, before = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
                    for folder in (tmp_path/"head", model)]
    assert torch.equal(kept, before) and read(tmp_path/"head/config.json")["architectures"] == ["LlamaForCausalLM"]
    assert files_of(tmp_path/"head")[1] == []


def test_shorter_embeddings_are_named(tmp_path):
    model = checkpoint(tmp_path/"m", said=dict(recipe=dict(matryoshka_dims=[16, 8])))
    export(model, tmp_path/"out")
    config = read(tmp_path/"out/config.json")
    assert config["is_matryoshka"] and config["matryoshka_dimensions"] == [8, 16, 32]
    ours = AnchorEmbedder.from_pretrained(model).encode(SHORT, truncate_dim=8)
    np.testing.assert_allclose(peer_of(tmp_path/"out").encode(SHORT, truncate_dim=8, normalize_embeddings=True), ours,
                               atol=1e-6)


def snapshot(folder, base, **said):
    "An adapter with weights, on a base, as a snapshot of stage II is saved."
    from peft import LoraConfig, get_peft_model
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(folder)
    save_layout(folder, resolve_layout(tokenizer, max_length=128), base=str(base), **dict(pooling="eos") | said)
    return str(folder)


def test_an_adapter_alone_and_merged(tmp_path):
    base = checkpoint(tmp_path/"base", "qwen2", "qwen2.5")
    model = snapshot(tmp_path/"snapshots/step-5", base)
    export(model, tmp_path/"merged")
    export(model, tmp_path/"adapter", adapter=True)
    for name in ("merged", "adapter"):
        assert check(model, tmp_path/name)["largest"] < 2e-6 and check(model, tmp_path/name)["same"]
    base_vectors = AnchorEmbedder.from_pretrained(base).encode(SHORT)
    assert abs(peer_of(tmp_path/"adapter").encode(SHORT) - base_vectors).max() > 1e-3
    assert not (tmp_path/"adapter/model.safetensors").exists() and not (tmp_path/"adapter/config.json").exists()
    assert [files_of(tmp_path/name)[1] for name in ("merged", "adapter")] == [[], []] # an upload takes all of it
    np.testing.assert_allclose(AnchorEmbedder.from_pretrained(str(tmp_path/"adapter")).encode(SHORT),
                               AnchorEmbedder.from_pretrained(model).encode(SHORT), atol=1e-6)
    found = {name: known["reads"] for name, known in readers(tmp_path/"adapter", dict(same=True)).items()}
    assert found == {"sentence-transformers": COMPARED, "vllm": NOT_READ, "tei": NOT_READ, "llama.cpp": NOT_READ}
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path/"merged").rglob("*.json"))


def test_an_exported_adapter_notices_another_base(tmp_path):
    model = snapshot(tmp_path/"snapshots/step-5", base := checkpoint(tmp_path/"base"))
    export(model, tmp_path/"out", adapter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        before = AnchorEmbedder.from_pretrained(tmp_path/"out").encode("x")
    checkpoint(base, rope_parameters=dict(rope_type="default", rope_theta=100.0))
    with pytest.warns(UserWarning, match="which has changed since"):
        assert abs(AnchorEmbedder.from_pretrained(tmp_path/"out").encode("x") - before).max() > 1e-4


def test_a_run_of_stage_two_and_its_snapshot(tmp_path):
    "As training leaves them: the finished model merged, the snapshot as an adapter; nothing says where they were made."
    run(recipe(Stage2, tmp_path/"run", steps=2, negatives=2, lora_rank=4, snapshot_steps=1, instructions="corpora",
               matryoshka_dims=[16]))
    written = export(str(tmp_path/"run"), tmp_path/"merged")["prompts"]
    assert set(written) == {"query", "document", "toy"} and written["query"] == written["toy"] != ""
    assert read(tmp_path/"merged/config.json")["matryoshka_dimensions"] == [16, 64]
    export(str(tmp_path/"run/snapshots/step-1"), tmp_path/"adapter", adapter=True)
    assert check(str(tmp_path/"run"), tmp_path/"merged")["same"]
    assert check(str(tmp_path/"run/snapshots/step-1"), tmp_path/"adapter")["same"]
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path/"merged").rglob("*.json"))


def test_tokens_to_pool_over_stay_before_eos(tmp_path):
    "The state at [EOS] behind added tokens can be exported; the mean over those tokens cannot."
    from anchor_nb.models.backbone import load_backbone
    layout = fit_layout(resolve_layout(AutoTokenizer.from_pretrained(TINY)), "tokens", 3)
    formatter = Formatter(AutoTokenizer.from_pretrained(TINY), layout)
    marked = AnchorEmbedder(load_backbone(TINY, vocabulary=len(formatter.tokenizer)), formatter)
    marked.save_pretrained(tmp_path/"m")
    export(str(tmp_path/"m"), tmp_path/"out")
    assert check(str(tmp_path/"m"), tmp_path/"out")["same"]
    with pytest.raises(ValueError, match="only anchor_nb knows pooling=tokens"):
        export(str(tmp_path/"m"), tmp_path/"no", pooling="tokens")


# ---- what is refused, and what is left behind ----

@pytest.mark.parametrize("said, words, message", [
    (dict(pooling="content_mean"), {},
     "only anchor_nb knows pooling=content_mean; other libraries know eos, last, mean"),
    (dict(pooling="echo_mean"), {}, "pooling=echo_mean"),
    ({}, dict(dtype="int8"), "dtype='int8'; choose one of float32, bfloat16, float16"),
    ({}, dict(adapter=True), "has full weights and no adapter; export it without adapter"),
    ({}, dict(query="find " * 99), "leaves no room for the text"),
    ({}, dict(adapter=True, head=True), "leave out dtype and head")])
def test_what_cannot_be_exported_leaves_nothing(tmp_path, said, words, message):
    model = checkpoint(tmp_path/"m", **said)
    with pytest.raises(ValueError, match=re.escape(message)): export(model, tmp_path/"out", **words)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_that_cuts_eos_is_exported_when_asked(tmp_path):
    model = checkpoint(tmp_path/"m")
    save_layout(model, resolve_layout(AutoTokenizer.from_pretrained(model), max_length=128, truncation="cut_eos"))
    with pytest.raises(ValueError, match="truncation=keep_eos exports it with"): export(model, tmp_path/"out")
    export(model, tmp_path/"out", truncation="keep_eos")
    assert check(model, tmp_path/"out")["same"]


def test_adapters_that_need_more_than_their_base_says(tmp_path):
    base = checkpoint(tmp_path/"base")
    model = snapshot(tmp_path/"run/snapshots/step-5", base, bidirectional=True, pooling="mean")
    with pytest.raises(ValueError, match="the model uses bidirectional attention; .* does not say so"):
        export(model, tmp_path/"out", adapter=True)
    export(model, tmp_path/"merged")
    assert check(model, tmp_path/"merged")["same"]
    shutil.copytree(base, tmp_path/"run/model")
    with pytest.raises(ValueError, match="the run's adapters are its snapshots, such as .*step-5"):
        export(str(tmp_path/"run"), tmp_path/"out", adapter=True)


def test_another_folder_is_never_replaced_and_half_of_one_never_left(tmp_path, monkeypatch):
    from anchor_nb.release import export as module
    model = checkpoint(tmp_path/"m")
    (tmp_path/"out").mkdir()
    with pytest.raises(ValueError, match="out exists; choose another out"): export(model, tmp_path/"out")
    (tmp_path/"out").rmdir()
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(module, "write_modules", full)
    with pytest.raises(OSError, match="the disk is full"): export(model, tmp_path/"out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_check_notices(tmp_path):
    "Another pooling, another length, another prompt, weights of another model."
    model = checkpoint(tmp_path/"m")
    export(model, tmp_path/"good", query="Find the passage")
    def spoil(name, **changes):
        shutil.copytree(tmp_path/"good", tmp_path/name.replace("/", "-"))
        path = tmp_path/name.replace("/", "-")/name
        path.write_text(json.dumps(read(path) | changes))
        return check(model, path.parents[name.count("/")])
    assert check(model, tmp_path/"good")["same"]
    assert not spoil("1_Pooling/config.json", pooling_mode_lasttoken=False, pooling_mode_mean_tokens=True)["same"]
    assert spoil("sentence_bert_config.json", max_seq_length=32)["other_tokens"] > 0
    assert spoil("config_sentence_transformers.json", prompts=dict(query="Find: ", document=""))["queries"] > 1e-3
    assert not spoil("config.json", rope_theta=5e5, rope_parameters=dict(rope_theta=5e5, rope_type="default"))["same"]


def test_vectors_that_are_not_finite_are_never_the_same(tmp_path):
    from safetensors.torch import load_file, save_file
    export(model := checkpoint(tmp_path/"m"), tmp_path/"out")
    weights = load_file(file := tmp_path/"out/model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"]*torch.nan}, file, dict(format="pt"))
    assert not check(model, tmp_path/"out")["same"]
    weights = load_file(file := Path(model)/"model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(weights, file, dict(format="pt"))
    with pytest.raises(ValueError, match="up_proj.weight has a weight of 100000, which float16 cannot hold"):
        export(model, tmp_path/"half", dtype="float16")


def test_a_misspelt_name_of_an_instruction_is_not_one():
    from anchor_nb.release.export import query_instruction
    known = dict(msmarco_passage="Given a question, find its answer", nq="Find it")
    with pytest.raises(ValueError, match="names no instruction; did you mean msmarco_passage"):
        query_instruction(known, "msmarco")
    assert query_instruction(known, "nq") == "Find it" and query_instruction(known, "query:") == "query:"
