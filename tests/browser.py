"""A headless Chromium for tests of pages: `from browser import chromium, open_page`, then take `open_page` as fixture.

`open_page(url)` gives a Playwright page whose `problems` collect what a visitor must not meet: errors in the console,
exceptions, answers of 400 and above, requests that fail or leave this machine. A test that expects some removes them
from the list; what is left when the test ends fails it.
"""
import functools
import os
import shutil
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
PHONE, DESK = (390, 844), (1280, 800)  # width and height in CSS pixels


def find_chromium():
    "Path of the system's Chromium ($ANCHOR_NB_CHROMIUM first), or an empty string."
    return next((path for name in (os.environ.get("ANCHOR_NB_CHROMIUM", ""), *NAMES)
                 if name and (path := shutil.which(name))), "")


def no_browser(why):
    "Skip; but where a gate promises a browser (CI=true), fail."
    if os.environ.get("CI") == "true": pytest.fail(f"CI=true promises a browser, but {why}")
    pytest.skip(why)


@contextmanager
def launched(**options):
    "A Playwright browser on the system's Chromium; nothing is downloaded."
    try: from playwright.sync_api import sync_playwright
    except ModuleNotFoundError: no_browser("playwright is not installed: pip install playwright")
    if not (executable := find_chromium()):
        no_browser("no Chromium was found: install chromium, or set ANCHOR_NB_CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable,
                                             args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
                                             **options)
        try: yield browser
        finally: browser.close()


@pytest.fixture(scope="module")  # not the session: while it lives, asyncio.run refuses to start in this thread
def chromium():
    with launched() as browser: yield browser


def is_local(url):
    parts = urlsplit(url)
    return parts.scheme in ("file", "data", "blob", "about", "chrome-extension") or parts.hostname in ("127.0.0.1",
                                                                                                       "localhost",
                                                                                                       "::1")


def watch(page):
    "Collect a page's problems as strings in `page.problems`."
    page.problems = []
    note = page.problems.append
    page.on("console", lambda message: note(f"console: {message.text} ({message.location.get('url', '')})")
            if message.type == "error" else None)
    page.on("pageerror", lambda error: note(f"exception: {error}"))
    page.on("request", lambda request: None if is_local(request.url) else note(f"leaves this machine: {request.url}"))
    page.on("requestfailed", lambda request: None if request.failure == "net::ERR_ABORTED"
            else note(f"failed: {request.url} ({request.failure})"))  # aborted: by the page itself
    page.on("response", lambda response: note(f"status {response.status}: {response.url}") if response.status >= 400
            else None)
    return page


def new_page(browser, url="", size=DESK, scheme="light", **options):
    "A watched page in a context of its own; scheme is light or dark."
    context = browser.new_context(viewport=dict(width=size[0], height=size[1]), color_scheme=scheme,
                                  reduced_motion="reduce", **options)
    context.set_default_timeout(20_000)
    page = watch(context.new_page())
    if url: page.goto(url)
    return page


@pytest.fixture
def open_page(chromium):
    "`new_page` on the module's browser; pages are closed, and must be without problems, when the test ends."
    pages = []

    def opened(url="", **options):
        pages.append(new_page(chromium, url, **options))
        return pages[-1]

    yield opened
    problems = [problem for page in pages for problem in page.problems]
    for page in pages: page.context.close()
    assert not problems, "\n".join(problems)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@contextmanager
def served(folder):
    "Address of a web server, in a thread, for the files of a folder."
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield f"http://127.0.0.1:{server.server_address[1]}"
        finally: server.shutdown()
