"The stage `analyse` from parameters to files: run, resumed, refused; its rows in a ledger; bad input."
import json

import pytest
import torch
from common import toy_pairs
from typer.testing import CliRunner

from anchor_nb.runs import ledger as ledgers
from anchor_nb.analysis import analyse as analysis
from anchor_nb.models import embedder
from anchor_nb.runs import manifest as runs
from anchor_nb.evaluation import tables
from anchor_nb.cli.main import app
from anchor_nb.models.resolve import resolve_model
from anchor_nb.data.rows import parse_row
from anchor_nb.core.recipe import Analyse


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    "Vectors of these tests stay out of the user's cache; the tiny model is taken from it."
    tiny = resolve_model("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "cache_dir", lambda: tmp_path_factory.getbasetemp()/"vectors")
        yield tiny


@pytest.fixture(scope="module")
def other(tmp_path_factory, cache):
    "A model like tiny with other weights, and one that a word of these texts makes NaN."
    folders = []
    for name in ("other", "ruined"):
        model, generator = embedder.AnchorEmbedder.from_pretrained(cache), torch.Generator().manual_seed(1)
        if name == "other":
            for weight in model.lm.parameters(): weight.data += 0.02*torch.randn(weight.shape, generator=generator)
        else:
            word = model.formatter(["river"])[0].content[0]
            model.lm.get_input_embeddings().weight.data[word] = float("nan")
        model.save_pretrained(folder := str(tmp_path_factory.mktemp("models")/name))
        folders.append(folder)
    return folders


def asked(out, **changes):
    return Analyse(**dict(a="tiny", b="tiny", data=toy_pairs(), out=str(out), texts=80, max_length=48, layers=3,
                          neighbours=[3, 5]) | changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory, other):
    "One analysis from the command, through its stage notebook; what it prints is the summary."
    out = tmp_path_factory.mktemp("analysis")/"run"
    parameters = dict(a="tiny", b=other[0], data=toy_pairs(), out=str(out), texts=80, max_length=48, layers=3,
                      neighbours=[3, 5], quick=False)
    names = ("out", "texts", "max_length", "layers", "neighbours")
    words = [word for name in names for word in ("-p", f"{name}={parameters[name]}")]
    printed = CliRunner().invoke(app, ["analyse", "tiny", other[0], "--data", toy_pairs(), "--json", "--quiet", *words],
                                 catch_exceptions=False)
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout) == json.loads((out/"summary.json").read_text())
    return out, parameters, out/"analyse.ipynb"


def test_the_stage_leaves_files_figures_and_a_map(done):
    out, _, notebook = done
    assert ledgers.read_json(out/"run.json")["status"] == "complete"
    for name in ("similarity.json", "geometry.json", "map.json", "summary.json", "similarity.pdf", "map.png",
                 "training.png", "embeddings.png"):
        assert (out/name).stat().st_size > 100, name
    summary = json.loads((out/"summary.json").read_text())
    assert {"cka", "correlation", "knn_3"} <= summary["last_layer"].keys() and summary["a"] == "tiny"
    # 80 texts cannot fix a rotation of 64 dimensions
    assert "compare tokens" in summary["left_out"]["procrustes_residual"]
    values = summary["last_layer"]["cka"]
    assert values["low"] <= values["value"] <= values["high"] and abs(values["null_shuffled"]) < 0.5
    assert "random points" in notebook.read_text()


def test_a_finished_analysis_is_not_done_again_and_another_is_refused(done):
    out, parameters, _ = done
    again = lambda **changes: runs.start_run(out, Analyse(**parameters | changes), runs.read_manifest(out)["data"])
    assert again() == "done"
    with pytest.raises(ValueError, match="seed is 0 there and 5 here"): again(seed=5)


def test_rows_are_in_the_ledgers_format_and_stay_out_of_tables(done):
    out, _, _ = done
    table = ledgers.frame(out/"ledger.jsonl")
    assert {"cka", "uniformity", "separation"} <= set(table["metric"]) and not table["main"].any()
    assert tables.comparable(ledgers.read_rows(out/"ledger.jsonl")) == []


def test_rows_say_the_instruction_of_the_numbers_it_changed(tmp_path):
    "Embeddings of pairs are made with it, states of layers and single texts without."
    said = lambda out, **changes: (analysis.analyse(asked(tmp_path/out, instruction="Find the word", **changes),
                                                    say=lambda text: None),
                                   ledgers.read_rows(tmp_path/out/"ledger.jsonl"))[1]
    rows = said("pairs")
    instructions = {row["metric"]: row["instructions"] for row in rows}
    assert (instructions["cka"], instructions["uniformity"]) == ("none", "Find the word")
    assert {row["instructions"] for row in said("texts", text_fields=["positive"])} == {"none"}


@pytest.mark.parametrize("lines, changes, message", [
    (['{"text": "a"}', '["b", "c"]'], {}, "texts.jsonl, line 2: the row is list, not an object; write"),
    (["3"], {}, "texts.jsonl, line 1: the row is int, not an object"),
    (['{"query": "a", "positive": "b"}'], dict(texts=1), r"texts.jsonl, line 1 has 2 texts \(query and positive\); "
                                                         r"raise texts, or name one field with text_fields"),
    (['{"query": "a", "positive": "b", "neg": [" "]}'], {}, r"texts.jsonl, line 1, field 'neg\[0\]' is empty"),
])
def test_rows_that_cannot_be_drawn_are_named_with_file_line_and_fix(tmp_path, lines, changes, message):
    (tmp_path/"texts.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        analysis.draw(asked(tmp_path/"out", data=str(tmp_path/"texts.jsonl"), **changes))


def test_negatives_are_those_that_training_reads(tmp_path):
    rows = [dict(query="q", positive="p", negative_10="ten", negative_2="two", negative_scores=[1, 2, 3], label=1),
            dict(query="r", positive="s", negatives=[["", "first"], "second"]),
            dict(query="r", positive="s", hard_negatives=["first"], negatives_source="mined")]
    for row in rows:
        (tmp_path/"texts.jsonl").write_text(json.dumps(row))
        found = analysis.draw(asked(tmp_path/"out", data=str(tmp_path/"texts.jsonl")))
        others = ("label", "negative_scores", "negatives_source")
        fields = {name: value for name, value in row.items() if name not in others}
        assert found.negatives == parse_row(fields)["negatives"][:1]


def test_a_model_against_itself_is_the_same_everywhere(tmp_path):
    found = analysis.analyse(asked(tmp_path, states="tokens"), say=lambda text: None)
    last = found["last_layer"]
    values = [last[metric]["value"] for metric in ("cka", "knn_3", "procrustes_residual")]
    assert values == pytest.approx([1, 1, 0], abs=1e-4)
    assert found["geometry"]["tiny (a), step 0"] == found["geometry"]["tiny (b), step 0"]


def test_vectors_are_computed_once(tmp_path, monkeypatch):
    settings = asked(tmp_path)
    sample = analysis.draw(settings)
    before = analysis.embeddings(analysis.checkpoints_of(settings)[0], sample, settings)
    monkeypatch.setattr(embedder.AnchorEmbedder, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded "
                                                                                                 "again"))
    again = analysis.embeddings(analysis.checkpoints_of(settings)[0], sample, settings)
    assert all((before[side] == again[side]).all() for side in before)


def test_other_texts_or_lengths_are_other_vectors(tmp_path):
    settings, shorter = asked(tmp_path), asked(tmp_path, max_length=20)
    sample, each = analysis.draw(settings), analysis.checkpoints_of(settings)[0]
    assert (analysis.embeddings(each, sample, settings)["documents"] != analysis.embeddings(each, sample,
                                                                                            shorter)["documents"]).any()


def test_a_ruined_model_is_named(tmp_path, other):
    (tmp_path/"texts.jsonl").write_text("\n".join(json.dumps(dict(text=f"river {n} is long")) for n in range(40)))
    with pytest.raises(ValueError, match="(?i)nan|finite"):
        analysis.analyse(asked(tmp_path/"out", b=other[1], data=str(tmp_path/"texts.jsonl")), say=lambda text: None)


@pytest.mark.parametrize("changes, message", [
    (dict(data="nowhere"), "neither a folder nor a file"), (dict(a="no/such/folder"), "no/such/folder"),
    (dict(label="topic"), "field 'topic' is missing"), (dict(texts=38), "texts=38, gives 19 rows .* at least 20")])
def test_bad_input_is_named_before_much_is_done(tmp_path, changes, message, monkeypatch):
    monkeypatch.setattr("anchor_nb.analysis.compare.accumulate", lambda *_: pytest.fail("the models were compared"))
    with pytest.raises((ValueError, OSError), match=message):
        analysis.analyse(asked(tmp_path, **changes), say=lambda text: None)


@pytest.mark.parametrize("fields, row, groups", [(["query", "document"], ["a", "b"], [0, 0, 1, 1]),
                                                 (["text"], ["a"], None)])
def test_a_query_stays_with_its_document(tmp_path, monkeypatch, fields, row, groups):
    monkeypatch.setattr(analysis, "compare", lambda *_, **how: how)
    how = analysis.compared(asked(tmp_path), analysis.Sample(fields, [row]*2, [], ["x", "y"]))
    assert how["groups"] == groups and len(how["labels"]) == 2*len(row)


def test_classes_give_a_probe_and_one_class_says_so(tmp_path):
    texts = [dict(text=f"{word} number {n} of them", topic=word) for n in range(30) for word in ("cat", "house")]
    (tmp_path/"texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    found = analysis.analyse(asked(tmp_path/"out", data=str(tmp_path/"texts.jsonl"), label="topic", texts=60),
                             say=lambda text: None)
    assert found["last_layer"]["probe_source"]["value"] > 0.6
    assert "alignment" not in found["geometry"]["tiny (a), step 0"]
    with pytest.raises(ValueError, match="class"):
        (tmp_path/"one.jsonl").write_text("\n".join(json.dumps(row | dict(topic="one")) for row in texts))
        analysis.analyse(asked(tmp_path/"out2", data=str(tmp_path/"one.jsonl"), label="topic", texts=60),
                         say=lambda text: None)
