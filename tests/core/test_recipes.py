"""Every method, from its preset to vectors, on the tiny model; and what the settings that only they use do to a run."""
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.runs.launch import launch
from anchor_nb.experiments.pipeline import full_preset
from anchor_nb.core.presets import methods, preset, preset_folder
from anchor_nb.core.recipe import RECIPES
from anchor_nb.training.trainer import train
from common import rows

TINY = dict(data=str(build_corpus("toy")/"pairs"), instructions="corpora", steps=3, global_batch=8, warmup_steps=1,
            max_length=64, save_steps=0, micro_tokens=10_000, precision="fp64")


def settings(method, stage, out, **more):
    return RECIPES[stage](**full_preset(method, stage) | dict(model="tiny", out=str(out)) | TINY | more)


def trained(method, folder, **more):
    "All stages of a method, each from the one before; the folder of the last."
    model = "tiny"
    for stage in methods()[method]["stages"]:
        train(settings(method, stage, folder/stage, model=model, **more.get(stage, {})))
        model = str(folder/stage/"model")
    return folder/stage


STAGES = [(method, stage) for method, card in methods().items() for stage in card["stages"]]
PLACES = {"model", "data", "out", "micro_tokens", "save_steps", "snapshot_steps"} # of a preset; they are no method's


@pytest.mark.parametrize("method, stage", STAGES)
def test_a_preset_is_its_original_but_for_what_it_says(method, stage):
    "Option by option: each that a preset sets has an original, and each that differs from it is named on the card."
    originals = yaml.safe_load((Path(__file__).parent.parent/"originals.yaml").read_text(encoding="utf-8"))
    written = originals[method][stage]
    assert (here := set(preset(method, stage)) - PLACES) <= set(written), f"no original of {here - set(written)}"
    recipe = RECIPES[stage](**full_preset(method, stage))
    card = " ".join(methods()[method]["differs"]) + (preset_folder()/method/f"{stage}.yaml").read_text(encoding="utf-8")
    for name, value in written.items():
        different = isinstance(value, dict) and "said" in value
        original = value["original"] if different else value
        assert (getattr(recipe,
                        name) != original) == different, f"{name}: {getattr(recipe, name)!r}, original {original!r}"
        assert not different or value["said"] in card, f"{name} differs, and no card says {value['said']!r}"


@pytest.mark.parametrize("method", methods())
def test_every_method_runs_to_vectors(method, tmp_path):
    out = trained(method, tmp_path)
    wanted = settings(method, "stage2", out)
    facts = json.loads((out/"model"/"anchor_nb.json").read_text())
    assert (facts["pooling"], facts["bidirectional"]) == (wanted.pooling, wanted.bidirectional)
    assert json.loads((out/"model"/"config.json").read_text()).get("is_causal", True) is not wanted.bidirectional
    embedder = AnchorEmbedder.from_pretrained(str(out))
    assert embedder.pooling == wanted.pooling
    vectors = embedder.encode_query(["a barber with rabbits", "a brewer of beer"], "Find the person")
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) and abs(vectors[0] @ vectors[1]) < 1 - 1e-6
    assert all(np.isfinite(row["loss"]) for row in rows(out)) and len(rows(out)) == 3


@pytest.mark.parametrize("method, stage, more", [
    ("llama2vec", "stage1", dict(objectives=dict(llara=1.0), pooling="tokens", pooling_tokens=4)),
    ("echo", "stage2", dict(both_directions=True, matryoshka_dims=[8])), ("bge-icl", "stage2", {})])
def test_micro_batches_and_processes_change_nothing(method, stage, more, tmp_path):
    ways = dict(plain={}, pieces=dict(micro_tokens=150), ranks=dict(micro_tokens=300, processes=2))
    found = {}
    for name, how in ways.items():
        recipe = settings(method, stage, tmp_path/name, **more | how)
        launch(train, recipe, processes=recipe.processes, run_dir=recipe.out)
        found[name] = [(row["loss"], row["grad_norm"]) for row in rows(recipe.out)]
    for name in ("pieces", "ranks"):
        assert np.array(found[name]) == pytest.approx(np.array(found["plain"]), rel=1e-6), name


def test_a_bidirectional_model_does_not_become_causal_by_silence(tmp_path):
    trained("llm2vec", tmp_path)
    with pytest.raises(ValueError, match="was trained with bidirectional attention; set bidirectional=true"):
        train(settings("e5", "stage2", tmp_path/"next", model=str(tmp_path/"stage1"/"model")))


@pytest.mark.parametrize("changes, message", [
    (dict(without_in_batch=["toys"]), "without_in_batch names unknown datasets toys; there are toy"),
    (dict(distillation="kl"), "needs a teacher's scores, and toy has none"),
    (dict(few_shot=2, instructions="paper"), "few_shot needs queries with instructions"),
    (dict(matryoshka_dims=[4096]), "4096 is not between 0 and"),
])
def test_a_setting_that_these_rows_leave_without_effect_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message): train(settings("e5", "stage2", tmp_path/"run", **changes))
    assert not (tmp_path/"run").exists()


def test_all_parameters_train_on_two_processes_though_the_head_has_no_part(tmp_path):
    "A head of its own gets no gradient from stage II, and DDP waits for every gradient."
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    tiny, model = resolve_model("tiny"), str(tmp_path/"untied")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny, tie_word_embeddings=False)).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(model)
    losses = {}
    for processes in (1, 2):
        recipe = settings("gritlm-re", "stage2", tmp_path/str(processes), model=model, processes=processes)
        launch(train, recipe, processes=processes, run_dir=recipe.out)
        losses[processes] = [row["loss"] for row in rows(recipe.out)]
    assert losses[2] == pytest.approx(losses[1], rel=1e-9)
