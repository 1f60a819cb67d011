"Decoding: the training pass for every family, runs of both stages, the ledger, and without the extra."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import warm
from anchor_nb.models.backbone import run_packed, trunk_of
from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.resolve import resolve_model
from anchor_nb.inference.decoding import (anchors_of, decode_from_anchor, given_tokens, others, remembered, rules_of,
                                          target_losses, token_overlap, write)
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.packing import pack
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.losses.reconstruction import DecodeRules
from anchor_nb.runs.ledger import read_rows
from anchor_nb.evaluation.tables import comparable
from anchor_nb.training.trainer import train
from common import recipe, rows

TEXTS = ["Who bakes bread?", "a", "", "the river floods in spring " * 30, "naïve 文字 \ud83d"[:8]]
AUTHORS = dict(decode_from="sequence", target_template=True, target_eos=False, hide_template=True)
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig, {}), "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
            "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=8)),
            "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
            "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, dict(head_dim=8, sliding_window=128))}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    "A random model of each family, with the tiny model's tokenizer, and weights large enough that no two tokens tie."
    folder = tmp_path_factory.mktemp("families")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    for name, (model, config, more) in FAMILIES.items():
        torch.manual_seed(0)
        built = model(config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2,
                             max_position_embeddings=256, initializer_range=0.3, eos_token_id=tokenizer.eos_token_id,
                             pad_token_id=tokenizer.pad_token_id, bos_token_id=None, tie_word_embeddings=False, **more))
        built.generation_config.repetition_penalty = 3.0 # a habit that must not show
        built.save_pretrained(folder/name), tokenizer.save_pretrained(folder/name)
    return folder


def eos(embedder): return embedder.formatter.tokenizer.convert_tokens_to_ids(embedder.formatter.layout.eos)


@torch.no_grad()
def step_by_step(embedder, anchor, given, most, hide):
    "The likeliest next token, again and again, by the packed decoding pass that stage I trains."
    lm, written = embedder.lm, []
    while len(written) < most:
        packed = pack([[0, *given, *written]])
        embeddings = lm.get_input_embeddings()(packed.ids).index_copy(0, torch.tensor([0]), anchor[None])
        visible = torch.tensor([True] + [not hide]*len(given) + [True]*len(written)) if hide else None
        state = run_packed(trunk_of(lm), packed, embeddings, visible, causal=True)[-1]
        token = lm.get_output_embeddings()(state).argmax().item()
        if token == eos(embedder): break
        written.append(token)
    return written


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_writing_is_the_training_pass_token_by_token(models, family, bidirectional):
    embedder = AnchorEmbedder.from_pretrained(str(models/family), precision="fp64", max_length=64,
                                              bidirectional=bidirectional, pooling="mean" if bidirectional else "")
    for rules in (DecodeRules(), DecodeRules(**AUTHORS)):
        anchors, given = anchors_of(embedder, embedder.formatter(TEXTS)), given_tokens(embedder, rules, "find it")
        written = write(embedder, anchors, given, max_new_tokens=12, rules=rules)
        assert written == [step_by_step(embedder, anchor, given, 12, rules.hide_template) for anchor in anchors]
        assert len({tuple(ids) for ids in written}) > 1, "anchors make no difference, so this test sees nothing"
    assert embedder.lm.config.is_causal is not bidirectional and embedder.lm.generation_config.repetition_penalty == 3.0


def test_neither_batch_nor_budget_nor_company_change_what_is_written(models):
    embedder = AnchorEmbedder.from_pretrained(str(models/"llama"), precision="fp64", max_length=64)
    formatted = embedder.formatter(TEXTS)
    anchors = anchors_of(embedder, formatted)
    losses = torch.cat(target_losses(embedder, anchors, formatted))
    embedder.micro_tokens = 10
    assert torch.allclose(anchors_of(embedder, formatted), anchors, atol=1e-9)
    assert torch.allclose(torch.cat(target_losses(embedder, anchors, formatted)), losses, atol=1e-5)
    alone = [write(embedder, anchor[None], max_new_tokens=9)[0] for anchor in anchors]
    assert write(embedder, anchors, batch=2, max_new_tokens=9) == alone
    before = torch.random.get_rng_state()
    first = decode_from_anchor(embedder, TEXTS, samples=2, seed=5, max_new_tokens=9)
    assert first == decode_from_anchor(embedder, TEXTS, samples=2, seed=5, max_new_tokens=9)
    assert torch.equal(before, torch.random.get_rng_state())
    assert [len(decoding.samples) for decoding in first] == [2]*len(TEXTS)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    "A run of stage I by the authors' rules, and one of stage II on it."
    folder = tmp_path_factory.mktemp("chain")
    train(recipe(Stage1, folder/"one", steps=4, instructions="corpora", max_length=96, **AUTHORS))
    train(recipe(Stage2, folder/"two", steps=4, instructions="corpora", max_length=96, model=str(folder/"one"),
                 snapshot_steps=2))
    return folder


def test_checkpoints_of_both_stages_write_by_the_rules_of_stage_one(chain):
    "Every checkpoint of a chain says how stage I decoded, and is decoded so."
    for where in (chain/"one", chain/"two", chain/"two/snapshots/step-2"):
        assert rules_of(str(where)) == DecodeRules(**AUTHORS)
        embedder = AnchorEmbedder.from_pretrained(str(where))
        instruction, words = "Find the person", "the smith"
        found = decode_from_anchor(str(where), [words], instruction, samples=1, max_new_tokens=8)
        assert found == decode_from_anchor(embedder, [words], instruction, samples=1, max_new_tokens=8,
                                           rules=DecodeRules(**AUTHORS))
        assert isinstance(found[0].text, str) and len(found[0].samples) == 1
        text, = embedder.formatter([words], instruction)
        assert given_tokens(embedder, DecodeRules(**AUTHORS), instruction) == text.ids[:text.start]
    assert given_tokens(embedder, DecodeRules(), instruction) == []


@pytest.mark.parametrize("how", [dict(), dict(anchor_scale=0.1), dict(anchor_norm=False)], ids=str)
def test_the_loss_of_a_first_step_is_found_again(tmp_path, how):
    "One step over all of a small data set: what the trainer logs is what `remembered` says of the untrained model."
    pairs = [(f"query {n}", f"document {n} is longer " * (n + 1)) for n in range(4)]
    (tmp_path/"few.jsonl").write_text("".join(json.dumps(dict(query=q, positive=d, negatives=[])) + "\n"
                                              for q, d in pairs))
    train(recipe(Stage1, tmp_path/"run", data=str(tmp_path/"few.jsonl"), steps=1, global_batch=4, instructions="none",
                 max_length=64, **how))
    assert rules_of(str(tmp_path/"run")) == DecodeRules(**how)
    found = remembered(AnchorEmbedder.from_pretrained("tiny", max_length=64), pairs, rules=DecodeRules(**how),
                       max_new_tokens=4)
    for name in ("loss_q2d", "loss_d2q"): assert found[name] == pytest.approx(rows(tmp_path/"run")[0][name], rel=1e-5)


def evaluate(folder, *words):
    command = Path(sys.executable).with_name("anchor-nb")
    return warm.run([command, "evaluate", "tiny", "--task", build_corpus("toy")/"eval", "-p", "max_length=64",
                           "-p", "yardsticks=[]", *map(str, words), "--json"], cwd=folder, capture_output=True,
                           text=True, timeout=600)


def test_reconstructions_go_into_the_ledger_beside_the_scores(tmp_path):
    first = evaluate(tmp_path, "-p", "reconstruction=3")
    assert first.returncode == 0, first.stderr[-2000:]
    ledger = read_rows(tmp_path/"runs/evaluate/ledger.jsonl")
    ours = [row for row in ledger if row["type"] == "Reconstruction"]
    assert len(ours) == 32 and {row["task"] for row in ours} == {"reconstruction:toy"}
    assert not any(row["main"] for row in ours) and {row["queries"] for row in ours} == {3}
    assert {row["evaluation"] for row in ours} == {row["evaluation"] for row in ledger}
    assert ([row["task"] for row in comparable(ledger)] == ["toy"]
            and json.loads(first.stdout)["tasks"].keys() == {"toy"})


def test_without_the_extra_texts_are_written_and_scores_say_what_to_install():
    code = """
import sys
sys.modules["rouge_score"] = None
from anchor_nb.inference.decoding import decode_from_anchor, remembered
from anchor_nb.models.embedder import AnchorEmbedder
tiny = AnchorEmbedder.from_pretrained("tiny")
assert isinstance(decode_from_anchor(tiny, "a", max_new_tokens=3).text, str)
try: remembered(tiny, [("a", "b"), ("c", "d")])
except ImportError as error: print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "anchor_nb[generation]"' in result.stdout, result.stderr[-1000:]


@pytest.mark.parametrize("count", [2, 3, 7, 100])
@pytest.mark.parametrize("seed", range(5))
def test_a_shuffle_leaves_nothing_in_place(count, seed):
    order = others(count, seed)
    assert sorted(order) == list(range(count)) and all(n != other for n, other in enumerate(order))


def test_overlap_is_a_bag_and_blind_to_order():
    assert token_overlap([3, 1, 2], [1, 2, 3]) == (1, 1) and token_overlap([1]*9, [1]) == (1, 1/9)
