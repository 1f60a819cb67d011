"The paper's numbers through our tables, and tables of ledgers that have holes; the notebook holds the examples."

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.evaluation.comparison import Part, difference
from anchor_nb.evaluation.significance import over_seeds
from anchor_nb.evaluation.tables import (by_seed, comparable, expected_vs_obtained, inconsistencies,
                                         our_label, paper, paper_backbone, paper_cells, paper_rows, paper_tasks,
                                         results_table, significance_table, task_means, task_type, tolerance)

THEIRS = paper_rows()
MODELS = list(dict.fromkeys(row["label"] for row in THEIRS))


def row(label="anchor", task="wiki", value=0.5, **changes):
    "A row of today's ledger."
    usual = dict(label=label, step=20, task=task, type="Retrieval", metric="ndcg_at_10", main=True, value=value, seed=0,
                 training_seed=42, queries=9,
                 documents=9, max_length=64, instructions="paper", model="m", manifest="", benchmark="local", data="1")
    return usual | changes


# ---- the paper ----

@pytest.mark.parametrize("label, mean_of_56, mean_of_15", [
    ("llama-3.2-1b/baseline", 60.994, 63.955), ("llama-3.2-1b/anchor", 62.244, 65.191), ("qwen2.5-1.5b/baseline",
                                                                                         61.505, 64.393),
    ("qwen2.5-1.5b/anchor", 62.865, 64.982), ("llama-3.2-3b/baseline", 62.326, 65.236), ("llama-3.2-3b/anchor", 63.548,
                                                                                         66.163),
    ("llama-3.1-8b/baseline", 64.067, 66.791), ("llama-3.1-8b/anchor", 65.299, 67.791)])
def test_the_paper_comes_out_of_its_single_tasks(label, mean_of_56, mean_of_15):
    assert results_table(THEIRS, paper_tasks()).loc[label, "mean"] == pytest.approx(mean_of_56, abs=6e-4)
    assert results_table(THEIRS, paper_tasks("paper15")).loc[label, "mean"] == pytest.approx(mean_of_15, abs=6e-4)


def test_beir_is_the_mean_of_14():
    assert results_table(THEIRS, paper_tasks("beir14")).loc["llama-3.1-8b/anchor", "mean"] == pytest.approx(58.07,
                                                                                                            abs=0.005)


def test_means_by_type_are_table_1_but_for_its_known_slips():
    slips = {(r.label, r.column) for r in inconsistencies().itertuples()}
    table, printed = results_table(THEIRS), paper()["table1_mteb56"]
    for label in MODELS:
        model, system = label.split("/")
        for column, value in printed[model][system].items():
            agrees = table.loc[label, "mean" if column == "Average" else column] == pytest.approx(value, abs=0.0055)
            assert agrees != ((label, column) in slips), (label, column)
    assert len(slips) == 7


def test_every_cell_of_the_paper_is_there_once():
    cells = paper_cells()
    assert len({(cell["table"], cell["row"], cell["column"]) for cell in cells}) == len(cells) == 696
    assert {cell["table"] for cell in cells} == {"1", "2", "3", "4", "5", "9", "10", "11", "14", "15"}
    assert all(17 < cell["paper"] < 97 for cell in cells)


def test_the_ablations_agree_with_each_other_where_they_print_one_run():
    "Tables 4, 5, 10 and 14 hold the same runs; the tables differ in the third digit at most."
    found = {}
    for cell in paper_cells():
        if cell["column"] == "15 tasks, step 1000": found.setdefault(cell["label"], set()).add(cell["paper"])
    assert found["llama-3.2-1b/anchor"] == {65.19} and found["llama-3.2-1b/baseline"] == {63.95}


# ---- which rows ----

@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("st"), st.integers(0, 1), st.integers(0, 1),
                          st.sampled_from([0, 32, 64])), max_size=12))
def test_one_row_each_all_on_one_cut(drawn):
    rows = [row(label, task, place / 20, seed=seed, training_seed=training, max_length=length, data="")
            for place, (label, task, seed, training, length) in enumerate(drawn)]
    found = comparable(rows)
    assert comparable(found) == found and all(one in rows for one in found)
    assert len({(r["label"], r["step"], r["task"], r["training_seed"]) for r in found}) == len(found)
    for task in "st":
        assert len({r["data"] or r["seed"] for r in found if r["task"] == task}) <= 1
        assert len({r["max_length"] for r in found if r["task"] == task and r["max_length"]}) <= 1
    assert {r["task"] for r in found} == {r["task"] for r in rows}


def test_other_data_is_another_cut():
    assert [r["label"] for r in comparable([row("baseline", data="1"), row("anchor", data="2")])] == ["anchor"]


# ---- results ----

def test_a_mean_with_a_hole_is_no_mean():
    rows = [row(task="a", value=0.4), row(task="b", value=0.6), row("baseline", task="a", value=0.9)]
    table = results_table(rows)
    assert table["mean"].tolist() == pytest.approx([50.0, np.nan], nan_ok=True) and table["missing"].tolist() == [0, 1]
    assert results_table(rows, ["a", "c"])["missing"].tolist() == [1, 1]


def test_training_seeds_give_an_interval_and_a_seed_with_a_hole_is_left_out():
    rows = [row(task=task, training_seed=seed, value=value) for seed, value in [(1, 0.4), (2, 0.5), (3, 0.6)]
            for task in "ab"]
    assert results_table(rows).loc["anchor", ["mean", "seeds"]].tolist() == pytest.approx([50, 3])
    assert results_table(rows).loc["anchor", "low"] == pytest.approx(50 - 24.841, abs=1e-3)
    assert results_table(rows[:-1]).loc["anchor", "mean"] == pytest.approx(45)


def test_the_last_step_stands_and_is_not_filled_up_from_earlier_ones():
    rows = [row(task="a", step=10, value=0.1), row(task="b", step=10, value=0.1), row(task="a", value=0.3)]
    assert results_table(rows).loc["anchor", ["step", "missing", "a"]].tolist() == pytest.approx([20, 1, 30])


def test_two_models_under_one_label_are_not_averaged():
    rows = [row(task="a", model="old"), row(task="b", model="old"), row(task="a", model="new", value=0.7)]
    assert results_table(rows).loc["anchor", ["missing", "a"]].tolist() == pytest.approx([1, 70])
    assert task_means(comparable(rows), ["a"]) == [0.7]


# ---- expected and obtained ----

def test_the_paper_agrees_with_itself():
    table = expected_vs_obtained(THEIRS)
    ran = table[table["verdict"] != "not run"]
    off = ran[ran["verdict"] != "within tolerance"]
    assert set(zip(off["row"], off["column"])) == {("qwen2.5-1.5b/baseline", "PairClassification"),
                                                   ("llama-3.1-8b/baseline", "Clustering")}
    assert len(ran) == 544 and set(table["table"]) == {"1", "2", "3", "4", "5", "9", "10", "11", "14", "15"}
    assert table.loc[table["verdict"] == "not run", ["ours", "difference"]].isna().all().all()


@pytest.mark.parametrize("shift, verdict", [(0.0, "within tolerance"), (0.0044, "within tolerance"), (0.0046, "above"),
                                            (-0.0046, "below")])
def test_a_shift_beyond_the_tolerance_is_seen(shift, verdict):
    ours = [r | dict(label="anchor", value=r["value"] + shift) for r in THEIRS if r["label"] == "llama-3.2-3b/anchor"]
    table = expected_vs_obtained(ours, base="meta-llama/Llama-3.2-3B-Instruct")
    average = table[(table["table"] == "10") & (table["row"] == "llama-3.2-3b/stage1+stage2")]
    assert average["verdict"].tolist() == [verdict] and average["difference"].item() == pytest.approx(100 * shift,
                                                                                                      abs=0.006)


@pytest.mark.parametrize("change, why", [
    (dict(step=60), "ours at step 60, theirs at 1000"),
    (dict(max_length=64), "ours with max_length=64, theirs with 512"),
    (dict(max_length=0, tokens=64), "ours with max_length=64, theirs with 512"),
    (dict(instructions="mteb"), "ours with instructions=mteb, theirs with paper"),
    (dict(data="0123456789abcdef"), "ours on other data"),
    (dict(task="LocalWikiRetrieval"), "no rows"),
])
def test_what_is_not_comparable_is_not_run(change, why):
    ours = [row(task="SciFact", step=1000, max_length=512, data="") | change]
    table = expected_vs_obtained(ours, base="llama-3.2-1b")
    assert set(table["verdict"]) == {"not run"}
    cell = table[(table["row"] == "llama-3.2-1b/anchor") & (table["column"] == "SciFact")]
    assert cell["why"].tolist() == [why]


def test_another_model_is_no_reproduction():
    ours = [r | dict(label="anchor") for r in THEIRS if r["label"] == "llama-3.2-1b/anchor"]
    for base in ("", "smollm2-135m"): assert set(expected_vs_obtained(ours, base=base)["verdict"]) == {"not run"}
    same = expected_vs_obtained(ours, base="llama-3.2-1b")
    assert (same["verdict"] == "within tolerance").sum() == 56 + 8 + 8 + 1 + 1 + 1


def test_names_are_matched():
    assert our_label("BGE-large-en-v1.5", [], "llama-3.2-1b") == "BGE-large-en-v1.5"
    assert our_label("llama-3.2-1b/untrained", [], "llama-3.2-1b") == "untrained"
    assert our_label("llama-3.2-1b/anchor", ["llama-3.2-1b/anchor"], "llama-3.2-1b") == "llama-3.2-1b/anchor"


def test_a_tolerance_never_covers_the_papers_gain():
    assert tolerance(1) == 1.5 and tolerance(56) == tolerance(15) == 0.45 and tolerance(4) == 0.75
    for scores in paper()["table10_stages_subset15"].values():
        assert 2 * tolerance(15) < scores["stage1+stage2"] - scores["stage2_only"]


# ---- differences ----

def test_lines_agree_with_the_rows_and_only_items_give_intervals():
    generator = np.random.default_rng(0)
    values = {label: {f"q{i}": float(v) for i, v in enumerate(generator.random(50) * scale)}
              for label, scale in (("anchor", 1.0), ("baseline", 0.3))}
    rows = [row(label, task, float(np.mean(list(values[label].values())))) for label in values for task in "ab"]
    items = {(label, 20, "a"): dict(statistic="mean", values=values[label]) for label in values}
    table = significance_table(rows, items, [("anchor", "baseline"), ("baseline", "anchor"), ("anchor", "nobody")])
    assert table["verdict"].tolist() == ["first better", "no interval", "no interval", "second better", "no interval",
                                         "no interval"]
    assert table["difference"].abs().tolist() == pytest.approx([100 * (rows[0]["value"] - rows[2]["value"])] * 6)
    assert table["items"].tolist()[0] == 50 and np.isnan(table["low"][1])


def test_the_line_over_tasks_has_an_interval_over_tasks():
    table = significance_table(THEIRS, {}, [("llama-3.1-8b/anchor", "llama-3.1-8b/baseline")])
    scores = paper()["table14_15_tasks"]
    found = over_seeds([scores[task]["llama-3.1-8b/anchor"] - scores[task]["llama-3.1-8b/baseline"]
                       for task in sorted(scores)])
    assert len(table) == 57 and table.iloc[-1][["difference", "low", "high"]].tolist() == pytest.approx([found.mean,
                                                                                                         found.low,
                                                                                                         found.high],
                                                                                                        abs=1e-6)


@pytest.mark.parametrize("name", ["ablation", "alpha", "early", "objectives", "stages", "steps"])
def test_the_arms_of_the_papers_sweeps_are_found_by_its_tables(name):
    from anchor_nb.experiments.sweeps import arms_of, read_sweep
    known = {cell["label"] for cell in paper_cells()}
    for arm in arms_of(read_sweep(name)):
        assert our_label(f"llama-3.2-1b/{arm.label}", {arm.label}, paper_backbone("meta-llama/Llama-3.2-1B-Instruct")
                         ) == arm.label and f"llama-3.2-1b/{arm.label}" in known, arm.label


def test_a_ledger_of_its_own_may_call_the_longer_run_baseline_too():
    assert our_label("llama-3.2-1b/baseline_3000", {"baseline"}, "llama-3.2-1b") == "baseline"
    assert our_label("llama-3.2-1b/baseline_3000", {"baseline", "baseline_3000"}, "llama-3.2-1b") == "baseline_3000"
    assert paper_backbone("mistralai/Mistral-7B-v0.1") == "mistral-7b"


# ---- as code ----

def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose paper56, paper15 or beir14"): paper_tasks("mteb")
    with pytest.raises(ValueError, match="'SciFacts'"): task_type("SciFacts")


def test_tasks_that_were_asked_in_other_ways_stay_together():
    "Each `evaluate --task A --instructions ...` makes another revision of the same model."
    rows = [row(task="a", model="m1", system="s"), row(task="b", model="m2", system="s", instructions="file-1"),
            row(task="c", model="m3", system="other")]
    assert list(by_seed(rows[:2])) == ["a", "b"] and list(by_seed(rows)) == ["c"]
    assert list(by_seed([row(task="a", model="m1"), row(task="b", model="m2")])) == ["b"], "rows of before"


def test_one_trained_run_is_no_constant_beside_several():
    part = lambda *seeds: Part(dict(zip(seeds, (0.5, 0.6, 0.7))), [None])
    assert difference(part(1, 2, 3), part(7)) is None, "whatever its seed is called"
    assert difference(part(1, 2, 3), part(None)).mean == pytest.approx(0.1), "a model that was not trained here"


def test_queries_of_the_mean_of_tasks_are_paired_by_name():
    def part(**values): return Part({None: 0.5}, [dict(statistic="mean", values=values)]*2)
    assert difference(part(a=0.5, b=0.7), part(b=0.5, a=0.5)).mean == pytest.approx(0.1)
    with pytest.raises(ValueError, match="2 queries were asked of one system only"):
        difference(part(a=0.5, b=0.7), part(a=0.5, c=0.5))
