"Documents in, a model or a plain no out: bad input, resuming, the refusal. Training and scoring are replaced in most."
import inspect
import json
import random
import shutil
from pathlib import Path

import datasets
import pytest
from typer.testing import CliRunner

from anchor_nb.cli.main import app
from anchor_nb.core.recipe import Adapt
from anchor_nb.data.documents import Passage, passages_of, read_documents
from anchor_nb.data.retrieval_sets import Retrieval, read_retrieval
from anchor_nb.data.rows import load_pairs
from anchor_nb.data.writers import write_pairs
from anchor_nb.evaluation.encoders import Candidate
from anchor_nb.evaluation.verdict import Ranked
from anchor_nb.inference.corpus_encoding import cut_of
from anchor_nb.inference.own_pairs import match_pairs
from anchor_nb.inference.search import bm25_weight
from anchor_nb.release import adapt as module
from anchor_nb.release.adapt import adapt, outlook
from anchor_nb.release.card import UNSCORED, UNTRAINED
from anchor_nb.runs.ledger import read_json

datasets.disable_progress_bars()
WORDS = "mill river bread oven rabbit harbour ladder candle forest winter letter garden".split()


def village(folder, count=160):
    "Documents of one paragraph, each with a number that no other has."
    folder.mkdir()
    for n in range(count):
        words = " ".join(WORDS[(n*k + k) % 12] for k in range(1, 9))
        (folder/f"house{n}.txt").write_text(f"House number{n}00 of the village tells of {words} since year{n}11.")
    return folder


def questions(path, count=160, name="house{n}.txt"):
    rows = [dict(question=f"Which house speaks of year{n}11?", place=name.format(n=n)) for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


COLUMNS = dict(query="question", positive="place")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    "No model is loaded: negatives are none, candidates rank by a rule. Returns what `tune_encoder` was called with."
    calls, rule = [], dict(tuned=1.0)

    def mined(recipe):
        shutil.copytree(recipe.data, f"{recipe.out}/pairs")
        return dict(pairs=dict(rows=1, negatives=0, without=1, refused=0))

    def tuned(model, rows, dev, out, *rest, **more):
        calls.append(len(rows))
        return dict(model=model, pairs=len(rows), rate=1e-4, rates={}, epochs={0: 0.1, 1: 0.2}, share=0.75, dev=0.2,
                    seconds=60.0, batch=32, max_length=256, seed=0, parameters=22_700_000)

    def scored(test, systems, max_length=256, known=None, weights=None):
        sheet = {}
        for label in [*systems, *(f"{name} + BM25" for name in systems if name != "bm25")]:
            good = rule["tuned"] if label.endswith(" tuned") else 0.5
            if "untrained" in label: good = rule.get("untrained", 0.5)
            values = {query: float(hash_of(query) < good) for query in test.queries}
            ranking = {query: {next(iter(judged)): 1.0} for query, judged in test.qrels.items()}
            score = sum(values.values())/len(values)
            sheet[label] = dict(score=score, low=score, high=score, seconds=0.1, values=values, ranking=ranking)
            if "BM25" in label: sheet[label]["weight"] = 0.3
        return sheet

    def exported(model, out, **how):
        folder = tmp_path.joinpath(out)
        folder.mkdir()
        (folder/"README.md").write_text(f"# a card\n\n{UNSCORED}\n\n{UNTRAINED}\n")
        return dict(bytes=10, dimension=4)
    for name, stand_in in dict(mine=mined, tune_encoder=tuned, score_systems=scored, export_with_card=exported,
                               find_model=lambda model: model, is_encoder=lambda base: True,
                               model_content=lambda base: "").items(): monkeypatch.setattr(module, name, stand_in)
    return calls, rule


def hash_of(query): return int(query.removeprefix("q"))*37 % 100/100


def recipe(tmp_path, **more):
    usual = dict(documents=str(tmp_path/"docs"), pairs=str(tmp_path/"pairs.jsonl"), out=str(tmp_path/"out"),
                 base="minilm", columns=COLUMNS)
    return Adapt(**usual | more)


def test_a_better_model_is_exported_with_its_verdict_and_a_second_run_does_nothing(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    found = adapt(recipe(tmp_path))
    assert found["verdict"]["better"] and found["verdict"]["delivered"] == "minilm tuned"
    assert found["systems"]["minilm tuned"]["size"] == found["systems"]["minilm"]["size"] == "23 M"
    card = (tmp_path/"out/model/README.md").read_text()
    assert "adapted to, minilm tuned beats bm25 by" in card and UNSCORED not in card
    assert UNTRAINED not in card and "on 100 pairs of pairs.jsonl: learning rate 0.0001" in card
    page = (tmp_path/"out/verdict.html").read_text()
    assert "Better than what you have" in page and "<script" not in page and "http" not in page
    assert any("75 % of the weights after training and 25 % of those before" in note for note in found["notes"])
    assert quick[0] == [100, 25, 50] and list(found["curve"]) == ["0", "25", "50", "100"]
    assert adapt(recipe(tmp_path))["fresh"] == [] and quick[0] == [100, 25, 50]


def test_only_the_steps_behind_a_change_are_made_again(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    adapt(recipe(tmp_path))
    fresh = adapt(recipe(tmp_path, epochs=1))["fresh"]
    assert fresh == ["train-minilm", "curve", "choose", "test", "export"]
    (tmp_path/"docs/house3.txt").write_text("House number300 of the village burned down in year311 and is gone.")
    assert adapt(recipe(tmp_path, epochs=1))["fresh"][:3] == ["read", "pairs", "split"]
    (tmp_path/"out/steps/test/step.json").write_text("{}")
    assert adapt(recipe(tmp_path, epochs=1))["fresh"] == ["test"] # a damaged step is made again


def test_a_model_is_set_aside_only_once_the_new_one_is_whole(tmp_path, quick, monkeypatch):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    card = Path(adapt(recipe(tmp_path))["model"], "README.md").read_text()
    quick[1]["tuned"] = 0.9
    def full(*_, **__):
        raise OSError("no space left")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("anchor_nb.release.adapt.shutil.copytree", full)
        adapt(recipe(tmp_path, epochs=2))
    assert (tmp_path/"out/model/README.md").read_text() == card and not (tmp_path/"out/model.before-1").exists()
    adapt(recipe(tmp_path, epochs=2))
    assert (tmp_path/"out/model.before-1/README.md").read_text() == card
    assert "minilm tuned beats" in (tmp_path/"out/model/README.md").read_text()


def test_a_model_that_is_not_better_is_not_delivered_and_the_command_says_so(tmp_path, quick, monkeypatch):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    assert adapt(recipe(tmp_path))["model"]
    beside = {name: (tmp_path/"out"/name).read_text() for name in ("verdict.html", "adapt.json", "passages.jsonl")}
    quick[1]["tuned"] = 0.2
    found = adapt(recipe(tmp_path, epochs=2))
    assert found["model"] == ""
    assert not (tmp_path/"out/model").exists() and (tmp_path/"out/model.before-1/README.md").is_file(), "set aside"
    for name, text in beside.items():
        assert (tmp_path/"out"/name.replace(".", ".before-1.")).read_text() == text, "of the model set aside"
    assert found["verdict"]["sentence"].startswith("Not")
    from anchor_nb.cli import training
    monkeypatch.setattr(training, "run_stage", lambda *_, **__: None)
    done = CliRunner().invoke(app, ["adapt", str(tmp_path/"docs"), "-o", str(tmp_path/"out"), "--quiet"])
    assert done.exit_code == 1 and "Not" in done.output and "anchor-nb serve minilm " in done.output
    assert done.output.rstrip().endswith("passages.jsonl --bm25 1"), "with what one should keep"
    assert found["keep"] == dict(model="minilm", bm25=1)


def test_a_base_that_is_good_as_it_is_needs_no_training(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    quick[1]["untrained"] = 1.0
    found = adapt(recipe(tmp_path, base="good"))
    assert found["verdict"]["against"].startswith("good untrained") and not found["verdict"]["better"]
    assert found["model"] == "" and any("The test set is too easy" in line for line in found["advice"])


@pytest.mark.parametrize("place", [0, 120], ids=["in front", "in the middle"])
def test_versions_of_a_document_are_on_one_side(tmp_path, place):
    "Fifteen words more, so that the passages behind them are cut elsewhere; those before are repeats."
    drawn, passages, repeats, whole = random.Random(0), [], [], {}
    for n in range(80):
        words = [f"w{drawn.randrange(10**6)}" for _ in range(240)]
        for version, text in enumerate((words, words[:place] + [f"v{n}w{k}" for k in range(15)] + words[place:])):
            for part in (" ".join(text[k:k + 60]) for k in range(0, len(text), 60)):
                name = f"{n}-{version}.txt"
                if part in whole: repeats.append((name, whole[part]))
                else:
                    whole[part] = len(passages)
                    passages.append(module.Passage(name, "", "", part))
    pairs = [dict(query=f"query {k}", passage=k) for k in range(len(passages))]
    module.split_step(Adapt(documents="x", pairs="y"), tmp_path, passages, pairs, repeats=repeats)
    number = {passage.text: passage.document.partition("-")[0] for passage in passages}
    rows = [row for table in load_pairs(str(tmp_path/"pairs")).values() for row in table]
    held = {name.partition("-")[0] for name in json.loads((tmp_path/"documents.json").read_text()).values()}
    assert held and not held & {number[text] for row in rows for text in row["positives"]}


def test_a_test_set_about_five_documents_is_refused():
    "Twenty-four questions about each: no outcome of it could be shown."
    rows = [dict(query=f"q{n}", positives=[f"text {n*n} of {n}"], negatives=[]) for n in range(480)]
    marks = [f"d{n//24}" for n in range(480)]
    refused(lambda: module.parted(rows, marks, 480, Adapt(documents="x", pairs="y")), "would be about 5 documents")


def test_spellings_of_a_query_count_once(tmp_path):
    passages = [module.Passage(f"d{n}", "", "", f"text {n*n} of {n}") for n in range(150)]
    spelt = ("reset w{}", "Reset w{}", "reset w{} ", "RESET w{}")
    pairs = [dict(query=way.format(n*n), passage=n) for n in range(150) for way in spelt]
    limits = Adapt(documents="x", pairs="y", test_queries=30, dev_queries=10)
    facts = module.split_step(limits, tmp_path, passages, pairs)
    assert (facts["test"], facts["dev"], facts["train"]) == (30, 10, 440)


def test_a_log_whose_queries_share_answers_is_not_told_to_cut_its_documents():
    drawn = random.Random(0)
    rows = [dict(query=f"q{n}", positives=[f"text {m*m} of {m}"], negatives=[])
            for n in range(400) for m in drawn.sample(range(200), 2)]
    marks = [row["positives"][0] for row in rows]
    refused(lambda: module.parted(rows, marks, 800, Adapt(documents="x", pairs="y")),
            "800 of 800 pairs belong together, since they share queries or answers")
    long = [dict(query=f"q{n}", positives=[f"text {n*n} of {n}"], negatives=[]) for n in range(400)]
    refused(lambda: module.parted(long, ["a"]*390 + [*"bcdefghijk"], 400, Adapt(documents="x", pairs="y")),
            "a alone has 390 of 400")


def test_other_words_and_another_command_reach_the_delivered_model(tmp_path, quick):
    "All documents are short, so that their passages stay what they were."
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    adapt(recipe(tmp_path))
    made = adapt(recipe(tmp_path, words=200))
    assert made["fresh"] == ["read", "export"]
    assert json.loads(Path(made["model"], "search.json").read_text())["words"] == 200
    assert "words=200" in Path(made["model"], module.ADAPTED).read_text()


def test_passages_longer_than_models_read_are_told(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    for n in range(20): (tmp_path/f"docs/long{n}.txt").write_text(" ".join(f"w{n}x{k}" for k in range(300)))
    told = lambda **more: [note for note in adapt(recipe(tmp_path, **more))["notes"] if "256 tokens" in note]
    assert told() == [] and "lower words" in told(words=300)[0]


def test_the_test_set_shares_no_document_with_training(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    adapt(recipe(tmp_path))
    place = tmp_path/"out/steps/split"
    trained = (place/"pairs/pairs.jsonl").read_text() + (place/"pool.jsonl").read_text()
    for name in ("test", "dev"):
        part = read_retrieval(place/name)
        for judged in part.qrels.values(): assert not any(part.corpus[document] in trained for document in judged)
        assert len(part.corpus) == 160


def test_what_is_searched_is_what_was_scored(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl", name="house{n}.md")
    for path in (tmp_path/"docs").iterdir():
        path.with_suffix(".md").write_text(f"# Street\n\n## Heading of {path.stem}\n\n{path.read_text()}\n")
        path.unlink()
    adapt(recipe(tmp_path))
    rows = [json.loads(line) for line in (tmp_path/"out/passages.jsonl").read_text().splitlines()]
    test = read_retrieval(tmp_path/"out/steps/split/test")
    assert sorted(row["text"] for row in rows) == sorted(test.corpus.values()) and len(rows) == 160
    assert "Heading of house7\n" in dict((row["_id"], row["text"]) for row in rows)["house7.md"]


@pytest.mark.parametrize("more, message", [(dict(test_queries=5), "test_queries=5 are too few"),
                                           (dict(dev_queries=9), "dev_queries=9 are too few"),
                                           (dict(train_pairs=15), "train_pairs=15 are too few"),
                                           (dict(pairs="nosuch.jsonl"), "pairs='nosuch.jsonl' is neither")])
def test_what_the_settings_alone_say_is_wrong(tmp_path, quick, more, message):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    with pytest.raises((ValueError, FileNotFoundError), match=message): adapt(recipe(tmp_path, **more))


def test_a_folder_that_is_no_step_and_an_index_of_before(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    (tmp_path/"other/steps/read").mkdir(parents=True)
    with pytest.raises(ValueError, match="steps/read: no step of an adaptation"):
        adapt(recipe(tmp_path, out=str(tmp_path/"other")))
    adapt(recipe(tmp_path))
    (tmp_path/"out/search").mkdir()
    adapt(recipe(tmp_path))
    assert (tmp_path/"out/search").exists()
    adapt(recipe(tmp_path, epochs=1))
    assert not (tmp_path/"out/search").exists()


def test_a_candidate_that_training_did_not_change_is_not_preferred_to_one_that_may_be_better(monkeypatch):
    values = dict(bm25=[0.1]*40, minilm=[0.5]*40, a=[0.5]*40, b=[0.3, 0.9]*20)
    sheet = {label: dict(values=dict(enumerate(of)), score=sum(of)/40) for label, of in values.items()}
    monkeypatch.setattr(module, "score_systems", lambda *_, **__: sheet)
    monkeypatch.setattr(module, "systems_of", lambda candidates: sheet)
    assert module.choose_step(dict(a={}, b={}), None, {})["chosen"] == "b"


def test_what_falls_behind_is_not_preferred_to_what_ranks_as_before(monkeypatch):
    "Where fused rankings tie, the tuned model alone is no better candidate for being unlike them."
    values = {"bm25": [0.8]*40, "minilm": [0.1]*40, "minilm + BM25": [0.9]*40, "a": [0.4, 0.2]*20, "a + BM25": [0.9]*40}
    sheet = {label: dict(values=dict(enumerate(of)), score=sum(of)/40) for label, of in values.items()}
    monkeypatch.setattr(module, "score_systems", lambda *_, **__: sheet)
    monkeypatch.setattr(module, "systems_of", lambda candidates: sheet)
    assert module.choose_step(dict(a={}), None, {})["chosen"] == "a + BM25"


def test_answers_that_another_passage_nearly_repeats_are_counted():
    text = " ".join(f"word{n}" for n in range(60))
    corpus = dict(one=text, twin=text + " more", other="something else entirely")
    assert module.with_twins(corpus, dict(q1={"one": 1}, q2={"other": 1}, q3={"one": 1, "twin": 1})) == 1


def test_what_is_delivered_is_the_surer_gain(monkeypatch):
    "Of two candidates, the one that gains 5 points on every query, not the one that gains 20 on half and loses 8."
    values = dict(bm25=[0.2]*40, minilm=[0.5]*40, sure=[0.55]*40, wild=[0.7, 0.42]*20)
    sheet = {name: dict(score=sum(row)/40, values=dict(enumerate(row))) for name, row in values.items()}
    assert sheet["wild"]["score"] > sheet["sure"]["score"]
    monkeypatch.setattr(module, "score_systems", lambda dev, systems, known: sheet)
    facts = dict(base="minilm", library="sentence-transformers", model="")
    assert module.choose_step(dict(sure=facts, wild=facts), None, {})["chosen"] == "sure"


def test_the_interval_of_a_score_is_over_documents_as_that_of_a_difference_is(monkeypatch):
    queries, documents = {f"q{n}": f"what is {n}" for n in range(40)}, {f"q{n}": f"d{n % 4}" for n in range(40)}
    systems = {name: dict(values={query: float(document in good) for query, document in documents.items()}, ranking={},
                          score=0.5, low=0.4, high=0.6) for name, good in dict(bm25=(), tuned=("d0", "d1")).items()}
    monkeypatch.setattr(module, "score_systems", lambda *_, **__: systems)
    monkeypatch.setattr(module, "systems_of", lambda candidates: systems)
    test = Retrieval("village", "", {"d": "a text"}, queries, {query: {"d": 1} for query in queries})
    judged = module.judge_step(dict(tuned={}), test, "tuned", {}, {}, documents)
    assert (judged["systems"]["tuned"]["low"], judged["systems"]["tuned"]["high"]) == (0.0, 1.0)
    assert (judged["verdict"]["low"], judged["verdict"]["high"]) == (0.0, 100.0)


def made_village(sentences):
    "Passages with a title each, titles as queries, and first sentences."
    passages = [module.Passage(f"d{n}", f"House {n}", "", " ".join(f"Room {n*7 + k} of it has {n*13} painted doors."
                                                                   for k in range(sentences))) for n in range(240)]
    rows = lambda pairs: [dict(query=query, passage=n) for query, n in pairs]
    return passages, rows((f"House {n}", n) for n in range(240)), rows(module.sentence_pairs(passages))


def test_test_queries_are_of_another_kind_than_those_trained_on(tmp_path):
    facts = module.split_step(Adapt(documents="x"), tmp_path, *made_village(2))
    rows = [row for table in load_pairs(str(tmp_path/"pairs")).values() for row in table]
    assert facts["test"] >= 20 and len(rows) >= 100 and all(row["query"].startswith("Room") for row in rows)
    for part in map(read_retrieval, (tmp_path/"test", tmp_path/"dev")):
        assert all(query.startswith("House") for query in part.queries.values())
        held = [part.corpus[name] for judged in part.qrels.values() for name in judged]
        assert not any(row["positives"][0] in text for row in rows for text in held)


def test_passages_of_one_sentence_give_nothing_to_learn_from(tmp_path):
    refused(lambda: made_village(1), "0 of 240 passages have a second sentence", "give pairs of your own")
    village(tmp_path/"docs")
    refused(lambda: outlook(recipe(tmp_path, pairs="")), "0 of 160 passages")


def test_a_row_without_a_mined_negative_gets_any_text_but_its_own(tmp_path):
    row = lambda text, negatives: dict(query=f"what is {text}", positives=[text], negatives=negatives,
                                       positive_scores=[0.5], negative_scores=[0.25]*len(negatives))
    rows = [row("a", ["b"]), row("c", [])]
    first, second = module.with_negatives(rows, ["c", "d"], 0)
    assert first["negatives"] == ["b"] and second["negatives"] == ["d"]
    assert module.with_negatives(rows[1:], ["c"], 0)[0]["negatives"] == [], "there is no other"
    write_pairs(tmp_path, "pairs", [first, second])
    table, = load_pairs(str(tmp_path)).values()
    assert [row["negatives"] for row in table] == [["b"], ["d"]], "stage II can read them"


def test_the_card_of_a_tuned_encoder_has_its_base_licence_and_scores(tmp_path):
    "Training writes beside the weights what they were before; here MiniLM's own are exported."
    tuned = tmp_path/"tuned"
    shutil.copytree(Path(module.find_model("minilm")), tuned)
    (tuned/"source.json").unlink(missing_ok=True)
    facts = dict(model="minilm", pairs=100, rate=1e-4, epochs={"0": 0.1, "1": 0.2}, batch=32, max_length=256, seed=0,
                 share=0.5)
    (tuned/"training.json").write_text(json.dumps(facts))
    found = dict(verdict=dict(sentence="Better.", queries=10, against="bm25"),
                 systems={"minilm tuned": dict(score=0.5), "bm25": dict(score=0.4)})
    winner = facts | dict(model=str(tuned), library="sentence-transformers")
    recipe = Adapt(documents="x", epochs=2, out=str(tmp_path/"mine"))
    module.export_step(recipe, tmp_path, winner, found, [], "minilm tuned")
    card = (tmp_path/"model/README.md").read_text()
    assert str(tmp_path) not in card and "mine/model" in card, "which `push` would refuse"
    assert "base_model_relation: finetune" in card and "not on record." not in card.partition("## Data")[0]
    assert "tuned by anchor_nb" in card and "anchor-nb adapt x --out" in card and "-p epochs=2" in card
    assert "license: apache-2.0" in card and "base_model: sentence-transformers/all-MiniLM-L6-v2" in card
    assert "Licence: apache-2.0, that of the base model" in card and "Better." in card and UNSCORED not in card


def test_a_model_on_the_hub_is_known_by_its_files(monkeypatch):
    "Its name is no folder here, wherever the hub's files are kept."
    folder = Path(module.find_model("minilm"))
    monkeypatch.setattr(module, "find_model", lambda name: "sentence-transformers/all-MiniLM-L6-v2")
    monkeypatch.setattr(module, "small_files", lambda name: folder)
    assert module.is_encoder("minilm")


def test_a_decoder_goes_through_stage_two_and_the_development_part_chooses_its_epoch(tmp_path):
    from anchor_nb.data.corpora import build_corpus
    from anchor_nb.data.retrieval_sets import subset
    from anchor_nb.data.rows import load_pairs
    folder = build_corpus("toy")
    rows = [row for table in load_pairs(str(folder/"pairs")).values() for row in table][:160]
    dev, sizes = subset(read_retrieval(folder/"eval"), 10, 20), dict(documents="x", epochs=2, minutes=600)
    size = module.size_step(Adapt(**sizes), "tiny", rows, True)
    facts = module.decoder_step(Adapt(**sizes), "tiny", rows, dev, tmp_path/"runs", size, {})
    assert facts["pairs"] == 160 and facts["steps"] == 20 and facts["parameters"] > 1e4
    assert list(facts["snapshots"]) == [10, 20] and Path(facts["model"]).is_dir() and facts["seeds"] == [0, 1]
    again = module.decoder_step(Adapt(**sizes), "tiny", rows, dev, tmp_path/"runs", size, {})
    assert again["model"] == facts["model"], "a finished run is not repeated"
    system = dict(score=0.5)
    found = dict(verdict=dict(sentence="Better.", queries=10, against="bm25"),
                 systems={"tiny tuned": system, "tiny tuned + BM25": system | dict(weight=0.3), "bm25": system})
    winner = facts | dict(library="anchor_nb")
    module.export_step(Adapt(**sizes), tmp_path, winner, found, ["A note."], "tiny tuned + BM25")
    assert "Better." in (tmp_path/"model/README.md").read_text() and (tmp_path/"model/modules.json").is_file()
    assert bm25_weight(tmp_path/"model") == 0.3, "what was scored is what is searched with"
    assert read_json(tmp_path/"model/anchor_nb.json")["layout"]["max_length"] == module.TOKENS == 256
    assert inspect.signature(module.opened).parameters["max_length"].default == module.TOKENS, "as it was scored"
    assert cut_of(str(tmp_path/"model")) == dict(words=160, titled=False)
    short = Adapt(**sizes | dict(minutes=1e-6))
    left_out = module.size_step(short, "tiny", rows, False)
    assert "was left out" in left_out["why"]
    assert module.decoder_step(short, "tiny", rows, dev, tmp_path/"runs", left_out, {}) == left_out
    few = module.size_step(Adapt(**sizes), "tiny", rows, False)
    assert "2 passes over 160 pairs are 20; give more pairs" in few["why"]
    assert module.size_step(short, "tiny", rows, True)["steps"] == 20, "asked for, it is trained"


@pytest.mark.parametrize("minutes, seeds", [(100, [5, 6]), (50, [5])])
def test_the_better_of_two_seeds_is_taken_where_there_is_time_for_two(minutes, seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "step_seconds", lambda *_: 45)
    monkeypatch.setattr(module, "dev_score", lambda model, *_: dict(m5=0.2, m6=0.7)[model])
    monkeypatch.setattr(module, "best_snapshot", lambda run, *_: dict(model=run, snapshots={}))
    monkeypatch.setattr(module, "train_decoder", lambda base, rows, steps, out, seed: dict(
        model=f"m{seed}", run=f"run-{seed}", seconds=1))
    asked = Adapt(documents="x", out=".", minutes=minutes, epochs=3, seed=5)
    size = module.size_step(asked, "tiny", [{}]*200, True)
    facts = module.decoder_step(asked, "tiny", [{}]*200, None, tmp_path, size, {})
    assert (facts["model"], facts["seeds"]) == (f"run-{seeds[-1]}", seeds)
    assert facts["seconds"] == len(seeds)


# ---- bad input ----

def refused(call, *words):
    with pytest.raises((ValueError, FileNotFoundError)) as error: call()
    what, fix = str(error.value).split("; ", 1) # two lines at the terminal
    for word in words: assert word in str(error.value)
    assert fix


def test_an_empty_folder_and_binary_files(tmp_path):
    bare = lambda **more: recipe(tmp_path, pairs="", **more)
    (tmp_path/"docs").mkdir()
    refused(lambda: outlook(bare()), "holds no document that can be read")
    (tmp_path/"docs/a.txt").write_bytes(bytes(range(256))*10)
    (tmp_path/"docs/b.exe").write_bytes(b"MZ\0\0")
    refused(lambda: outlook(bare()), "holds no document", "1 x binary")
    refused(lambda: outlook(bare(documents=str(tmp_path/"missing"))), "neither a folder nor a file")
    refused(lambda: outlook(bare(documents=str(tmp_path/"docs/a.txt"))), "cannot be read (binary)")


def test_a_model_that_replaces_another_leaves_it_beside(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    for epochs, kept in ((3, 0), (3, 0), (2, 1), (1, 2)):
        assert Path(adapt(recipe(tmp_path, epochs=epochs))["model"]).is_dir()
        assert len(list((tmp_path/"out").glob("model.before-*"))) == kept
    (tmp_path/"out/model/search.json").write_text('{"bm25": 0.9}') # by hand
    again = adapt(recipe(tmp_path, epochs=1))
    assert again["fresh"] == [] and "0.9" in (tmp_path/"out/model.before-3/search.json").read_text()
    assert "0.9" not in (tmp_path/"out/model/search.json").read_text()
    (tmp_path/"out/model/config.json").write_text("{}")
    told, = module.adapted_before(recipe(tmp_path, base=str(tmp_path/"out/model")))
    assert told.startswith("model was adapted before")


def test_a_file_that_is_not_read_changes_nothing_after_reading(tmp_path, quick, capsys):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    adapt(recipe(tmp_path))
    (tmp_path/"docs/notes.log").write_text("seen")
    found = adapt(recipe(tmp_path))
    assert {*found["fresh"]} == {"read", "export"}, "its notes are in the card"
    assert "1 file left out: 1 x .log: not a known kind of text (notes.log)" in capsys.readouterr().err
    assert "1 file left out: 1 x .log: not a known kind of text (notes.log)." in found["notes"]


def test_the_plan_checks_what_the_run_would_refuse(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    refused(lambda: outlook(recipe(tmp_path, out=str(tmp_path/"docs/out"))), "lies in documents")
    refused(lambda: outlook(recipe(tmp_path, columns=dict(query="place", positive="question"))), "exchange the two")
    refused(lambda: outlook(recipe(tmp_path, pairs=str(tmp_path/"pairs.csv"))), "pairs=", "is neither a table")


def test_a_folder_does_not_hide_a_model_that_adapt_needs(tmp_path, quick, monkeypatch):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path/"minilm").mkdir()
    refused(lambda: outlook(recipe(tmp_path)), "the folder minilm here hides the model of that name")


def test_a_plan_caps_titles_as_the_run_does(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(module, "ask", lambda *_: pytest.fail("a model was asked"))
    (tmp_path/"docs").mkdir()
    for n in range(160):
        (tmp_path/f"docs/house{n}.md").write_text(f"# House {n}\n\nRoom {n} of it is red. It has {n*7} doors in all.")
    few = recipe(tmp_path, pairs="", questions=0, train_pairs=16)
    for call in (outlook, adapt): refused(lambda: call(few), "32 queries leave a test set of 8", "or raise train_pairs")


def test_a_folder_with_another_model_is_left_alone(tmp_path, quick):
    (tmp_path/"run"/"model").mkdir(parents=True)
    with pytest.raises(ValueError, match="choose another out"): adapt(recipe(tmp_path, out=str(tmp_path/"run")))
    assert (tmp_path/"run"/"model").is_dir()


def test_a_base_in_the_folder_that_is_written_is_left_alone(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    delivered = adapt(recipe(tmp_path))["model"]
    refused(lambda: adapt(recipe(tmp_path, base=delivered)), f"holds base={delivered}", "choose an out")
    assert Path(delivered, "README.md").is_file()


def test_one_document(tmp_path, quick):
    village(tmp_path/"docs", 1), questions(tmp_path/"pairs.jsonl")
    refused(lambda: adapt(recipe(tmp_path)), "has 1 different document", "at least 10")


def test_two_megabytes_of_one_line(tmp_path):
    (tmp_path/"long.txt").write_text("x"*2_000_000)
    passages, _ = passages_of(read_documents(str(tmp_path))[0])
    assert max(map(len, (passage.text for passage in passages))) <= 160*101


def test_documents_with_more_queries_than_the_test_set_takes(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl", name="house1.txt")
    refused(lambda: adapt(recipe(tmp_path)), "house1.txt alone has 160 of 160", "one a chapter")


def test_two_models_of_one_name():
    refused(lambda: module.bases_of(Adapt(documents="x", base="a/stage2,b/stage2")), "two models are called stage2")


def test_a_model_of_several_names_is_trained_once():
    names = "all-MiniLM-L6-v2, minilm,smollm2-135m,SmolLM2-135M-Instruct"
    assert module.bases_of(Adapt(documents="x", base=names))[0] == ["minilm", "smollm2-135m"]


def test_another_encoder_is_forecast_by_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "encoder_seconds", lambda texts: 1)
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    shutil.copytree(Path(module.find_model("minilm")), tmp_path/"other")
    lines = outlook(recipe(tmp_path, base=str(tmp_path/"other")))
    first, second = (line.split(maxsplit=1)[1] for line in lines if line.startswith("train-"))
    assert first == second and "3 short runs" in second, "it is as large as MiniLM"


def test_a_reader_that_was_installed_since_is_used(tmp_path, quick, monkeypatch):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    adapt(recipe(tmp_path))
    monkeypatch.setattr(module, "readers", lambda: ["another"])
    assert "read" in adapt(recipe(tmp_path))["fresh"]


def test_rows_without_fields_and_text_that_utf8_cannot_hold(tmp_path):
    rows = ['{"text": "one two three four \\ud83d"}', "null", '{"text": "five six seven eight"}']
    (tmp_path/"docs.jsonl").write_text("\n".join(rows))
    documents, _ = read_documents(str(tmp_path/"docs.jsonl"))
    assert [document.sections[0][1] for document in documents] == ["one two three four ?", "five six seven eight"]
    refused(lambda: read_documents(str(tmp_path/"docs.jsonl"), dict(text=["a", "b"])), "give the name of one column")


def test_a_short_answer_goes_to_the_passage_that_its_query_asks_for():
    texts = [f"Paris street {n} is short." for n in range(60)] + [
        "Another thing to know about trees.", "The capital of France, with many rivers and old towns, is called Paris."]
    passages = [module.Passage(f"d{n}", "", "", text) for n, text in enumerate(texts)]
    asked = [dict(query="What is the capital of France?", positives=["Paris"]), dict(query="Trees?", positives=["No"])]
    assert match_pairs(asked, passages) == ([("What is the capital of France?", 61)], ["Trees?"])


def test_duplicates_count_once(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    shutil.copytree(tmp_path/"docs", tmp_path/"docs/again")
    found = adapt(recipe(tmp_path))
    assert found["facts"]["read"]["repeated"] == 160 and found["facts"]["read"]["passages"] == 160


def test_pairs_that_point_to_no_document(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl", name="nowhere{n}.md")
    refused(lambda: adapt(recipe(tmp_path)), "160 of 160 answers", "are in no document")


def test_a_test_set_too_small_says_how_many_queries_it_would_take(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl", 40)
    refused(lambda: adapt(recipe(tmp_path)), "40 queries leave a test set of 10", "about 97 queries, 5 points 385")
    refused(lambda: outlook(recipe(tmp_path)), "40 queries leave a test set of 10")


def test_other_languages_are_named_on_the_page(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"pairs.jsonl")
    for n in range(60):
        (tmp_path/f"docs/haus{n}.txt").write_text(f"Das Haus Nummer{n}77 am Fluss hat {n*3} Fenster und steht seit dem "
                                                  f"Jahr{n}55 leer, weil niemand mehr darin wohnen mag, sagt der Wirt.")
    found = adapt(recipe(tmp_path))
    assert any("do not look English" in note for note in found["notes"])


def test_pdf_without_its_reader_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("anchor_nb.data.documents.find_spec", lambda name: None)
    village(tmp_path/"docs", 2)
    (tmp_path/"docs/a.pdf").write_bytes(b"%PDF-1.4")
    documents, skipped = read_documents(str(tmp_path/"docs"))
    assert len(documents) == 2 and 'pip install "anchor_nb[documents]"' in skipped["a.pdf"]


def test_office_files_go_through_markitdown(tmp_path, monkeypatch):
    import sys
    import types
    read = lambda self, path: types.SimpleNamespace(text_content="# Mills\nOld.")
    reader = type("MarkItDown", (), dict(convert=read))
    monkeypatch.setitem(sys.modules, "markitdown", types.SimpleNamespace(MarkItDown=reader))
    monkeypatch.setattr("anchor_nb.data.documents.find_spec", lambda name: True)
    (tmp_path/"a.docx").write_bytes(b"PK")
    assert read_documents(str(tmp_path))[0][0].title == "Mills"


def test_a_real_pdf_and_a_real_word_file_are_read(tmp_path):
    pytest.importorskip("markitdown")
    import zipfile
    from matplotlib.figure import Figure
    page = Figure(figsize=(8, 3))
    page.text(0.1, 0.5, "The old mill burned down in the winter of 1808.")
    page.savefig(tmp_path/"mill.pdf")
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    relation = "http://schemas.openxmlformats.org/package/2006/relationships"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    paragraph = "<w:p><w:pPr><w:pStyle w:val='Heading1'/></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>"
    with zipfile.ZipFile(tmp_path/"river.docx", "w") as file:
        file.writestr("[Content_Types].xml", f"<Types xmlns='{types}'><Override PartName='/word/document.xml' "
                                             f"ContentType='{kind}'/></Types>")
        file.writestr("_rels/.rels", f"<Relationships xmlns='{relation}'><Relationship Id='r' Type='{office}' "
                                     "Target='word/document.xml'/></Relationships>")
        file.writestr("word/document.xml", f"<w:document xmlns:w='{word}'><w:body>{paragraph.format('Floods')}<w:p>"
                                           "<w:r><w:t>The river rises in spring.</w:t></w:r></w:p></w:body>"
                                           "</w:document>")
    documents, skipped = read_documents(str(tmp_path))
    assert not skipped and [document.id for document in documents] == ["mill.pdf", "river.docx"]
    assert "The old mill burned down in the winter of 1808." in documents[0].sections[0][1]
    assert (documents[1].title, documents[1].sections[-1][1]) == ("Floods", "The river rises in spring.")


def test_a_ranking_is_a_search_model_to_mteb(tmp_path):
    from mteb.models.models_protocols import SearchProtocol
    assert isinstance(Ranked("a", {}), SearchProtocol)
    assert Candidate("bm25", "bm25", library="bm25").label == "bm25"


@pytest.mark.parametrize("name", ["search", "passages.jsonl", "verdict.html"])
def test_what_stands_in_an_out_of_other_use_is_left_alone(tmp_path, name):
    village(tmp_path/"docs")
    (tmp_path/"out").mkdir()
    (tmp_path/"out"/name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, which adapt would replace"):
        adapt(Adapt(documents=str(tmp_path/"docs"), out=str(tmp_path/"out")))
    assert (tmp_path/"out"/name).read_text() == "mine"


def test_sentences_of_a_script_without_spaces_are_counted_by_characters():
    texts = [f"老磨坊建于第{n}年之后。村里现在还有人用它磨面粉。" for n in range(60)]
    assert len(module.sentence_pairs([module.Passage("mills.md", "", "", text) for text in texts])) == 60


def test_pairs_among_the_documents_are_refused(tmp_path, quick):
    village(tmp_path/"docs"), questions(tmp_path/"docs/pairs.jsonl")
    refused(lambda: adapt(recipe(tmp_path, pairs=str(tmp_path/"docs/pairs.jsonl"))), "tables are read as documents")


def test_too_few_queries_are_refused_before_any_is_written(monkeypatch):
    monkeypatch.setattr(module, "ask", lambda *_: pytest.fail("a model was asked"))
    passages = [Passage(f"d{n}", "", "", f"House {n} " + "of the village "*5) for n in range(12)]
    refused(lambda: module.made_pairs(Adapt(documents="x"), passages, []), "too small to tell anything")


def test_texts_to_which_a_server_gave_no_answer_are_asked_again(tmp_path, quick, monkeypatch):
    "And what follows is made again where that changes the pairs."
    village(tmp_path/"docs")
    passages = [Passage(f"d{n}", "", "", f"{n} " + "word "*20) for n in range(160)]
    monkeypatch.setattr(module, "ask", lambda texts, *_: [f"What is {text}?" if n > 2 else None
                                                          for n, text in enumerate(texts)])
    monkeypatch.setattr(module, "found_again", lambda asked, *_, **__: asked)
    monkeypatch.setattr(module, "encoder_of", lambda model: None)
    kept, counts = module.made_pairs(Adapt(documents="x", questions=160), passages, [])
    assert (len(kept), counts["questions"], counts["unanswered"]) == (157, 157, 3)
    lacking = [2, 2, 0]
    def pairs_step(recipe, part, *_):
        gone = lacking.pop(0)
        for name in ("pairs", "sentences"):
            module.write_lines(part/f"{name}.jsonl", (dict(query=f"q{n}", passage=n) for n in range(160 - gone)))
        return dict(unanswered=gone) if gone else {}
    monkeypatch.setattr(module, "pairs_step", pairs_step)
    monkeypatch.setattr(module, "split_step", lambda recipe, part, *_: (part/"pairs").mkdir() or {})
    fresh = []
    for _ in range(4):
        module.prepared(recipe(tmp_path, pairs=""), steps := module.Steps(tmp_path/"out"))
        fresh.append(steps.fresh)
    assert fresh == [["read", "pairs", "split", "mine"], ["pairs"], ["pairs", "split", "mine"], []]
