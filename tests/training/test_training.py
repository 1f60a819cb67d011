"Invariants of a training run: ranks, micro-batches, kills and time leave its trajectory alone."
import json
import os
import random
import shutil
import signal
from pathlib import Path
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from anchor_nb.core.presets import preset
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.training.defaults import values_from
from anchor_nb.training.trainer import checkpoints
from common import STAGES, assert_same_trajectory, check_pinned, interrupted, recipe, rows, run, start, stop_after


@pytest.mark.parametrize("name", STAGES)
def test_how_does_not_change_what(name, tmp_path):
    "Batches prepared by other processes, and activations computed twice, leave the trajectory alone."
    stage, settings = STAGES[name]
    hows = dict(plain={}, prepared=dict(workers=2, gradient_checkpointing="always", micro_tokens=10_000),
                both=dict(processes=2, workers=1, gradient_checkpointing="always", micro_tokens=10_000))
    for how, extra in hows.items(): run(recipe(stage, tmp_path/how, steps=4, precision="fp64", **settings | extra))
    for how in ("prepared", "both"): assert_same_trajectory(rows(tmp_path/"plain"), rows(tmp_path/how), 1e-9)


def test_what_is_recomputed_twice_is_told(tmp_path):
    "Checkpointing and GradCache together cost time; a run does not end over it."
    from anchor_nb.training.trainer import train
    with pytest.warns(UserWarning, match="both recompute"):
        train(recipe(Stage2, tmp_path/"run", steps=2, micro_tokens=60, gradient_checkpointing="always"))


def test_memory_that_runs_out_with_checkpointing_keeps_it(tmp_path, monkeypatch):
    "Half a batch takes more memory without it than the whole one with it; both together change nothing."
    from anchor_nb.training.steps import ContrastiveStep
    from anchor_nb.training.trainer import train
    settings = dict(steps=4, precision="fp64", **STAGES["stage2"][1])
    often = recipe(Stage2, tmp_path/"often", **settings | dict(gradient_checkpointing="always", micro_tokens=10_000))
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")
    monkeypatch.setattr(ContrastiveStep, "run", full)
    with pytest.raises(torch.OutOfMemoryError, match="it resumes with"): train(often)
    monkeypatch.undo()
    train(often)
    run(recipe(Stage2, tmp_path/"once", **settings))
    assert_same_trajectory(rows(tmp_path/"once"), rows(tmp_path/"often"), 1e-9)


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_the_precision_is_the_recipe_s(asked, tmp_path, monkeypatch):
    "Also where the environment gives accelerate another one."
    from anchor_nb.training.trainer import training_arguments
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    found = training_arguments(recipe(Stage1, tmp_path, precision=asked))
    assert found.mixed_precision == {"fp32": "no"}.get(asked, asked)


def test_sharding_by_another_way_is_refused(tmp_path, monkeypatch):
    from anchor_nb.training.trainer import train
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="sharding=fsdp2"): train(recipe(Stage1, tmp_path/"run"))


def test_eight_bit_optimizer_states(tmp_path):
    "They learn, and their states are small; without the package the error says what to install."
    from anchor_nb.training.trainer import train
    settings = recipe(Stage1, tmp_path/"run", steps=10, optimizer="adamw_8bit")
    if not find_spec("bitsandbytes"):
        with pytest.raises(ValueError, match=r"pip install .anchor_nb\[8bit\]"): train(settings)
        pytest.skip("bitsandbytes is not installed")
    train(settings)
    found = rows(tmp_path/"run")
    assert found[-1]["loss"] < found[0]["loss"] - 0.3


def test_a_resumed_run_saves_as_often_as_is_asked_now(tmp_path, monkeypatch):
    from anchor_nb.training.trainer import AnchorTrainer, train
    saved, publish, step = [], AnchorTrainer.publish, AnchorTrainer.training_step

    def stops(self, *args, **more):
        if self.state.global_step == 2: os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args, **more)
    monkeypatch.setattr(AnchorTrainer, "training_step", stops)
    with pytest.raises(RuntimeError, match="stopped"): train(recipe(Stage2, tmp_path/"run", steps=8, save_steps=0))
    monkeypatch.setattr(AnchorTrainer, "training_step", step)
    monkeypatch.setattr(AnchorTrainer, "publish", lambda *given: (saved.append(given[-1]), publish(*given)))
    train(recipe(Stage2, tmp_path/"run", steps=8, save_steps=3))
    assert saved == ["checkpoint-6"]


@pytest.mark.parametrize("name, settings", [("stage1", {}), ("stage2", dict(micro_tokens=10_000)),
                                            ("stage2", dict(processes=2, micro_tokens=150))],
                         ids=["stage1", "stage2", "stage2-two-processes-cached"])
def test_killed_run_is_the_uninterrupted_run(name, settings, tmp_path):
    "SIGKILL at a random step, the same command again: the same bits. Dropout is on in stage II."
    wanted = random.randint(3, 12)
    print("killed after row", wanted)
    kill = lambda settings: stop_after(wanted, start(settings), tmp_path/"killed")
    interrupted(STAGES[name][0], STAGES[name][1] | settings, tmp_path, kill)


KILL_IN_SAVE = """
import os, signal
import anchor_nb.training.trainer as training
def die(part, final):
    if final.name == "checkpoint-6": os.kill(os.getpid(), signal.SIGKILL)
    return original(part, final)
original, training.replace_folder = training.replace_folder, die
"""


def test_kill_while_a_checkpoint_is_written(tmp_path):
    "The half-written folder is not resumed from, and does not stay."
    def kill(settings):
        process = start(settings, before=KILL_IN_SAVE)
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        assert [p.name for p in checkpoints(tmp_path/"killed")] == ["checkpoint-2", "checkpoint-4"]
        assert (tmp_path/"killed"/".writing"/"checkpoint-6").exists()
    interrupted(*STAGES["stage1"], tmp_path, kill)


def test_one_process_uses_one_gpu(tmp_path, monkeypatch):
    "More than one would be nn.DataParallel, which cuts packed batches apart."
    from transformers import TrainingArguments
    from anchor_nb.training.trainer import training_arguments
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: getattr(self, "_n_gpu", 8)))
    assert training_arguments(recipe(Stage1, tmp_path)).n_gpu <= 1


def test_an_encoder_is_tuned_on_one_gpu_with_the_batch_that_was_asked_for(monkeypatch):
    import sentence_transformers
    from types import SimpleNamespace
    from transformers import TrainingArguments
    from anchor_nb.training.encoders import fit
    class Trainer:
        def __init__(self, encoder, settings, **_):
            seen.append((settings.n_gpu, settings.train_batch_size, settings.prompts))
            self.state = SimpleNamespace(log_history=[])
        def remove_callback(self, _): pass
        def train(self): pass
    def eight_gpus(settings, real=TrainingArguments.__post_init__):
        real(settings)
        settings._n_gpu = 8
    seen, encoder = [], SimpleNamespace(model_card_data=SimpleNamespace(), device=torch.device("cuda"),
                                    modules=list, prompts=dict(query="ask: "))
    monkeypatch.setattr(TrainingArguments, "__post_init__", eight_gpus)
    monkeypatch.setattr(sentence_transformers, "SentenceTransformerTrainer", Trainer)
    fit(encoder, [dict(query="a", positives=["b"], negatives=[])]*40, None, 1e-4, 1, 32, 0)
    assert seen == [(1, 32, dict(anchor="ask: "))] # and with its prompts, with which it is scored


def test_a_models_own_dropout_is_off_unless_the_recipe_asks_for_some(tmp_path):
    "Noise depends on micro-batches, and kernels that cannot drop weights would refuse the model."
    from anchor_nb.losses.simcse import is_noisy
    from anchor_nb.models.resolve import resolve_model
    from anchor_nb.training.trainer import build_model, check_inputs
    shutil.copytree(resolve_model("tiny"), model := tmp_path/"model")
    config = json.loads((model/"config.json").read_text())
    (model/"config.json").write_text(json.dumps(config | dict(attention_dropout=0.1)))
    for asked in (0.0, 0.3):
        inputs = check_inputs(recipe(Stage1, tmp_path/"run", model=str(model), attention_dropout=asked))
        layers = build_model(inputs).lm.model.layers
        assert [layer.self_attn.attention_dropout for layer in layers] == [asked]*len(layers)
    adapted = build_model(check_inputs(recipe(Stage2, tmp_path/"run", model=str(model), lora_dropout=0.1)))
    assert is_noisy(adapted.lm) and not any(getattr(module, "attention_dropout", 0) for module in adapted.modules())


@pytest.mark.parametrize("name", STAGES)
def test_pinned_trajectory(name, tmp_path):
    "Twenty steps of the tiny model have not changed since the file was written (delete its entry to write it anew)."
    stage, settings = STAGES[name]
    run(recipe(stage, tmp_path/name, steps=20, precision="fp64", **settings))
    found = [row["loss"] for row in rows(tmp_path/name)]
    check_pinned("training", name, found, rel=1e-6)


@pytest.mark.parametrize("stage", [Stage1, Stage2])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_every_schedule_reaches_its_peak(stage, schedule, tmp_path):
    "Whatever the number of steps, where nothing is said of a warm-up; the paper's runs keep its 300 steps."
    from transformers import get_scheduler
    from anchor_nb.training.trainer import training_arguments
    limits = preset("paper", stage.__name__.lower())
    for steps in (1, 2, 30, 100, 299, 300, 301, limits["steps"], 3*limits["steps"]):
        made = stage(out=str(tmp_path), steps=steps, schedule=schedule)
        args = training_arguments(replace(made, **values_from(limits, made, [10**6], [])))
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps)
        rates = [args.learning_rate*scheduler.lr_lambdas[0](step) for step in range(steps)]
        assert max(rates) == pytest.approx(args.learning_rate), steps
        assert steps < limits["steps"] or args.warmup_steps == 300


def test_a_warm_up_that_does_not_end_is_said(tmp_path):
    "Where a preset's 300 steps meet fewer steps of one's own."
    from anchor_nb.training.inputs import check_inputs
    with pytest.warns(UserWarning, match="warmup_steps=300 does not end within steps=100, .*warmup_steps=-1"):
        check_inputs(recipe(Stage1, tmp_path, steps=100, warmup_steps=300))


def test_a_run_keeps_the_precision_it_began_with(tmp_path, monkeypatch):
    "Begun with auto where a trial finds bf16 faster, it goes on in bf16 where none is made, and its facts say so."
    from anchor_nb.training import trainer as training
    from anchor_nb.training.trainer import AnchorTrainer, train
    settings = recipe(Stage1, tmp_path/"run", steps=4, save_steps=2)
    assert settings.precision == "auto"
    def die(self, *args, before=AnchorTrainer.training_step, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return before(self, *args, **kwargs)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "auto_precision", lambda config: ("bf16", "it was faster"))
        patch.setattr(AnchorTrainer, "training_step", die)
        train(settings)
    monkeypatch.setattr(training, "auto_precision", lambda config: pytest.fail("decided again"))
    assert train(settings)["precision"] == train(settings)["precision"] == "bf16" # gone on with; finished
    train(recipe(Stage1, tmp_path/"asked", steps=4, precision="bf16"))
    assert rows(tmp_path/"run") == rows(tmp_path/"asked")


def test_a_tiny_model_stays_with_fp32_and_nothing_is_tried(tmp_path, monkeypatch, capsys):
    from anchor_nb.training import precision
    from anchor_nb.training.trainer import train
    monkeypatch.setattr(precision, "trial", lambda *asked: pytest.fail("tried"))
    facts = train(recipe(Stage1, tmp_path/"run", steps=2, warmup_steps=1))
    layout = json.loads((tmp_path/"run"/"model"/"anchor_nb.json").read_text())
    assert facts["precision"] == layout["recipe"]["precision"] == "fp32"
    assert "precision: fp32, since the model is too small" in capsys.readouterr().out


@pytest.fixture(scope="module")
def usual_losses(tmp_path_factory):
    "The losses of a recipe without a switch, trained once for all its switches."
    known = {}
    def losses(stage, **settings):
        key = json.dumps([stage.__name__, settings], sort_keys=True)
        if key not in known: known[key] = losses_of(stage, tmp_path_factory.mktemp("usual")/"run", **settings)
        return known[key]
    return losses


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    path = tmp_path_factory.mktemp("instructions")/"instructions.yaml"
    path.write_text("toy: Find the text\n")
    return str(path)


def losses_of(stage, out, **settings) -> list:
    from anchor_nb.training.trainer import train
    train(recipe(stage, out, **settings))
    return [row["loss"] for row in rows(out)]


SEQUENCE = dict(decode_from="sequence")
SWITCHES1 = [({}, dict(truncation="cut_eos")), ({}, dict(target_eos=False)), ({}, SEQUENCE),
             (SEQUENCE, dict(target_template=True)), (SEQUENCE, dict(hide_template=True)),
             ({}, dict(schedule_steps=100)), ({}, dict(schedule="constant")), ({}, dict(precision="pure_bf16")),
             ({}, dict(alpha=0.8)), ({}, dict(anchor_scale=0.1)), ({}, dict(anchor_norm=False)),
             ({}, dict(weight_decay=0.5)),
             ({}, dict(template="plain")), ({}, dict(eos="<|endoftext|>")),
             ({}, dict(instruction_format="{instruction}: {text}")), ({}, dict(instructions="none")),
             ({}, dict(seed=1))]


@pytest.mark.parametrize("usual, switch", SWITCHES1, ids=[str(switch) for _, switch in SWITCHES1])
def test_every_switch_of_stage1_changes_the_run(usual, switch, tmp_path, usual_losses, instructions):
    "A switch that leaves the trajectory alone is not wired."
    settings = dict(steps=5, max_length=24, instructions=instructions) | usual
    assert losses_of(Stage1, tmp_path/"run", **settings | switch) != usual_losses(Stage1, **settings)


@pytest.mark.parametrize("switch", [dict(temperature=0.02), dict(mask_false_negatives=False), dict(lora_dropout=0.05),
                                    dict(lora_rank=4), dict(lora_alpha=8), dict(negatives=0)], ids=str)
def test_every_switch_of_stage2_changes_the_run(switch, tmp_path, usual_losses):
    settings = dict(steps=4, global_batch=64, negatives=2, micro_tokens=10_000)
    assert losses_of(Stage2, tmp_path/"run", **settings | switch) != usual_losses(Stage2, **settings)


def test_stage1_learns(tmp_path):
    "The loss of both directions falls."
    from anchor_nb.training.trainer import train
    train(recipe(Stage1, tmp_path/"run", steps=40))
    found = rows(tmp_path/"run")
    for name in ("loss_q2d", "loss_d2q"): assert found[-1][name] < found[0][name] - 1


def test_tracker_by_name(tmp_path, monkeypatch):
    "TensorBoard finds each step once, though the run was stopped after step 5 and went on from step 4."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from anchor_nb.training.trainer import train
    settings = recipe(Stage1, tmp_path/"run", steps=6, save_steps=2, trackers=["tensorboard"])
    from anchor_nb.training.trainer import AnchorTrainer
    def die(self, *args, before=AnchorTrainer.training_step, **kwargs):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return before(self, *args, **kwargs)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnchorTrainer, "training_step", die)
        train(settings)
    train(settings)
    events = EventAccumulator(str(tmp_path/"run"/"tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss_q2d")] == [1, 2, 3, 4, 5, 6]


def test_paper_and_authors_presets_differ_where_the_notes_say():
    from anchor_nb.core.presets import preset
    ours, theirs = [Stage1(**preset(name, "stage1")) for name in ("paper", "authors-code")]
    assert (theirs.truncation, theirs.decode_from, theirs.target_eos, theirs.hide_template) == ("cut_eos", "sequence",
                                                                                                False, True)
    assert (ours.steps, ours.learning_rate, ours.global_batch, ours.warmup_steps, ours.alpha) == (2000, 4e-5, 512, 300,
                                                                                                  0.2)
    ours, theirs = [Stage2(**preset(name, "stage2")) for name in ("paper", "authors-code")]
    assert (ours.temperature, theirs.temperature) == (0.05, 0.02)
    assert (ours.steps, ours.learning_rate, ours.lora_rank, ours.global_batch) == (1000, 2e-4, 16, 512)


OWN = '''
from torch.nn.functional import cosine_similarity
from anchor_nb.losses.llama2vec import Bags
from anchor_nb.losses.reconstruction import vectors

class Align(Bags):
    uses_head = False
    def __init__(self, rules, formatter):
        super().__init__("ebae", rules.pooling)
        self.parts, self.counted = dict(loss_align=1.0), ("texts_align",)
    def loss(self, lm, batch, totals):
        states = vectors(lm, batch.packed, self.pooling)
        share = FACTOR*(1 - cosine_similarity(*states.chunk(2))).sum()/totals[0]
        return share, share.detach()[None]
'''


def test_an_objective_of_your_own(tmp_path, monkeypatch):
    "It trains from the working directory, alike in any micro-batches; its code is part of the run."
    from anchor_nb.training.trainer import train
    monkeypatch.chdir(tmp_path)
    Path("align_own.py").write_text(OWN.replace("FACTOR", "2"))
    settings = dict(steps=3, precision="fp64", objectives={"align_own:Align": 1.0, "ebae": 0.5})
    run(recipe(Stage1, tmp_path/"whole", **settings))
    run(recipe(Stage1, tmp_path/"cut", processes=2, **settings | dict(micro_tokens=60)))
    assert_same_trajectory(rows(tmp_path/"whole"), rows(tmp_path/"cut"), 1e-9)
    assert rows(tmp_path/"whole")[-1]["loss_align"] > 0
    Path("align_own.py").write_text(OWN.replace("FACTOR", "3"))
    with pytest.raises(ValueError, match="another content of objectives.code of align_own:Align"):
        train(recipe(Stage1, tmp_path/"whole", **settings))
    with pytest.raises(ValueError, match="align_own.py has no class 'Aline'"):
        train(recipe(Stage1, tmp_path/"other", **settings | dict(objectives={"align_own:Aline": 1.0})))


def test_the_disk_is_asked_for_checkpoints_too():
    from anchor_nb.training.trainer import disk_needed
    model = torch.nn.Linear(10, 10, bias=False) # 400 bytes
    saving = lambda steps: Stage1(data="x", out="y", steps=steps, save_steps=5, keep_last=2)
    assert disk_needed(model, saving(100), 0) == 400 + 3*3*400 and disk_needed(model, saving(100), 2) == 400 + 3*400
    assert disk_needed(model, saving(4), 0) == 400 + 3*400, "only if the run is told to stop"
    assert disk_needed(model.requires_grad_(False), saving(100), 0) == 400, "adapters are all that a checkpoint has"


def test_a_run_records_the_commit_of_its_base(tmp_path, monkeypatch):
    "Adapters trained on one state of a model on the hub are not gone on with on another without a word."
    from anchor_nb.models.resolve import resolve_model
    from anchor_nb.training.inputs import Record, check_inputs
    from anchor_nb.training.trainer import check_same_run, train
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path/"hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path/"hub"/"models--org--base"
    for commit in ("a"*40, "b"*40): shutil.copytree(resolve_model("tiny"), place/"snapshots"/commit)
    (place/"refs").mkdir()
    (place/"refs"/"main").write_text("a"*40)
    asked = recipe(Stage2, tmp_path/"run", steps=2, model="org/base", lora_rank=2, precision="fp32",
                   warmup_steps=1)
    facts = train(asked)
    assert facts["commit"] == f"org/base@{'a'*40}"
    (tmp_path/"run"/"checkpoint-1").mkdir()
    shutil.copy(tmp_path/"run"/"model"/"anchor_nb.json", tmp_path/"run"/"checkpoint-1")
    (place/"refs"/"main").write_text("b"*40)
    check_same_run(tmp_path/"run", record := Record(check_inputs(asked))) # whole weights
    (tmp_path/"run"/"checkpoint-1"/"adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="trained on org/base@a{40}, and this run has org/base@b"):
        check_same_run(tmp_path/"run", record)


def test_gpus_that_are_not_to_be_used_do_not_count(tmp_path, monkeypatch):
    from anchor_nb.training.inputs import check_sizes
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    check_sizes(recipe(Stage1, tmp_path, global_batch=4, processes=0))
