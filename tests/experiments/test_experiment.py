"""Claims of an experiment: what must hold for every set of scores."""
import numpy as np
from hypothesis import given, settings, strategies as st

from anchor_nb.experiments.experiment import Claim, answers, by_queries, by_training_seed, differences_of
from anchor_nb.evaluation.significance import bootstrap, holm

OPPOSITE = {"supported": "contradicted", "contradicted": "supported", "undecided": "undecided", "no difference that "
                                                                                                "matters": "no difference that matters"}
scores = st.lists(st.floats(0, 1, width=16), min_size=6, max_size=6)


def rows_of(arms, seeds=(1, 2)):
    "Rows of two tasks with three queries each."
    return [dict(label=label, training_seed=seed, step=3, task=task,
                 values={f"q{k}": value + shift for k, value in enumerate(values[at:at + 3])})
            for label, (values, shifts) in arms.items() for seed, shift in zip(seeds, shifts) for at, task in ((0, "a"),
                                                                                                               (3,
                                                                                                                "b"))]


@settings(max_examples=40, deadline=None)
@given(scores, scores, st.floats(-.5, .5), st.floats(-.5, .5))
def test_turning_a_claim_around_turns_its_verdict(one, other, first, second):
    rows = rows_of({"one": (one, (first, second)), "other": (other, (0, 0))})
    (there,), (back,) = [answers(rows, [Claim("H", *names)]) for names in (("one", "other"), ("other", "one"))]
    assert np.isclose(there.queries.mean, -back.queries.mean) and np.allclose(list(there.seeds.values()),
                                                                              [-value for value in back.seeds.values()])
    near = min(abs(abs(edge) - bound) for edge in (there.queries.low, there.queries.high) for bound in (0, .02))
    assert near < 1e-2 or there.verdict == OPPOSITE[back.verdict]


@settings(max_examples=40, deadline=None)
@given(scores, scores, st.permutations(range(12)))
def test_the_order_of_rows_does_not_matter(one, other, order):
    rows = rows_of({"one": (one, (0, .1)), "other": (other, (0, 0)), "third": (one, (.2, .2))})
    claims = [Claim("H1", "one", "other"), Claim("H2", "third", "one")]
    assert answers(rows, claims) == answers([rows[k] for k in order], claims)


@settings(max_examples=40, deadline=None)
@given(scores, scores)
def test_queries_and_seeds_have_one_mean(one, other):
    found = differences_of(rows_of({"one": (one, (0, .3)), "other": (other, (.1, 0))}), Claim("H", "one", "other"))
    assert np.isclose(np.mean([part.mean() for part in by_queries(found)]),
                      np.mean(list(by_training_seed(found).values())))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1, width=16), min_size=5, max_size=30), st.integers(1, 9))
def test_company_widens_an_interval(values, others):
    alone, beside = bootstrap(values, samples=20_000), holm({"it": [values]} | {f"other {k}": [[0.0, 1e-9]]
                                                                                for k in range(others)})["it"]
    assert beside.low <= alone.low + .02 and beside.high >= alone.high - .02 and 1 - .05/1 <= beside.level <= 1 - .05/(1
                                                                                                                       + others) + 1e-12
