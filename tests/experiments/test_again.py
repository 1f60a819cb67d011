"""The analysis of nbs/paper/again.py beside naive references, and its runs end to end on a random model."""
import json
import os
import sys
import time
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import warm
from hypothesis import given, settings, strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT/"nbs"/"paper"))
import again

differences = st.lists(st.floats(-5, 5, width=16), min_size=2, max_size=8)


@settings(max_examples=40, deadline=None)
@given(differences)
def test_the_test_counts_all_ways_in_which_signs_could_have_fallen(values):
    means = [fmean(sign*value for sign, value in zip(signs, values))
             for signs in product((1, -1), repeat=len(values))]
    own, some = fmean(values), 1e-12*max(map(abs, values), default=0)
    beyond = min(sum(mean >= own - some for mean in means), sum(mean <= own + some for mean in means))
    assert again.sign_flip(values) == pytest.approx(min(1, 2*beyond/len(means)))


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.001, 1), min_size=1))
def test_holm_is_the_closed_test_of_bonferroni(p):
    "A claim holds where every set of claims that it belongs to is refused by Bonferroni's test of the set."
    sets = [group for size in range(1, len(p) + 1) for group in combinations(p, size)]
    for name, value in again.holm(p).items():
        assert value == pytest.approx(max(min(1, len(group)*min(p[one] for one in group))
                                          for group in sets if name in group))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-3, 3, width=16), min_size=3, max_size=8).filter(lambda values: stdev(values) > 0.01))
def test_equivalence_is_the_90_percent_interval_inside_the_margin(values):
    half = stats.t.ppf(0.95, len(values) - 1)*stdev(values)/len(values)**0.5
    inside = -2 < fmean(values) - half and fmean(values) + half < 2
    assert (again.equivalent(values) < 0.05) == inside


@pytest.mark.parametrize("seeds, level", [(6, 0.05), (7, 0.025)])
def test_power_is_what_repeating_the_experiment_finds(seeds, level):
    draw = np.random.default_rng(3).normal(1.8, 1, (300, seeds))
    assert again.power(1.8, seeds, level) == pytest.approx(np.mean([again.sign_flip(row) <= level for row in draw]),
                                                           abs=0.07)


def test_six_seeds_could_never_pass_and_seven_can():
    rows = lambda seeds: [dict(rung="r", arm=arm, seed=seed, step=9, ndcg_at_10=50 + 3*(arm == "A") + seed/100)
                          for arm in "ASW" for seed in range(seeds)]
    assert {one.verdict for one in again.contrasts(rows(6), "r")} == {"undecided"}
    assert {one.verdict for one in again.contrasts(rows(7), "r")} == {"greater"}
    assert [one.name for one in again.contrasts(rows(7), "r", others="W", first="S")] == ["S - W"]
    fewer = [row for row in rows(7) if (row["arm"], row["seed"]) != ("S", 3)]
    with pytest.raises(ValueError, match="run it to its end"): again.contrasts(fewer, "r")


def test_an_early_score_of_one_arm_against_a_late_one_of_another():
    rows = [dict(rung="r", arm=arm, seed=seed, step=step,
                 ndcg_at_10=dict(A=50 + seed, W=40)[arm] + step/10)
            for arm in "AW" for step in (10, 40) for seed in (1, 2, 3)]
    assert again.early_against_late(rows, "r", 10, 40).differences == (8.0, 9.0, 10.0)
    with pytest.raises(ValueError, match="run it to its end"): again.early_against_late(rows[:-1], "r", 10, 40)


def test_longer_rungs_have_the_rates_and_stage_i_of_the_shortest(monkeypatch):
    monkeypatch.setattr(again, "rows_of", lambda path: [
        dict(rung="gpu", arm="W", learning_rate=rate, temperature=0.02, ndcg_at_10=1000*rate) for rate in (3e-4, 1e-3)])
    assert again.tuned("gpu-longer", "W") == again.tuned("gpu-long", "W") == dict(learning_rate=1e-3, temperature=0.02)
    assert {name: again.shortest(name) for name in ("gpu-longer", "gpu-long", "gpu", "village-long")} == {
        "gpu-longer": "gpu", "gpu-long": "gpu", "gpu": "gpu", "village-long": "village"}
    assert again.RUNGS["gpu-longer"]["stage1"] == again.RUNGS["gpu"]["stage1"]


def test_yardsticks_read_every_pair_before_one_comes_again():
    import random
    import yardsticks
    few, many = (yardsticks.drawn(range(10), count, random.Random(1)) for count in (4, 25))
    assert few == random.Random(1).sample(range(10), 4), "as it was for sets that are large enough"
    assert [sorted(many[:10]), sorted(many[10:20])] == [list(range(10))]*2 and len(set(many[20:])) == 5


def test_ndcg_of_one_document_a_query():
    class Model:
        encode_query = staticmethod(lambda texts: np.eye(12)[[int(text) for text in texts]])
        encode_document = staticmethod(lambda texts: np.array([[float(text.split()[0] == str(k))*(1 + n)
                                                                for k in range(12)] for n, text in enumerate(texts)]))
    documents = ["0", "1 first", "1 second", "1 third"]
    found = again.ndcg(Model, [("0", 0), ("1", 3), ("1", 1)], documents)
    assert found == pytest.approx([100, 100, 100/np.log2(4)])


def seen(folder, name):
    card = os.environ["CUDA_VISIBLE_DEVICES"]
    (folder/name).write_text(card)
    other = {"4": "7", "7": "4"}[card]
    until = time.monotonic() + 60
    while not any(path.read_text() == other for path in folder.iterdir()):  # both cards are at work at the same time
        assert time.monotonic() < until
        time.sleep(0.01)


def test_runs_share_all_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(again, "visible", lambda: ["4", "7"])
    assert again.side_by_side(partial(seen, tmp_path), [("a",), ("b",), ("c",)], 2) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
    assert {path.read_text() for path in tmp_path.iterdir()} == {"4", "7"}


def test_the_steps_and_objectives_of_each_arm(monkeypatch):
    import anchor_nb
    trained = []
    monkeypatch.setattr(anchor_nb, "train", lambda recipe: trained.append(recipe) or {})
    for arm in again.ARMS: again.first_stage("descriptions-long", arm, 1, "pairs")
    kept = {"/".join(Path(recipe.out).parts[-2:]): (recipe.steps, recipe.pairing, recipe.anchor_sink, recipe.objectives)
            for recipe in trained}
    bags, both = dict(ebae=1.0, ebar=1.0), dict(anchor=1.0, ebae=0.3, ebar=0.3)
    assert kept == {"A-1/bags": (150, "own", False, bags), "A-1/stage1": (800, "own", True, both),
                    "S-1/bags": (150, "strangers", False, bags), "S-1/stage1": (800, "strangers", True, both),
                    "B-1/bags": (150, "own", False, bags), "B-1/stage1": (800, "own", False, bags),
                    "L-1/stage1": (950, "own", False, dict(lm=1.0)),
                    "C-1/bags": (150, "own", False, bags), "C-1/stage1": (800, "own", True, bags | dict(anchor=0.3))}


def test_the_plan_runs_from_one_command_and_a_second_time_does_nothing(tmp_path):
    (tmp_path/"nbs").symlink_to(ROOT/"nbs")
    command = [sys.executable, "nbs/paper/again.py", "run", "dry", "--seeds", "1"]
    first = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    kept = tmp_path/"runs/again/dry-rows"
    rows = again.rows_of(kept/"again.jsonl")
    assert [(row["arm"], row["step"]) for row in rows] == [(arm, step) for arm in "ASW" for step in (4, 2)]
    assert {row["queries"] for row in rows} == {101} == {row["documents"] for row in rows}
    carried = again.rows_of(kept/"again-carried.jsonl")
    assert len(carried) == 2 and not any(map(again.carries, carried))
    assert warm.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert again.rows_of(kept/"again.jsonl") == rows
    stopped = [row for row in rows if (row["arm"], row["step"]) != ("S", 4)]
    (kept/"again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stopped), encoding="utf-8")
    assert warm.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert again.rows_of(kept/"again.jsonl") == [*stopped, rows[2]] and rows[2]["arm"] == "S"
    assert again.rows_of(kept/"again-carried.jsonl") == carried, "what was known is not written twice"
    (kept/"again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]), encoding="utf-8")
    longer = [*command[:-3], "dry-long", "--seeds", "1", "--arms", "AW"]
    assert warm.run(longer, cwd=tmp_path, capture_output=True).returncode == 0
    of = lambda rung: {(row["arm"], row["step"]): row["ndcg_at_10"] for row in again.rows_of(kept/"again.jsonl")
                       if row["rung"] == rung and row["arm"] in "AW"}
    assert list(of("dry-long")) == [(arm, step) for arm in "AW" for step in (8, 6, 4, 2)]
    assert of("dry").items() <= of("dry-long").items() and len(of("dry")) == 4, "begins alike, fills what is missing"
    assert again.rows_of(kept/"again-carried.jsonl") == carried, "it has the same stage I"
