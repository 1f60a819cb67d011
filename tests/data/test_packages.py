"Fetching packages: once, checked, and with the fix when it fails; and what is read from them."
import gzip
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from anchor_nb.data import packages
from anchor_nb.data.packages import FetchError, Item, Package
from common import files


def fake_client(monkeypatch, content, calls=None):
    "A client that leaves a wheel with this content in the working folder."
    def run(command, folder, seconds=1800):
        if calls is not None: calls.append(command)
        Path(folder, "thing-1.0-py3-none-any.whl").write_bytes(content)
        return ""
    monkeypatch.setattr(packages, "run_client", run)


GOOD = b"the pinned bytes"
THING = Package("pip", "thing", "1.0", "thing-1.0-py3-none-any.whl", hashlib.sha256(GOOD).hexdigest())


def test_fetch_once(cache, monkeypatch):
    calls = []
    fake_client(monkeypatch, GOOD, calls)
    first = packages.fetch_package(THING)
    assert first.read_bytes() == GOOD and first == cache / "packages" / THING.file
    assert packages.fetch_package(THING) == first and len(calls) == 1
    first.write_bytes(b"damaged")
    assert packages.fetch_package(THING).read_bytes() == GOOD and len(calls) == 2


def test_hash_mismatch(cache, monkeypatch):
    fake_client(monkeypatch, b"other bytes")
    with pytest.raises(FetchError) as caught: packages.fetch_package(THING)
    for part in ("thing 1.0", "not the pinned one", f"put the file {THING.file} with sha256 {THING.sha256} into",
                 str(cache)):
        assert part in str(caught.value)
    assert files(cache) == {}


@pytest.mark.parametrize("client,program", [("apt", "apt-get"), ("npm", "npm")])
def test_missing_client(cache, monkeypatch, client, program):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match=rf"Could not fetch thing 1.0: `{program} .*{program} is not installed.*Fix: "
                                         rf"connect"):
        packages.fetch_package(replace(THING, client=client))
    assert files(cache) == {}


def test_no_registry(cache, monkeypatch):
    "A real pip that can reach nothing fails with the command and the fix."
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items(): monkeypatch.setenv(name, value)
    with pytest.raises(FetchError, match="python -m pip download .* thing==1.0` failed with exit status 1.*Fix: "
                                         "connect"):
        packages.fetch_package(THING)


def test_no_debian_index(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="Could not fetch Debian's package index.*copy the folder debian-index"):
        packages.fetch_debian_index()
    assert files(cache) == {}


def test_stanza_of_a_debian_index(tmp_path):
    "One binary a source, transitional packages dropped, descriptions joined by checksum."
    listed = "".join(f"Package: {name}\nSource: {source}\nSection: main/games\nDescription-md5: {md5}\n\n"
                       for name, source, md5 in
                       [("alpha-data", "alpha (1.0)", "1"), ("alpha", "alpha", "2"), ("old", "old", "3"),
                        ("beta", "beta", "4")])
    texts = "".join(f"Package: x\nDescription-md5: {md5}\nDescription-en: {first}\n {rest}\n .\n more: of it\n\n"
                    for md5, first, rest in
                    [("1", "data", "Data of it."), ("2", "a game", "Play it."), ("3", "transitional package",
                                                                                 "Remove it.")])
    (tmp_path / "Packages.gz").write_bytes(gzip.compress(listed.encode()))
    (tmp_path / "Translation-en.gz").write_bytes(gzip.compress(texts.encode()))
    assert packages.debian_items(tmp_path) == [Item("alpha", "a game", "Play it. more: of it", "games")]


@pytest.mark.registry
def test_labelled_sets():
    counts = dict(sts=dict(simlex=999, wordsim=353, lee=1225), sentiment=dict(amazon=1000, imdb=1000, yelp=1000))
    for name, read in dict(sts=packages.sts_rows, sentiment=packages.sentiment_rows).items():
        parts = read(packages.fetch_package(packages.PACKAGES[name]))
        assert {part: len(rows) for part, rows in parts.items()} == counts[name]
