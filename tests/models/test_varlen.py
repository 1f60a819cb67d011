"PyTorch's variable-length kernel needs a GPU; here a naive form takes its place and checks how it is called."
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.attention.varlen as varlen

from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.data.rows import Example
from anchor_nb.experiments import parity
from anchor_nb.models import attention

TEXTS = [("x", "a cat sleeps on the mat and does not care", "rain"), ("what barks?", "a dog", "the sun is a star"),
         ("stars", "the sun is a star, and there are others that are far away", "y"), ("w", "z", "a b c d e f g")]
EXAMPLES = [Example(query, positive, [negative], "", "") for query, positive, negative in TEXTS]
COMMON = dict(model="tiny", data="unused", out="unused", max_length=24, global_batch=4, precision="fp32")
ANCHORS = [{}, dict(micro_tokens=32), dict(anchor_sink=True, anchor_scale=0.07), dict(anchor_norm=False),
           dict(decode_from="sequence", target_template=True), dict(bidirectional=True), dict(pooling="mean"),
           dict(lora_rank=2), dict(objectives=dict(anchor=1.0, ebae=0.3, ebar=0.3, lm=0.1)),
           dict(objectives=dict(mntp=1.0), bidirectional=True)]
PAIRS = [{}, dict(micro_tokens=32), dict(bidirectional=True), dict(pooling="mean"), dict(lora_rank=2),
         dict(both_directions=True, matryoshka_dims=[16])]
STEPS = [Stage1(**COMMON, **more) for more in ANCHORS] + [
    Stage2(**COMMON, **dict(dict(lora_rank=0, negatives=1, mask_false_negatives=False), **more)) for more in PAIRS]
CALLS = Counter()


def naive_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                 enable_gqa=False):
    "The kernel's contract: packed texts, a window aligned at the end of query and key; [tokens, heads, size] each."
    for states, starts, longest in ((query, cu_seq_q, max_q), (key, cu_seq_k, max_k), (value, cu_seq_k, max_k)):
        assert states.ndim == 3 and states.stride(-1) == 1 and states.dtype == value.dtype
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.device == states.device
        assert starts[0] == 0 and starts[-1] == len(states) and starts.diff().min() > 0, "a text without a token"
        assert type(longest) is int and starts.diff().max() == longest
    assert len(cu_seq_q) == len(cu_seq_k) and key.shape == value.shape and window_size in ((-1, -1), (-1, 0))
    groups, last = divmod(query.shape[1], key.shape[1])
    assert not last and (groups == 1 or enable_gqa)
    CALLS["last token" if max_q < max_k else {(-1, 0): "causal", (-1, -1): "both ways"}[window_size]] += 1
    outputs = []
    for q, k, v in zip(*(states.split(starts.diff().tolist()) for states, starts in (
            (query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k)))):
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k)*(q.shape[-1]**-0.5 if scale is None else scale)
        if window_size == (-1, 0):
            later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
            scores = scores.masked_fill(later, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def before_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    "As PyTorch 2.11 has it: no grouped heads."
    return naive_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.fixture
def gpu_kernels(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", naive_varlen)
    monkeypatch.setattr(attention, "usable_attention", lambda *how: ["packed_varlen", "packed_sdpa"])
    CALLS.clear()


def gradient(recipe, kernel):
    return parity.packed_gradient(type(recipe)(**vars(recipe) | dict(attention=kernel)), EXAMPLES)


def label(recipe):
    plain = Stage1(**COMMON) if isinstance(recipe, Stage1) else Stage2(**COMMON)
    return type(recipe).__name__ + "".join(f" {name}={value}" for name, value in vars(recipe).items()
                                           if value != getattr(plain, name))


@pytest.mark.parametrize("recipe", STEPS, ids=label)
def test_every_step_calls_the_kernel_right(gpu_kernels, recipe):
    expected = gradient(recipe, "packed_sdpa")
    assert not CALLS
    found = parity.parity_of(gradient(recipe, "packed_varlen"), expected)
    assert found.loss_error < 1e-5 and found.gradient_error < 1e-5 and found.median_error < 1e-5
    decodes = isinstance(recipe, Stage1) and set(recipe.objectives or ("anchor",)) & {"anchor", "lm"}
    assert bool(CALLS["both ways"]) == recipe.bidirectional
    assert bool(CALLS["causal"]) == bool(decodes or not recipe.bidirectional)
    if recipe.pooling == "eos" and "mntp" not in getattr(recipe, "objectives", ()): assert CALLS["last token"]


@pytest.mark.parametrize("recipe", [STEPS[0], STEPS[-1]], ids=label)
def test_it_is_called_so_under_gradient_checkpointing_and_without_grouped_heads(gpu_kernels, monkeypatch, recipe):
    expected = gradient(recipe, "packed_sdpa")
    monkeypatch.setattr(varlen, "varlen_attn", before_groups)
    monkeypatch.setattr(attention, "TAKES_GROUPS", False)
    monkeypatch.setattr(parity, "build_model", partial(parity.build_model, checkpointing=True))
    found = parity.parity_of(gradient(recipe, "packed_varlen"), expected)
    assert found.gradient_error < 1e-5 and CALLS["causal"] > 1
