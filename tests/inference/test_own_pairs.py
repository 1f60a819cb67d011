"What the answers of the user's own pairs stand for."
import pytest

from anchor_nb.data.documents import Passage
from anchor_nb.inference.own_pairs import CHOSEN, match_pairs, question_set


def asked(*answers): return [dict(query=f"q{n}", positives=[text]) for n, text in enumerate(answers)]


def test_a_name_is_looked_up_before_texts_that_hold_the_word():
    passages = [Passage("printers.md", "Printers", "", "The installation of a printer needs the vpn on holidays."),
                Passage("it/vpn.md", "Remote work", "", "Connect from home."),
                Passage("installation.md", "Set-up", "", "Run the program."),
                Passage("days.md", "Holidays", "", "Thirty a year.")]
    pairs, _ = match_pairs(asked("vpn", "installation", "Holidays", "needs the vpn"), passages)
    assert [number for _, number in pairs] == [1, 2, 3, 0]


def test_a_number_is_never_looked_for_in_texts(capsys):
    passages = [Passage(f"row {n}", "", "", f"Size {n} mm.") for n in range(5)]
    with pytest.raises(ValueError, match="3 of 3 answers.*name the column of ids with document_columns"):
        match_pairs(asked("1", "2", "3"), passages)
    assert match_pairs(asked("1", "row 2", "size 3"), passages) == ([("q1", 2), ("q2", 3)], ["q0"])
    assert "name the column of ids" in capsys.readouterr().err
    with pytest.raises(ValueError, match="an answer must be a text"):
        match_pairs(asked("1", "zzz yyy", "uuu"), passages)


def test_an_id_of_two_tables_is_refused():
    passages = [Passage(f"{table}:17", "", "", f"Text of {table}.") for table in ("products.jsonl", "tickets.csv")]
    with pytest.raises(ValueError, match="own.csv: '17' may be products.jsonl:17 or tickets.csv:17; write which one"):
        match_pairs(asked("17"), passages, "own.csv")
    assert match_pairs(asked("tickets.csv:17"), passages) == ([("q0", 1)], [])
    passages.append(Passage("hours.md", "", "", "Open 24/17, and all year."))
    assert match_pairs(asked("24/17"), passages) == ([("q0", 2)], []), "no path, but a text"


def test_a_test_set_says_how_the_answer_in_a_long_document_is_chosen(tmp_path, capsys):
    (tmp_path/"docs").mkdir()
    (tmp_path/"docs/mill.md").write_text("# Mill\n\nThe mill burned down.\n\n# River\n\nThe river floods the meadow.\n")
    (tmp_path/"asked.csv").write_text("query,positive\nWhat floods?,mill.md\n")
    question_set(str(tmp_path/"docs"), str(tmp_path/"asked.csv"), str(tmp_path/"out"))
    assert CHOSEN in capsys.readouterr().err
