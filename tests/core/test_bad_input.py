"Wrong input is refused with file, line, field and the fix, before anything is written."
import json
import os
import shutil
from pathlib import Path

import pytest

from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.release.merging import merge_models
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.experiments.stages import StageError, run_stage
from anchor_nb.runs.manifest import start_run
from anchor_nb.training.inputs import check_inputs
from anchor_nb.training.trainer import train
from common import recipe, rows, toy_pairs

GOOD = '{"query": "a question", "positive": "an answer"}\n'


def refused(tmp_path, stage=Stage1, **changes) -> str:
    "The message of the error, after making sure that nothing was written."
    with pytest.raises((ValueError, FileNotFoundError)) as caught: train(recipe(stage, tmp_path/"out", **changes))
    assert not (tmp_path/"out").exists()
    return str(caught.value)


@pytest.mark.parametrize("line, expected", [
    ('{"query": "a", "positive"', "not valid JSON"),
    ('{"query": "a"}', "field 'positive' is missing"),
    ('{"positive": "a"}', "field 'query' is missing"),
    ('{"query": "a", "positive": "  "}', "field 'positive' is empty"),
    ('{"query": 7, "positive": "b"}', "field 'query' is int, not text"),
    ('{"query": "a", "positive": "b", "negative": ["c", null]}', "field 'negative[1]' is NoneType"),
    ('["a", "b"]', "the row is list, not an object")])
def test_faulty_line(line, expected, tmp_path):
    data = tmp_path/"data"
    data.mkdir()
    (data/"mine.jsonl").write_text(GOOD*2 + line + "\n" + GOOD*20)
    message = refused(tmp_path, data=str(data))
    assert expected in message and "mine.jsonl, line 3" in message


def test_empty_folder(tmp_path):
    (tmp_path/"data").mkdir()
    assert "holds no table" in refused(tmp_path, data=str(tmp_path/"data"))


def test_empty_file(tmp_path):
    (tmp_path/"data").mkdir()
    (tmp_path/"data"/"mine.jsonl").touch()
    assert "mine.jsonl" in refused(tmp_path, data=str(tmp_path/"data"))


def test_no_such_folder(tmp_path): assert "neither a folder nor a file" in refused(tmp_path, data=str(tmp_path/"data"))


def test_unknown_dataset(tmp_path): assert "unknown datasets tpy; there are toy" in refused(tmp_path, ratios={"tpy": 1})


def test_batch_larger_than_dataset(tmp_path): assert "larger than toy" in refused(tmp_path, global_batch=4096)


def test_alpha_outside(tmp_path):
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\], it is 1.5"):
        recipe(Stage1, tmp_path/"out", alpha=1.5)


def test_max_length_below_template(tmp_path): assert "leaves no room for text" in refused(tmp_path, max_length=3)


def changed_model(tmp_path, file, **changes):
    "The tiny model with a configuration file changed."
    folder = shutil.copytree(resolve_model("tiny"), tmp_path/"model")
    (folder/"anchor_nb.json").unlink(missing_ok=True)
    content = json.loads((folder/file).read_text()) | changes
    (folder/file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(folder)


def test_tokenizer_without_eos(tmp_path):
    assert "[EOS] is None" in refused(tmp_path, model=changed_model(tmp_path, "tokenizer_config.json", eos_token=None))


def test_model_without_head(tmp_path):
    model = changed_model(tmp_path, "config.json", architectures=["LlamaModel"])
    assert "LlamaModel is not a causal language model" in refused(tmp_path, model=model)


def test_model_that_is_not_there(tmp_path): assert "no-such" in refused(tmp_path, model="./no-such-model")


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_run_in_what_it_reads(name, tmp_path):
    "It would change its own input while it runs."
    folder = changed_model(tmp_path, "config.json") if name == "model" else str(shutil.copytree(toy_pairs(),
                                                                                                tmp_path/"pairs"))
    before = sorted(Path(folder).rglob("*"))
    settings = recipe(Stage1, folder if name == "data" else f"{folder}/run", **{name: folder})
    with pytest.raises(ValueError, match=f"would change {name}={folder}"): train(settings)
    assert sorted(Path(folder).rglob("*")) == before


def test_a_run_over_the_model_that_it_starts_from(tmp_path):
    "It would write its own model there."
    shutil.copytree(resolve_model("tiny"), tmp_path/"run"/"model")
    with pytest.raises(ValueError, match=f"would change model={tmp_path/'run'}"):
        train(recipe(Stage1, tmp_path/"run", model=str(tmp_path/"run")))


def test_huge_text_keeps_eos_and_trains(tmp_path):
    "A text far over the limit is cut, its [EOS] is not, and the run goes on."
    (tmp_path/"data").mkdir()
    row = json.dumps(dict(query="word " * 20_000, positive="文字" * 30_000)) + "\n"
    (tmp_path/"data"/"mine.jsonl").write_text(row * 8)
    settings = recipe(Stage1, tmp_path/"out", data=str(tmp_path/"data"), steps=1)
    formatter = check_inputs(settings).formatter
    tokens, = formatter(["word " * 20_000])
    assert len(tokens.ids) == 48 and tokens.ids[-1] == formatter.tokenizer.eos_token_id
    train(settings)
    assert rows(tmp_path/"out")[0]["target_tokens_q2d"] == 8*(48 - formatter.head - formatter.tail + 1)


def test_folder_of_another_run(tmp_path):
    start_run(tmp_path, recipe(Stage1, tmp_path))
    with pytest.raises(ValueError, match="alpha"): start_run(tmp_path, recipe(Stage1, tmp_path, alpha=0.5))
    with pytest.raises(ValueError): start_run(tmp_path, recipe(Stage2, tmp_path))


def test_data_changed_under_a_checkpoint(tmp_path):
    data = tmp_path/"data"
    data.mkdir()
    (data/"mine.jsonl").write_text(GOOD*20)
    settings = recipe(Stage1, tmp_path/"out", data=str(data), steps=4)
    train(settings)
    shutil.copytree(tmp_path/"out"/"model", tmp_path/"out"/"checkpoint-2")
    (data/"mine.jsonl").write_text(GOOD*21)
    with pytest.raises(ValueError, match="trained on other content of mine"): train(settings)


def test_stage_notebook_stops_before_its_run_folder(tmp_path):
    """The same from a stage notebook: the error is the notebook's, and what is left there would not block the mended
    command."""
    usual = dict(model="tiny", data=toy_pairs(), out=str(tmp_path/"out"), processes=9, global_batch=8)
    with pytest.raises(StageError, match="global_batch=8 leaves some of 9 processes without an example"):
        run_stage("stage1", usual, output=tmp_path/"stage1.ipynb", log=False)
    assert [path.name for path in (tmp_path/"out").iterdir()] == [".stage1.lock"]


def test_data_without_rows_stop_a_stage_before_its_notebook(tmp_path):
    (tmp_path/"data").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no table"):
        run_stage("stage1", dict(model="tiny", data=str(tmp_path/"data"), out=str(tmp_path/"out")), log=False)
    assert not (tmp_path/"out").exists()


@pytest.mark.parametrize("size", [4, 5_000, 100_000])
def test_weights_that_break_off_are_named(size, tmp_path):
    folder = changed_model(tmp_path, "config.json")
    os.truncate(Path(folder)/"model.safetensors", size)
    expected = f"model.safetensors is incomplete: it has {size} bytes, and safetensors says "
    with pytest.raises(ValueError, match=expected): AnchorEmbedder.from_pretrained(folder)
    with pytest.raises(ValueError, match=expected): merge_models([folder, "tiny"], str(tmp_path/"soup"))
