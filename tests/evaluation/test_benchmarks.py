"Benchmarks by name against the paper, instructions, and copies of hub data in four layouts through mteb itself."
import json

import numpy as np
import pytest

from anchor_nb.evaluation import benchmarks
from anchor_nb.evaluation.benchmarks import (check_data, find_task, find_tasks, instructions_for, leaves,
                                             use_local_copies)
from anchor_nb.core.recipe import paper


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    "No hub, and no conversions of `datasets` from an earlier test: it would serve them for files that have changed."
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path/"datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def names(tasks): return [task.metadata.name for task in tasks]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---- four layouts of hub repositories ----

WORDS = "tides bread moon flour ship rain lamp stone river cloud glass paper".split()


def scifact(root, corpus=WORDS):
    folder = root/"mteb/scifact"
    write(folder/"corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(corpus)])
    write(folder/"queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(WORDS)])
    write(folder/"qrels/test.jsonl", [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1}
                                      for i in range(len(WORDS))])
    files = {"default": ("test", "qrels/test.jsonl"), "corpus": ("corpus", "corpus.jsonl"),
             "queries": ("queries", "queries.jsonl")}
    configs = "".join(f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}\n"
                      for name, (split, path) in files.items())
    (folder/"README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")


def sts17(root, languages=("en-en", "es-en")):
    rows = [{"sentence1": a, "sentence2": b, "score": float(score), "lang": lang} for lang in languages
            for a, b, score in (("moon", "moon", 5), ("moon tides", "moon ship", 3), ("rain", "lamp", 0))]
    write(root/"mteb/sts17-crosslingual-sts/test.jsonl", rows)


def banking(root):
    rows = [{"text": f"{word} {other}", "label": i, "label_text": word} for i, word in enumerate(WORDS[:2])
            for other in WORDS[2:]]
    for split in ("train", "test"): write(root/f"mteb/banking77/{split}.jsonl", rows)


def sprint(root):
    pairs = [(a, a, 1) for a in WORDS] + [(a, b, 0) for a, b in zip(WORDS, WORDS[1:])]
    sent1, sent2, labels = map(list, zip(*pairs))
    write(root/"mteb/sprintduplicatequestions-pairclassification/test.jsonl",
          [{"sent1": sent1, "sent2": sent2, "labels": labels}])


LAYOUTS = {"SciFact": (scifact, "ndcg_at_10"), "STS17": (sts17, "cosine_spearman"),
           "Banking77Classification": (banking, "accuracy"), "SprintDuplicateQuestions": (sprint, "max_ap")}


def toy_encoder():
    "Counts words: texts are near when they share some, and equal texts are the nearest."
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    class Toy(AbsEncoder):
        mteb_model_meta = ModelMeta.create_empty(dict(name="test/toy", revision="1",
                                                      similarity_fn_name=ScoringFunction.COSINE))

        def __init__(self): pass

        def encode(self, inputs, **_):
            return np.array([[text.split().count(word) + 1e-3 for word in WORDS] for batch in inputs
                             for text in batch["text"]], dtype=np.float32)
    return Toy()


def evaluate(task):
    import mteb
    return mteb.evaluate(toy_encoder(), task, cache=None, show_progress_bar=False).task_results[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hub_task_runs_from_a_folder(name, tmp_path):
    write_layout, metric = LAYOUTS[name]
    write_layout(tmp_path)
    shared = find_task(name)
    before = (shared.metadata.dataset.copy(), shared.data_loaded)
    [task] = find_tasks(tasks=[name], data_root=tmp_path)
    check_data([task], tmp_path)
    for _ in range(2):  # mteb unloads after each; the second evaluation must still find the folder
        result = evaluate(task)
        assert result.get_score() == pytest.approx(1, abs=1e-6)
    [split] = result.scores
    assert metric in result.scores[split][0]
    assert [row["hf_subset"] for row in result.scores[split]] == (["en-en"] if name == "STS17" else ["default"])
    assert result.dataset_revision.startswith("local-")
    assert (find_task(name).metadata.dataset, find_task(name).data_loaded) == before and find_task(name) is shared


def test_copies_reach_the_leaves_of_a_mean(tmp_path):
    forum = find_task("CQADupstackRetrieval").metadata.tasks[0].metadata.dataset["path"]
    scifact(tmp_path)
    (tmp_path/"mteb/scifact").rename(tmp_path/forum)
    [task] = find_tasks(tasks=["CQADupstackRetrieval"], data_root=tmp_path)
    paths = [leaf.metadata.dataset["path"] for leaf in leaves(task)]
    assert [path.startswith(str(tmp_path)) for path in paths] == [True] + [False] * 11
    plain = names(leaves(find_task("CQADupstackRetrieval")))
    assert [part.metadata.name for part in task.tasks] == names(task.metadata.tasks) == plain
    assert not any("local" in leaf.metadata.dataset["revision"] for leaf in leaves(find_task("CQADupstackRetrieval")))
    assert evaluate(leaves(task)[0]).get_score() == pytest.approx(1)
    with pytest.raises(ValueError, match="11 of 12 data sets"): check_data([task], tmp_path)


def test_an_edited_copy_is_other_data(tmp_path):
    "Also for the library `datasets`, which keeps what it converted and does not look at edited files by itself."
    from anchor_nb.evaluation.benchmarks import data_id
    from anchor_nb.evaluation.measure import evaluate_task
    scifact(tmp_path)
    def score():
        [task] = find_tasks(tasks=["SciFact"], data_root=tmp_path)
        return data_id(task), evaluate_task(toy_encoder(), task, tmp_path/"mteb-results").score
    first, same = score(), score()
    scifact(tmp_path, corpus=WORDS[1:] + ["paper boat"])
    edited = score()
    assert first == same and edited[0] != first[0] and edited[1] < 0.5 < first[1]


# ---- data that is not there, or not whole ----

def test_missing_data_names_the_folders_that_would_do(tmp_path):
    sts17(tmp_path)
    tasks = find_tasks("paper15", data_root=tmp_path)
    with pytest.raises(ValueError) as error: check_data(tasks, tmp_path)
    lines = str(error.value).splitlines()
    assert (lines[0].startswith("14 of 15 data sets") and f"  SciFact: {tmp_path/'mteb/scifact'}" in lines
            and not any("STS17" in line for line in lines))


def test_the_hub_is_asked_once_for_what_is_missing(monkeypatch):
    asked, answers = [], [True, None, False]
    def hub_has(name, kind):
        asked.append((name, kind))
        return answers.pop(0)
    monkeypatch.setattr(benchmarks, "hub_has", hub_has)
    tasks = find_tasks("paper15")
    check_data(tasks)
    with pytest.raises(ValueError, match="are not on this machine, and the hub does not answer"): check_data(tasks)
    with pytest.raises(ValueError, match="and the hub does not have the first"): check_data(tasks)
    assert asked == [(leaves(tasks[0])[0].metadata.dataset["path"], "dataset")]*3


def test_what_datasets_has_converted_needs_no_hub(tmp_path):
    (tmp_path/"datasets/mteb___banking77/default/0.0.0/abc").mkdir(parents=True)
    check_data(find_tasks(tasks=["Banking77Classification"]))


@pytest.mark.parametrize("spoil, name", [
    (lambda root: scifact(root, corpus=[]), "SciFact"),
    (lambda root: (scifact(root), write(root/"mteb/scifact/queries.jsonl", [])), "SciFact"),
    (lambda root: (scifact(root), (root/"mteb/scifact/README.md").unlink()), "SciFact"),
    (lambda root: sts17(root, languages=("es-en",)), "STS17"),
    (lambda root: write(root/"mteb/banking77/train.jsonl", [{"text": "a", "label": 0}]), "Banking77Classification"),
], ids=["empty corpus", "empty queries", "no README", "no English", "no test split"])
def test_a_copy_that_is_not_whole_is_found_before_a_model_is_loaded(spoil, name, tmp_path):
    spoil(tmp_path)
    tasks = find_tasks(tasks=[name], data_root=tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: ") as error: check_data(tasks, tmp_path)
    assert str(tmp_path) in str(error.value)


# ---- names ----

@pytest.mark.parametrize("name, count", [("paper56", 56), ("paper15", 15), ("beir14", 14), ("beir", 15),
                                         ("nanobeir", 13), ("bright", 20), ("mteb-v2", 41), ("NanoBEIR", 13)])
def test_benchmarks_have_the_tasks_they_are_known_for(name, count):
    assert len(set(names(find_tasks(name)))) == count


def test_the_papers_benchmarks_are_the_papers():
    assert set(names(find_tasks("paper56"))) == set(paper()["table14_15_tasks"])
    by_type = {}
    for task in find_tasks("paper15"): by_type.setdefault(task.metadata.type, set()).add(task.metadata.name)
    assert by_type == {kind: set(tasks) for kind, tasks in paper()["table8_subset15"].items()}
    assert set(names(find_tasks("beir14"))) == set(names(find_tasks("beir"))) - {"MSMARCO"}


def test_splits_and_subsets_are_the_papers_also_by_a_tasks_own_name():
    languages = {"STS17": ["en-en"]} | dict.fromkeys(("STS22", "MassiveIntentClassification",
                                                      "MassiveScenarioClassification", "MTOPDomainClassification",
        "MTOPIntentClassification", "AmazonReviewsClassification", "AmazonCounterfactualClassification"), ["en"])
    for task in find_tasks("paper56"):
        alone, name = find_task(task.metadata.name), task.metadata.name
        assert list(alone.hf_subsets) == list(task.hf_subsets) == languages.get(name, ["default"])
        assert list(alone.eval_splits) == list(task.eval_splits) == (["dev"] if name == "MSMARCO" else ["test"])


def test_every_benchmark_with_a_description_can_be_found():
    known = benchmarks.names()
    assert set(benchmarks.BENCHMARKS) <= set(known) and all(known.values())
    for name in benchmarks.BENCHMARKS.keys() - {"local"}: assert find_tasks(name)


@pytest.mark.parametrize("benchmark, tasks, message", [
    ("papr56", [], "paper56"), ("MTEB(eng, v3)", [], "MTEB"), ("", ["SciFatc"], "did you mean SciFact"),
    ("", ["emotionclasification"], "did you mean EmotionClassification"),
    ("", ["paper56"], "is a benchmark, not a task; set benchmark"), ("", [], "Nothing to evaluate on"),
    ("", ["SciFact", "SciFact"], "SciFact: named twice"),
    ("paper56", ["STS17"], "paper56 already has its tasks"), ("", ["qqqq"], r"no task 'qqqq'; give a folder"),
    ("", ["MNIST"], "only text is embedded"),
])
def test_bad_names_say_what_is_meant(benchmark, tasks, message):
    with pytest.raises(ValueError, match=message): find_tasks(benchmark, tasks)


def test_a_folder_is_a_task(tmp_path):
    folder = tmp_path/"mine"
    write(folder/"corpus.jsonl", [{"_id": f"d{i}", "text": text} for i, text in enumerate(WORDS)])
    write(folder/"queries.jsonl", [{"_id": "q", "text": "moon"}])
    for split in ("test", "dev"): write(folder/f"qrels/{split}.tsv", [])
    (folder/"qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td2\t1\n", encoding="utf-8")
    (folder/"qrels/dev.tsv").write_text("q 0 d3 1\n", encoding="utf-8")
    tasks = find_tasks(tasks=[str(folder), f"{folder}:dev"])
    check_data(tasks)
    assert (names(tasks), evaluate(tasks[0]).get_score()) == (["mine", "mine-dev"], 1)
    assert tasks[0].metadata.description == f"1 queries of {folder}/qrels/test.tsv, {len(WORDS)} documents"
    for source in ("paper", "mteb", "none"): assert instructions_for(tasks[:1], source) == {"mine": ""}
    table = tmp_path/"instructions.yaml"
    table.write_text("mine: Find it\n", encoding="utf-8")
    assert instructions_for(tasks[:1], table) == {"mine": "Find it"}
    (folder/"corpus.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="qrels/test.tsv"): find_tasks(tasks=[str(folder)])
    with pytest.raises(FileNotFoundError, match=f"nime is missing; did you mean {folder}"):
        find_tasks(tasks=[str(tmp_path/"nime")])
    with pytest.raises(FileNotFoundError, match="is missing"): find_tasks(tasks=[str(tmp_path/"nowhere")])
    with pytest.raises(FileNotFoundError, match="--data-root holds copies"):
        find_tasks(tasks=["SciFact"], data_root=tmp_path/"nowhere")


def test_the_quick_suite_needs_nothing_and_runs():
    tasks = find_tasks("local-quick")
    check_data(tasks)
    assert use_local_copies(tasks, ".") == tasks
    assert {task.metadata.type for task in tasks} >= {"Retrieval", "Reranking", "STS", "PairClassification",
                                                      "Classification", "Clustering"}
    found = instructions_for(tasks, "paper")
    assert found == instructions_for(tasks, "mteb") and all(found.values())


# ---- instructions ----

def test_instructions_are_the_papers():
    table, found = paper()["table13_eval_instructions"], instructions_for(find_tasks("paper56"), "paper")
    assert len(found) == 67
    for task in find_tasks("paper56"):
        name, kind = task.metadata.name, task.metadata.type
        assert {found[leaf.metadata.name] for leaf in leaves(task)} == {table["STS*" if kind == "STS" else name]}


def test_instructions_of_mteb_are_what_its_encoders_get():
    from mteb.types import PromptType
    encoder = toy_encoder()
    tasks = [leaf for task in find_tasks("paper56") for leaf in leaves(task)]
    found = instructions_for(tasks, "mteb")
    for task in tasks: assert found[task.metadata.name] == encoder.get_instruction(task.metadata, PromptType.query)


def test_instructions_from_a_file(tmp_path):
    path = tmp_path/"instructions.yaml"
    path.write_text("STS17: by name\nSTS*: by pattern\nSTS: by type\nRetrieval: found\n", encoding="utf-8")
    found = instructions_for([find_task(name) for name in ("STS17", "STS12", "BIOSSES", "CQADupstackRetrieval")],
                             str(path))
    assert [found[name] for name in ("STS17", "STS12", "BIOSSES")] == ["by name", "by pattern",
                                                                       "by type"] and len(found) == 15
    with pytest.raises(ValueError, match="no entry for SciDocsRR, EmotionClassification"):
        instructions_for([find_task(name) for name in ("SciDocsRR", "EmotionClassification")], str(path))
    path.write_text("a: b\nSciFact: [1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"instructions.yaml: entry 'SciFact' is \[1\]"):
        benchmarks.read_instructions(path)


def write_beir(folder):
    write(folder/"corpus.jsonl", [dict(_id=f"d{n}", text=word) for n, word in enumerate(WORDS)])
    write(folder/"queries.jsonl", [dict(_id="q0", text="tides")])
    (folder/"qrels").mkdir()
    (folder/"qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n", encoding="utf-8")
    return folder


def test_home_is_meant_as_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path/"asked.yaml").write_text("SciFact: Find it\n", encoding="utf-8")
    task = find_task("SciFact")
    scifact(tmp_path/"copies")
    assert instructions_for([task], "~/asked.yaml") == {"SciFact": "Find it"}
    assert benchmarks.instructions_id("~/asked.yaml") == benchmarks.instructions_id(str(tmp_path/"asked.yaml"))
    made, = use_local_copies([task], "~/copies")
    assert made.metadata.dataset["path"] == str((tmp_path/"copies/mteb/scifact").resolve())


def test_folders_of_one_name_are_refused(tmp_path):
    paths = [write_beir(tmp_path/part/"test") for part in "ab"]
    with pytest.raises(ValueError, match="test: named twice; leave out one, or rename a folder"):
        find_tasks(tasks=[str(path) for path in paths])


def test_an_instruction_with_an_address_is_left_as_it_is():
    text = "Find what answers it, as https://example.org/how/ says"
    assert instructions_for([find_task("SciFact")], text) == {"SciFact": text}
