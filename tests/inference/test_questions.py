"Questions from a server that is busy, slow or silent, and links that lead nowhere."
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from anchor_nb.data.documents import Document, passages_of
from anchor_nb.inference import questions
from anchor_nb.inference.questions import ask, link_pairs


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
            busy = "busy" in text and number not in refused
            refused.add(number)
            self.send_response(429 if busy else 401 if "secret" in text else 200)
            self.end_headers()
            content = None if "silent" in text else f"Who lives in house number {number}?"
            self.wfile.write(json.dumps(None if "nothing" in text else
                                        dict(choices=[dict(message=dict(content=content))])).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1#model", keys
        httpd.shutdown()


def test_a_server_is_asked_again_when_busy_and_answers_keep_their_order(server, monkeypatch):
    address, keys = server
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    kinds = ["plain", "busy", "silent"]
    texts = [f"House number {n} is {kinds[n % 3]}." for n in range(30)]
    assert ask(texts, address) == ["" if n % 3 == 2 else f"Who lives in house number {n}?" for n in range(30)]
    assert set(keys) == {"Bearer k"} and len(keys) == 40, "ten were refused once"


@pytest.mark.parametrize("kind, said", [("secret", "401"), ("nothing", "NoneType")])
def test_a_server_that_gives_no_answer_is_named_with_the_fix(server, kind, said):
    with pytest.raises(ValueError, match=rf"no answer .*{said}.*OPENAI_API_KEY"):
        ask([f"House number {n} is {kind}." for n in range(20)], server[0])


def test_links_that_are_no_address_are_left_out():
    documents = [Document("a.md", "A", [("", "The first document tells of mills and of rivers.")], (
        ("the second document", "b.md"), ("an odd link", "http://[HOST]/b.md"))),
        Document("b.md", "B", [("", "The second document tells of bread and of ovens.")], ())]
    passages, _ = passages_of(documents, 50)
    assert [query for query, _ in link_pairs(documents, passages)] == ["the second document"]
