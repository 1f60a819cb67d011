"What is read of a folder of documents, and what is told of the rest."
import json

import pytest

from anchor_nb.data.documents import from_html, left_out, not_english, read_documents


def test_tables_that_are_left_out_come_first_and_the_rest_is_counted():
    skipped = {f"{n}.txt": f"reason {n}" for n in range(6)} | {"z.csv": "no texts"}
    told = left_out(skipped)
    assert told.startswith("7 files left out: 1 x no texts (z.csv); 1 x reason 0") and told.endswith("; and 2 more")
    assert "more" not in left_out(dict(list(skipped.items())[:5]))


@pytest.mark.parametrize("name, text, place", [
    ("tickets.csv", "id,text\n1,one\n2,two,three\n", "line 3"), ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2"),
    ("a.json", '[{"text": "a"},\n{"text": }]', "line 2")])
def test_a_table_with_a_broken_row_is_refused_in_a_folder_too(tmp_path, name, text, place):
    (tmp_path/"good.md").write_text("# Good\n\nA text.")
    (tmp_path/name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}, {place}: .*; (put|write)"): read_documents(str(tmp_path))


def test_other_json_and_tables_without_texts_are_left_out(tmp_path):
    (tmp_path/"good.md").write_text("A text.")
    (tmp_path/"tsconfig.json").write_text('{\n// a comment\n"a": 1}')
    (tmp_path/"n.jsonl").write_text('{"a": 1}')
    found, skipped = read_documents(str(tmp_path))
    assert [document.id for document in found] == ["good.md"] and sorted(skipped) == ["n.jsonl", "tsconfig.json"]


def test_the_columns_of_a_table_in_a_folder_are_told(tmp_path, capsys):
    (tmp_path/"deep").mkdir()
    row = dict(ticket_id=1, subject="Mill", description="It burned.", resolution="It was built anew in spring.")
    (tmp_path/"deep/tickets.jsonl").write_text(json.dumps(row))
    read_documents(str(tmp_path))
    told = "deep/tickets.jsonl: texts from description, titles from subject, ids from ticket_id"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("picture", ["![photo of the mill](data:image/png;base64,{})",
                                     "[image1]: <data:image/png;base64,{}>",
                                     '<img alt="mill" src="data:image/png;base64,{}">'])
def test_pictures_inside_markdown_are_no_text(tmp_path, picture):
    (tmp_path/"a.md").write_text(f"The old mill.\n\n{picture.format('iVBORw0KGgo'*1000)}\n\nIt burned down.\n")
    (document,), _ = read_documents(str(tmp_path/"a.md"))
    text = document.sections[0][1]
    assert "iVBOR" not in text and text.startswith("The old mill.") and text.endswith("It burned down.")
    assert ("photo of the mill" in text) == picture.startswith("!")


def test_short_texts_in_other_languages_are_noticed():
    german = ["Der Drucker im dritten Stock druckt seit heute Morgen nicht mehr richtig.",
              "Mein Kennwort wurde abgelehnt, bitte setzen Sie es in Kürze zurück."]*150
    english = ["The printer on the third floor has not been printing since this morning.",
               "My password was rejected, so please set it again for me."]*150
    assert (not_english(german), not_english(english), not_english(["list files"]*300)) == (1, 0, 0)


def test_a_break_that_ends_itself_is_one_break(tmp_path):
    for name, text in dict(a="one<br>two<hr>three", b="one<br/>two<hr />three").items():
        (tmp_path/f"{name}.html").write_text(f"<html><body><p>{text}</p></body></html>")
    first, second = [document.sections for document in read_documents(str(tmp_path))[0]]
    assert first == second
    assert from_html("c", "<p>one</br>two</p>").sections[0][1] == "one two", "browsers break the line here too"
