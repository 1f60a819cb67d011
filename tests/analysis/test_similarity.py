"Properties of the similarity measures over generated matrices, and comparisons from end to end."
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.linalg import orthogonal_procrustes

import warm
from anchor_nb.analysis import representation_similarity as similarity, hidden_states as states, compare as streaming
from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.analysis.representation_similarity import (Moments, block_interval, cosine, dimension_correlations, hsic,
                                                          neighbours, observe, overlap, permuted, ratio, residual,
                                                          rotations, row_inverse_entropy, shifted, turned)
from anchor_nb.analysis.hidden_states import Settings
from anchor_nb.analysis.compare import compare


def matrix(seed, *shape): return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rotation(seed, width): return torch.linalg.qr(matrix(seed, width, width))[0]


def moments_of(x, y, means=None):
    "The sums of one layer of either model, shifted by the means of their rows or of others."
    moments = Moments([(0, 0)], (1, x.shape[1]), (1, y.shape[1]))
    means = means or [states.double().mean(0) for states in (x, y)]
    observe(moments, *[shifted(states, mean)[:, None] for states, mean in zip((x, y), means)])
    return moments


def cka(x, y, debiased=True):
    return ratio(*[hsic(moments_of(*pair), debiased)[0] for pair in ((x, y), (x, x), (y, y))]).item()


def procrustes(x, y, x_held, y_held):
    "Fit a rotation to some rows and score it on others: residual, cosine, rotation."
    moments, held = moments_of(x, y), moments_of(x_held, y_held, [states.double().mean(0) for states in (x, y)])
    fitted = rotations(moments)
    sums = turned(held, fitted, moments.x/moments.rows, moments.y/moments.rows)
    return residual(*sums).item(), cosine(*sums).item(), fitted[0]


SEED, ROWS, WIDTH = st.integers(0, 10**6), st.integers(6, 40), st.integers(2, 9)
few = settings(max_examples=40, deadline=None)


# ---- CKA ----

@few
@given(SEED, ROWS, WIDTH, WIDTH, st.floats(0.01, 100), st.booleans())
def test_cka_minds_neither_rotation_nor_scale_nor_place_nor_side(seed, rows, p, q, scale, debiased):
    x, y = matrix(seed, rows, p), matrix(seed + 1, rows, q)
    found = cka(x, y, debiased)
    assert cka(y, x, debiased) == pytest.approx(found, abs=1e-9, nan_ok=True)
    assert cka(scale*x @ rotation(seed, p) + 5, y - 3, debiased) == pytest.approx(found, abs=1e-8, nan_ok=True)
    assert cka(x, x @ rotation(seed, p), debiased) == pytest.approx(1, abs=1e-9)
    assert debiased or -1e-12 <= found <= 1 + 1e-12


@few
@given(SEED, ROWS, WIDTH, WIDTH)
def test_debiased_hsic_is_the_mean_over_all_quadruples_of_rows(seed, rows, p, q):
    "A U-statistic: the mean of the kernel of Song and others (2012) over every four distinct rows of a handful."
    from itertools import permutations
    rows = min(rows, 6)
    x, y = matrix(seed, rows, p), matrix(seed + 1, rows, q)
    k, l = (x @ x.T).numpy(), (y @ y.T).numpy()
    of_four = [k[i, j]*(l[i, j] + l[a, b] - 2*l[i, a]) for i, j, a, b in permutations(range(rows), 4)]
    assert hsic(moments_of(x, y))[0].item() == pytest.approx(np.mean(of_four), abs=1e-9)


@few
@given(SEED, st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 3), WIDTH, WIDTH)
def test_batches_are_as_good_as_the_whole(seed, sizes, layers_x, layers_y, p, q):
    pairs = [(i, j) for i in range(layers_x) for j in range(layers_y)]
    x, y = matrix(seed, sum(sizes), layers_x, p), matrix(seed + 1, sum(sizes), layers_y, q)
    whole, total = [Moments(pairs, (layers_x, p), (layers_y, q)) for _ in range(2)]
    observe(whole, x, y)
    for a, b in zip(x.split(sizes), y.split(sizes)):
        part = Moments(pairs, (layers_x, p), (layers_y, q))
        observe(part, a, b)
        total.add(part)
    assert total.rows == whole.rows
    for own, expected in zip(total.parts(), whole.parts()):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


def test_fp32_states_far_from_the_origin_lose_nothing():
    "A dimension with values a thousand times those of the others, as language models have, and a mean far away."
    x = matrix(0, 3000, 8)*torch.tensor([1e3] + [1.0]*7) + 1e4*torch.tensor([1.0] + [0.0]*7)
    y = x @ rotation(1, 8) + matrix(2, 3000, 8)
    assert cka(x.float(), y.float()) == pytest.approx(cka(x, y), abs=1e-6)


def test_the_biased_estimator_rises_with_the_width_and_the_debiased_does_not():
    found = {debiased: [cka(matrix(0, 60, width), matrix(1, 60, width), debiased) for width in (10, 100, 1000)]
             for debiased in (True, False)}
    assert found[False] == sorted(found[False]) and found[False][-1] > 0.9
    assert all(abs(value) < 0.15 for value in found[True])


# ---- correlation, Procrustes, row inverse entropy ----

@few
@given(SEED, ROWS, WIDTH, st.floats(0.1, 50))
def test_correlation_by_dimension_is_that_of_numpy(seed, rows, width, scale):
    x = matrix(seed, rows, width)
    y = x + scale*matrix(seed + 1, rows, width)
    found = dimension_correlations(moments_of(x, y))[0]
    assert found.tolist() == pytest.approx([np.corrcoef(x[:, d], y[:, d])[0, 1] for d in range(width)], abs=1e-9)
    torch.testing.assert_close(dimension_correlations(moments_of(3*y - 1, scale*x))[0], found)


@few
@given(SEED, st.integers(20, 60), WIDTH, st.floats(0.1, 10))
def test_procrustes_finds_a_rotation_and_scores_others_by_it(seed, rows, width, scale):
    x, held, turn = matrix(seed, rows, width), matrix(seed + 1, rows, width), rotation(seed + 2, width)
    assert procrustes(x, x @ turn + 2, held, held @ turn + 2)[:2] == pytest.approx((0, 1), abs=1e-8)
    noisy, noisy_held = x @ turn + matrix(seed + 3, rows, width), held @ turn + matrix(seed + 4, rows, width)
    left, alike, found = procrustes(x, noisy, held, noisy_held)
    expected = orthogonal_procrustes(x - x.mean(0), noisy - noisy.mean(0))[0]
    near, at = (held - x.mean(0)) @ torch.tensor(expected), noisy_held - noisy.mean(0)
    assert (left, alike) == pytest.approx((((near - at).norm()/at.norm()).item()**2,
                                           ((near*at).sum()/near.norm()/at.norm()).item()), abs=1e-8)
    assert procrustes(x, scale*noisy, held, scale*noisy_held)[1] == pytest.approx(alike, abs=1e-8)
    torch.testing.assert_close(found @ found.T, torch.eye(width).double(), atol=1e-9, rtol=0)


@few
@given(SEED, st.lists(st.integers(2, 9), min_size=2, max_size=5), WIDTH)
def test_held_out_scores_add_up_over_blocks(seed, sizes, width):
    x, y = matrix(seed, 60, 1, width), matrix(seed + 1, 60, 1, width)
    fit, means = moments_of(x[:, 0], y[:, 0]), (torch.zeros(1, width).double(), torch.ones(1, width).double())
    parts, whole = [], Moments([(0, 0)], (1, width), (1, width))
    observe(whole, x[:sum(sizes)], y[:sum(sizes)])
    for a, b in zip(x[:sum(sizes)].split(sizes), y[:sum(sizes)].split(sizes)):
        part = Moments([(0, 0)], (1, width), (1, width))
        observe(part, a, b)
        parts.append(turned(part, rotations(fit), *means))
    together = [torch.stack(sums).sum(0) for sums in zip(*parts)]
    for own, expected in zip(together, turned(whole, rotations(fit), *means)): torch.testing.assert_close(own, expected)
    assert residual(*together).item() >= 0 and -1 <= cosine(*together).item() <= 1


@few
@given(SEED, st.integers(2, 30))
def test_row_inverse_entropy_is_between_smeared_and_exchanged(seed, width):
    found = row_inverse_entropy(rotation(seed, width))
    assert ((found >= -1e-12) & (found <= 1 + 1e-12)).all()
    exchange = torch.eye(width).double()[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    assert row_inverse_entropy(exchange).tolist() == pytest.approx([1.0]*width)
    torch.testing.assert_close(row_inverse_entropy(rotation(seed, width) @ exchange), found)


# ---- neighbours ----

@few
@given(SEED, st.integers(30, 60), WIDTH, st.integers(1, 5), st.integers(1, 20))
def test_neighbours_are_the_nearest_rows_of_other_texts(seed, rows, width, per_text, chunk):
    x, texts = matrix(seed, rows, width), torch.arange(rows)//per_text
    found = neighbours(x, 10, texts, chunk)
    unit = x/x.norm(dim=1, keepdim=True)
    for row in range(0, rows, 7):
        others = sorted((k for k in range(rows) if texts[k] != texts[row]), key=lambda k: -float(unit[row] @ unit[k]))
        assert found[row].tolist() == others[:10]
    same = neighbours(2*x @ rotation(seed, width), 10, texts)
    assert overlap(found, same, 10).mean() == 1
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert permuted(found, order).equal(neighbours(x[order], 10, texts[order]))


@few
@given(SEED, st.integers(1, 10))
def test_overlap_is_that_of_sets_and_symmetric(seed, count):
    generator = np.random.default_rng(seed)
    a, b = [torch.tensor(np.stack([generator.permutation(30)[:10] for _ in range(8)])) for _ in range(2)]
    expected = [len(set(x[:count]) & set(y[:count]))/len(set(x[:count]) | set(y[:count])) for x, y in zip(a.tolist(),
                                                                                                          b.tolist())]
    assert overlap(a, b, count).tolist() == pytest.approx(expected)
    assert overlap(b, a, count).equal(overlap(a, b, count))


# ---- intervals ----

def test_a_block_interval_holds_the_value_and_is_the_same_again():
    sums = dict(total=matrix(0, 12, 3)*5 + 100, count=torch.full((12, 1), 10.0).double())
    found = block_interval(lambda total, count: total/count, sums)
    assert all(low <= value <= high for value, low, high in zip(found["value"], found["low"], found["high"]))
    assert found == block_interval(lambda total, count: total/count, sums)
    assert found != block_interval(lambda total, count: total/count, sums, seed=1)


def test_the_interval_of_cka_covers_the_truth():
    "x is half of y, so many rows tell their debiased CKA; intervals over 10 blocks of 20 rows hold it 95 times in 100."
    both = matrix(5, 200_000, 6)
    truth = cka(both[:, :4], both)
    def interval(seed):
        rows = matrix(seed, 10, 20, 6)
        sums = {name: torch.stack([hsic(moments_of(*[block[:, :4] if side == "x" else block for side in name]))
                                   for block in rows]) for name in ("xy", "xx", "yy")}
        return block_interval(similarity.ratio, sums, draws=300)
    inside = [found["low"][0] <= truth <= found["high"][0] for found in map(interval, range(100))]
    assert sum(inside) >= 88


# ---- from end to end ----

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    "Two models, of which the second is the first a little changed, and a third that is the second changed otherwise."
    folder, found = tmp_path_factory.mktemp("models"), []
    for number, name in enumerate("abc"):
        embedder, generator = AnchorEmbedder.from_pretrained("tiny"), torch.Generator().manual_seed(0)
        for weight in embedder.lm.parameters(): weight.data += 0.1*torch.randn(weight.shape, generator=generator)
        other = torch.Generator().manual_seed(number)
        for weight in embedder.lm.parameters() if number else ():
            weight.data += 0.02*torch.randn(weight.shape, generator=other)
        embedder.save_pretrained(folder/name)
        found.append(str(folder/name))
    return found


@pytest.fixture(scope="module")
def texts():
    lines = (build_corpus("toy")/"pairs"/"toy.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["positive"] for line in lines][:120]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch): monkeypatch.setattr(streaming, "cache_dir", lambda: tmp_path)


SMALL = dict(max_length=40, blocks=6, draws=100, neighbours=[3], sample=100, precision="fp32")


@pytest.mark.parametrize("rows", ["pooled", "tokens"])
def test_what_is_kept_does_not_grow_with_the_texts(models, texts, rows, monkeypatch):
    sizes, usual = [], streaming.evaluate
    def weighed(readers, comparisons, names, alone, *rest):
        sizes.append(sum(part.nbytes for sums in (*comparisons.values(), *alone.values())
                         for moments in (sums.total, sums.block) for part in moments.parts()))
        return usual(readers, comparisons, names, alone, *rest)
    monkeypatch.setattr(streaming, "evaluate", weighed)
    few, many = [compare(*models[:2], texts[:count], Settings(rows=rows, **SMALL), cache=False) for count in (40, 120)]
    assert sizes[0] == sizes[1]
    assert many["rows"] > 2*few["rows"]


@pytest.mark.parametrize("rows", ["pooled", "tokens"])
def test_streaming_is_extracting_first(models, texts, rows):
    a, b = [compare(*models[:2], texts, Settings(rows=rows, extract=extract, **SMALL), cache=False)
            for extract in (False, True)]
    assert a == b


def test_nulls_stand_beside_every_number_and_below_it(models, texts):
    found = compare(models[0], models[1], texts, Settings(rows="tokens", **SMALL), twin=models[2])
    assert set(found["curves"]) == {"cka", "cka_biased", "correlation", "procrustes_residual", "procrustes_cosine",
                                    "row_inverse_entropy", "knn_3"}
    for metric, nulls in found["curves"].items(): assert set(nulls) == {"pair", "shuffled", "random", "seeds"}, metric
    curves = [(metric, null, curve) for metric, nulls in found["curves"].items() for null, curve in nulls.items()]
    last = {(metric, null): {side: values[-1] for side, values in curve.items()} for metric, null, curve in curves}
    for metric in ("cka", "correlation", "procrustes_cosine", "knn_3"):
        assert last[metric, "pair"]["low"] > last[metric, "shuffled"]["high"]
        assert last[metric, "pair"]["value"] > last[metric, "random"]["value"]
    assert last["cka", "shuffled"]["low"] <= 0.02 and last["procrustes_residual", "shuffled"]["value"] > 1.5
    assert all(len(values) == 3 for *_, curve in curves for values in curve.values())


def test_a_result_is_json_and_the_same_in_another_process(models, texts, tmp_path):
    found = compare(*models[:2], texts[:40], Settings(**SMALL), out=str(tmp_path/"out"), cache=False)
    # no NaN
    stored = json.loads((tmp_path/"out/similarity.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert stored == json.loads(json.dumps(found))
    code = ("import json, sys; from anchor_nb.analysis.compare import Settings, compare; a, b, texts, small = "
            "json.load(sys.stdin); print(json.dumps(compare(a, b, texts, Settings(**small), cache=False)))")
    said = warm.run([sys.executable, "-c", code], input=json.dumps([*models[:2], texts[:40], SMALL]),
                    capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr[-2000:]
    again = json.loads(said.stdout.splitlines()[-1])
    for metric, nulls in stored["curves"].items():
        for null, own in nulls.items():
            other = again["curves"][metric][null]
            numbers, others = [[-9 if v is None else v for v in curve["value"]] for curve in (own, other)]
            assert others == pytest.approx(numbers, abs=1e-5)


def test_a_changed_model_text_or_setting_is_another_result(models, texts, tmp_path):
    count = lambda: len(list((tmp_path/"similarity").iterdir()))
    compare(*models[:2], texts[:40], Settings(**SMALL))
    compare(*models[:2], texts[:40], Settings(**SMALL | dict(micro_tokens=70)))
    assert count() == 1
    for pair, kept, settings in ((models[::2], 40, {}), (models[:2], 41, {}), (models[:2], 40, dict(seed=1))):
        before = count()
        compare(*pair, texts[:kept], Settings(**SMALL | settings))
        assert count() == before + 1


def test_texts_of_a_group_are_in_one_block_and_on_one_side_of_the_probe(models, texts, tmp_path, monkeypatch):
    blocks, null, groups, labels = [], [], [number//2 for number in range(40)], ["x", "x", "y", "y"]*10
    dealt, strangers = streaming.dealt, streaming.strangers
    monkeypatch.setattr(streaming, "dealt", lambda *how: blocks.append(dealt(*how)) or blocks[-1])
    monkeypatch.setattr(streaming, "strangers", lambda which, draws: null.append(which) or strangers(which, draws))
    found = compare(*models[:2], texts[:40], Settings(**SMALL), labels=labels, groups=groups)
    assert len(blocks[0]) == 6 and all(len({n//2 for n in block}) == len(block)/2 for block in blocks[0])
    assert sorted(n for block in blocks[0] for n in block) == list(range(40))
    assert sorted(torch.cat(null).tolist()) == groups # no query's stranger is its own document
    assert (found["probe"]["train"], found["probe"]["test"]) == (30, 10)
    compare(*models[:2], texts[:40], Settings(**SMALL), labels=labels)
    assert len(list((tmp_path/"similarity").iterdir())) == 2


def test_a_damaged_kept_result_is_named(models, texts, tmp_path):
    compare(*models[:2], texts[:40], Settings(**SMALL))
    file, = (tmp_path/"similarity").iterdir()
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match="not JSON"): compare(*models[:2], texts[:40], Settings(**SMALL))


def test_the_untrained_model_is_the_same_each_time_and_leaves_the_generator_alone(models):
    embedder = AnchorEmbedder.from_pretrained(models[0])
    before = torch.get_rng_state()
    one, two = [states.untrained(embedder, 0) for _ in range(2)]
    assert torch.get_rng_state().equal(before)
    for a, b in zip(one.lm.parameters(), two.lm.parameters()): assert a.equal(b)
    assert not one.lm.get_input_embeddings().weight.equal(embedder.lm.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["distilbert", "modernbert", "mpnet"])
def test_an_encoder_without_a_language_model_has_an_untrained_twin(kind):
    from types import SimpleNamespace
    from transformers import AutoConfig, AutoModel
    sizes = dict(vocab_size=60, hidden_size=32, dim=32, intermediate_size=48, hidden_dim=48, num_hidden_layers=2,
                 n_layers=2, num_attention_heads=4, n_heads=4, pad_token_id=0, cls_token_id=1, sep_token_id=2,
                 bos_token_id=1, eos_token_id=2)
    lm = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
    fresh = states.untrained(SimpleNamespace(lm=lm, device=torch.device("cpu")), 0).lm
    assert type(fresh) is type(lm) and not fresh.training
    assert not fresh.get_input_embeddings().weight.equal(lm.get_input_embeddings().weight)


def test_texts_that_do_not_differ_are_named(models):
    with pytest.raises(ValueError, match="no dimension varies over these rows; give texts that differ"):
        compare(*models[:2], ["the same text"]*20, Settings(**SMALL), cache=False)


@pytest.mark.parametrize("change, message", [
    (dict(layers=1), "layers=1; give 0 for all, or at least 2"), (dict(blocks=0), "blocks=0; give at least 2"),
    (dict(neighbours=[]), "neighbours="), (dict(rows="word"), "choose one of pooled, tokens"),
])
def test_settings_that_cannot_be_are_named(change, message):
    with pytest.raises(ValueError) as error: Settings(**change)
    assert message in str(error.value)


@pytest.mark.parametrize("texts, labels, message", [
    ([], None, "0 texts"), (["a"]*7, None, "7 texts"), (["a", None], None, "text 1 is None"),
    (["a b"]*9, ["x"]*8, "one label for each text"), (["a b"]*9, ["x"]*9, "two classes"), (["a b"]*9, ["x"]*8 + ["y"],
                                                                                           "class 'y' has 1"),
])
def test_texts_and_labels_that_do_not_fit_are_named(models, texts, labels, message):
    with pytest.raises(ValueError) as error: compare(*models[:2], texts, Settings(**SMALL), labels=labels)
    assert message in str(error.value)
