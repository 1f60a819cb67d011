"Properties of the intervals over many generated values; the notebook holds the examples and the naive references."
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from anchor_nb.evaluation.significance import (Interval, average_precision, bootstrap, difference_of, interval_of,
                                               over_seeds, paired_bootstrap, spearman, statistic)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 5))
def test_a_bootstrap_interval_holds_the_mean(values, seed):
    found = bootstrap(values, seed, samples=500)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found == bootstrap(values, seed, samples=500)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator, hits = np.random.default_rng(0), 0
    for trial in range(200):
        found = bootstrap(generator.normal(0.3, 0.2, 60), seed=trial, samples=500)
        hits += found.low <= 0.3 <= found.high
    assert 180 <= hits <= 199


def test_many_values_do_not_fill_the_memory():
    import tracemalloc
    tracemalloc.start()
    bootstrap(np.arange(20_000), samples=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6, "draws come a hundred at a time: 16 MB of numbers, and as much of values"


def test_different_queries_cannot_be_paired():
    with pytest.raises(ValueError, match="same cut"): paired_bootstrap({"a": 1.0}, {"b": 1.0})


def test_the_interval_over_seeds_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(0)
    hits = sum(found.low <= 0.6 <= found.high for found in (over_seeds(generator.normal(0.6, 0.01, 3))
                                                            for _ in range(400)))
    assert 365 <= hits <= 395


@pytest.mark.parametrize("values", [[], [0.5]])
def test_one_seed_has_no_interval(values):
    with pytest.raises(ValueError, match="at least two"): over_seeds(values)


def pairs(kind, gold, predicted):
    return dict(statistic=kind, values={f"{n:05}": [float(g), float(p)]
                                        for n, (g, p) in enumerate(zip(gold, predicted))})


@st.composite
def drawn_pairs(build):
    "Gold values, predictions with many ties, and one draw as counts."
    size = build(st.integers(3, 25))
    of = lambda strategy: np.array(build(st.lists(strategy, min_size=size, max_size=size)))
    return of(st.integers(0, 1)), of(st.integers(-3, 3)) / 4, of(st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(drawn_pairs())
def test_counts_are_as_good_as_copies(drawn):
    gold, predicted, counts = drawn
    copies = np.repeat(np.arange(len(gold)), counts)
    if len(set(gold[copies])) < 2: return
    expected = average_precision_score(gold[copies], predicted[copies])
    assert average_precision(gold, predicted, counts[None])[0] == pytest.approx(expected)
    if len(set(predicted[copies])) > 1:
        assert spearman(gold, predicted, counts[None])[0] == pytest.approx(spearmanr(gold[copies],
                                                                                     predicted[copies]).statistic)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["mean", "spearman", "average_precision"]), st.integers(8, 60), st.integers(0, 99))
def test_a_difference_is_paired_and_symmetric(kind, size, seed):
    generator = np.random.default_rng(seed)
    gold = np.r_[0, 1, generator.integers(0, 2, size)]
    def system():
        values = generator.normal(size=size + 2)
        return pairs(kind, gold, values) if kind != "mean" else dict(statistic=kind,
                                                                     values={f"{n}": float(v)
                                                                             for n, v in enumerate(values)})
    a, b = system(), system()
    found, back = difference_of(a, b, samples=200), difference_of(b, a, samples=200)
    assert found.low <= found.high
    assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low), abs=1e-9)
    assert found.mean == pytest.approx(interval_of(a).mean - interval_of(b).mean, abs=1e-9)
    assert difference_of(a, a, samples=200) == Interval(0.0, 0.0, 0.0)


def covered(kind, truth, sample, trials=200):
    "In how many trials the interval holds the truth."
    found = [interval_of(sample(), seed=trial, samples=300) for trial in range(trials)]
    return sum(one.low <= truth <= one.high for one in found)


def test_the_interval_of_a_correlation_covers_the_truth():
    generator = np.random.default_rng(1)
    def sample(size=150):
        gold = generator.normal(size=size)
        return pairs("spearman", gold, gold + generator.normal(size=size))
    truth = 6 / np.pi * np.arcsin(np.sqrt(0.5) / 2)  # Spearman's of a bivariate normal with Pearson's 1/sqrt(2)
    assert 178 <= covered("spearman", truth, sample) <= 199


def test_the_interval_of_average_precision_covers_the_truth():
    generator = np.random.default_rng(2)
    def sample(size=300):
        gold = generator.integers(0, 2, size)
        return pairs("average_precision", gold, gold + generator.normal(size=size))
    truth = average_precision(*np.array(list(sample(400_000)["values"].values())).T, np.ones((1, 400_000), int))[0]
    assert 176 <= covered("average_precision", truth, sample) <= 199


def test_a_thousand_pairs_take_seconds():
    generator = np.random.default_rng(0)
    gold = generator.integers(0, 5, 1225)
    begin = time.perf_counter()
    difference_of(*(pairs("spearman", gold, gold + generator.normal(size=1225)) for _ in range(2)))
    assert time.perf_counter() - begin < 10


def test_draws_without_a_positive_pair_are_left_out():
    found = interval_of(pairs("average_precision", [1, 0, 0, 0], [0.1, 0.4, 0.3, 0.2]))
    assert found.mean == 0.25 and 0.25 <= found.low <= found.high <= 1


@pytest.mark.parametrize("items, message", [
    (dict(statistic="", values={"a": 1.0}), "there are mean, spearman, average_precision"),
    (dict(statistic="mean", values={}), "at least one"),
    (dict(statistic="mean", values={"a": [1, 2]}), "'a': mean needs a number"),
    (dict(statistic="spearman", values={"a": [1, 2], "b": 3}), "'b': spearman needs"),
    (pairs("spearman", [1, 1, 1], [1, 2, 3]), "undefined"),
])
def test_items_that_do_not_fit_are_named(items, message):
    with pytest.raises(ValueError) as error: interval_of(items)
    assert message in str(error.value)


def test_other_gold_values_are_no_pair():
    with pytest.raises(ValueError, match="same data"):
        difference_of(pairs("spearman", [1, 2, 3], [1, 2, 3]), pairs("spearman", [1, 2, 4], [1, 2, 3]))


def test_each_type_has_its_statistic():
    kinds = dict(Retrieval="mean", STS="spearman", PairClassification="average_precision", Clustering="")
    assert {kind: statistic(kind) for kind in kinds} == kinds
