"""The search page: what the server answers to odd and hostile requests, and the page in a real browser."""
import asyncio
import contextlib
import json
import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

import warm
from anchor_nb.data.packages import cache_dir
from anchor_nb.release import serving
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.inference.search import open_index
from anchor_nb.release.serving import HEADERS, Limits, Ranker, app, find_corpus, listen, running, serve
from browser import PHONE, chromium, open_page  # noqa: F401 (fixtures)

ATTACKS = ["<img src=x onerror=\"window.hit = 1\">", "</p><script>window.hit = 2</script>", "<svg/onload=window.hit=3>",
           "{{7*7}} ${window.hit = 4} <!-- &amp; -->"]
WRITTEN = "<b>the vector</b> of a " # + the question: shows that it is put in as text, and whose it is
LIMITS = Limits(query_characters=300, hits=20, shown_characters=500, body_bytes=4000, waiting=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    "An evaluation set whose texts are partly markup; the first question has a relevant text."
    folder = tmp_path_factory.mktemp("corpus")
    animals = ["A cat sleeps in the sun all day", "The dog barks at the postman", "Two rabbits with brown ears",
               "Three sheep with white wool", "A stubborn goat with one horn",
               "A long text about a bird that talks. " * 40, "", "half a letter \ufffd here"]
    documents = [dict(_id=f"d{n}", title="", text=text)
                 for n, text in enumerate(animals + ATTACKS)] + [dict(_id=ATTACKS[0], text="its id is markup")]
    (folder/"corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    (folder/"queries.jsonl").write_text("".join(json.dumps(dict(_id=f"q{n}", text=text)) + "\n"
                                                for n, text in enumerate(["Who sleeps?", "Who has wool?"])))
    (folder/"qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td3\t1\n")
    (folder/"task.json").write_text(json.dumps(dict(name="animals <i>", instruction="find animals")))
    return find_corpus(str(folder))


@pytest.fixture(scope="module")
def rankers(corpus):
    one, other = AnchorEmbedder.from_pretrained("tiny"), AnchorEmbedder.from_pretrained("tiny", pooling="mean")
    return [Ranker("first <b>model</b>", open_index(one, corpus.path), [dict(stage="stage1")]),
            Ranker("second", open_index(other, corpus.path))]


@pytest.fixture(autouse=True)
def no_language_model(monkeypatch):
    monkeypatch.setattr(Ranker, "written", lambda self, query, instruction="", tokens=40: WRITTEN + query)


@pytest.fixture(scope="module")
def url(rankers, corpus):
    with running(app(rankers, corpus, LIMITS, k=5, names=("127.0.0.1", "localhost"))) as address: yield address


# ---- the server ----

def test_a_search_is_what_the_vectors_say(url, rankers):
    found = httpx.post(f"{url}/api/search", json=dict(query=" who sleeps ", instruction="find animals",
                                                      k=13)).json()["models"]
    for ranker, answer, other in zip(rankers, found, found[::-1]):
        scores = ranker.index.vectors @ ranker.index.embedder.encode_query(["who sleeps"], "find animals")[0]
        best = np.argsort(-scores, kind="stable")
        assert [hit["id"] for hit in answer["hits"]] == [ranker.index.ids[row] for row in best]
        np.testing.assert_allclose([hit["score"] for hit in answer["hits"]], np.sort(scores)[::-1], atol=1e-4)
        there = {hit["id"]: (hit["rank"], hit["score"]) for hit in other["hits"]}
        assert all(there[hit["id"]] == (hit["elsewhere"]["rank"], hit["elsewhere"]["score"])
                   for hit in answer["hits"]), "all 13 are on both sides"
    first, second = [[hit["id"] for hit in answer["hits"]] for answer in found]
    assert first != second, "else this test could not see sides mixed up"


def test_only_known_questions_have_relevant_texts(url):
    def relevant(query):
        answers = httpx.post(f"{url}/api/search", json=dict(query=query, k=20)).json()["models"]
        return {hit["id"] for answer in answers for hit in answer["hits"] if hit["judged"]}
    assert relevant("Who has wool?") == {"d3"} and relevant("Who has wool") == set()


def test_long_and_broken_texts_are_sent_short_and_whole(url):
    hits = httpx.post(f"{url}/api/search", json=dict(query="bird", k=20)).json()["models"][0]["hits"]
    texts = {hit["id"]: hit["text"] for hit in hits}
    assert (len(texts["d5"]) == 500 and texts["d5"].endswith("…") and texts["d7"] == "half a letter \ufffd here"
            and texts["d6"] == "")


HOSTILE = [ # body, status, words of the answer
    (b'{"query": ""}', 422, "query"), (b'{"query": "   "}', 422, "query"),
    (b'{"query": "' + b"x"*301 + b'"}', 422, "at most 300 characters"),
    (b'{"query": "x", "instruction": "' + b"x"*301 + b'"}', 422, "instruction"),
    (b'{"query": "x", "k": 0}', 422, "k"), (b'{"query": "x", "k": 21}', 422, "less than or equal to 20"),
    (b'{"query": "x", "k": 1e99}', 422, "k"), (b'{"query": "x", "k": NaN}', 422, "k"),
    (b'{"query": "x", "k": true, "z": 1}', 422, ""), (b'{"query": "x", "more": 1}', 422, "more"),
    (b'{"query": ["x"]}', 422, "query"), (b'{"query": null}', 422, "query"), (b'{"query": "\\ud800"}', 422, "query"),
    (b'{}', 422, "query"), (b'[]', 422, ""), (b'', 422, ""), (b'{', 422, "JSON"), (b'\xff\xfe', 422, ""),
    (b'{"query": "\xff"}', 400, ""), (b'['*3900, 400, ""), (b'{"query": "x"' + b" "*4000 + b'}', 413, "4000 bytes")]


@pytest.mark.parametrize("path", ["/api/search", "/api/decode"])
def test_bad_requests_get_a_message_and_no_more(url, path):
    for body, status, words in HOSTILE:
        if path == "/api/decode" and b'"k"' in body: continue
        answer = httpx.post(url + path, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), (body[:60], answer.text)
        assert words in answer.json()["error"], (body[:60], answer.text)
        assert len(answer.text) < 300 and "Traceback" not in answer.text


def test_a_body_whose_length_is_not_said_is_counted(url):
    endless = (b"x"*1000 for _ in range(50))
    assert httpx.post(f"{url}/api/search", content=endless,
                      headers={"Content-Type": "application/json"}).status_code == 413


def test_other_sites_cannot_ask_in_a_browsers_name(url):
    "A form or fetch of another site lacks JSON's type or asks with OPTIONS first; a foreign domain is not answered."
    assert httpx.post(f"{url}/api/search", content=b'{"query": "x"}',
                      headers={"Content-Type": "text/plain"}).status_code == 422
    preflight = httpx.options(f"{url}/api/search", headers={"Origin": "http://elsewhere.example",
                                                            "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 405 and not [name for name in preflight.headers
                                                 if name.startswith("access-control")]
    for name in ("elsewhere.example", "127.0.0.1.elsewhere.example", "[", ""):
        assert httpx.get(f"{url}/health", headers={"Host": name}).status_code in (400, 421)
    assert httpx.get(f"{url}/health", headers={"Host": "localhost:1"}).status_code == 200


def test_every_answer_has_the_headers(url):
    pages = ["/", "/page.js", "/page.css", "/icon.svg", "/health", "/api/about"]
    nothing = ["/missing", "/../serving.py", "/%2e%2e/serving.py", "/..%2fserving.py", "/docs", "/openapi.json"]
    for path in pages + nothing:
        answer = httpx.get(url + path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS and "server" not in answer.headers, path
        assert answer.status_code == (200 if path in pages else 404), path
        if path in nothing: assert list(answer.json()) == ["error"], path


def test_a_fault_of_ours_tells_nothing(url, monkeypatch):
    def fails(*_):
        raise OSError("/secret/place")
    monkeypatch.setattr(serving, "search", fails)
    answer = httpx.post(f"{url}/api/search", json=dict(query="x"))
    assert (answer.status_code == 500 and list(answer.json()) == ["error"] and "secret" not in answer.text
            and answer.headers["X-Frame-Options"] == "DENY")


def test_one_computes_some_wait_and_the_rest_are_sent_away(url, monkeypatch):
    at_once, most, gate = [0], [0], threading.Event()
    def slow(*_):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        gate.wait(20)
        at_once[0] -= 1
        return "done"
    monkeypatch.setattr(Ranker, "written", slow)
    async def crowd():
        async with httpx.AsyncClient(timeout=30) as client:
            asked = [asyncio.create_task(client.post(f"{url}/api/decode", json=dict(query="x"))) for _ in range(8)]
            while sum(task.done() for task in asked) < 5: await asyncio.sleep(.01)
            healthy = await client.get(f"{url}/health")
            gate.set()
            return healthy, await asyncio.gather(*asked)
    healthy, answers = asyncio.run(crowd())
    assert healthy.status_code == 200 and most == [1], ("the server answers while a model computes, and computes one "
                                                        "at a time")
    assert sorted(answer.status_code for answer in answers) == [200]*3 + [503]*5
    busy = next(answer for answer in answers if answer.status_code == 503)
    assert "Retry-After" in busy.headers and "too many" in busy.json()["error"]
    assert httpx.post(f"{url}/api/decode", json=dict(query="x")).status_code == 200, "there is room again"


def test_only_models_that_learned_it_write(url):
    assert httpx.post(f"{url}/api/decode", json=dict(query="x", model=0)).json() == dict(text=WRITTEN + "x")
    assert "stage I does that" in httpx.post(f"{url}/api/decode", json=dict(query="x", model=1)).json()["error"]
    assert httpx.post(f"{url}/api/decode", json=dict(query="x", model=2)).status_code == 422


def test_the_page_loads_nothing_from_elsewhere():
    for file in Path(serving.__file__).parent.parent.joinpath("page").iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|outerHTML|insertAdjacentHTML|eval\(|"
                             r"document\.write|\son\w+=|<style|<script(?![^>]* src=)|\sstyle=", text), file.name


def test_faults_are_told_before_a_model_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(serving, "open_rankers", lambda *_, **__: pytest.fail("a model was loaded"))
    with listen(port=0) as taken, pytest.raises(ValueError, match="Address already in use; give another port"):
        serve(["tiny"], "toy", port=taken.getsockname()[1])
    with pytest.raises(FileNotFoundError, match="nothing.jsonl does not exist"):
        serve(["tiny"], str(tmp_path/"nothing.jsonl"), port=0)
    with pytest.raises(ValueError, match="3 models"): serve(["tiny"]*3, "toy", port=0)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(RuntimeError, match=r'pip install "anchor_nb\[serve\]"'): serve(["tiny"], "toy", port=0)


def test_the_page_cannot_be_reached_before_it_is_ready(monkeypatch):
    "A probe of readiness would take a server that only listens for one that answers."
    class Loaded(Exception): pass
    with listen(port=0) as taken: port = taken.getsockname()[1]
    def probe(*_, **__):
        with pytest.raises(ConnectionRefusedError): socket.create_connection(("127.0.0.1", port), 1)
        raise Loaded
    monkeypatch.setattr(serving, "open_rankers", probe)
    with pytest.raises(Loaded): serve(["tiny"], "toy", port=port)


def test_silent_connections_do_not_close_the_page(url):
    with contextlib.ExitStack() as stack:
        place = httpx.URL(url).host, httpx.URL(url).port
        for _ in range(120): stack.enter_context(socket.create_connection(place, 5))
        assert httpx.get(f"{url}/health").status_code == 200


def test_two_models_search_the_same_texts(corpus, monkeypatch):
    "And BM25 is ready before the first question."
    first, second = serving.open_rankers(["tiny", "tiny"], corpus, bm25=0.3)
    assert first.index.words is second.index.words is not None
    assert serving.open_rankers(["tiny"], corpus)[0].index.words is None
    rows = [{"a": "one text"}, {"a": "another text"}]
    from anchor_nb.inference import search as searching
    monkeypatch.setattr(searching, "read_corpus", lambda *_, **__: (rows.pop(0), None))
    with pytest.raises(ValueError, match="has changed while it was read"): serving.open_rankers(["tiny"]*2, corpus)


def test_what_was_encoded_is_kept(corpus, tmp_path, monkeypatch):
    first = serving.open_rankers(["tiny"], corpus, keep=str(tmp_path/"kept"))[0]
    monkeypatch.setattr(AnchorEmbedder, "encode_document", lambda *_, **__: pytest.fail("the corpus was encoded again"))
    again = serving.open_rankers(["tiny"], corpus, keep=str(tmp_path/"kept"))[0]
    assert (first.index.vectors == again.index.vectors).all()
    assert [path.name for path in (tmp_path/"kept").iterdir()] == ["tiny"]


def test_indices_of_the_page_and_one_of_a_search_do_not_replace_each_other(corpus, tmp_path):
    "The next search would replace its folder, with the page's index in it."
    from anchor_nb.inference.search import check_keep
    kept = tmp_path/"kept"/"tiny"
    index = serving.open_rankers(["tiny"], corpus, keep=str(kept.parent))[0].index
    with pytest.raises(ValueError, match="is itself an index"): serving.open_rankers(["tiny"], corpus, keep=str(kept))
    (kept/"more").mkdir()
    for save in (check_keep, index.save):
        with pytest.raises(ValueError, match="holds more beside an index"): save(kept)


def test_with_bm25_the_texts_that_are_not_fused_keep_their_order(rankers, monkeypatch):
    monkeypatch.setattr(serving, "DEPTH", 2)
    alone, both = (replace(rankers[1], bm25=weight).scores("Zyx?") for weight in (0, 0.3)) # no text has the word
    assert (np.argsort(-alone) == np.argsort(-both)).all() and len(set(both.tolist())) == len(both)


def test_an_instruction_of_training_is_asked_with(rankers, corpus):
    usual, alone = replace(rankers[1], usual="find animals"), rankers[1]
    assert (usual.vector("a") == alone.vector("a", "find animals")).all()
    assert (usual.vector("a", "x") == alone.vector("a", "x")).all() and "find animals" in usual.description


def test_none_asks_without_the_query_prompt_of_a_checkpoint(rankers, monkeypatch):
    embedder = rankers[1].index.embedder
    plain = embedder.encode(["a"], normalize_embeddings=True)[0]
    monkeypatch.setattr(embedder, "prompts", dict(query="find: "))
    assert (rankers[1].vector("a", "none") == plain).all() and (rankers[1].vector("a") != plain).any()


def test_a_table_with_columns_of_its_own(tmp_path, monkeypatch):
    (tmp_path/"a.csv").write_text("nr,inhalt\n7,hallo\n8,welt\n")
    monkeypatch.setenv("ANCHOR_NB_CACHE", str(cache_dir()))
    monkeypatch.setenv("HOME", str(tmp_path))
    ranker, = serving.open_rankers(["tiny"], find_corpus("~/a.csv"), columns=dict(text="inhalt", id="nr"))
    assert (ranker.index.ids, ranker.index.texts) == (["7", "8"], ["hallo", "welt"])


def test_an_open_address_is_warned_of(monkeypatch, capsys):
    class Loaded(Exception): pass
    def stop(*_, **__):
        raise Loaded
    monkeypatch.setattr(serving, "open_rankers", stop)
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        with pytest.raises(Loaded): serve(["tiny"], "toy", host=host, port=0)
        assert ("other machines can reach" in capsys.readouterr().err) == warned


def test_from_a_shell_until_it_is_interrupted():
    import signal
    code = "from anchor_nb.release.serving import serve; serve(['tiny'], 'toy', port=0)"
    process = warm.Popen([sys.executable, "-c", code], stdout=warm.PIPE, stderr=warm.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+  toy, 86 texts, tiny; Ctrl-C to stop\n",
                            line), line + process.stderr.read()
        about = httpx.get(line.split()[0] + "/api/about").json()
        assert about["models"] == [dict(name="tiny", about="64 dimensions", writes=False, takes_instruction=True,
                                        bm25=0.0)]
        assert about["documents"] == 86
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()


# ---- the page ----

def question(page, text):
    page.fill("#query", text)
    page.press("#query", "Enter")
    # no wait_for_function: it evaluates strings, which the page's policy forbids
    page.wait_for_selector("body:not(.busy) :is(.hit, #message:not([hidden]))")


def test_a_typed_question_shows_both_rankings(open_page, url, rankers):
    page = open_page(url)
    question(page, "a cat sleeps")
    assert page.inner_text("#about") == "animals <i> · 13 texts"
    columns = page.locator(".column")
    assert columns.count() == 2 and page.locator(".column h2").all_inner_texts() == ["first <b>model</b>", "second"]
    for ranker, column in zip(rankers, columns.all()):
        scores = ranker.index.vectors @ ranker.index.embedder.encode_query(["a cat sleeps"], "find animals")[0]
        best = np.argsort(-scores, kind="stable")[:5]
        shown = [item.get_attribute("data-id") for item in column.locator(".hit").all()]
        assert shown == [ranker.index.ids[row] for row in best]
        values = [f"{round(float(scores[row]), 6):.3f}".replace("-", "\N{MINUS SIGN}") for row in best]
        assert column.locator(".value.own").all_inner_texts() == values
    left, right = [column.bounding_box() for column in columns.all()]
    assert left["x"] + left["width"] < right["x"] and left["y"] == right["y"]
    assert page.locator(".memory").count() == 1, "only the first model writes"
    page.wait_for_selector(".memory:not(.waiting)")
    assert page.inner_text(".memory blockquote") == WRITTEN + "a cat sleeps"
    both = set.intersection(*[{item.get_attribute("data-id") for item in column.locator(".hit").all()}
                              for column in columns.all()])
    assert (page.locator("#results path").count() == len(both)
            and f"{len(both)} of the top 5 in common" in page.inner_text("#status"))


def test_markup_in_texts_ids_and_names_is_shown_as_text(open_page, url):
    page = open_page(url)
    page.click("summary")
    page.select_option("#k", "20")
    question(page, "<script>window.hit = 5</script><img src=x onerror='window.hit = 6'>")
    page.wait_for_selector(".memory:not(.waiting)")
    shown = page.locator(".column").first.locator(".text").all_inner_texts()
    assert all(attack in shown for attack in ATTACKS) and ATTACKS[0] in page.locator(".id").all_inner_texts()
    assert page.evaluate("window.hit") is None and page.locator("#results img, #results script, #results b, #results "
                                                                "svg[onload]").count() == 0
    page.goto(url + "/#q=" + "%3Cimg%20src%3Dx%20onerror%3D%22window.hit%3D7%22%3E")
    page.reload()
    page.wait_for_selector(".hit")
    assert page.evaluate("window.hit") is None and page.input_value("#query") == "<img src=x onerror=\"window.hit=7\">"


def test_too_long_a_question_is_told(open_page, url):
    page = open_page(url)
    page.fill("#query", "x"*301)
    page.wait_for_selector("#room:not([hidden])") # hidden until the page knows the limit
    assert page.inner_text("#room") == "301 of 300 characters"
    question(page, "x"*301)
    assert (page.inner_text("#message") == "The question is too long. The limit is 300 characters."
            and page.locator(".hit").count() == 0)
    question(page, "x"*300)
    assert page.is_hidden("#message") and page.locator(".hit").count() == 10


def test_what_the_server_refuses_is_told_and_the_page_goes_on(open_page, url, monkeypatch):
    page = open_page(url)
    page.click("summary")
    page.evaluate("document.querySelector('#k').append(new Option('999', 999))")
    page.select_option("#k", "999")
    question(page, "a cat")
    assert "k: Input should be less than or equal to 20" in page.inner_text("#message")
    assert all("422" in problem for problem in page.problems) and page.problems
    page.problems.clear()
    page.select_option("#k", "5")
    question(page, "a cat")
    assert page.is_hidden("#message") and page.locator(".hit").count() == 10


def test_a_server_that_is_gone_is_told(open_page, rankers, corpus):
    with running(app(rankers, corpus)) as address:
        page = open_page(address)
        page.wait_for_selector("#welcome:not([hidden])")
    page.fill("#query", "a cat")
    page.press("#query", "Enter")
    page.wait_for_selector("#message:not([hidden])")
    assert page.inner_text("#message") == "The server is not responding. Is it still running?"
    page.problems.clear() # the browser's own words about it


@pytest.mark.parametrize("before", ["asked", "typed"])
def test_a_question_before_the_page_knows_anything(open_page, url, before):
    page, held = open_page(), []
    page.route("**/api/about", lambda route: held.append(route))
    page.goto(url)
    page.fill("#query", "Who has\nwool?")
    if before == "asked":
        page.press("#query", "Enter")
        assert page.url.endswith("#q=Who+has%0Awool%3F")
    assert held, "the page waits for what it has to know"
    held[0].continue_()
    page.wait_for_selector("#examples button", state="attached")
    if before == "typed": page.press("#query", "Enter")
    page.wait_for_selector(".hit")
    assert page.input_value("#query") == "Who has\nwool?" and page.inner_text("h2 >> nth=1") == "second"


def test_examples_address_and_the_way_back(open_page, url):
    page = open_page(url)
    page.click("#examples button >> text=Who has wool?")
    page.wait_for_selector(".hit")
    assert page.url.endswith("#q=Who+has+wool%3F") and page.locator(".hit[data-id=d3] .judged").count() in (1, 2)
    question(page, "a dog")
    page.go_back()
    page.wait_for_selector(".hit")
    assert page.input_value("#query") == "Who has wool?"
    page.go_back()
    page.wait_for_selector("#welcome:not([hidden])")
    assert page.locator(".hit").count() == 0 and page.input_value("#query") == ""


def test_all_of_it_without_a_mouse(open_page, url):
    page = open_page(url)
    page.wait_for_selector("#welcome:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "query"
    question(page, "a bird that talks")
    at = lambda: page.evaluate("(item => item && "
                               "[[...document.querySelectorAll('.column')].indexOf(item.closest('.column')), "
                               "item.dataset.id])(document.activeElement.closest('.hit'))")
    ids = [[item.get_attribute("data-id") for item in column.locator(".hit").all()]
           for column in page.locator(".column").all()]
    page.keyboard.press("ArrowDown")
    assert at() == [0, ids[0][0]]
    page.keyboard.press("ArrowDown")
    assert at() == [0, ids[0][1]] and page.locator(".hit.same").count() == 1 + (ids[0][1] in ids[1])
    page.keyboard.press("ArrowRight")
    assert at() == [1, ids[0][1] if ids[0][1] in ids[1] else ids[1][1]]
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "query"
    page.click("summary")
    page.select_option("#k", "20")
    question(page, "a bird")
    page.locator(".hit[data-id=d5]").first.focus()
    page.keyboard.press("Enter")
    assert (page.locator(".hit.whole").count() == 1
            and page.evaluate("document.activeElement.querySelector('.more').ariaExpanded") == "true")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"


def test_on_a_phone_nothing_sticks_out_and_one_switches(open_page, url):
    page = open_page(url, size=PHONE)
    question(page, "a bird that talks " + "w"*200)
    page.wait_for_selector(".memory:not(.waiting)")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    visible = lambda: [column.is_visible() for column in page.locator(".column").all()]
    assert visible() == [True, False]
    page.click("#switch button >> nth=1")
    pressed = page.locator("#switch button").evaluate_all("all => all.map(one => one.ariaPressed)")
    assert visible() == [False, True] and pressed == ["false", "true"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(open_page, url, scheme):
    "Contrast of every visible text against what is behind it, as WCAG counts it: 4.5 or more."
    page = open_page(url, scheme=scheme)
    question(page, "Who sleeps?")
    page.wait_for_selector(".memory:not(.waiting)")
    low = page.evaluate("""() => {
      const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
      const over = colours => {
        canvas.clearRect(0, 0, 1, 1);
        for (const one of colours) { canvas.fillStyle = one; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
      };
      const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = rgb => rgb.map(linear).reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
      const behind = node => {
        const all = [];
        for (; node; node = node.parentElement) all.unshift(getComputedStyle(node).backgroundColor);
        return all;
      };
      const says = node => node.checkVisibility()
        && [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
      return [...document.querySelectorAll('body *')].filter(says).map(node => {
        const back = behind(node), text = light(over([...back, getComputedStyle(node).color]));
        const [a, b] = [light(over(back)), text].sort((x, y) => y - x);
        return [(a + .05) / (b + .05), node.className || node.tagName, node.textContent.slice(0, 30)];
      }).filter(([contrast]) => contrast < 4.5);
    }""")
    assert low == []


def test_a_split_and_the_names_of_columns_reach_the_judgements(tmp_path):
    (tmp_path/"qrels").mkdir()
    (tmp_path/"corpus.jsonl").write_text('{"nr": "1", "inhalt": "A cat sleeps."}\n')
    (tmp_path/"queries.jsonl").write_text('{"nr": "q", "inhalt": "Who sleeps?"}\n')
    for split in ("dev", "train"): (tmp_path/"qrels"/f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t1\n")
    columns = dict(text="inhalt", id="nr")
    with pytest.raises(ValueError, match="dev"): find_corpus(str(tmp_path), columns)
    served = find_corpus(f"{tmp_path}:dev", columns)
    assert (served.path, served.judged) == (str(tmp_path), (("Who sleeps?", frozenset("1")),))


def test_the_column_of_queries_is_no_concern_of_the_corpus(tmp_path):
    (tmp_path/"qrels").mkdir()
    (tmp_path/"corpus.jsonl").write_text("".join(f'{{"_id": "{n}", "inhalt": "A cat sleeps."}}\n' for n in "ab"))
    (tmp_path/"queries.jsonl").write_text("".join(f'{{"_id": "{n}", "frage": "Who sleeps?"}}\n' for n in "qr"))
    (tmp_path/"qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\nr\tb\t1\n")
    columns = dict(text="inhalt", query="frage")
    served = find_corpus(str(tmp_path), columns)
    assert served.judged == (("Who sleeps?", frozenset("ab")),), "two queries of one text share their answers"
    ranker, = serving.open_rankers(["tiny"], served, columns=columns)
    assert list(ranker.index.ids) == ["a", "b"]
