"""The planner's formulas behave: monotone where costs are, within the memory given, and robust where training asks."""
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.training import memory as planning
from anchor_nb.training.flops import SHAPES, Shape, forward_flops, stage1_flops, stage2_flops
from anchor_nb.training.memory import USABLE, Setup, Work, choose, fitting_tokens, memory, plan_for

GB = 10**9
shapes = st.builds(lambda layers, heads, groups, size, mlp, vocabulary, tied: Shape(layers, heads*size, heads*size,
                                                                                    heads//groups*size, mlp, vocabulary,
                                                                                    tied, layers*2*heads*size),
                   st.integers(2, 40), st.sampled_from([4, 8, 32]), st.sampled_from([1, 2, 4]),
                   st.sampled_from([16, 64, 128]), st.integers(64, 16384), st.integers(100, 200_000), st.booleans())
setups = st.builds(Setup, st.sampled_from(["stage1", "stage2", "encode"]),
                   st.sampled_from(["fp32", "bf16", "pure_bf16"]), st.sampled_from(["adamw", "adamw_8bit"]),
                   st.sampled_from([0, 8, 16]),
                   st.sampled_from(["packed_varlen", "packed_sdpa"]), st.integers(1, 8))
works = st.builds(Work, st.integers(1, 64), st.integers(1, 40), st.integers(1, 300), st.integers(0, 4),
                  st.sampled_from([64, 512, 4096]))
lengths = st.lists(st.integers(1, 600), min_size=1, max_size=20)
several = settings(max_examples=60, deadline=None)


def total(parts): return sum(parts.values())


def padded(lengths): return [max(lengths)]*len(lengths)  # as rows of one batch


@several
@given(shapes, lengths, lengths)
def test_operations_add_up_over_texts(shape, some, others):
    for only_last in (False, True):
        together, apart = forward_flops(shape, some + others, only_last), [forward_flops(shape, part, only_last)
                                                                           for part in (some, others)]
        assert together == {name: sum(part[name] for part in apart) for name in together}


@several
@given(shapes, lengths)
def test_what_is_saved_never_costs(shape, texts):
    least, plain = total(forward_flops(shape, texts, only_last=True)), total(forward_flops(shape, texts))
    assert least <= plain <= total(forward_flops(shape, padded(texts)))
    assert total(stage1_flops(shape, texts, texts)) < total(stage1_flops(shape, padded(texts), padded(texts),
                                                                         only_last=False, recomputed=1))
    one, two = [total(stage2_flops(shape, texts, rank=rank)) for rank in (1, 2)]
    assert one <= two < total(stage2_flops(shape, texts, rank=2, recomputed=0.5))


@several
@given(shapes, setups, st.integers(1, 10**6), st.integers(0, 10**6))
def test_memory_grows_with_tokens_and_nothing_is_negative(shape, setup, tokens, more):
    few, many = memory(shape, setup, tokens), memory(shape, setup, tokens + more)
    assert all(value >= 0 for value in few.values()) and total(few) <= total(many)


@several
@given(shapes, setups, st.integers(1, 10**6), st.integers(1, 10**10))
def test_all_states_of_a_pooling_and_a_guide_take_memory(shape, setup, tokens, guide):
    usual = total(memory(shape, setup, tokens))
    every = total(memory(shape, replace(setup, only_last=False), tokens))
    assert (every > usual) == (setup.stage != "encode")
    assert total(memory(shape, replace(setup, guide=guide), tokens)) == usual + guide


@several
@given(shapes, setups, st.integers(1, 200))
def test_fitting_tokens_is_the_last_that_fits(shape, setup, gigabytes):
    tokens = fitting_tokens(shape, setup, gigabytes*GB)
    assert tokens == 0 or total(memory(shape, setup, tokens)) <= gigabytes*GB
    assert tokens > 2**24 - 2 or total(memory(shape, setup, tokens + 1)) > gigabytes*GB


@several
@given(shapes, setups, works, st.integers(1, 200))
def test_a_plan_fits_and_never_recomputes_twice(shape, setup, work, gigabytes):
    try: plan = choose(shape, setup, work, gigabytes*GB, rate=1e14)
    except ValueError as error:
        assert "does not fit: it needs" in str(error) and ("it would with" in str(error)
                                                           or "a smaller model" in str(error))
        return
    assert plan.peak_bytes <= USABLE*gigabytes*GB and plan.seconds > 0
    assert not (setup.stage == "stage2" and plan.pieces > 1 and plan.gradient_checkpointing)
    assert plan.pieces*plan.micro_tokens >= sum(work.lengths(setup.stage))


@several
@given(shapes, setups, works, st.integers(1, 100), st.integers(0, 100))
def test_more_memory_is_never_worse(shape, setup, work, gigabytes, more):
    try: small = choose(shape, setup, work, gigabytes*GB)
    except ValueError: return
    large = choose(shape, setup, work, (gigabytes + more)*GB)
    assert large.flops <= small.flops*1.000001


def test_checkpointing_only_when_memory_asks():
    shape, work = SHAPES["llama-3.2-1b"], Work(examples=64)
    assert not choose(shape, Setup(), work, 80*GB).gradient_checkpointing
    tight = choose(shape, Setup(), work, 40*GB)
    assert tight.gradient_checkpointing and tight.micro_tokens >= 4096 and "with gradient checkpointing" in tight.why


# ---- what training asks ----

@pytest.fixture
def tiny():
    from transformers import AutoConfig
    return AutoConfig.for_model("llama", vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                num_attention_heads=4, num_key_value_heads=2)


SETUPS = {stage: Setup(stage, "fp32", attention="packed_sdpa", head_rows=1024) for stage in ("stage1", "stage2")}
EIGHT = Work(examples=8, query=64, document=64, max_length=64)
MANY = Work(examples=512, query=64, document=64, max_length=64)


@pytest.mark.parametrize("stage", SETUPS)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "pure_bf16"])
def test_a_run_on_a_cpu_keeps_its_micro_batches(stage, precision, tiny):
    plan = plan_for(tiny, replace(SETUPS[stage], precision=precision), EIGHT)
    assert (plan.micro_tokens, plan.gradient_checkpointing) == (planning.ON_CPU[stage], False)


@pytest.mark.parametrize("stage", SETUPS)
@pytest.mark.parametrize("asked, checkpointing", [("always", True), ("never", False), ("auto", False)])
def test_what_the_user_says_stands(stage, asked, checkpointing, tiny):
    plan = plan_for(tiny, SETUPS[stage], MANY, micro_tokens=300, checkpointing=asked)
    assert (plan.micro_tokens, plan.gradient_checkpointing) == (300, checkpointing)


def test_short_memory_makes_smaller_pieces_or_says_so(tiny, monkeypatch):
    first, second = SETUPS.values()
    monkeypatch.setattr(planning, "free_memory", lambda device: 11e6)
    assert plan_for(tiny, first, MANY).micro_tokens < planning.ON_CPU["stage1"]
    assert plan_for(tiny, first, MANY, micro_tokens=1024).gradient_checkpointing
    assert not plan_for(tiny, second, MANY, micro_tokens=256).gradient_checkpointing # GradCache recomputes already
    monkeypatch.setattr(planning, "free_memory", lambda device: 1e6)
    with pytest.raises(ValueError, match="stage1 does not fit: it needs"): plan_for(tiny, first, MANY)


def test_an_unknown_architecture_is_run_unplanned():
    from transformers import AutoConfig
    plan = plan_for(AutoConfig.for_model("gpt2"), SETUPS["stage1"], Work())
    assert plan.micro_tokens == planning.ON_CPU["stage1"] and "unplanned" in plan.why


def test_this_machine_is_planned_for_and_its_hours_are_counted(monkeypatch):
    "Without options: the CPU here, its threads and its free memory, with the preset for it."
    from typer.testing import CliRunner
    from anchor_nb.cli.main import app
    from anchor_nb.training import plan
    from common import toy_pairs
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(plan, "matrix_rate", lambda *_: 1e9)
    shown = CliRunner().invoke(app, ["plan", "--model", "tiny", "--data", toy_pairs()])
    assert shown.exit_code == 0, shown.output
    for words in ("tiny on this machine, a CPU with", "preset laptop", "268 pairs", "CPU hours", "stage2", "yes"):
        assert words in shown.stdout
    rows = plan.report("tiny", plan.Machine(0, 8*GB, 1e9, "fp32", cores=4), given=dict(steps=10, global_batch=8))
    for row in rows: assert row["device_hours"] == pytest.approx(row["minutes"]/60*4)


def test_a_precision_that_is_given_needs_no_trial(monkeypatch):
    from anchor_nb.training import plan, precision
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(plan, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(precision, "measured", lambda *_: pytest.fail("tried both"))
    assert plan.this_machine(SHAPES["smollm2-135m"], "fp32").precision == "fp32"
