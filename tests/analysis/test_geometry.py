"Geometry and its figures: what must hold for any embeddings; the notebooks hold the references."
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from anchor_nb.analysis import geometry as g
from anchor_nb.experiments import similarity_figures as figures

few = settings(max_examples=30, deadline=None)
sizes = st.tuples(st.integers(20, 60), st.integers(2, 12), st.integers(0, 10**6), st.floats(0, 5))


def points(size):
    "Points in a cone, from (texts, hidden, seed, how narrow)."
    n, hidden, seed, cone = size
    drawn = np.random.default_rng(seed).normal(size=(n, hidden))
    drawn[:, 0] += cone*hidden**0.5
    return g.unit(drawn)


def numbers(x, y=None): return g.set_numbers(x, None, 5, 0) if y is None else g.pair_numbers(y, x, 5, 0)


@few
@given(sizes)
def test_every_number_lies_where_it_must(size):
    x = points(size)
    found = numbers(x, points((*size[:2], size[2] + 1, size[3])))
    n, hidden = x.shape
    assert 0 <= found["alignment"] <= 4 and 0 <= found["separation"] <= 1 and 0 <= found["gap"] <= 4
    assert -4 - 1e-9 <= found["uniformity"] <= 1e-9 and -1/(n - 1) - 1e-9 <= found["mean_cosine"] <= 1 + 1e-9
    assert 1 - 1e-9 <= found["effective_rank"] <= min(n - 1, hidden) + 1e-6 and 0 <= found["antihubs"] <= 1
    assert float(g.spectrum(x).sum()) == pytest.approx(1) and (g.spectrum(x).diff() <= 1e-12).all()


@few
@given(sizes)
def test_order_and_rotation_change_nothing(size):
    x, y = points(size), points((*size[:2], size[2] + 1, size[3]))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(size[2]))
    turn = torch.linalg.qr(torch.randn(x.shape[1], x.shape[1], dtype=torch.float64,
                                       generator=torch.Generator().manual_seed(size[2])))[0]
    before, moved, turned = numbers(x, y), numbers(x[order], y[order]), numbers(x @ turn, y @ turn)
    for name in before:
        assert moved[name] == pytest.approx(before[name], abs=1e-6), name
        # its directions stand still
        if name != "gaussian_distance": assert turned[name] == pytest.approx(before[name], abs=1e-6), name


@few
@given(sizes, st.integers(1, 7))
def test_pieces_change_nothing(size, piece):
    x, y = points(size), points((*size[:2], size[2] + 1, size[3]))
    whole = numbers(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(g, "PIECE", piece)
        assert numbers(x, y) == pytest.approx(whole, abs=1e-9)
        assert int(g.occurrences(x, x, 3, itself=True).sum()) == 3*len(x)


@few
@given(arrays(np.float64, st.integers(2, 50), elements=st.floats(-1, 1)))
def test_a_histogram_loses_nothing(values):
    counts = g.histogram(values)
    assert sum(counts) == len(values) and len(counts) == len(g.EDGES) - 1


def test_the_closer_pair_is_better_aligned_and_better_separated():
    x = points((200, 16, 0, 0.0))
    found = [numbers(x, g.unit(x + noise*points((200, 16, 1, 0.0)))) for noise in (0.1, 0.5, 2.0)]
    assert [f["alignment"] for f in found] == sorted(f["alignment"] for f in found)
    assert [f["separation"] for f in found] == sorted((f["separation"] for f in found), reverse=True)


def test_a_collapsed_model_is_described_and_not_refused():
    x = np.ones((40, 8), np.float32)
    found = g.geometry(x, x)["numbers"]
    assert [round(found[name][0], 6) for name in ("alignment", "separation", "uniformity", "mean_cosine",
                                                  "effective_rank")] == [0, 0.5, 0, 1, 0]
    json.dumps(found, allow_nan=False)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    "Of 200 sets of isotropic points, some 95 % of the intervals around their mean cosine hold 0."
    held = 0
    for seed in range(200):
        _, low, high = g.jackknife(lambda kept, x=points((40, 16, seed, 0.0)): dict(m=g.mean_cosine(x[kept])), 40)["m"]
        held += low <= 0 <= high
    assert held >= 170


def test_vectors_of_low_precision_and_one_dimension_are_no_trouble():
    x = torch.randn(40, 1, dtype=torch.bfloat16)
    assert g.geometry(x)["numbers"]["effective_rank"][0] in (0.0, pytest.approx(1))


@pytest.mark.parametrize("documents, queries, message", [
    (np.zeros((0, 4)), None, "at least two texts"), (np.ones((30, 4))*np.inf, None, "length inf"),
    (np.ones((5, 4)), None, "at least 20 texts"),
    (np.ones((30, 4)), np.ones((30, 5)), "differ")])
def test_bad_vectors_are_named(documents, queries, message):
    with pytest.raises(ValueError, match=message): g.geometry(documents, queries)


def test_figures_of_an_analysis_leave_no_trace_and_survive_missing_parts():
    import matplotlib, matplotlib.pyplot as plt
    before = dict(matplotlib.rcParams)
    found = dict(checkpoints=[dict(label="one", step=0, **g.geometry(points((30, 4, 0, 0.0))))],
                 isotropic=g.isotropic(30, 4, False))
    nothing = dict(texts=30, settings=dict(rows="tokens"), layers_a=[0], layers_b=[0], matched=[[0, 0]], matrices={},
                   curves={}, last_layer=None, probe=None, left_out={})
    figures.similarity(nothing)
    figures.geometry_through_training(found)
    figures.embeddings_compared(found)
    assert dict(matplotlib.rcParams) == before and not plt.get_fignums()


def test_values_that_are_not_there_are_gaps_in_a_curve():
    curve = dict(value=[0.5, None], low=[None, None], high=[None, None])
    found = dict(texts=2, settings=dict(rows="pooled"), layers_a=[0, 1], layers_b=[0, 1], matched=[[0, 0], [1, 1]],
                 matrices=dict(cka=[[1.0, None], [None, 0.5]]), curves=dict(cka=dict(pair=curve)), last_layer=None,
                 probe=None, left_out={})
    axes = next(axes for axes in figures.similarity(found).axes if axes.lines)
    assert np.isnan(axes.lines[0].get_ydata()[1]) and axes.lines[0].get_ydata()[0] == 0.5
