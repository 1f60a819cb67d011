"The variants of stage II's loss: ranks and padding change nothing, and what each of them promises holds for any batch."
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchor_nb.losses.infonce import contrastive_batch
from anchor_nb.losses.contrastive import ContrastiveRules, contrastive_objective
from anchor_nb.data.prompts import Tokens

RULES = {
    "plain": {},
    "both": dict(both_directions=True),
    "margin": dict(margin="absolute", margin_size=0.3, both_directions=True),
    "relative": dict(margin="relative", margin_size=-0.5, mask_false_negatives=False),
    "sigreg": dict(sigreg=0.5),
    "matryoshka": dict(matryoshka_dims=(2, 4)),
    "margin_mse": dict(distillation="margin_mse", teacher_temperature=2.0),
    "kl": dict(distillation="kl", contrastive_weight=0.0),
    "all": dict(both_directions=True, margin="absolute", margin_size=0.2, temperature=0.3, sigreg=0.1,
                matryoshka_dims=(4,), distillation="kl"),
}
every_rule = pytest.mark.parametrize("name", RULES)
HIDDEN, SEEN = 8, 6


def text(*content): return Tokens([2, *content, 1], 1, 1 + len(content))


def made(count: int, seed: int):
    """Examples with few different texts, so some are false negatives; 0 to 2 hard negatives; scores for some queries;
    further positives of some, and further queries of theirs."""
    draw = random.Random(seed)
    some = lambda: text(*[draw.randrange(5, 9) for _ in range(draw.randint(1, 3))])
    examples = [(some(), some(), [some() for _ in range(draw.randint(0, 2))]) for _ in range(count)]
    known = [([some() for _ in range(draw.choice([0, 0, 2]))], [some() for _ in range(draw.choice([0, 1]))])
             for _ in examples]
    return (examples, [[draw.gauss(0, 3) for _ in range(1 + len(e[2]))] if draw.random() < 0.7 else []
                       for e in examples], known)


def inputs(texts: list, width: int, kind: int) -> torch.Tensor:
    "What a text looks like to a linear model: a function of the text alone."
    return torch.stack([torch.randn(width, dtype=torch.float64,
                                    generator=torch.Generator().manual_seed(hash((kind, *t.ids)) % 2**31))
                        for t in texts])


def value(weight, examples, teacher, rules, most=0, **fields):
    "Loss and facts for one rank's examples."
    batch = contrastive_batch(examples, 2, most, teacher=teacher, step=3, **fields)
    if rules.margin != "none": batch = batch._replace(guide=inputs(batch.texts, 5, 1))
    return contrastive_objective(inputs(batch.texts, SEEN, 0) @ weight, batch, rules)


def start_weight():
    return torch.randn(SEEN, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def results(shares, rank=0, ranks=1):
    "Loss, gradient and facts of every set of rules, summed over ranks as DDP and the log do."
    found = {}
    for name, changes in RULES.items():
        for in_batch in (True, False):
            examples, teacher, known = shares[rank]
            weight = start_weight()
            loss, facts = value(weight, examples, teacher, ContrastiveRules(**changes),
                                most=max(len(s[0]) for s in shares), in_batch=in_batch, known=known)
            loss.backward()
            # between equal texts, the first is the best
            if not changes.get("mask_false_negatives", True): del facts["accuracy"]
            gradient, logged = weight.grad/ranks, torch.stack([fact.double() for fact in facts.values()])
            if ranks > 1: [torch.distributed.all_reduce(t) for t in (gradient, logged)]
            found[name, in_batch] = gradient, dict(zip(facts, logged.tolist()))
    return found


def worker(rank, ranks, shares, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    found = results(shares, rank, ranks)
    if rank == 0: torch.save(found, folder/"found.pt")
    torch.distributed.destroy_process_group()


def test_ranks_change_nothing(tmp_path, sizes=(2, 2, 1)):
    "Uneven shares, uneven negatives, scores on some ranks only: loss, gradient and log are those of one process."
    examples, teacher, known = made(5, seed=1)
    assert any(others for others, _ in known) and any(askers for _, askers in known)
    examples[3] = (examples[0][0], *examples[3][1:]) # one query twice, on two ranks
    examples = [(q, p, [examples[0][0], examples[3][1]] if n == 0 else [examples[0][0]] + found[:1])
                for n, (q, p, found) in enumerate(examples)]
    # one on the first rank, two on the second, none on the last
    teacher = [[float(n), 1.0, -float(n)][:1 + len(e[2])] if n in (0, 2, 3) else [] for n, e in enumerate(examples)]
    ends = [sum(sizes[:k + 1]) for k in range(len(sizes))]
    shares = [[part[end - size:end] for part in (examples, teacher, known)] for size, end in zip(sizes, ends)]
    torch.multiprocessing.spawn(worker, (len(sizes), shares, tmp_path), len(sizes))
    many, one = torch.load(tmp_path/"found.pt"), results([(examples, teacher, known)])
    assert many.keys() == one.keys()
    for name, (gradient, facts) in one.items():
        torch.testing.assert_close(many[name][0], gradient, rtol=1e-9, atol=1e-12, msg=str(name))
        assert many[name][1] == pytest.approx(facts, rel=1e-6), name # counts are divided in fp32


batches = given(count=st.integers(2, 7), seed=st.integers(0, 10**6), in_batch=st.booleans())


@every_rule
@settings(deadline=None, max_examples=15)
@batches
def test_order_padding_and_lengths_change_nothing(name, count, seed, in_batch):
    "The loss of examples in another order, with room for more, and with embeddings of other lengths."
    examples, teacher, known = made(count, seed)
    rules, weight = ContrastiveRules(**RULES[name]), start_weight().detach()
    loss, facts = value(weight, examples, teacher, rules, in_batch=in_batch, known=known)
    assert loss.isfinite()
    order = random.Random(seed).sample(range(count), count)
    again, others = value(7*weight, [examples[n] for n in order], [teacher[n] for n in order], rules, most=count + 3,
                          in_batch=in_batch, known=[known[n] for n in order])
    # between equal texts, the first is the best
    if not rules.mask_false_negatives: others["accuracy"] = facts["accuracy"]
    assert {k: v.item() for k, v in others.items()} == pytest.approx({k: v.item() for k, v in facts.items()}, rel=1e-9,
                                                                     abs=1e-9)
    assert again.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=25)
@batches
def test_variants_that_must_be_the_plain_loss(count, seed, in_batch):
    "A margin beyond all cosines, and a regulariser of no weight."
    examples, teacher, _ = made(count, seed)
    value_of = lambda **rules: value(start_weight().detach(), examples, teacher, ContrastiveRules(**rules),
                                     in_batch=in_batch)[0].item()
    for rules in (dict(margin="absolute", margin_size=-2.1), dict(sigreg=0.0)):
        assert value_of(**rules) == pytest.approx(value_of(), rel=1e-9, abs=1e-9), rules


@settings(deadline=None, max_examples=25)
@given(count=st.integers(2, 7), seed=st.integers(0, 10**6), size=st.floats(-0.5, 1.5))
def test_a_wider_margin_masks_more_and_never_the_positive(count, seed, size):
    "The loss can only fall, the count only grow, and with everything masked there is nothing to learn."
    examples, *_ = made(count, seed)
    found = [value(start_weight().detach(), examples, None, ContrastiveRules(margin="absolute", margin_size=s,
                                                                             mask_false_negatives=False))
             for s in (size, size + 0.3, 2.1)]
    losses, counts = [loss.item() for loss, _ in found], [facts["too_close"].item() for _, facts in found]
    assert losses == sorted(losses, reverse=True) and counts == sorted(counts)
    assert losses[-1] == 0 and found[-1][1]["accuracy"].item() == 1


def test_directions_of_the_regulariser_are_those_of_the_step():
    examples, *_ = made(4, 0)
    batch = contrastive_batch(examples, 2)
    states, rules = inputs(batch.texts, SEEN, 0), ContrastiveRules(sigreg=1.0)
    at = lambda step: contrastive_objective(states, batch._replace(step=step), rules)[0].item()
    assert at(1) == at(1) != at(2)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    "The toy pairs with hard negatives, and scores of a teacher in every other row."
    from common import toy_pairs
    folder = tmp_path_factory.mktemp("scored")
    file, = Path(toy_pairs()).glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for n, row in enumerate(lines):
        row["negatives"] = [lines[(n + k) % len(lines)]["positive"] for k in (5, 9)]
        if n % 2: row |= dict(positive_scores=[5.0 + math.sin(n)], negative_scores=[math.cos(n), -1.0])
    (folder/file.name).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    return str(folder)


def test_training_is_the_same_in_pieces_and_on_ranks(scored, tmp_path):
    "All variants in a real run: in one piece, and on two ranks with unequal shares and cached gradients."
    from anchor_nb.core.recipe import Stage2
    from anchor_nb.training.trainer import train
    from common import assert_same_trajectory, recipe, rows, run # here, so that the ranks above start fast
    settings = dict(data=scored, precision="fp64", global_batch=9, steps=4, negatives=2, both_directions=True,
                    margin="relative", margin_size=0.05, guide="tiny",
                    sigreg=0.5, matryoshka_dims=[8, 16], distillation="margin_mse", teacher_temperature=1.0,
                    contrastive_weight=100.0)
    train(recipe(Stage2, tmp_path/"one", micro_tokens=10_000, **settings))
    run(recipe(Stage2, tmp_path/"two", processes=2, micro_tokens=90, **settings))
    one, two = rows(tmp_path/"one"), rows(tmp_path/"two")
    assert_same_trajectory(one, two, 1e-6)
    for row, other in zip(one, two): assert row == pytest.approx(other, rel=1e-5)
    assert one[0].keys() >= {"loss_contrastive", "loss_contrastive_8", "loss_distillation_16", "sigreg", "too_close"}
    assert any(row["loss_distillation"] for row in one)


@pytest.mark.parametrize("name", ["kl", "margin_mse"])
def test_the_right_student_of_a_teacher_that_gives_cosines_has_nothing_to_learn(name):
    "By the default, which is for scores such as our mining writes; and a flat student has."
    torch.manual_seed(0)
    right = torch.randn(6, 8, dtype=torch.float64)
    examples = [(text(1), text(2), [text(3)]), (text(4), text(5), [text(6)])] # queries, positives, negatives
    order = torch.tensor([0, 3, 1, 4, 2, 5]) # as `contrastive_batch` lays them out
    cosine = lambda query, document: torch.cosine_similarity(right[query], right[document], dim=0).item()
    teacher = [[cosine(0, 1), cosine(0, 2)], [cosine(3, 4), cosine(3, 5)]]
    batch = contrastive_batch(examples, negatives=1, teacher=teacher)
    flat = right[:1].expand(6, 8) + 1e-9*right
    losses = [contrastive_objective(student[order], batch, ContrastiveRules(distillation=name))[1]["loss_distillation"]
              for student in (right, flat)]
    assert losses[0] < 1e-8 < 0.1 < losses[1]


def test_a_teacher_on_another_scale_than_the_student_is_refused(scored, tmp_path):
    "Before any model is loaded, with the lowest and the highest score that were found."
    from anchor_nb.core.recipe import Stage2
    from anchor_nb.training.trainer import train
    from common import recipe
    mined = tmp_path/"mined"
    mined.mkdir()
    for file in Path(scored).glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for row in lines: row |= dict(positive_scores=[0.8], negative_scores=[0.6, -0.25])
        (mined/file.name).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    settings = dict(distillation="kl", negatives=2)
    with pytest.raises(ValueError, match="scores of toy lie between -0.25 and 0.8, .*leave teacher_temperature at 0"):
        train(recipe(Stage2, tmp_path/"flat", data=str(mined), teacher_temperature=1.0, **settings))
    with pytest.raises(ValueError, match="scores of toy lie between -1 and 6, .*set teacher_temperature to 1"):
        train(recipe(Stage2, tmp_path/"steep", data=scored, **settings))


def test_a_dataset_without_in_batch_negatives(scored, tmp_path):
    from anchor_nb.core.recipe import Stage2
    from anchor_nb.training.trainer import train
    from common import recipe, rows
    for out, names in (("own", ["toy"]), ("all", [])):
        train(recipe(Stage2, tmp_path/out, data=scored, steps=2, negatives=2, without_in_batch=names, distillation="kl",
                     teacher_temperature=1.0, contrastive_weight=0.5))
    assert [[row["candidates"] for row in rows(tmp_path/out)] for out in ("own", "all")] == [[3, 3], [24, 24]]
    with pytest.raises(ValueError, match="without_in_batch names unknown datasets toys"):
        train(recipe(Stage2, tmp_path/"x", data=scored, without_in_batch=["toys"]))
    with pytest.raises(ValueError, match="needs a teacher's scores in the rows"):
        contrastive_objective(torch.randn(2, 4), contrastive_batch([(text(5), text(6), [])], 0),
                              ContrastiveRules(distillation="kl"))
