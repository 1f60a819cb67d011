"Causal or bidirectional, packed or padded: every family gives the states of a single text, or is refused."
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from anchor_nb.models.attention import register_attention, wants_autocast
from anchor_nb.models.backbone import (add_lora, check_attention, checkpoint_activations, load_backbone, run_packed,
                                       trunk_of, what_it_sees)
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.last_layer import shorten_last_layer
from anchor_nb.models.packing import pack
from anchor_nb.models.pooling import POOLINGS, needs_last_only, pack_texts, pool_states
from anchor_nb.data.prompts import Formatter, Tokens, fit_layout, load_formatter

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text")
SIZES = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
texts = st.lists(st.lists(st.integers(3, 59), min_size=1, max_size=9), min_size=1, max_size=5)
few = settings(max_examples=8, deadline=None)
register_attention()


def model_of(family, causal=True, implementation="packed_sdpa", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | changes),
                                             attn_implementation=implementation).eval()
    model.config.is_causal = causal
    return model


MODELS = {(family, causal): model_of(family, causal) for family in FAMILIES for causal in (True, False)}
every_model = pytest.mark.parametrize("family, causal", MODELS)


def padded(model, sequences, side):
    "States of padded rows under plain attention, as transformers runs them."
    longest = max(map(len, sequences))
    def fill(text, value):
        padding = [value]*(longest - len(text))
        return padding + text if side == "left" else text + padding
    mask = torch.tensor([fill([1]*len(text), 0) for text in sequences])
    model.set_attn_implementation("sdpa")
    try:
        states = model.base_model(torch.tensor([fill(text, 0) for text in sequences]), attention_mask=mask,
                                  position_ids=(mask.cumsum(1) - 1).clamp(0), use_cache=False).last_hidden_state
    finally: model.set_attn_implementation("packed_sdpa")
    return states[mask.bool()]


@every_model
@few
@given(sequences=texts, side=st.sampled_from(["left", "right"]))
@torch.no_grad()
def test_packed_is_padded_is_alone(family, causal, sequences, side):
    model = MODELS[family, causal]
    packed = run_packed(model.base_model, pack(sequences))
    torch.testing.assert_close(packed, torch.cat([run_packed(model.base_model, pack([text])) for text in sequences]),
                               atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed, padded(model, sequences, side), atol=1e-4, rtol=1e-4)


@every_model
@few
@given(sequences=texts, where=st.data())
@torch.no_grad()
def test_a_token_is_seen_where_it_may_be_seen_and_nowhere_else(family, causal, sequences, where):
    model = MODELS[family, causal]
    text = where.draw(st.integers(0, len(sequences) - 1))
    place = where.draw(st.integers(0, len(sequences[text]) - 1))
    changed = [list(sequence) for sequence in sequences]
    changed[text][place] = 3 + (changed[text][place] - 2) % 57
    before, after = [run_packed(model.base_model, pack(some)) for some in (sequences, changed)]
    moved = [(one - other).abs().amax(1) > 1e-4 for one, other in zip(before.split(list(map(len, sequences))),
                                                                      after.split(list(map(len, sequences))))]
    for number, states in enumerate(moved):
        if number != text: assert not states.any()
    assert not (causal and moved[text][:place].any())
    if not causal and len(set(sequences[text])) > 1: assert moved[text].all()


@every_model
def test_the_check_agrees(family, causal):
    check_attention(MODELS[family, causal])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_may_look_the_other_way_with_the_same_gradient(family):
    "Under activation checkpointing layers run again when the call is long over."
    packed, found = pack([[3, 4, 5, 6], [7, 8]]), []
    for causal, said, checkpointing in [(True, None, False), (False, True, False), (False, True, True)]:
        model = model_of(family, causal)
        if checkpointing: checkpoint_activations(model.train())
        states = run_packed(model.base_model, packed, causal=said)
        states.sin().sum().backward()
        found.append([states.detach(), *[p.grad for p in model.base_model.parameters()]])
    for one in found[1:]:
        for got, expected in zip(one, found[0]): torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@every_model
def test_the_short_last_layer_looks_both_ways_too(family, causal):
    model, packed = model_of(family, causal), pack([[3, 4, 5, 6], [7, 8], [9]])
    full = run_packed(model.base_model, packed)[packed.last].detach()
    shorten_last_layer(model)
    torch.testing.assert_close(run_packed(model.base_model, packed, only_last=True).detach(), full, atol=1e-5,
                               rtol=1e-4)


# ---- at load ----

def test_loading_says_which_way(tmp_path):
    model_of("qwen3").save_pretrained(tmp_path/"causal")
    both = load_backbone(str(tmp_path/"causal"), bidirectional=True)
    assert what_it_sees(both)[0] > 1e-3 > 1e-5 > what_it_sees(load_backbone(str(tmp_path/"causal")))[0]
    both.save_pretrained(tmp_path/"both")
    assert load_backbone(str(tmp_path/"both")).config.is_causal is False
    assert load_backbone(str(tmp_path/"both"), bidirectional=False).config.is_causal is True


@pytest.mark.parametrize("family", ["bloom", "mamba", "gptj", "falcon"])
def test_a_model_with_attention_of_its_own_is_refused(tmp_path, family):
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **dict(rotary_dim=4) if family == "gptj"
                                                          else {})).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="brings attention of its own, which can neither keep texts of a packed row "
                                         "apart nor look both ways"):
        load_backbone(str(tmp_path))


def test_a_model_whose_layers_drop_what_they_are_given_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="packed batches only, and none reached it; .*take a model whose layers hand "
                                         "on"):
        load_backbone(str(tmp_path))


def test_a_recurrent_model_is_refused(tmp_path):
    sizes = dict(SIZES, num_experts=2, num_experts_per_tok=1, linear_num_key_heads=2, linear_num_value_heads=2)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lets texts of a packed row see each other"): load_backbone(str(tmp_path))


def test_loading_consumes_no_randomness():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_backbone(resolve_model("tiny"), vocabulary=1010)
    assert torch.rand(1) == expected


# ---- poolings ----

formatted = st.lists(st.builds(lambda before, content, after,
                               pooled: Tokens([1]*(before + content + after + pooled + 1), before, before + content,
                                              pooled),
                               st.integers(0, 4), st.integers(0, 5), st.integers(0, 3), st.integers(1, 3)), min_size=1,
                     max_size=5)


@pytest.mark.parametrize("name", POOLINGS)
@settings(max_examples=25, deadline=None)
@given(said=formatted, seed=st.integers(0, 9))
def test_a_pooling_is_a_mean_of_its_span_and_knows_its_text_alone(name, said, seed):
    torch.manual_seed(seed)
    states = [torch.randn(len(text.ids), 4, dtype=torch.float64) for text in said]
    pooled = pool_states(name, torch.cat(states), pack_texts(said))
    for vector, text, own in zip(pooled, said, states):
        torch.testing.assert_close(pool_states(name, own, pack_texts([text]))[0], vector)
        inside = range(len(own))
        if "content" in name or name in ("echo", "echo_mean"):
            inside = inside[text.start:text.stop] or inside[text.start:]
        if "rest" in name: inside = inside[text.start:]
        if name == "tokens": inside = inside[-1 - text.pooled:-1]
        if name == "first": inside = inside[:1]
        if needs_last_only(name): inside = inside[-1:]
        outside = own.clone()
        outside[[k for k in range(len(own)) if k not in inside]] = 9.0
        # what is outside of the span does not count
        torch.testing.assert_close(pool_states(name, outside, pack_texts([text]))[0], vector)
        weights = torch.ones(len(inside), dtype=own.dtype)
        if "weighted" in name: weights = weights.cumsum(0)
        torch.testing.assert_close((own[list(inside)]*weights[:, None]).sum(0)/weights.sum(), vector)


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=80), instruction=st.sampled_from(["", "find animals"]), count=st.integers(1, 4),
       pooling=st.sampled_from(["tokens", "echo_mean", "mean"]))
def test_added_tokens_and_copies_survive_any_text(text, instruction, count, pooling):
    formatter = FORMATTERS.setdefault((count, pooling), with_layout(count, pooling))
    tokens, = formatter([text], instruction)
    ids = formatter.tokenizer.convert_tokens_to_ids([f"<|pool_{n + 1}|>" for n in range(count)])
    assert tokens.ids[-1 - count:-1] == ids and tokens.pooled == count and len(tokens.ids) <= 64
    assert set(tokens.content).isdisjoint(ids)
    if pooling == "echo_mean" and tokens.content:
        assert "".join(map(chr, tokens.ids)).count("".join(map(chr, tokens.content))) >= 2


FORMATTERS = {}


def with_layout(count, pooling):
    plain = load_formatter(resolve_model("tiny"))
    return Formatter(plain.tokenizer, fit_layout(replace(plain.layout, max_length=64), pooling, count))


def test_added_tokens_train_under_an_adapter():
    "Only their rows of the embedding move, and they are merged with it."
    formatter = with_layout(3, "tokens")
    ids = formatter.tokenizer.convert_tokens_to_ids(["<|pool_1|>", "<|pool_2|>", "<|pool_3|>"])
    model = load_backbone(resolve_model("tiny"), vocabulary=len(formatter.tokenizer))
    before = model.get_input_embeddings().weight.detach().clone()
    adapted = add_lora(model, rank=2, alpha=4, tokens=ids)
    packed = pack_texts(formatter(["a cat sleeps", "x"]))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    pool_states("tokens", run_packed(trunk_of(adapted), packed), packed).sin().sum().backward()
    optimizer.step()
    expected = run_packed(trunk_of(adapted), packed).detach()
    merged = adapted.merge_and_unload()
    moved = (merged.get_input_embeddings().weight - before).abs().amax(1) > 0
    assert moved.nonzero().flatten().tolist() == sorted(ids)
    torch.testing.assert_close(run_packed(merged.base_model, packed).detach(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("configured, asked, told", [(True, None, True), (False, None, False), (False, True, True)])
def test_transformers_own_kernels_are_told_whether_to_look_ahead(configured, asked, told, monkeypatch):
    "Layers of Llama say `is_causal`, whatever the configuration says."
    seen = []
    def spy(module, query, *_, is_causal=None, **__):
        seen.append(is_causal)
        return query.transpose(1, 2), None
    monkeypatch.setitem(AttentionInterface._global_mapping, "spy", spy) # as FlashAttention is registered
    run_packed(model_of("llama", configured, "spy").base_model, pack([[3, 4], [5]]), causal=asked)
    assert seen == [told]*SIZES["num_hidden_layers"]


@pytest.mark.parametrize("generation, autocast", [(7, False), (8, True)])
def test_a_gpu_that_only_emulates_bf16_is_given_fp32(generation, autocast, monkeypatch):
    from types import SimpleNamespace
    from anchor_nb.training.precision import auto_precision
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for name, value in dict(is_available=True, current_device=0, _check_bf16_tensor_supported=True,
                            get_device_properties=SimpleNamespace(major=generation)).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert wants_autocast() is autocast and auto_precision(None)[0] == ("bf16" if autocast else "fp32")


@pytest.mark.parametrize("given", ["attention_mask", "position_bias", "s_aux"])
def test_what_a_model_adds_to_its_attention_is_not_ignored(given):
    from types import SimpleNamespace
    from anchor_nb.models.attention import packed_sdpa
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="packed_sdpa"))
    with pytest.raises(ValueError, match=f"gives its attention {given}, which packed_sdpa would ignore"):
        packed_sdpa(module, None, None, None, packed=SimpleNamespace(longest=3), **{given: torch.ones(1)})
