"Drawing that leaves no trace, and the paper's numbers; the notebook holds what a figure draws."
import pytest

from anchor_nb.experiments import figures


@pytest.mark.parametrize("rows", [[], [dict(step=1, loss=2.0, loss_q2d=1.0, loss_d2q=1.0, seconds=1.0, tokens=5)]])
def test_losses_of_no_step_and_of_one_step(rows):
    for figure in (figures.stage1_losses(rows), figures.stage2_losses({"anchor": rows}), figures.throughput(rows)):
        assert (figure.axes[0].texts[0].get_text() == "not run") == (not rows)


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    import matplotlib, matplotlib.pyplot as plt
    before = dict(matplotlib.rcParams)
    figures.stages_compared([])
    assert dict(matplotlib.rcParams) == before and not plt.get_fignums()


def test_papers_numbers_are_consistent():
    "Tables that repeat a number agree on it."
    paper = figures.paper()
    steps, stages = paper["table5_steps_llama-3.2-1b_subset15"], paper["table10_stages_subset15"]["llama-3.2-1b"]
    assert steps["stage II only, 1000 steps"] == stages["stage2_only"]
    objectives, mteb56 = paper["table3_objectives_llama-3.2-1b_mteb56"], paper["table1_mteb56"]["llama-3.2-1b"]
    assert objectives["baseline"] == mteb56["baseline"]
    for model in figures.PAPER_MODELS:
        assert all(len(values) == 5 for values in paper["table9_early_stage2_subset15"][model].values())
