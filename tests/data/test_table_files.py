"Any table as rows: the same rows from every format, and a message with file, line and fix for whatever is wrong."
import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import datasets
import pandas
import pytest

from anchor_nb.core.files import keep_apart
from anchor_nb.data import documents, tables
from anchor_nb.data.inspection import inspect_pairs
from anchor_nb.data.prompts import load_instructions
from anchor_nb.data.retrieval_sets import split_off
from anchor_nb.data.rows import load_pairs, parsed
from anchor_nb.data.splitting import group_rows, split_pairs
from anchor_nb.data.tables import find_sources, indexed, is_lines, table_rows, slice_rows
from anchor_nb.inference.corpus_encoding import corpus_sources
from anchor_nb.runs.identity import content_at

ROWS = [dict(query="Wie heißt\ndas Haus?", positive='Das "Haus"; es heißt so.', negative="Nein, anders\tgesagt"),
        dict(query="5", positive="fünf", negative=None)] * 3


def written(path):
    "The rows in the format that the suffix of `path` names."
    table, lines = pandas.DataFrame(ROWS), "".join(json.dumps(row) + "\n" for row in ROWS)
    name = path.name.lower()
    if name.startswith("list"): lines = json.dumps(ROWS, indent=1)
    if name.startswith("held"): lines = json.dumps(dict(version=1, rows=ROWS))
    if ".csv" in name: lines = table.to_csv(index=False, sep=";" if name.startswith(("german", "excel")) else ",")
    if "blank" in name: lines = "\n \n" + lines
    if name.startswith("excel"): lines = "sep=;\n" + lines
    if ".tsv" in name: lines = table.to_csv(index=False, sep="\t")
    content = lines.encode("utf-8-sig" if name.startswith("mark") else "utf-8")
    for suffix, packed in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        if name.endswith(suffix): content = packed(content)
    if name.endswith(".zst"):
        import pyarrow
        content = pyarrow.compress(content, "zstd", asbytes=True)
    table.to_parquet(path) if name.endswith(".parquet") else path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("name", ["a.csv", "german.csv", "german-blank.csv", "excel.csv", "mark.csv.gz", "A.CSV",
                                  "a.tsv", "a.tsv.xz", "a.jsonl", "a.ndjson.bz2", "mark.jsonl.zst", "list.json",
                                  "held.json.gz", "lines.json", "a.parquet"])
def test_the_same_rows_from_every_format(name, tmp_path):
    source = written(tmp_path/name)
    read = list(table_rows(source))
    assert [row for _, row in read] == ROWS and all(place.startswith(f"{source}, ") for place, _ in read)
    assert len({place for place, _ in read}) == len(ROWS)
    if not name.startswith("held"): assert find_sources(str(tmp_path)) == find_sources(source)
    if not is_lines(source):
        assert len(indexed(source)) == len(ROWS)
        assert [*slice_rows(source, 1, 2), *slice_rows(source, 3, 3)] == read[1:]
    table, = load_pairs(source, tmp_path/"cache").values()
    assert table["positives"][:2] == [[row["positive"]] for row in ROWS[:2]]
    assert table["negatives"][:2] == [[ROWS[0]["negative"]], []]


def test_a_table_is_checked_once_however_many_pieces_are_read(tmp_path, monkeypatch):
    source, checked, real = written(tmp_path/"a.csv"), [], tables.damage
    monkeypatch.setattr(tables, "damage", lambda folder: checked.append(folder) or real(folder))
    indexed(source)
    tables.stored_version.cache_clear() # as in another process
    for first in range(len(ROWS)): assert len(list(slice_rows(source, first, 1))) == 1
    assert len(checked) == 1
    (tmp_path/"a.csv").write_text("query,positive\nnew,row\n")
    assert [row for _, row in slice_rows(source, 0, 1)] == [dict(query="new", positive="row")]


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = written(tmp_path/"a.csv")
    (tmp_path/"mine.yaml").write_text("a: one\n")
    assert find_sources("~/a.csv") == find_sources("~") == dict(a=source)
    assert corpus_sources("~/a.csv") == [source] and split_off("~/a.csv:dev") == (source, "dev")
    assert load_instructions("~/mine.yaml") == dict(a=["one"]) and content_at("~/a.csv") == content_at(source)
    with pytest.raises(ValueError, match="what is read there could be lost"): keep_apart(source, data="~/a.csv")
    with pytest.raises(ValueError, match="what is read there could be lost"): keep_apart("~/a.csv", data=source)
    split_pairs("~/a.csv", "~/out", queries=1)
    assert (tmp_path/"out/test").is_dir()


def test_a_saved_dataset_has_its_folders_name_however_it_is_reached(tmp_path, monkeypatch):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path/"mine")
    (tmp_path/"mine/deeper").mkdir()
    for place, source in (("mine", "."), ("mine/deeper", "..")):
        monkeypatch.chdir(tmp_path/place)
        assert find_sources(source) == dict(mine=source) # a nameless one would be written into a hidden file


def test_a_sheet_may_begin_with_empty_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "find_spec", lambda name: True)
    monkeypatch.setattr(pandas, "read_excel", lambda *_, **__: {"one": pandas.DataFrame(cells)} | more)
    more = {"empty": pandas.DataFrame()}
    cells = [["", ""], ["query", "positive"], ["", " "], ["a", "b"]]
    assert list(tables.sheet_rows("a.xlsx")) == [("row 4", dict(query="a", positive="b"))]
    cells = [["", ""], ["a", "a"]]
    with pytest.raises(ValueError, match="line 2: two columns are named 'a'"): list(tables.sheet_rows("a.xlsx"))
    more = {"2024": pandas.DataFrame(cells)}
    with pytest.raises(ValueError, match="rows in 2 sheets .one, 2024."): list(tables.sheet_rows("a.xlsx"))
    more, cells = {}, [["query", "positive"], ["a", float("nan")]] # pandas, of #N/A
    with pytest.raises(ValueError, match="row 2: a cell holds an error such as #N/A"):
        list(tables.sheet_rows("a.xlsx"))


COLUMNS = dict(query="frage", positive="antwort")

@pytest.mark.parametrize("name, content, columns, expected", [
    ("a.csv", "frage,antwort\na,b\n", {}, "line 2, field 'query' is missing; the fields are frage, antwort"),
    ("a.csv", "frage,antwort\na,b\n", {}, "columns='{query: frage, positive: antwort}'"),
    ("a.csv", "frage:antwort\na:b\n", {}, "the fields are frage:antwort"),
    ("a.csv", "Who wrote it?,She wrote it.\nWho?,She.\n", {}, "which looks like a row; begin the file with a header"),
    ("a.csv", "frage,antwort\na,b\nc,\n", COLUMNS, "line 3, field 'positive' is empty"),
    ("a.csv", "frage,antwort\na,b\n", dict(query="fragen"), "line 2: columns says query is 'fragen', and the row has"),
    ("a.csv", "frage,antwort\na,b\n", COLUMNS | dict(negative="falsch"), "columns names falsch, which no row has; the"),
    ("a.csv", "frage,antwort\na,b\n", dict(frage="query"), "columns has no field 'frage'; write our name first"),
    ("a.csv", "query,positive,label\na,b,1\n", {}, "hide it with columns='{label: }'"),
    ("a.csv", "query,positive\na,b\nc d,\ne,f,g\n", {}, "line 3, field 'positive' is empty"),
    ("a.csv", "query,positive\na,b\nc,d\ne,f,g\n", {}, "line 4: 3 cells, and the header has 2"),
    ("a.csv", 'query,positive\na,"b\nc,d\n', {}, "line 2: a quote that opens in this row is never closed"),
    ("a.csv", "query,positive\ra,b\r", {}, "line 1: a line ends in a carriage return alone: save the file with line"),
    ("a.csv", "query,positive\ncafé,b\n".encode("latin-1"), {}, "line 2: not UTF-8 (byte 0xe9 after 'caf')"),
    ("a.csv", "query,positive\na,b\n".encode("utf-16"), {}, "line 1: UTF-16, not UTF-8"),
    ("a.jsonl", '{"query": 3, "positive": "b"}\n', {}, "line 1, field 'query' is int, not text"),
    ("a.json", '[{"query": "a", "positive": 3}]', {}, "item 1, field 'positive' is int, not text"),
    ("a.json", '[{"query": "a",\n "positive" 3}]', {}, "line 2: not valid JSON"),
    ("a.json", '{"query": {"0": "a"}, "positive": {"0": "b"}}', {}, "ordered by columns, not by rows"),
    ("a.csv.gz", gzip.compress(random.Random(0).randbytes(9999).hex().encode())[:-99], {},
     "is damaged or breaks off after line"),
    ("a.csv.gz", b"query,positive\n", {}, "is damaged or breaks off after line 0"),
    ("a.csv", "query,positive\n", {}, "holds no row"), ("a.csv", "", {}, "holds no row")])
def test_what_is_wrong_has_its_place_and_its_fix(name, content, columns, expected, tmp_path):
    (tmp_path/name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught: load_pairs(str(tmp_path/name), tmp_path/"cache", columns)
    assert expected in str(caught.value) and name in str(caught.value) or expected.startswith("columns has no")


def test_fields_are_renamed_collected_and_hidden(tmp_path):
    (tmp_path/"a.csv").write_text("query,antwort,falsch 1,falsch 2,label\na,b,c,,3\nd,e,f,g,4\n")
    columns = dict(positive="antwort", negatives=["falsch 1", "falsch 2"], label="")
    rows = list(parsed(str(tmp_path/"a.csv"), columns))
    assert [(row["query"], row["positives"], row["negatives"]) for row in rows] == [
        ("a", ["b"], ["c"]), ("d", ["e"], ["f", "g"])]
    first = load_pairs(str(tmp_path/"a.csv"), tmp_path/"cache", columns)["a"]
    turned = load_pairs(str(tmp_path/"a.csv"), tmp_path/"cache", columns | dict(positive="query", query="antwort"))["a"]
    assert first["query"][:] == ["a", "d"] and turned["query"][:] == ["b", "e"] # each mapping has its own cache


def test_all_faults_of_a_table_in_one_list(tmp_path):
    lines = ["query,positive", "a?,An answer.", ",b", "c?,", "d?,nan", "e?,Half of", "f,g,h", "i?,never read"]
    (tmp_path/"a.csv").write_text("\n".join(lines))
    facts = inspect_pairs(str(tmp_path/"a.csv"))["datasets"]["a"]
    assert (facts["usable"], facts["faulty"], facts["odd"]) == (3, 3, 1)
    assert [fault.split(":")[0].split(",")[0] for fault in facts["faults"]] == ["line 3", "line 4", "line 7"]
    assert "nothing after it was read" in facts["faults"][-1]


def test_a_split_keeps_documents_and_near_duplicates_apart(tmp_path):
    "Whatever the order of the rows; twice the same bytes."
    draw = random.Random(0)
    words = [f"word{n}" for n in range(500)]
    text = lambda: " ".join(draw.choices(words, k=40))
    documents = [text() for _ in range(60)]
    rows = [dict(query=f"{text()} {n}?", positive=documents[n % 60] + (" more" if n % 3 else "")) for n in range(240)]
    for name, some in (("a", rows), ("b", rows[::-1])):
        (tmp_path/f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        facts = split_pairs(str(tmp_path/f"{name}.jsonl"), str(tmp_path/name), queries=20)
        assert (facts["groups"], facts["queries"], facts["pairs"][name]) == (60, 20, 220)
    read = lambda path: [json.loads(line) for line in open(tmp_path/path)]
    asked = [{row["text"] for row in read(f"{name}/test/queries.jsonl")} for name in "ab"]
    assert asked[0] == asked[1]
    train, texts = read("a/pairs/a.jsonl"), {row["_id"]: row["text"] for row in read("a/test/corpus.jsonl")}
    pairs = [line.split("\t") for line in open(tmp_path/"a/test/qrels/test.tsv").read().splitlines()[1:]]
    stem = lambda text: text.removesuffix(" more")
    assert not {stem(texts[pair[1]]) for pair in pairs} & {stem(row["positive"]) for row in train}
    assert len(texts) == len({row["positive"] for row in rows})
    again = split_pairs(str(tmp_path/"a.jsonl"), str(tmp_path/"again"), queries=20)
    assert again["queries"] == 20
    for file in (tmp_path/"a"/"test").rglob("*.*l"): # byte for byte
        assert file.read_bytes() == (tmp_path/"again"/file.relative_to(tmp_path/"a")).read_bytes()


def test_a_file_whose_clock_is_ahead_is_hashed_once(tmp_path, monkeypatch):
    (tmp_path/"a.csv").write_text("a")
    changed, read, sha256 = (tmp_path/"a.csv").stat().st_ctime, [], tables.sha256
    monkeypatch.setattr(tables, "sha256", lambda path: read.append(path) or sha256(path))
    for ahead, times in ((0, 2), (3600, 3)): # what has just changed is read each time
        monkeypatch.setattr(tables.time, "time", lambda: changed - ahead)
        assert tables.file_hash(tmp_path/"a.csv") == tables.file_hash(tmp_path/"a.csv")
        assert len(read) == times


def test_hidden_files_and_one_that_vanishes_do_not_change_the_passages_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ANCHOR_NB_CACHE", str(tmp_path/"cache"))
    folder, below = tmp_path/"texts", documents.files_below
    (folder/".git").mkdir(parents=True)
    (folder/"a.txt").write_text("The old mill burned.")
    before, hits = documents.passages_file(folder), documents.known_passages.cache_info().hits
    (folder/".git"/"a.txt").write_text("hidden")
    monkeypatch.setattr(documents, "files_below", lambda folder: [*below(folder), folder/"gone.txt"])
    assert documents.passages_file(folder) == before and documents.known_passages.cache_info().hits == hits + 1


def test_rows_of_one_template_are_grouped_in_time():
    "A large group of near-duplicates is joined without comparing all its pairs."
    rows = [dict(query=f"q{n}", positives=["the same long sentence about nothing at all, repeated in every single row "
                                           f"of this table, and then number {n}"]) for n in range(1500)]
    assert len(group_rows(rows)) == 1


@pytest.mark.parametrize("source", [".rows.jsonl", "file://{}/sub/..", "file://{}/.snap/*.parquet"])
def test_a_data_set_has_a_name_that_a_file_can_have(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/".rows.jsonl").write_text('{"query": "a", "positive": "b"}')
    with pytest.raises(ValueError, match="cannot be a data set's name"): find_sources(source.format(tmp_path))
    (tmp_path/"mixture.yaml").write_text("rows: .rows.jsonl")
    assert list(find_sources("mixture.yaml")) == ["rows"], "which gives it another name"


def test_a_folder_of_texts_is_read_once_until_it_changes(tmp_path, monkeypatch):
    calls, read = [], documents.read_documents
    monkeypatch.setattr(documents, "read_documents", lambda *given: calls.append(given) or read(*given))
    (tmp_path/"mills.md").write_text("# Mills\nThe old mill burned down.")
    table, = corpus_sources(str(tmp_path))
    assert corpus_sources(str(tmp_path)) == [table] and len(calls) == 1
    (tmp_path/"deep").mkdir()
    (tmp_path/"deep/bread.txt").write_text("Bread is baked of flour.")
    other, = corpus_sources(str(tmp_path))
    assert other != table and [row["_id"] for _, row in table_rows(other)] == ["deep/bread.txt", "mills.md"]


@pytest.mark.parametrize("address", ["{}", "file://{}", "file://{}/*.parquet"])
def test_a_link_to_nothing_is_named(address, tmp_path):
    "A disk that is not mounted must not cost rows without a word."
    pandas.DataFrame([dict(query="a", positive="b")]).to_parquet(tmp_path/"a.parquet")
    assert len(load_pairs(address.format(tmp_path))) == 1
    (tmp_path/"b.parquet").symlink_to("/nonexistent/b.parquet")
    with pytest.raises(FileNotFoundError, match="b.parquet is a broken link"): load_pairs(address.format(tmp_path))


def test_a_cached_address_is_where_its_files_are(tmp_path):
    (tmp_path/"w[1]").mkdir()
    keep_apart(tmp_path/"out", data=f"file://{tmp_path}/w[1]")
    for address in (f"simplecache::file://{tmp_path}/w[1]", f"file://{tmp_path}/w*"):
        with pytest.raises(ValueError, match="lies in data="): keep_apart(tmp_path/"w[1]/out", data=address)


@pytest.mark.parametrize("content, expected", [
    ({"title": "Mills", "text": "Old.", "authors": [{"name": "Ada"}]}, ["Old."]), # a document, not its authors
    ({"data": [{"text": "Old."}, {"text": "New."}]}, ["Old.", "New."])])
def test_a_json_document_is_not_its_longest_list(tmp_path, content, expected):
    (tmp_path/"a.json").write_text(json.dumps(content))
    assert [row["text"] for _, row in table_rows(str(tmp_path/"a.json"))] == expected


@pytest.mark.parametrize("content, message", [
    ({f"d{n}": "a text" for n in range(30)}, "has a text under each id; write a list of"),
    ({"data": [{"title": "Mills", "paragraphs": [{"context": "Old.", "qas": []}]}]}, "as SQuAD does")])
def test_what_would_be_read_in_part_is_refused(tmp_path, content, message):
    (tmp_path/"a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message): list(table_rows(str(tmp_path/"a.json")))


def test_what_a_folder_leaves_out_is_said(tmp_path):
    (tmp_path/"later").mkdir()
    for name in ("a.jsonl", "later/b.jsonl"): (tmp_path/name).write_text('{"query": "a", "positive": "b"}\n')
    (tmp_path/"c.json").write_text('{\n "rows": [\n  {"query": "a", "positive": "b"}\n ]\n}\n')
    with pytest.warns(UserWarning) as said: assert list(find_sources(str(tmp_path))) == ["a"]
    assert ["c.json is not read" in str(each.message) or "b.jsonl; move them up" in str(each.message)
            for each in said] == [True, True]


def test_texts_beside_an_archive_are_searched(tmp_path):
    (tmp_path/"mills.md").write_text("The old mill burned down.")
    (tmp_path/"site.zip").write_bytes(b"PK")
    table, = corpus_sources(str(tmp_path))
    assert [row["_id"] for _, row in table_rows(table)] == ["mills.md"]
    for text in ("The mill burned.", "The mill stands."): # one file alone, which changes
        (tmp_path/"mills.md").write_text(text)
        alone, = corpus_sources(str(tmp_path/"mills.md"))
        assert [row["text"] for _, row in table_rows(alone)] == [text]
    (tmp_path/"more.jsonl").symlink_to("/nonexistent/more.jsonl")
    (tmp_path/"site.zip").unlink()
    with pytest.raises(FileNotFoundError, match="more.jsonl is a broken link"): corpus_sources(str(tmp_path))


def test_a_table_named_corpus_without_queries_is_one_of_several(tmp_path):
    for name in ("corpus.csv", "faq.csv"): (tmp_path/name).write_text("text\nold\n")
    assert [Path(source).name for source in corpus_sources(str(tmp_path))] == ["corpus.csv", "faq.csv"]


def test_texts_in_folders_beside_a_table_are_named(tmp_path):
    (tmp_path/"handbook").mkdir()
    (tmp_path/"handbook/one.md").write_text("# One\n\nA text.")
    (tmp_path/".drafts").mkdir()
    (tmp_path/".drafts/two.md").write_text("# Two\n\nA text.")
    (tmp_path/"faq.csv").write_text("text\nan answer\n")
    with pytest.warns(UserWarning, match=r"not handbook/one\.md; to read"): corpus_sources(str(tmp_path))


def test_a_workbook_that_its_reader_stumbles_on_is_left_out(tmp_path, monkeypatch):
    pytest.importorskip("openpyxl")
    monkeypatch.setattr(pandas, "read_excel", lambda *_, **__: exec("raise TypeError('expected Fill')"))
    (tmp_path/"odd.xlsx").write_bytes(b"PK")
    (tmp_path/"good.md").write_text("# Good\n\nA text.")
    found, skipped = documents.read_documents(str(tmp_path))
    assert [document.id for document in found] == ["good.md"] and "(TypeError)" in skipped["odd.xlsx"]


def test_what_datasets_caches_beside_a_table_is_no_part_of_it(tmp_path):
    datasets.Dataset.from_list([dict(query="q", positive="p")]).save_to_disk(tmp_path/"saved")
    before = content_at(str(tmp_path/"saved"))
    (tmp_path/"saved/cache-0a1b.arrow").write_bytes(b"x")
    assert content_at(str(tmp_path/"saved")) == before
    (tmp_path/"saved/more.arrow").write_bytes(b"x")
    assert content_at(str(tmp_path/"saved")) != before


def test_shards_of_one_dataset_are_named(tmp_path):
    (tmp_path/"snap/data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pandas.DataFrame(dict(query=["q"], positive=["p"])).to_parquet(tmp_path/f"snap/data/{name}.parquet")
    with pytest.raises(FileNotFoundError, match=r"but .*snap/data does; give that folder"):
        find_sources(str(tmp_path/"snap"))
    with pytest.warns(UserWarning) as told: find_sources(str(tmp_path/"snap/data"))
    said = " ".join(str(warning.message) for warning in told)
    assert "trained on as two; its address is file://" in said and "test-00000-of-00001 will be read" in said
    address = f"file://{(tmp_path/'snap/data').resolve()}/train-*.parquet"
    assert address in said and len(load_pairs(address)) == 1


@pytest.mark.parametrize("page, expected", [
    ("<nav>menu<h1>A</h1><p>all that follows", "all that follows"),
    ("<title>Top<h1>A</h1><p>body text</p>", "body text"),
    ("<title>Top</title><nav>menu</nav><svg><path></svg><p>body text</p>", "body text")])
def test_a_page_with_an_element_that_is_never_closed_keeps_its_text(page, expected):
    found = documents.from_html("page", page)
    assert expected in " ".join(text for _, text in found.sections), found
    assert found.title in ("Top", "A")


def test_a_folder_reached_twice_is_entered_once(tmp_path):
    for name in (".store/c", ".whole", "x/a"): (tmp_path/name).mkdir(parents=True)
    (tmp_path/"x/b").symlink_to("a")
    (tmp_path/"x/c").symlink_to("../.store/c")
    (tmp_path/"x/d").symlink_to("../.whole")
    for name in ("x/a/f.txt", ".store/c/g.txt", ".whole/h.txt"): (tmp_path/name).touch()
    assert tables.files_below(tmp_path) == [tmp_path/"x"/name for name in ("a/f.txt", "c/g.txt", "d/h.txt")]


def test_a_split_is_named_below_a_folder_with_a_colon(tmp_path):
    saved = tmp_path/"c:d/saved"
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(saved)
    assert find_sources(f"{saved}:train") == find_sources(str(saved)) == dict(saved=str(saved/"train"))
    documents.read_documents(f"{saved}:train", dict(text="positive"))


def test_a_mistyped_column_is_no_fault_of_a_row(tmp_path):
    with pytest.raises(ValueError, match="columns names negativ, which no row has"):
        inspect_pairs(written(tmp_path/"a.csv"), dict(negative="negativ"))


def test_passages_that_are_gone_from_the_cache_are_cut_again(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "cache_dir", lambda: tmp_path/"cache")
    (tmp_path/"mine").mkdir()
    (tmp_path/"mine/a.txt").write_text("A text of some words.")
    path = documents.passages_file(tmp_path/"mine")
    path.unlink()
    assert documents.passages_file(tmp_path/"mine") == path and path.is_file()
