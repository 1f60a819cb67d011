"What decides an outcome: changed behind any path, nothing is reused."
import json
import os
import re
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from common import check_pinned, toy_pairs

from anchor_nb.runs import identity as identities, ledger, manifest as runs
from anchor_nb.experiments import sweeps
from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.tables import content_hash
from anchor_nb.runs.ledger import read_json
from anchor_nb.runs.identity import ENGINE, engine_of, hashed_out, input_hashes, inputs_of, settings_of
from anchor_nb.core.recipe import RECIPES, Stage1, Stage2
from anchor_nb.training.trainer import train

NEEDED = dict(mine=dict(data="hf:o/n", out="out"), evaluate=dict(tasks=["SciFact"], out="out"),
              analyse=dict(a="org/a", b="org/b", data="hf:o/n", out="out"),
              stage2=dict(margin="absolute"))
OPTIONS = dict(mteb_dict=lambda path: {"ours": dict(model="org/base", adapter=path)},
               of_labels=lambda path: {"model": path, "b": [path]})


def rewrite(path, text):
    "Other content of the same size under the same time of last change, as `rsync -t` may leave it."
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def behind(kind, folder):
    "A path of this kind, and the file in it that decides; of code, its name."
    folder.mkdir()
    if kind == "code":
        (folder/"mine_own.py").write_text("class Loss: factor = 'one'\n")
        return "mine_own:Loss", folder/"mine_own.py"
    if kind == "instructions":
        (folder/"mine.yaml").write_text("wiki: one\n")
        return folder/"mine.yaml", folder/"mine.yaml"
    if kind == "files":
        (folder/"a.jsonl").write_text("one")
        return folder, folder/"a.jsonl"
    (folder/"model").mkdir()
    (folder/"model"/"weights").write_text("one")
    return folder, folder/"model"/"weights"


def cases():
    for stage, cls in RECIPES.items():
        for f in fields(cls):
            if not f.metadata["reads"]: continue
            shapes = [lambda path: path]
            if f.type is list: shapes = [lambda path: [path]]
            if f.type is dict: shapes = list(OPTIONS.values())
            if f.metadata["reads"] == "code": shapes = [lambda name: {name: 1.0}]
            for number, shape in enumerate(shapes): yield pytest.param(stage, f, shape, id=f"{stage}-{f.name}-{number}")


@pytest.mark.parametrize("stage, f, shape", list(cases()))
def test_changed_content_behind_a_path_is_another_run(tmp_path, monkeypatch, stage, f, shape):
    path, decisive = behind(f.metadata["reads"], tmp_path/"input")
    monkeypatch.syspath_prepend(str(tmp_path/"input"))
    made = RECIPES[stage](**NEEDED.get(stage, {}) | {f.name: shape(str(path))})
    out, node = tmp_path/"out", hashed_out(made, input_hashes(made), tmp_path)
    assert runs.start_run(out, made) == "new" and runs.start_run(out, made) == "resume"
    rewrite(decisive, decisive.read_text().replace("one", "two"))
    assert hashed_out(made, input_hashes(made), tmp_path) != node, "a sweep takes another node"
    with pytest.raises(ValueError, match=f"the content of {f.name}.* has changed since"): runs.start_run(out, made)
    rewrite(decisive, decisive.read_text().replace("two", "one"))
    assert runs.start_run(out, made) == "resume" and hashed_out(made, input_hashes(made), tmp_path) == node


def test_data_on_the_hub_is_known_by_its_content_where_it_is_read(tmp_path, monkeypatch):
    version = ["one"]
    monkeypatch.setattr(identities, "content_hash", lambda source: f"{source} {version[-1]}")
    assert identities.files_content("hf:squad:test") == "squad hf:squad:test one"
    made = RECIPES["mine"](data="hf:o/n", corpus="hf:o/c", out=str(tmp_path))
    assert input_hashes(made) == {} and list(identities.inputs_beside(made, {})) == ["corpus"]
    runs.start_run(tmp_path, made)
    version.append("two")
    with pytest.raises(ValueError, match="the content of corpus hf:o/c has changed since"):
        runs.start_run(tmp_path, made)


@pytest.mark.parametrize("stage", RECIPES)
def test_every_parameter_that_may_be_a_path_says_whether_its_content_decides(stage):
    "A new parameter whose help speaks of files or folders must say `reads`, or `how` where it only names a place."
    for f in fields(RECIPES[stage]):
        if f.type not in (str, list, dict): continue
        speaks = re.search(r"\b(file|files|folder|folders|embedder|hub id)\b", f.metadata["help"])
        assert not speaks or f.metadata["reads"] or f.metadata["how"], f"{stage}.{f.name}: {f.metadata['help']}"


def test_a_run_is_known_by_its_model_and_not_by_what_lies_beside_it(tmp_path):
    path, decisive = behind("model", tmp_path/"stage1")
    made = Stage2(model=str(path), out=str(tmp_path/"stage2"))
    runs.start_run(made.out, made)
    for name in ("stage1.ipynb", "metrics.jsonl", ".stage1.lock", "model/.lock"): (path/name).write_text("new")
    assert runs.start_run(made.out, made) == "resume"


def test_a_card_beside_the_weights_makes_no_other_model(tmp_path):
    "And a manifest of a version that counted it is still understood."
    path, _ = behind("model", tmp_path/"stage1")
    made = Stage2(model=str(path), out=str(tmp_path/"stage2"))
    runs.start_run(made.out, made)
    (path/"model"/"onnx").mkdir()
    for name in ("README.md", "search.json", "onnx/model.onnx"): (path/"model"/name).write_text("new")
    assert runs.start_run(made.out, made) == "resume"
    manifest = runs.read_manifest(made.out)
    old = dict(model=content_hash(str(path/"model")))
    assert old != manifest["inputs"]
    ledger.write_json(tmp_path/"stage2/run.json", manifest | dict(inputs=old))
    assert runs.start_run(made.out, made) == "resume"


def test_what_a_model_records_of_its_base_does_not_count_cards_either(tmp_path, monkeypatch, recwarn):
    from anchor_nb.models import embedder
    from anchor_nb.release.lineage import Run, is_still
    from anchor_nb.training.inputs import changes_of
    (base := tmp_path/"base").mkdir()
    for name in ("config.json", "README.md"): (base/name).write_text("{}")
    made, old = Stage2(model=str(base)), content_hash(str(base))
    facts = dict(stage="stage2", data={}, engine=engine_of("stage2"), recipe=settings_of(made))
    here = SimpleNamespace(**facts, inputs=identities.inputs_beside(made, {}))
    new = here.inputs["model"]
    (base/"README.md").unlink()
    assert new == content_hash(str(base)) != old
    for beside, known in (("", new), ("{}", old), ("{ }", new)):
        (base/"README.md").write_text(beside)
        assert not changes_of(facts | dict(inputs=dict(model=known)), here)
        assert is_still(base, Run(tmp_path, dict(inputs=dict(model=known))))
        monkeypatch.setattr(embedder, "stored_facts", lambda folder, known=known: dict(inputs=dict(model=known)))
        embedder.check_base("adapter", str(base))
    assert not recwarn.list
    (base/"config.json").write_text("{ }")
    assert not is_still(base, Run(tmp_path, dict(inputs=dict(model=new))))
    assert changes_of(facts | dict(inputs=dict(model="ab")), here)
    with pytest.warns(UserWarning, match="has changed since"): embedder.check_base("adapter", str(base))


def test_a_run_of_code_that_gives_other_results_is_not_taken_for_this_one(tmp_path, monkeypatch):
    made = Stage2(out=str(tmp_path))
    runs.start_run(tmp_path, made)
    node = hashed_out(made, {}, "root")
    monkeypatch.setitem(ENGINE, "scoring", 99)
    assert runs.start_run(tmp_path, made) == "resume", "training does not depend on how scores are computed"
    monkeypatch.setitem(ENGINE, "training", 99)
    assert hashed_out(made, {}, "root") != node
    with pytest.raises(ValueError, match="made by training code .*, and this is 99"): runs.start_run(tmp_path, made)


def test_one_path_may_be_spelled_in_several_ways(tmp_path, monkeypatch):
    "A run that was begun with a relative path resumes with the absolute one; other paths are other runs."
    monkeypatch.chdir(tmp_path)
    (tmp_path/"base"/"model").mkdir(parents=True)
    (tmp_path/"base"/"model"/"config.json").write_text("{}")
    (tmp_path/"pairs.jsonl").write_text("{}\n")
    made = Stage2(out="run", model="base", data="pairs.jsonl")
    runs.start_run("run", made)
    for model, data in ((f"{tmp_path}/base", "./pairs.jsonl"), ("base/model", f"{tmp_path}/pairs.jsonl")):
        assert runs.start_run("run", replace(made, model=model, data=data)) == "resume"
    with pytest.raises(ValueError, match="data is 'pairs.jsonl' there and 'other.jsonl' here"):
        runs.start_run("run", replace(made, data="other.jsonl"))


@pytest.mark.parametrize("changed", ["instructions", "engine", "stage"])
def test_a_checkpoint_of_other_inputs_is_not_gone_on_from(tmp_path, changed):
    "Also where a run is started from Python, without a manifest."
    from anchor_nb.training.trainer import check_same_run
    made, beside = Stage2(out=str(tmp_path), save_steps=2), dict(instructions="ab")
    facts = dict(stage="stage2", data={}, inputs=beside, engine=engine_of("stage2"), recipe=settings_of(made))
    here = SimpleNamespace(**facts)
    (tmp_path/"checkpoint-2").mkdir()
    (tmp_path/"checkpoint-2"/"anchor_nb.json").write_text(json.dumps(facts))
    check_same_run(tmp_path, here)
    (tmp_path/"checkpoint-2"/"anchor_nb.json").write_text(json.dumps(facts | {"engine": {"training": 0}}))
    with pytest.raises(ValueError, match=dict(instructions="another content of instructions", engine="trains otherwise",
                                              stage="is of a stage2 run, not stage1; choose another out")[changed]):
        if changed == "instructions": here.inputs = dict(instructions="cd")
        if changed == "stage": here = SimpleNamespace(**facts | dict(stage="stage1", recipe=settings_of(Stage1())))
        check_same_run(tmp_path, here)


def test_scores_of_other_scoring_code_are_not_todays(monkeypatch):
    from anchor_nb.evaluation.encoders import Candidate, revision
    before = revision(Candidate("bm25", "bm25", library="bm25"))
    monkeypatch.setitem(ENGINE, "scoring", 99)
    assert revision(Candidate("bm25", "bm25", library="bm25")) != before


def test_names_that_are_no_paths_identify_themselves(tmp_path, monkeypatch):
    "A folder that happens to be called like a table of instructions is not looked into."
    monkeypatch.chdir(tmp_path)
    (tmp_path/"paper").mkdir()
    (tmp_path/"paper"/"a.txt").write_text("not instructions")
    assert input_hashes(Stage2(instructions="paper")) == {}


def test_content_is_read_again_however_the_file_was_replaced(tmp_path):
    (tmp_path/"a").write_text("one")
    os.utime(tmp_path/"a", ns=(0, 0))
    first = content_hash(str(tmp_path))
    rewrite(tmp_path/"a", "two")
    assert content_hash(str(tmp_path)) != first
    (tmp_path/"b").write_text("one")
    os.utime(tmp_path/"b", ns=(0, 0))
    os.replace(tmp_path/"b", tmp_path/"a")
    assert content_hash(str(tmp_path)) == first


def plan(tmp_path, **base):
    base = {"prepare.corpora": [], "stage1.data": "hf:o/n", "stage2.data": "hf:o/n",
            "evaluate.tasks": ["SciFact"]} | base
    nodes, _ = sweeps.plan_sweep(dict(preset="smoke", base=base, seeds=[], arms={}, grid=[]), tmp_path/"root")
    return {node.stage: name for name, node in nodes.items()}


@pytest.mark.parametrize("address, first", [("stage2.guide", "stage2"), ("stage1.instructions", "stage1"),
                                            ("evaluate.tasks", "evaluate")])
def test_a_sweep_planned_twice_in_one_process_sees_what_changed(tmp_path, address, first):
    kind = dict(inputs_of(RECIPES[first](**NEEDED.get(first, {}))))
    kind = next(f for f in fields(RECIPES[first]) if f.name == address.partition(".")[2]).metadata["reads"]
    path, decisive = behind(kind, tmp_path/"input")
    said = {address: [str(path)] if address == "evaluate.tasks" else str(path)} | ({"stage2.margin": "absolute"}
                                                                                   if first == "stage2" else {})
    before = plan(tmp_path, **said)
    rewrite(decisive, decisive.read_text().replace("one", "two"))
    after = plan(tmp_path, **said)
    order = list(before)
    for place, stage in enumerate(order): assert (before[stage] == after[stage]) == (place < order.index(first)), stage


def test_a_ledger_shows_what_was_asked_for_last(tmp_path):
    "Gather A, then B under the same label, then A again."
    root, arm = tmp_path/"root", sweeps.Arm("mine", (), {}, 1)
    def node(name, value):
        out = root/name
        row = dict(label="mine", step=0, task="wiki", metric="ndcg_at_10", value=value, seed=0, training_seed=1,
                   data="cut", main=True)
        ledger.append_rows(out/"ledger.jsonl", [row])
        return sweeps.Node(name, "evaluate", dict(out=str(out)), ())
    a, b = node("evaluate-a", 0.4), node("evaluate-b", 0.6)
    shown = lambda: ledger.frame(root/"ledger.jsonl").value.item()
    for each, value in ((a, 0.4), (b, 0.6), (a, 0.4), (a, 0.4)):
        sweeps.gather(arm, [each], root)
        assert shown() == value
    assert len(ledger.read_rows(root/"ledger.jsonl")) == 3, "nothing is written when nothing is hidden"


# ---- what the engine gives today; another result needs another number in `ENGINE` ----

def test_vectors_are_those_of_this_engine():
    from anchor_nb.models.embedder import AnchorEmbedder
    tiny = AnchorEmbedder.from_pretrained("tiny", max_length=16, device="cpu")
    texts = ["a text", "a text that is longer than sixteen tokens, and so it is cut somewhere before this place", ""]
    found = [tiny.encode(texts), tiny.encode(texts, "Find it")]
    check_pinned("encoding", "tiny", [round(float(x), 7) for each in found for x in each[:, :4].ravel()], abs=1e-5)
    int8 = AnchorEmbedder.from_pretrained("tiny", max_length=16, device="cpu", precision="int8").encode(texts)
    check_pinned("encoding", "tiny int8", [round(float(x), 7) for x in int8[:, :4].ravel()], abs=2e-3)


def test_scores_are_those_of_this_engine(tmp_path):
    from anchor_nb.evaluation import benchmarks, encoders as evaluation, measure as measurement
    task, = benchmarks.find_tasks("", [str(build_corpus("toy")/"eval")])
    found = {}
    for source in ("bm25", "tiny"):
        candidate = evaluation.Candidate(source, source, library=evaluation.library_of(source))
        encoder = evaluation.load(candidate, evaluation.revision(candidate),
                                  instructions={task.metadata.name: "Find it"})
        found |= {f"{source} {name}": value for name, value in measurement.evaluate_task(encoder, task,
                                                                                         tmp_path).metrics.items()}
    check_pinned("scoring", "toy", [found[name] for name in sorted(found)], abs=1e-4)


def test_corpora_are_those_of_this_engine():
    "The content as a number, since that is what is compared."
    check_pinned("corpora", "toy", [int(content_hash(str(build_corpus("toy")))[:12], 16)], rel=0)


def test_what_lies_in_the_root_of_a_sweep_and_is_no_node_counts_with_its_content(tmp_path):
    path, decisive = behind("instructions", tmp_path/"root-and-inputs")
    said = {"stage1.instructions": str(path)}
    plans = []
    for text in ("wiki: one\n", "wiki: two\n"):
        path.write_text(text)
        base = {"prepare.corpora": [], "stage1.data": "hf:o/n", "stage2.data": "hf:o/n",
                "evaluate.tasks": ["SciFact"]} | said
        plans.append(list(sweeps.plan_sweep(dict(preset="smoke", base=base, seeds=[], arms={}, grid=[]),
                                            path.parent)[0]))
    assert plans[0] != plans[1]


def test_the_name_of_a_dataset_counts_where_it_is_the_name_of_a_file(tmp_path):
    "It chooses the instruction and the ratio."
    found = []
    for name in ("fever.jsonl", "nq.jsonl"):
        (tmp_path/name).write_text('{"query": "a", "positive": "b"}\n')
        made = Stage2(data=str(tmp_path/name))
        found.append(hashed_out(made, input_hashes(made), tmp_path))
    assert found[0] != found[1]


def test_linked_folders_are_looked_into(tmp_path):
    (tmp_path/"model").mkdir()
    (tmp_path/"inner").mkdir()
    (tmp_path/"inner"/"weights").write_text("one")
    (tmp_path/"model"/"0_Transformer").symlink_to(tmp_path/"inner")
    (tmp_path/"inner"/"loop").symlink_to(tmp_path/"model")
    first = content_hash(str(tmp_path/"model"))
    rewrite(tmp_path/"inner"/"weights", "two")
    assert content_hash(str(tmp_path/"model")) != first


def test_tables_show_the_model_that_a_label_stands_for_now(tmp_path):
    """A trained model takes the label of an untrained one, and gives it back; runs with other seeds stand beside each
    other."""
    from anchor_nb.evaluation.tables import comparable
    def row(value, step, manifest, seed):
        return dict(label="m", step=step, task="wiki", metric="ndcg_at_10", value=value, seed=0, training_seed=seed,
                    data="cut", main=True,
                    manifest=manifest, queries=1, documents=1)
    untrained, trained, other = row(0.1, 0, "", None), row(0.5, 6, "a/run.json", 1), row(0.6, 6, "b/run.json", 2)
    book = tmp_path/"ledger.jsonl"
    for wanted, shown in (([untrained], [0.1]), ([trained], [0.5]), ([untrained], [0.1]),
                          ([trained, other], [0.5, 0.6])):
        ledger.append_rows(book, ledger.to_restate(ledger.read_rows(book) if book.exists() else [], wanted))
        assert [each["value"] for each in comparable(ledger.read_rows(book))] == shown


def test_an_index_of_a_model_that_was_replaced_meanwhile_is_not_that_of_the_new_one(tmp_path):
    from anchor_nb.models.resolve import resolve_model
    from anchor_nb.models.embedder import AnchorEmbedder
    from anchor_nb.inference.corpus_encoding import loaded
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(resolve_model("tiny"), tmp_path/"model")
    embedder = AnchorEmbedder.from_pretrained(str(folder))
    before = loaded(embedder)[0]
    weights = {name: values*1.5 for name, values in load_file(folder/"model.safetensors").items()}
    save_file(weights, folder/"model.safetensors", metadata={"format": "pt"})
    assert loaded(embedder)[0] not in (before, loaded(AnchorEmbedder.from_pretrained(str(folder)))[0])


def test_an_instruction_may_be_longer_than_a_path(tmp_path):
    long = "Given a question, "*16 + "answer"
    train(Stage2(model="tiny", data=toy_pairs(), out=str(tmp_path/"run"), instructions=long, steps=1, global_batch=4,
                 max_length=256, warmup_steps=0))
    assert read_json(tmp_path/"run/model/anchor_nb.json")["recipe"]["instructions"] == long


def test_a_finished_training_whose_model_is_gone_is_repeated(tmp_path):
    made = Stage2(model="tiny", data=toy_pairs(), out=str(tmp_path/"run"), steps=1, global_batch=4, warmup_steps=0)
    runs.start_run(made.out, made)
    runs.finish_run(made.out, **train(made))
    assert runs.start_run(made.out, made) == "done"
    weights = tmp_path/"run/model/model.safetensors"
    first = weights.read_bytes()
    shutil.rmtree(weights.parent)
    assert runs.start_run(made.out, made) == "resume"
    train(made)
    assert weights.read_bytes() == first
