"Reading pairs: errors name file, line and field, files that cannot be read are named, and tables follow the file."
import json
import os
import warnings

import numpy as np
import pandas
import pytest

from anchor_nb.data.rows import Batch, Batches, examples, load_pairs, parse_row, parsed
from anchor_nb.data.tables import RowTable, content_hash, find_sources

GOOD = '{"query": "a question", "positive": "an answer"}\n'


@pytest.mark.parametrize("line, expected", [
    (r'{"query": "a\ud83d", "positive": "b"}', r", field 'query' has half a character, '\ud83d' at position 1"),
    (r'{"query": "a", "positive": "b", "negatives": ["c", "\udc00"]}', r", field 'negatives[1]' has half a character"),
    (r'{"query": "a", "positive": "b", "instruction": "\ud83d"}', ", field 'instruction' has half a character"),
    (r'{"query": ["\ud83d", "a"], "pos": ["b"]}', ", field 'query' has half a character"),
    ('{"query": ["a", "b"], "positive": "c"}', ", field 'query' is a list of two texts"),
    ('{"query": "a", "positive": "b", "negatives": [["c", "d"]]}', ", field 'negatives[0]' is a list of two texts"),
    ('{"query": "a", "pos": ["b", ["c", "d"]]}', ", field 'pos[1]' is a list of two texts"),
    ('{"query": "a", "positive": "b", "negatives": ' + "[" * 2000 + "]" * 2000 + "}", ": JSON nested too deeply"),
    ('{"query": "a", "positive": "b", "positive_scores": [1' + "0" * 400 + "]}",
     ", field 'positive_scores[0]' is not a finite number"),
    ('{"query": "a", "positive": "b", "positive_scores": [1' + "0" * 5000 + "]}", ": a number that cannot be read"),
    ('{"query": "a", "positive": "b", "negative": "c", "scores": [0.5, NaN]}',
     ", field 'scores[0]' is not a finite number: nan"),
    ('{"query": "a", "positive": "b", "positive_scores": [Infinity]}',
     ", field 'positive_scores[0]' is not a finite number: inf")])
def test_a_faulty_line_has_its_place(line, expected, tmp_path):
    (tmp_path/"mine.jsonl").write_text(GOOD * 2 + line + "\n" + GOOD)
    with pytest.raises(ValueError) as caught: load_pairs(str(tmp_path), tmp_path/"cache")
    assert f"mine.jsonl, line 3{expected}" in str(caught.value)


@pytest.mark.parametrize("raw, instruction, document_instruction", [
    (dict(query=["i", "a"], pos=["b"]), "i", ""), (dict(query=["", "a"], pos=[["", "b"]], neg=[["", "c"]]), "", ""),
    (dict(query=["i", "a"], pos=[["j", "b"]], neg=[["j", "c"]]), "i", "j"),
    (dict(query="a", positive=[["j", "b"]], negatives=["c"], instruction="i"), "i", "j"),
    (dict(query=["i", "a"], pos=["b"], instruction="i"), "i", "")])
def test_what_gritlm_writes_is_read(raw, instruction, document_instruction):
    row = parse_row(raw)
    assert (row["query"], row["positives"]) == ("a", ["b"])
    assert (row["instruction"], row["document_instruction"]) == (instruction, document_instruction)


def test_manifests_may_lie_beside_rows(tmp_path):
    (tmp_path/"a.jsonl").write_text(GOOD)
    (tmp_path/"manifest.json").write_text(json.dumps(dict(counts=1), indent=1))
    (tmp_path/"report.json").write_text('{"a": 1}')
    for name in ("qrels.tsv", "LICENSE.md", "._a.csv"): (tmp_path/name).touch()
    assert list(find_sources(str(tmp_path))) == ["a"]


@pytest.mark.parametrize("name", ["a.parquet", "a[1]?.parquet", "a.jsonl", "a.csv", "a.json.bz2"])
def test_a_file_with_an_old_time_and_new_rows(name, tmp_path):
    def write(text):
        rows, path = pandas.DataFrame([dict(query=text, positive="p")]), tmp_path/name
        if name.endswith("parquet"): rows.to_parquet(path)
        elif name.endswith("csv"): rows.to_csv(path)
        else: rows.to_json(path, orient="records", lines=True)
        os.utime(path, ns=(10**18, 10**18)) # as cp -p and rsync -t leave it
        return content_hash(str(path)), next(iter(load_pairs(str(path), tmp_path/"cache").values()))["query"][:]
    (first, old), (second, new) = write("old"), write("new")
    assert first != second and (old, new) == (["old"], ["new"])
    with warnings.catch_warnings(action="error"): assert write("old") == (first, ["old"])


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path/"a.parquet").write_bytes(b"rows")
    with pytest.raises(ValueError, match="a.parquet cannot be read as parquet .*write it again"):
        load_pairs(str(tmp_path), tmp_path/"cache")


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path):
    "No message, report or cache could hold it."
    (tmp_path/"a.jsonl").write_text(GOOD)
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    with open(bad, "w") as file: file.write(GOOD)
    for data in (str(tmp_path), bad):
        with pytest.raises(ValueError, match=r"caf\\udce9.jsonl' is not UTF-8; rename the file"): find_sources(data)
    os.rename(bad, bad.replace(".jsonl", ".txt")) # a file that is not read may have any name
    assert list(find_sources(str(tmp_path))) == ["a"]


def test_a_mark_at_the_start_of_a_file_is_no_error(tmp_path):
    (tmp_path/"a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert [row["query"] for row in parsed(str(tmp_path/"a.jsonl"))] == ["a question"]


@pytest.mark.parametrize("rows, columns", [
    ([dict(query="a", positive="b")]*3, {}),
    ([dict(anchor="2020-01-01", positive="b", negative="c", id=1)]*3, {}),
    ([dict(query="a", pos=["b", "c"], neg=[]), dict(query="a", pos=["b"], neg=["d"])], {}),
    ([dict(query="a", positive="b", negatives=["c"], positive_scores=[1], negative_scores=[0.5], instruction="i"),
      dict(query="a", positive="b", negatives=[])], {}),
    ([dict(frage="a", antwort="b", falsch="c")]*2, dict(query="frage", positive="antwort", negative="falsch"))])
def test_a_table_holds_the_rows_that_were_read(rows, columns, tmp_path):
    pandas.DataFrame(rows).to_parquet(tmp_path/"a.parquet")
    (tmp_path/"a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.jsonl", "a.parquet"):
        source = str(tmp_path/name)
        assert list(parsed(source, columns)) == list(load_pairs(source, tmp_path/"cache", columns)["a"])


def test_a_fault_after_many_rows_leaves_no_table(tmp_path):
    (tmp_path/"a.jsonl").write_text(GOOD*2500)
    assert len(load_pairs(str(tmp_path/"a.jsonl"), tmp_path/"cache")["a"]) == 2500
    (tmp_path/"a.jsonl").write_text(GOOD*2500 + "{}\n")
    with pytest.raises(ValueError, match="a.jsonl, line 2501, field 'query' is missing"):
        load_pairs(str(tmp_path/"a.jsonl"), tmp_path/"cache")
    assert len([path for path in (tmp_path/"cache/anchor_nb").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("ratio", [-1.0, float("nan")])
def test_a_ratio_is_not_below_0(ratio):
    with pytest.raises(ValueError, match="ratios gives a .*; give weights of 0 or more"):
        Batches(dict(a=8, b=8), 4, ratios=dict(a=ratio))


def test_negatives_under_two_names_are_all_read(tmp_path):
    (tmp_path/"a.jsonl").write_text(json.dumps(dict(query="a", positive="b", x="c", y=["d"])) + "\n")
    table = load_pairs(str(tmp_path/"a.jsonl"), tmp_path/"cache", dict(negative="x", negatives="y"))["a"]
    assert table["negatives"][:] == [["c", "d"]]


def test_without_instructions_documents_have_none_either():
    row = dict(query="q", positives=["p"], negatives=[], instruction="Find it", document_instruction="Represent it",
               positive_scores=[], negative_scores=[])
    given = [examples(RowTable([row]), Batch("toy", np.array([0]), 0), instructions)[0] for instructions in (None, {})]
    assert [(one.instruction, one.document_instruction) for one in given] == [("", ""), ("Find it", "Represent it")]


def test_two_objects_on_one_line_beside_one_on_two_lines_are_refused(tmp_path):
    one = '{"query": "q", "positive": "p"}'
    path = tmp_path/"rows.jsonl"
    path.write_text(f'{one} {one}\n{one[:16]}\n{one[16:]}\n{one}\n')
    with pytest.raises(ValueError, match="line 1"): load_pairs(find_sources(str(path)))
