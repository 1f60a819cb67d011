"Questions from a server that is busy, slow or silent, and links that lead nowhere."
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError

import pytest

from anchor_nb.data.documents import Document, passages_of
from anchor_nb.inference import questions
from anchor_nb.inference.own_pairs import match_pairs
from anchor_nb.inference.questions import ask, link_pairs


REFUSED = dict(busy=429, slow=504, secret=401, long=400, gone=503)

@pytest.fixture
def server(monkeypatch):
    "Answers by what a text says; what it was asked is in `keys`."
    monkeypatch.setattr(questions, "WAITS", (0.01, 0.01, 0))
    keys, refused = [], set()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *line): pass

        def do_POST(self):
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            keys.append(self.headers["Authorization"])
            number = text.split("number ")[1].split()[0]
            again = number in refused
            refused.add(number)
            if "reset" in text and not again: return self.connection.close()
            code = next((code for kind, code in REFUSED.items() if kind in text), 200)
            self.send_response(200 if again and code in (429, 504) else code)
            if "cut" in text and not again: self.send_header("Content-Length", "999")
            self.end_headers()
            content = None if "silent" in text else f"Who lives in house number {number}?"
            if "parts" in text: content = [dict(type="text", text=content)]
            self.wfile.write(json.dumps(None if "nothing" in text else
                                        dict(choices=[dict(message=dict(content=content))])).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1#model", keys
        httpd.shutdown()


def test_a_server_is_asked_again_when_busy_and_answers_keep_their_order(server, monkeypatch):
    address, keys = server
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    kinds = ["plain", "busy", "silent", "slow", "reset", "cut"]
    texts = [f"House number {n} is {kinds[n % 6]}." for n in range(30)]
    assert ask(texts, address) == ["" if n % 6 == 2 else f"Who lives in house number {n}?" for n in range(30)]
    assert set(keys) == {"Bearer k"} and len(keys) == 50, "twenty were refused once"


@pytest.mark.parametrize("kind, tries", [("long", 1), ("gone", 3), ("nothing", 1)])
def test_answers_are_kept_where_a_few_texts_get_none(server, kind, tries):
    address, keys = server
    texts = [f"House number {n} is {kind if n % 3 == 1 else 'plain'}." for n in range(12)]
    with pytest.warns(UserWarning, match="gave no answer to 4 of 12 texts"): found = ask(texts, address)
    assert found == [None if n % 3 == 1 else f"Who lives in house number {n}?" for n in range(12)]
    assert len(keys) == 8 + 4*tries


@pytest.mark.parametrize("plain", [1, 120])
def test_a_server_that_has_gone_is_asked_no_more(server, plain):
    address, keys = server
    texts = [f"House number {n} is {'plain' if n < plain else 'gone'}." for n in range(plain + 100)]
    if plain == 1:
        with pytest.raises(ValueError, match="no answer .*503"): ask(texts, address)
    else:
        with pytest.warns(UserWarning, match="gave no answer to 100 of 220 texts"): found = ask(texts, address)
        assert [*map(bool, found)] == [True]*120 + [False]*100
    assert len(keys) < plain + 3*(questions.LOST + 2*questions.AT_ONCE)


def test_the_server_says_how_long_to_wait():
    busy = lambda text: HTTPError("", 429, "busy", {"Retry-After": text} if text else {}, None)
    errors = (busy(""), busy("2"), busy("40"), busy("Wed, 21 Oct"), OSError())
    assert [questions.pause(error, 5) for error in errors] == [5, 5, 40, 5, 5]


@pytest.mark.parametrize("kind, said", [("secret", "401.*Who lives in house number 0"), ("nothing", "NoneType"),
                                        ("parts", "content is a list")])
def test_a_server_that_gives_no_answer_is_named_with_the_fix(server, kind, said):
    with pytest.raises(ValueError, match=rf"no answer .*{said}.*OPENAI_API_KEY"):
        ask([f"House number {n} is {kind}." for n in range(20)], server[0])
    assert len(server[1]) == 1


def test_a_repeat_asks_only_for_what_is_missing(server, tmp_path):
    address, keys = server
    kept, texts = tmp_path/"answers.jsonl", [f"House number {n} is {'plain' if n < 8 else 'gone'}." for n in range(20)]
    with pytest.raises(ValueError, match="no answer"): ask(texts, address, kept)
    kept.write_text(kept.read_text()[:-5]) # of a process that was killed
    keys.clear()
    texts = [text.replace("gone", "silent") if number < 15 else text for number, text in enumerate(texts)]
    with pytest.warns(UserWarning, match="gave no answer to 5 of 20 texts"): found = ask(texts, address, kept)
    assert [*map(bool, found)] == [True]*8 + [False]*12 and found[8:] == [""]*7 + [None]*5
    assert len(keys) == 1 + 7 + 5*3, "one that was cut, those that were lost, and the others three times"
    keys.clear()
    with pytest.warns(UserWarning): assert ask(texts, address, kept) == found
    assert len(keys) == 5*3
    assert len(ask(texts[:8], f"{address}#other", kept)) == 8 and len(keys) == 5*3 + 8, "of another model"


def test_the_key_goes_nowhere_where_others_read_along(server, monkeypatch):
    allowed = ["https://api.openai.com/v1", "http://localhost:8000/v1", "http://127.0.0.1/v1", "http://[::1]:80/v1"]
    refused = ["http://api.openai.com/v1", "http://10.0.0.7:8000/v1", "http://localhost.evil.org/v1", "http:///v1"]
    assert [*map(questions.may_have_key, allowed + refused)] == [True]*4 + [False]*4
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setattr(questions, "may_have_key", lambda address: False)
    ask(["House number 1 is plain."], server[0])
    assert server[1] == [None]


def test_links_that_are_no_address_are_left_out():
    documents = [Document("a.md", "A", [("", "The first document tells of mills and of rivers.")], (
        ("the second document", "b.md"), ("an odd link", "http://[HOST]/b.md"))),
        Document("b.md", "B", [("", "The second document tells of bread and of ovens.")], ())]
    passages, _ = passages_of(documents, 50)
    assert [query for query, _ in link_pairs(documents, passages)] == ["the second document"]


def test_names_with_accents_are_found_however_they_are_written():
    "A Mac's file system parts letter and accent; people type them as one."
    parted, typed = "U\u0308ber 1.md", "\u00dcber 1.md"
    documents = [Document(parted, "", [("", "Cats sleep a lot in this house.")], ()),
                 Document("index.md", "", [("", "See there.")], (("where the cats sleep", typed),))]
    passages, _ = passages_of(documents)
    assert match_pairs([dict(query="who sleeps?", positives=[typed])], passages) == ([("who sleeps?", 0)], [])
    assert link_pairs(documents, passages) == [("where the cats sleep", 0)]
