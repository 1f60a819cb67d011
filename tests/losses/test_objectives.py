"Objectives of stage I: shares add up however a step is cut or shared among ranks; masks belong to texts; peers agree."
import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import distributed, multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from anchor_nb.models.attention import register_attention
from anchor_nb.losses.llama2vec import Bags, Llara, bag_loss, padded
from anchor_nb.core.distributed import world
from anchor_nb.losses.carry import carried, in_words
from anchor_nb.losses.causal_lm import LanguageModelling
from anchor_nb.losses.mntp import MaskedPrediction, generator_of, mask_text
from anchor_nb.losses.objectives import Objectives, prepare_all, run_objectives
from anchor_nb.models.packing import cut_by_tokens, pack
from anchor_nb.data.prompts import Tokens
from anchor_nb.core.distributed import all_reduce
from anchor_nb.losses.reconstruction import Anchor, head_loss
from anchor_nb.losses.simcse import SimCSE, set_attention_dropout

VOCABULARY, EOS, MASK = 60, 1, 9
BOTH_WAYS = ["anchor", "ebae", "ebar", "mntp", "simcse"]


def lm(causal=False):
    "A tiny Llama in double precision; evaluating, so that its dropout is told to SimCSE and not done."
    torch.manual_seed(0)
    register_attention()
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, is_causal=causal)
    model = LlamaForCausalLM(config).double().eval()
    model.set_attn_implementation("packed_sdpa")
    set_attention_dropout(model, 0.1)
    return model


def make(names, weights, batch):
    makers = dict(anchor=lambda: Anchor(EOS), ebae=lambda: Bags("ebae", "mean"),
                  ebar=lambda: Bags("ebar"), mntp=lambda: MaskedPrediction(MASK, VOCABULARY),
                  llara=lambda: Llara([10], [11, 12, 13, 14], [11, 15, 13, 14], positions=2),
                  simcse=lambda: SimCSE(batch))
    return sorted([(name, makers[name](), weight) for name, weight in zip(names, weights)],
                  key=lambda one: not one[1].coupled)


@st.composite
def texts(build, instruction=False):
    content = build(st.lists(st.integers(16, VOCABULARY - 1), min_size=1, max_size=14))
    head = [2, 3] + build(st.lists(st.integers(4, 8), max_size=3 if instruction else 0))
    return Tokens([*head, *content, EOS], len(head), len(head) + len(content))


batches = st.lists(st.tuples(texts(instruction=True), texts()), min_size=1, max_size=6)


def step(objectives, pairs, budget=10_000, causal=False, cut=None, number=3):
    "Facts and gradient of a step."
    module = Objectives(lm(causal), objectives)
    cut = cut or (lambda lengths: (cut_by_tokens(lengths, budget), 0))
    facts = run_objectives(module, objectives, prepare_all(objectives, pairs, number), cut,
                           lambda loss: loss.backward(), lambda last: nullcontext(), torch.device("cpu"))
    return facts, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def assert_same(first, second):
    "Equal facts, except for the size of the largest piece, and equal gradients."
    (facts, gradient), (again, other) = first, second
    without_largest = lambda facts: {name: value for name, value in facts.items() if name != "largest"}
    assert without_largest(facts) == pytest.approx(without_largest(again), rel=1e-9)
    assert (other - gradient).norm() <= 1e-6*gradient.norm() # Llama's norms compute in fp32


@settings(max_examples=12, deadline=None)
@given(batches, st.lists(st.sampled_from(BOTH_WAYS), min_size=1, max_size=3, unique=True) | st.just(["llara"]),
       st.integers(1, 60), st.randoms(use_true_random=False))
@example([(Tokens([2, 3, 20, 21, EOS], 2, 4), Tokens([2, 3, 30, EOS], 2, 3))]*2, ["llara"], 7, random.Random(0))
def test_neither_cut_nor_order_of_a_step_matters(pairs, names, budget, random):
    "Also of the released form of LLaMA2Vec, which needs causal attention and so goes alone."
    objectives, causal = make(names, [0.5, 1.0, 2.0], len(pairs)), names == ["llara"]
    mixed = random.sample(pairs, len(pairs))
    assert_same(step(objectives, pairs, causal=causal), step(objectives, mixed, budget, causal=causal))


@pytest.mark.parametrize("objective, lost", [(Anchor, {0.0: "q2d", 1.0: "d2q"}),
                                             (LanguageModelling, {0.0: "documents", 1.0: "queries"})])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@settings(max_examples=6, deadline=None)
@given(pairs=batches, budget=st.integers(1, 60))
def test_a_direction_of_weight_0_is_neither_run_nor_logged(objective, lost, alpha, pairs, budget):
    "The gradient is that of the other one alone, in whatever pieces, and fewer tokens pass through the layers."
    from anchor_nb.experiments.figures import stage1_losses # here, or ranks would load it too
    one, both = [step([("it", objective(EOS, alpha=weight), 1.0)], pairs, budget) for weight in (alpha, 0.5)]
    gone = {f"loss_{lost[alpha]}", f"target_tokens_{lost[alpha]}"}
    assert set(both[0]) - set(one[0]) == gone and one[0]["tokens"] < both[0]["tokens"]
    assert_same(one, step([("it", objective(EOS, alpha=alpha), 1.0)], pairs[::-1]))
    name, = [name for name in one[0] if name.startswith("loss_")]
    assert one[0]["loss"] == pytest.approx(both[0][name], rel=1e-9)
    stage1_losses([dict(one[0], step=number) for number in (1, 2)]) # its figure has one curve


@settings(max_examples=60, deadline=None)
@given(texts(), st.integers(0, 5), st.integers(0, 5), st.floats(0.01, 1))
def test_masks_hide_content_only_and_something_always(text, seed, number, fraction):
    draw = lambda: mask_text(text, generator_of(seed, number, text.ids), MASK, VOCABULARY, fraction)
    masked = draw()
    assert draw() == masked
    assert masked.places and all(text.start <= place < text.stop for place in masked.places)
    again = list(masked.ids)
    for place, token in zip(masked.places, masked.targets): again[place] = token
    assert again == text.ids


def test_texts_of_one_length_are_masked_differently():
    places = {tuple(mask_text(text, generator_of(0, 0, text.ids), MASK, VOCABULARY).places) for n in range(16, 26)
              for text in [Tokens([2, *[n]*30, EOS], 1, 31)]}
    assert len(places) == 10


def test_masked_prediction_is_the_shifted_loss_of_transformers():
    "Labels at masked places only, shifted by transformers itself: what LLM2Vec trains."
    objective = MaskedPrediction(MASK, VOCABULARY, fraction=0.5)
    text = Tokens([2, 3, *range(20, 40), EOS], 2, 22)
    item, = [item for item in objective.prepare([(text, text)], 0)][:1]
    model = lm()
    share, _ = objective.loss(model, objective.pack([item]), torch.tensor(objective.counts([item])))
    labels = torch.full((1, len(item.ids)), -100)
    labels[0, item.places] = torch.tensor(item.targets)
    model.set_attn_implementation("sdpa")
    assert share.item() == pytest.approx(model(torch.tensor([item.ids]), labels=labels, use_cache=False).loss.item(),
                                         rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=9, unique=True), min_size=1, max_size=7),
       st.integers(1, 3), st.integers(1, 9))
def test_bag_loss_is_cross_entropy_with_soft_targets(bags, positions, chunk):
    torch.manual_seed(len(bags))
    states, weight = torch.randn(len(bags), positions, 4, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    soft = torch.stack([torch.zeros(20, dtype=torch.float64).index_fill(0, torch.tensor(bag), 1/len(bag))
                        for bag in bags])
    expected = torch.nn.functional.cross_entropy((states @ weight.T).amax(1), soft, reduction="none")
    torch.testing.assert_close(bag_loss(states, weight, padded(bags), chunk), expected)


PAIRS = [(Tokens([2, 3, *range(20, 20 + n), EOS], 2, 2 + n), Tokens([2, 3, *range(30, 30 + 3*n), EOS], 2, 2 + 3*n))
         for n in (1, 5, 2, 7, 3)]


def same_pieces(lengths, budget=25):
    "As many pieces as on the rank that has most, the last ones for nothing."
    pieces = cut_by_tokens(lengths, budget)
    empty = int(all_reduce(torch.tensor(len(pieces)), "MAX")) - len(pieces)
    return pieces + [[0]]*empty, empty


def on_rank(rank, names, file, out):
    "This rank's pairs of the step, gradients averaged as DDP does."
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for causal, some in ((True, ["llara"]), (False, names), *[(False, [name]) for name in names]):
        middle = 3 if "simcse" in some else 4 # its ranks differ by one text at most
        shares = PAIRS[:middle], PAIRS[middle:]
        facts, gradient = step(make(some, [0.5, 1, 2, 1, 0.5], len(PAIRS)), shares[rank], cut=same_pieces,
                               causal=causal)
        distributed.all_reduce(gradient)
        facts["tokens"] = int(all_reduce(torch.tensor(facts["tokens"])))
        torch.save((facts, gradient/world()[1]), f"{out}-{rank}-{'-'.join(some)}")
    distributed.destroy_process_group()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked")
def test_two_ranks_with_unequal_shares_are_one(tmp_path):
    "Four and one of five pairs, or three and two; one rank runs pieces for nothing."
    multiprocessing.start_processes(on_rank, (BOTH_WAYS, str(tmp_path/"meet"), str(tmp_path/"found")), nprocs=2,
                                    start_method="fork") # all is imported already
    for some in (["llara"], BOTH_WAYS, *[[name] for name in BOTH_WAYS]):
        expected = step(make(some, [0.5, 1, 2, 1, 0.5], len(PAIRS)), PAIRS, causal="llara" in some)
        for rank in (0, 1): assert_same(expected, torch.load(f"{tmp_path/'found'}-{rank}-{'-'.join(some)}"))


def test_bfloat16_autocast_is_close():
    "Losses stay in fp32 where products are in bf16."
    for causal, names in ((True, ["llara"]), (False, BOTH_WAYS)):
        objectives = make(names, [1.0]*5, len(PAIRS))
        module = Objectives(lm(causal).float(), objectives)
        facts = {}
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                facts[autocast] = run_objectives(module, objectives, prepare_all(objectives, PAIRS, 0), same_pieces,
                                                 lambda loss: loss.backward(), lambda last: nullcontext(),
                                                 torch.device("cpu"))
        assert facts[True] == pytest.approx(facts[False], rel=0.05)
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())


def test_an_objective_that_does_not_fit_its_model_is_refused():
    with pytest.raises(ValueError, match="mntp needs bidirectional=true"):
        Objectives(lm(causal=True), make(["mntp"], [1.0], 1))
    with pytest.raises(ValueError, match="llara .* needs bidirectional=false"):
        Objectives(lm(), make(["llara"], [1.0], 1))
    quiet = lm()
    set_attention_dropout(quiet, 0.0)
    with pytest.raises(ValueError, match="set attention_dropout=0.3"): Objectives(quiet, make(["simcse"], [1.0], 1))


def test_an_untied_head_is_frozen_where_nothing_applies_it():
    "Else DDP would wait for its gradient."
    for names, trained in ((["simcse"], False), (["simcse", "ebae"], True)):
        model = lm()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        module = Objectives(model, make(names, [1.0, 1.0], 1))
        assert module.lm.lm_head.weight.requires_grad == trained
        module("simcse", pack([[3, 4, 5]])).sum().backward() # as in the steps before `anchor_after`
        assert not trained or module.lm.lm_head.weight.grad.eq(0).all()


@torch.no_grad()
def test_losses_are_the_same_bits_where_no_gradient_is_wanted():
    "And none is computed: a measurement of the anchors would pay three times as much."
    random = torch.Generator().manual_seed(0)
    hidden, weight, scale = [torch.randn(size, generator=random) for size in ((9, 8), (VOCABULARY, 8), (9,))]
    given = torch.nn.Parameter(hidden), torch.nn.Parameter(weight), torch.arange(9), scale, 4
    with torch.enable_grad(): wanted = head_loss(*given)
    with mock.patch.object(torch, "zeros_like", side_effect=AssertionError), \
         mock.patch.object(torch, "mm", side_effect=AssertionError): found = head_loss(*given)
    assert all(torch.equal(*pair) for pair in zip(found, wanted)) and not found[0].requires_grad


@pytest.mark.parametrize("count, among", [(5, 5), (16, 16), (17, 17), (18, 16), (40, 16)])
def test_anchors_are_recognised_in_groups_of_one_size(count, among):
    "A last group of two would be recognised by chance in half of the cases."
    def run(group, shifts):
        losses = torch.ones(len(shifts), 1, len(group))
        losses[0] = 2.0 if len(group) == among else 0.0
        return losses
    anchor = SimpleNamespace(pack=lambda group: group, directions=("q2d",))
    found, costs = carried(run, anchor, list(range(count)))
    assert costs.shape == (1, count, 3)
    assert (found["q2d"].identified, found["q2d"].among) == (0, among)
    assert (f"of the first {among} texts 0% are likeliest behind their own anchor ({1/among:.0%} by chance)"
            in in_words(found)[0])
    old = {name: value for name, value in found["q2d"]._asdict().items() if name != "among"}
    assert "of the first 16 texts" in in_words(dict(q2d=old))[0], "rows of earlier versions can be read"


def test_few_pairs_have_the_wide_interval_of_student_and_a_sentence_says_it():
    gaps = torch.tensor([0.0, 1.0, 2.0, 3.0])
    def run(group, shifts): return torch.stack([gaps*(shift == 1) for shift in shifts])[:, None] + 9
    found, _ = carried(run, SimpleNamespace(pack=list, directions=("q2d",)), list(range(4)))
    assert found["q2d"].margin == pytest.approx(3.182*gaps.std().item()/2, rel=0.01) # t of 3 degrees of freedom
    tells = "What a query's anchor tells of its document"
    assert in_words(found)[0].startswith(f"{tells}: nothing measurable, 1.50 +- 2.04 nats a text;")
    surer = in_words(dict(q2d=found["q2d"]._replace(margin=0.5)))[0]
    assert surer.startswith(f"{tells}: 1.50 +- 0.50 nats of the 9 a text costs without it;")


@pytest.mark.parametrize("count", [2, 3, 4, 10, 64])
def test_the_interval_is_wide_enough_for_few_pairs(count):
    from scipy import stats
    from anchor_nb.losses.carry import student
    assert student(count) == pytest.approx(stats.t.ppf(0.975, count - 1), rel=0.01)
