"Runs of stage I on other objectives than anchor, and on several: processes and interruptions leave them alone."
import pytest

from anchor_nb.core.recipe import Stage1
from anchor_nb.training.trainer import AnchorTrainer, train
from common import recipe, rows, run


@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_several_objectives_as_one_does(tmp_path):
    "Adapters, both ways, in double precision; the second run cuts finer too."
    settings = dict(objectives=dict(mntp=1.0, anchor=0.5, ebar=0.2), bidirectional=True, lora_rank=4,
                    pooling="content_mean", precision="fp64", steps=4)
    train(recipe(Stage1, tmp_path/"one", micro_tokens=10_000, **settings))
    run(recipe(Stage1, tmp_path/"two", micro_tokens=150, processes=2, **settings))
    for one, two in zip(rows(tmp_path/"one"), rows(tmp_path/"two"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_share_an_encoding_as_one_does(tmp_path, sharding):
    "Bags alone, then the anchor with them: what is shared changes in the middle of the run."
    settings = dict(objectives=dict(ebar=0.3, anchor=1.0, ebae=0.3), anchor_after=2, word_dropout=0.3, precision="fp64",
                    steps=4)
    train(recipe(Stage1, tmp_path/"one", micro_tokens=10_000, **settings))
    run(recipe(Stage1, tmp_path/"two", micro_tokens=150, processes=2, sharding=sharding, **settings))
    for one, two in zip(rows(tmp_path/"one"), rows(tmp_path/"two"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    assert "loss_q2d" not in rows(tmp_path/"one")[1] and "loss_q2d" in rows(tmp_path/"one")[2]


def test_cached_gradients_and_pieces_in_one_step_of_two_processes(tmp_path):
    "SimCSE does not reach the head, so it goes before anchor; `finish` compares the ranks' weights."
    run(recipe(Stage1, tmp_path/"run", objectives=dict(anchor=1.0, simcse=0.5), attention_dropout=0.3, processes=2,
               micro_tokens=150, steps=3))
    assert all(0 < row["loss_simcse"] < 5 for row in rows(tmp_path/"run"))


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_draws_the_masks_and_the_noise_of_a_whole_one(tmp_path, monkeypatch):
    settings = dict(objectives=dict(mntp=1.0, simcse=0.5), bidirectional=True, attention_dropout=0.3, save_steps=2,
                    steps=5)
    train(recipe(Stage1, tmp_path/"whole", **settings))
    original = AnchorTrainer.training_step
    def stop(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise InterruptedError
        return original(self, *args, **kwargs)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(AnchorTrainer, "training_step", stop)
        train(recipe(Stage1, tmp_path/"broken", **settings))
    train(recipe(Stage1, tmp_path/"broken", **settings))
    assert rows(tmp_path/"broken") == rows(tmp_path/"whole")


def test_the_controls_train_on_the_same_texts_and_differ_where_they_should(tmp_path):
    "Strangers: the same targets, paired otherwise. Language modelling: the same targets, fewer tokens in the layers."
    arms = dict(own={}, strangers=dict(pairing="strangers"), language=dict(objectives={"lm": 1.0}))
    for name, settings in arms.items(): train(recipe(Stage1, tmp_path/name, steps=2, **settings))
    own, strangers, language = [rows(tmp_path/name) for name in arms]
    assert [row["target_tokens_d2q"] for row in own] == [row["target_tokens_d2q"]
                                                         for row in strangers] == [row["target_tokens_queries"]
                                                                                   for row in language]
    assert [row["target_tokens_q2d"] for row in own] == [row["target_tokens_documents"] for row in language]
    assert own[0]["loss_q2d"] != strangers[0]["loss_q2d"] != language[0]["loss_documents"]
    assert all(mine["tokens"] > theirs["tokens"] for mine, theirs in zip(own, language))
