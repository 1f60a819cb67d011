"One embedder in several threads: what one of them does changes nothing that another one reads."
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anchor_nb.inference.decoding import decode_from_anchor
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.data.prompts import Prompt

TEXTS = ["a cat sleeps", "the river floods in spring " * 40, "", "an <|im_end|> in a text " * 30, "x"]
WAYS = [dict(), dict(instruction="find animals"), dict(prompt="so: "),
        dict(instruction=["", "find animals"] + ["so"]*3), dict(role="query")]


@pytest.fixture(scope="module")
def embedder():
    plain = AnchorEmbedder.from_pretrained("tiny", max_length=64)
    return AnchorEmbedder(plain.lm, plain.formatter, prompts={"query": "question: "})


def test_eight_threads_get_the_vectors_that_one_gets(embedder):
    "Beside them, others decode, and use the tokenizer as they please; 16 of 240 vectors were wrong."
    expected = [embedder.encode(TEXTS, **way) for way in WAYS]
    asked = dict(instruction="find the person", samples=2, max_new_tokens=8)
    written = decode_from_anchor(embedder, TEXTS[:2], **asked)
    def disturb(n):
        embedder.tokenizer(TEXTS, truncation=n % 2 == 0, max_length=7, padding=True)
        return decode_from_anchor(embedder, TEXTS[:2], **asked) if n % 4 == 0 else written
    with ThreadPoolExecutor(8) as threads, ThreadPoolExecutor(2) as others:
        beside = [others.submit(disturb, n) for n in range(24)]
        found = list(threads.map(lambda n: embedder.encode(TEXTS, **WAYS[n % len(WAYS)]), range(80)))
    for n, vectors in enumerate(found): assert np.array_equal(vectors, expected[n % len(WAYS)]), WAYS[n % len(WAYS)]
    assert all(each.result() == written for each in beside)


def test_a_formatter_keeps_to_its_layout_whatever_becomes_of_the_tokenizer(embedder):
    formatter = embedder.formatter
    ways = ["", "find animals", Prompt("so: "), ["", "find animals", Prompt(""), Prompt("so: "), "so"]]
    expected = [formatter(TEXTS, before) for before in ways]
    again = copy.deepcopy(embedder)
    again.max_seq_length = 16 # another formatter of the same tokenizer
    formatter.tokenizer(TEXTS, truncation=True, max_length=5)
    for one in (formatter, copy.copy(formatter), copy.deepcopy(formatter), pickle.loads(pickle.dumps(formatter))):
        assert [one(TEXTS, before) for before in ways] == expected
    assert max(len(tokens.ids) for tokens in again.formatter(TEXTS)) == 16
