"""Claims of nbs/paper: what a sweep's scores become, and what must hold for every set of scores."""
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.evaluation.measure import Evaluation, save_evaluation
from anchor_nb.evaluation.scores import evaluation_file
from anchor_nb.evaluation.significance import bootstrap
from anchor_nb.experiments.sweeps import read_sweep
from anchor_nb.runs.ledger import append_rows, read_json, read_rows, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent/"nbs"/"paper"))
from experiment import (Claim, answer_table, answers, answers_figure, by_queries, by_training_seed, differences_of,
                        holm, keep_results, paper_differences, planned_claims, seeds_needed, verdict)

OPPOSITE = {"supported": "contradicted", "contradicted": "supported", "undecided": "undecided",
            "no difference that matters": "no difference that matters"}
scores = st.lists(st.floats(0, 1, width=16), min_size=6, max_size=6)


# ---- a made-up sweep: a good arm, one without effect, one that depends on the seed, and a model without a seed ----

EFFECTS = {"untrained": lambda seed: -0.2, "baseline": lambda seed: 0, "anchor": lambda seed: 0.1,
           "same": lambda seed: 0.0, "lucky": lambda seed: {42: 0.4, 43: -0.1, 44: -0.02}[seed]}
CLAIMS = [Claim("H1", "anchor", "baseline"), Claim("H2", "same", "baseline"), Claim("H3", "lucky", "baseline"),
          Claim("H4", "untrained", "baseline")]


RUNS = [f"stage2-{seed}" for seed in (42, 43, 44)]

@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root, generator = tmp_path_factory.mktemp("sweep"), np.random.default_rng(0)
    difficulty = {task: generator.uniform(0.3, 0.7, 100) for task in ("wiki", "debian")}
    for label, seed, task in [(label, seed, task) for label in EFFECTS
                              for seed in ([None] if label == "untrained" else [42, 43, 44]) for task in difficulty]:
        noisy = difficulty[task] + EFFECTS[label](seed) + generator.normal(0, 0.01, 100)
        values = {f"q{k}": float(value) for k, value in enumerate(noisy)}
        row = dict(label=label, training_seed=seed, step=21, task=task, type="Retrieval", metric="ndcg_at_10",
                   main=True, value=fmean(values.values()), data="d", model=f"{label}{seed}", seed=0, queries=100,
                   documents=300, manifest=f"{root}/stage2-{seed or 42}/run.json", max_length=40,
                   instructions="none", benchmark="")
        append_rows(root/"ledger.jsonl", [row])
        save_evaluation(Evaluation(task, "Retrieval", "ndcg_at_10", dict(ndcg_at_10=row["value"]), "d", 100, 300, 1.0,
                                   dict(statistic="mean", values=values)), root/"per_query"/evaluation_file(row))
    for name in RUNS:
        write_json(root/name/"run.json", dict(stage="stage2", recipe=dict(out=f"{root}/{name}"),
                                              failures=[dict(reason="Stopped", traceback="/usr/lib/somewhere")]))
        (root/name/"model").mkdir()
    return root


@pytest.fixture(scope="module")
def kept(sweep, tmp_path_factory):
    into = tmp_path_factory.mktemp("kept")
    assert keep_results(sweep, into) == RUNS
    return into


def test_what_is_kept_names_no_place_and_holds_no_weights(sweep, kept, tmp_path):
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert {str(path.relative_to(kept)) for path in files} == {
        "ledger.jsonl", "queries.jsonl", *(f"{name}/run.json" for name in RUNS)}
    assert not any(str(sweep) in path.read_text() for path in files)
    assert read_json(kept/"stage2-42/run.json") == dict(stage="stage2", recipe=dict(out="runs/stage2-42"),
                                                       failures=[dict(reason="Stopped")])
    with pytest.raises(FileNotFoundError, match="ledger.jsonl does not exist"): keep_results(tmp_path, kept)


def test_a_difference_is_that_of_each_query_and_each_seed(kept):
    rows = read_rows(kept/"queries.jsonl")
    value = {(row["label"], row["training_seed"], row["task"]): row["values"] for row in rows}
    differences = differences_of(rows, CLAIMS[0])
    naive = fmean(value["anchor", seed, "wiki"]["q7"] - value["baseline", seed, "wiki"]["q7"] for seed in (42, 43, 44))
    place = sorted(value["anchor", 42, "wiki"]).index("q7")
    assert by_queries(differences)[1][place] == pytest.approx(naive, abs=1e-12)
    assert fmean(by_training_seed(differences).values()) == pytest.approx(0.1, abs=2e-3)
    assert sorted(differences_of(rows, CLAIMS[3])) == [42, 43, 44] # the untrained model stands beside every seed


@pytest.mark.parametrize("claim, left_out, message", [
    (Claim("H1", "ankor", "baseline"), None, "no scores of 'ankor'; there are anchor, baseline"),
    (Claim("H2", "anchor", "baseline", 7), None, r"was not scored at step 7, only at \[21\]"),
    (Claim("H", "lucky", "baseline"), ("lucky", 44, "debian"), "were asked different queries"),
    (Claim("H", "same", "baseline"), ("same", 44), r"has the seeds \[42, 43\], 'baseline' \[42, 43, 44\]"),
])
def test_arms_that_were_not_measured_alike_are_not_compared(kept, claim, left_out, message):
    rows = [row for row in read_rows(kept/"queries.jsonl") if left_out is None
            or (row["label"], row["training_seed"], row["task"])[:len(left_out)] != left_out]
    with pytest.raises(ValueError, match=message): differences_of(rows, claim)


def test_verdicts_and_their_figure(kept):
    found = answers(read_rows(kept/"queries.jsonl"), CLAIMS)
    verdicts = ["supported", "no difference that matters", "undecided", "contradicted"]
    assert [answer.verdict for answer in found] == list(answer_table(found)["verdict"]) == verdicts
    assert found[2].queries.low > 0, "over queries alone, the lucky arm would have won"
    assert verdict([0.1, 0.2], bootstrap([0.1, 0.2, -0.3]), 0.02) == "undecided"
    axes = answers_figure(found, theirs={"H1": 3.0}).axes[0]
    assert [text.get_text() for text in axes.texts] == verdicts
    assert [len(line.get_xdata()) for line in axes.lines if line.get_gid() == "H3"] == [3]
    assert axes.get_yticklabels()[0].get_text() == "H1: anchor \N{MINUS SIGN} baseline"
    assert any(line.get_gid() == "H1 paper" for line in axes.lines)
    with pytest.raises(ValueError, match="no answers to draw"): answers_figure([])


def test_so_many_seeds_just_leave_out_zero():
    from scipy.stats import t
    values = [0.4, -0.1, -0.02]
    decides = lambda n: t.ppf(0.975, n - 1)*np.std(values, ddof=1)/n**0.5 < np.mean(values)
    assert decides(seeds_needed(values)) and not decides(seeds_needed(values) - 1)
    assert seeds_needed([0.1, 0.1, 0.1]) == 2 and seeds_needed([0.1, -0.1, 0.0]) is None


def test_the_claims_of_the_plan_are_about_arms_of_the_sweep():
    claims, arms = planned_claims(7), read_sweep("experiment-cpu")["arms"]
    assert all({claim.better, claim.worse} <= set(arms) for claim in claims)
    assert set(paper_differences()) < {claim.name for claim in claims}
    assert paper_differences()["H1"] == pytest.approx(65.19 - 63.95)


# ---- Holm's rule ----

def textbook(p):
    "The rule as it is usually written, a loop over the p values."
    held, going = [False]*len(p), True
    for rank, place in enumerate(np.argsort(p)):
        going = going and p[place] <= 0.05/(len(p) - rank)
        held[place] = going
    return held


def test_decisions_are_those_of_the_rule_as_it_is_usually_written():
    generator = np.random.default_rng(1)
    nine = holm({f"{gain:.2f}": [generator.normal(gain, 0.3, 100) for _ in range(2)]
                 for gain in (0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2)}).values()
    expected = textbook([answer.p for answer in nine])
    assert [answer.p <= 1 - answer.level for answer in nine] == expected
    assert [not answer.low <= 0 <= answer.high for answer in nine] == expected
    alone, around = holm({"only": [np.array([1.0, 2.0, 4.0])]})["only"], bootstrap([1, 2, 4], samples=20_000)
    assert (alone.mean, alone.level) == pytest.approx((7/3, 0.95))
    assert (alone.low, alone.high) == pytest.approx((around.low, around.high), abs=0.35)
    assert holm({"equal": [np.zeros(5)]})["equal"].p == 1.0
    with pytest.raises(ValueError, match="'anchor' has no task, or a task without queries"):
        holm({"anchor": [np.array([])]})


def test_nine_claims_without_a_cause_seldom_have_a_find():
    generator = np.random.default_rng(2)
    families = [holm({k: [generator.normal(0, 1, 60)] for k in range(9)}, samples=1000).values() for _ in range(100)]
    share = np.mean([any(not answer.low <= 0 <= answer.high for answer in family) for family in families])
    assert share < 0.14 # 5 %, three standard errors of 100 families, and the error of the percentile interval


# ---- for every set of scores ----


def rows_of(arms, seeds=(1, 2)):
    "Rows of two tasks with three queries each."
    return [dict(label=label, training_seed=seed, step=3, task=task,
                 values={f"q{k}": value + shift for k, value in enumerate(values[start:start + 3])})
            for label, (values, shifts) in arms.items() for seed, shift in zip(seeds, shifts)
            for start, task in ((0, "a"), (3, "b"))]


@settings(max_examples=40, deadline=None)
@given(scores, scores, st.floats(-.5, .5), st.floats(-.5, .5))
def test_turning_a_claim_around_turns_its_verdict(first_scores, second_scores, first, second):
    rows = rows_of({"one": (first_scores, (first, second)), "other": (second_scores, (0, 0))})
    (there,), (back,) = [answers(rows, [Claim("H", *names)]) for names in (("one", "other"), ("other", "one"))]
    assert np.isclose(there.queries.mean, -back.queries.mean)
    assert np.allclose(list(there.seeds.values()), [-value for value in back.seeds.values()])
    near = min(abs(abs(edge) - bound) for edge in (there.queries.low, there.queries.high) for bound in (0, .02))
    assert near < 1e-2 or there.verdict == OPPOSITE[back.verdict]


@settings(max_examples=40, deadline=None)
@given(scores, scores, st.permutations(range(12)))
def test_the_order_of_rows_does_not_matter(first_scores, second_scores, order):
    arms = {"one": (first_scores, (0, .1)), "other": (second_scores, (0, 0)), "third": (first_scores, (.2, .2))}
    rows = rows_of(arms)
    claims = [Claim("H1", "one", "other"), Claim("H2", "third", "one")]
    assert answers(rows, claims) == answers([rows[k] for k in order], claims)


@settings(max_examples=40, deadline=None)
@given(scores, scores)
def test_queries_and_seeds_have_one_mean(first_scores, second_scores):
    rows = rows_of({"one": (first_scores, (0, .3)), "other": (second_scores, (.1, 0))})
    differences = differences_of(rows, Claim("H", "one", "other"))
    assert np.isclose(np.mean([part.mean() for part in by_queries(differences)]),
                      np.mean(list(by_training_seed(differences).values())))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1, width=16), min_size=5, max_size=30), st.integers(1, 9))
def test_company_widens_an_interval(values, others):
    alone = bootstrap(values, samples=20_000)
    beside = holm({"it": [values]} | {f"other {k}": [[0.0, 1e-9]] for k in range(others)})["it"]
    assert beside.low <= alone.low + .02 and beside.high >= alone.high - .02
    assert .95 <= beside.level <= 1 - .05/(1 + others) + 1e-12
