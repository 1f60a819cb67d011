"Parquet shards at an address, read in place: the same runs and the same products as from a local table."
import json
import random

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from anchor_nb.core.progress import announce
from anchor_nb.core.recipe import Mine, Stage1, Stage2
from anchor_nb.core.redaction import without_secrets
from anchor_nb.data.deduplication import dedup_pairs
from anchor_nb.data.inspection import inspect_pairs
from anchor_nb.data.rows import Batches, load_pairs, undrawn
from anchor_nb.data.shards import name_of_address
from anchor_nb.inference.corpus_encoding import Encoded, encode_corpus
from anchor_nb.inference.hard_negatives import mine
from anchor_nb.runs.identity import files_content
from anchor_nb.training.inputs import Record, check_inputs
from anchor_nb.training.trainer import train
from common import STAGES, assert_same_trajectory, interrupted, recipe, rows, run, start, stop_after, toy_pairs


def write_shards(folder, rows, shards=3, group=7):
    "Shards of several row groups; their address."
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(rows)//shards)
    for number in range(shards):
        part = rows[number*size:(number + 1)*size]
        parquet.write_table(pyarrow.Table.from_pylist(part), folder/f"train-{number}.parquet", row_group_size=group)
    return f"file://{folder}/*.parquet"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> list:
    return [dict(query=row["query"], positive=row["positives"][0], negatives=row["negatives"])
            for row in load_pairs(toy_pairs())["toy"]]


@pytest.fixture(scope="module")
def address(toy, tmp_path_factory) -> str:
    return write_shards(tmp_path_factory.mktemp("far")/"toy", toy)


@pytest.fixture(scope="module")
def mixture(toy, address, tmp_path_factory) -> str:
    "A local table and shards at an address."
    place = tmp_path_factory.mktemp("mixture")
    (place/"near.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy[::2]))
    (place/"mixture.yaml").write_text(yaml.safe_dump(dict(near="near.jsonl", far=address)))
    return str(place/"mixture.yaml")


@pytest.mark.parametrize("name, extra", [("stage1", {}), ("stage2", dict(workers=2))], ids=["stage1", "stage2-workers"])
def test_a_killed_run_on_streams_is_the_uninterrupted_one(name, extra, mixture, tmp_path):
    wanted = random.randint(3, 12)
    kill = lambda settings: stop_after(wanted, start(settings), tmp_path/"killed")
    interrupted(STAGES[name][0], STAGES[name][1] | extra | dict(data=mixture), tmp_path, kill)


def test_two_ranks_draw_what_one_draws(mixture, tmp_path):
    for ranks in (1, 2):
        run(recipe(Stage1, tmp_path/str(ranks), steps=4, precision="fp64", processes=ranks, data=mixture))
    assert_same_trajectory(rows(tmp_path/"1"), rows(tmp_path/"2"), 1e-9)


def test_every_row_of_a_stream_is_seen_once_an_epoch(toy, address):
    table = load_pairs(address)["toy"]
    batches = Batches({"toy": len(table)}, 8, groups={"toy": table.groups})
    steps = len(toy)//8
    seen = [number for step in range(steps) for number in batches(step).rows.tolist()]
    assert len(set(seen)) == len(seen) == 8*steps
    assert [row["query"] for row in table.select(seen)] == [toy[number]["query"] for number in seen]
    left = undrawn(batches, 2, ["toy"], 4)["toy"]
    assert len(left) and not set(left.tolist()) & set(seen[:16])


def test_other_tools_read_streams(toy, address, tmp_path):
    "Deduplication, mining, checking and encoding give what they give for the same rows in a local file."
    (tmp_path/"toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy))
    made = {}
    for name, data in dict(near=str(tmp_path/"toy.jsonl"), far=address).items():
        dedup_pairs(data, str(tmp_path/name/"dedup"))
        mine(Mine(data=data, model="bm25", out=str(tmp_path/name/"mined"), negatives=2))
        encode_corpus(data, "tiny", str(tmp_path/name/"vectors"), columns=dict(text="positive"))
        made[name] = ([(tmp_path/name/place/"pairs/toy.jsonl").read_text() for place in ("dedup", "mined")],
                      Encoded(tmp_path/name/"vectors").rows(range(len(toy))).tolist(),
                      inspect_pairs(data)["datasets"]["toy"]["rows"])
    assert made["near"] == made["far"]


def test_a_faulty_row_is_named_by_its_file(toy, tmp_path):
    address = write_shards(tmp_path/"toy", [*toy[:250], dict(toy[0], query=" "), *toy[250:]], shards=2)
    table = load_pairs(address)["toy"] # its first rows are good
    named = r"train-\d.parquet, row \d+, field 'query' is empty"
    with pytest.raises(ValueError, match=named): list(table)
    with pytest.warns(UserWarning, match=named): taken = table.select([250, 251])
    assert taken[0] == taken[1] == table[251]
    with pytest.raises(ValueError, match="columns names typo, which no row has"):
        load_pairs(address, columns=dict(negative="typo"))
    address = write_shards(tmp_path/"other", [dict(frage="a", antwort="b")], shards=1)
    with pytest.raises(ValueError, match="columns='{query: frage, positive: antwort}'"): load_pairs(address)
    renamed = load_pairs(address, columns=dict(query="frage", positive="antwort"))["other"]
    assert renamed[0]["positives"] == ["b"]


@pytest.mark.parametrize("stage, settings, message", [
    (Stage1, dict(held_out=8), "held_out=8 cannot take rows out of toy"),
    (Stage1, dict(pairing="strangers"), "pairing=strangers needs tables"),
    (Stage2, dict(few_shot=2, instructions="Find the answer"), "few_shot draws examples from all rows, and toy"),
    (Stage2, dict(distillation="kl"), "needs a teacher's scores, and toy has none")])
def test_what_needs_all_rows_is_refused(stage, settings, message, address, tmp_path):
    with pytest.raises(ValueError, match=message): check_inputs(recipe(stage, tmp_path/"run", data=address, **settings))


def test_a_run_knows_its_shards(toy, tmp_path):
    "Other content at the same address is another run, and another input of a pipeline."
    address = write_shards(tmp_path/"toy", toy)
    (tmp_path/"mixture.yaml").write_text(f"far: '{address}'\n")
    settings = recipe(Stage1, tmp_path/"run", steps=2, data=str(tmp_path/"mixture.yaml"), save_steps=1)
    facts, content = train(settings), files_content(settings.data)
    assert facts["data"]["far"]["rows"] == len(toy)
    write_shards(tmp_path/"toy", toy[1:])
    assert files_content(settings.data) != content
    with pytest.raises(ValueError, match="other content of far"): train(settings)


def test_a_source_is_not_overwritten_by_another_name(toy, tmp_path):
    "Neither an address nor a mixture hides where rows are read."
    address = write_shards(tmp_path/"mined"/"pairs", toy)
    (tmp_path/"mix.yaml").write_text(f"toy: '{address}'\nnear: mined/pairs/train-0.parquet\n")
    for data in (address, str(tmp_path/"mix.yaml")):
        with pytest.raises(ValueError, match="lost"): dedup_pairs(data, str(tmp_path/"mined"))
        with pytest.raises(ValueError, match="would change data"):
            check_inputs(recipe(Stage1, tmp_path/"mined"/"pairs", data=data))


def test_no_secret_of_an_address_is_recorded(capsys):
    address = "s3://user:hunter2hunter2@bucket/nq/*.parquet?X-Amz-Signature=hunter3hunter3"
    assert name_of_address("s3://user:hunter2hunter2@bucket/*.parquet") == "bucket"
    assert "hunter" not in json.dumps(without_secrets({"data": address}))
    announce("reading pairs from", address)
    assert "hunter" not in capsys.readouterr().err


@pytest.mark.parametrize("given, asked", [("none", ""), ("paper", ""), ("Find it", "Find it")])
def test_a_model_says_what_the_queries_of_a_stream_were_asked_with(address, tmp_path, given, asked):
    record = Record(check_inputs(recipe(Stage1, tmp_path/"run", data=address, instructions=given)))
    assert list(record.instructions.values()) == [[asked]]
