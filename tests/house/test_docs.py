"""The documentation site, built once and read in a real browser."""
import importlib.util
import os
import re
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser import PHONE, chromium, new_page, open_page, served  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("smalldocs", reason="the site is rendered by smalldocs: pip install anchor_nb[docs]")

sys.path.insert(0, str(ROOT/"nbs/_site"))  # it is run as a script, beside what it imports
spec = importlib.util.spec_from_file_location("make_site", ROOT/"nbs/_site/make_site.py")
make_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_site)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site.build(tmp_path_factory.mktemp("docs")/"site", "smalldocs")


@pytest.fixture(scope="module")
def pages(site): return pages_of(site)


@pytest.fixture(scope="module")
def address(site):
    with served(site) as url: yield url


class Found(HTMLParser):
    "Ids of a page, the addresses it leads to, and those it loads."
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        has = dict(attributes)
        if has.get("id"): self.ids.append(has["id"])
        if tag == "a" and has.get("href") is not None: self.links.append(has["href"])
        if tag in ("link", "use") and has.get("href"): self.loads.append(has["href"])
        if has.get("src"): self.loads.append(has["src"])


def pages_of(site):
    return {path.relative_to(site).as_posix(): Found(path.read_text(encoding="utf-8"))
            for path in sorted(site.rglob("*.html"))}


def broken(pages, files):
    "Links to no page or no anchor, and what is loaded from elsewhere or is not there."
    for name, page in pages.items():
        for href in page.links + page.loads:
            parts = urlsplit(href)
            if parts.scheme in ("data", "mailto"): continue
            if parts.scheme or parts.netloc:
                if href in page.loads: yield name, href
                continue
            to = unquote(urlsplit(urljoin(f"http://site/{name}", href)).path.lstrip("/"))
            to = to + "index.html" if to in ("",) or to.endswith("/") else to
            if to not in files or (parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids):
                yield name, href


def test_every_notebook_has_a_page_and_no_link_is_broken(site, pages):
    assert {f"{page}.html" for page in make_site.all_notebooks().values()} <= set(pages)
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert not sorted(set(broken(pages, files)))


def test_the_check_of_links_notices():
    page = Found('<h2 id="here"></h2><a href="b.html"></a><a href="#there"></a><a href="#here"></a><script '
                 'src="http://elsewhere/x.js"></script>')
    assert [href for _, href in broken({"a.html": page}, {"a.html"})] == ["b.html", "#there", "http://elsewhere/x.js"]


def test_no_id_is_given_twice(pages):
    for name, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), (name, {i for i in page.ids if page.ids.count(i) > 1})


def test_nothing_names_a_host_to_load_from(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"googleapis|jsdelivr|unpkg|cdn\.", text), path


def test_exported_cells_become_signatures_descriptions_and_sources(site):
    text = (site/"models/pooling.html").read_text(encoding="utf-8")
    assert 'id="models.pooling.pool_states"' in text
    plain = re.sub(r"<[^>]+>", "", text)
    assert "Source, anchor_nb/models/pooling.py" in plain and "pool_states(" in plain
    assert "#| export" not in plain and "from fastcore.test import" not in plain


def test_what_is_internal_is_folded_and_not_listed(site):
    "An `exporti` cell keeps its source on the page, without a heading, and out of the API page."
    source = '#| default_exp models.a\n', "#| exporti\ndef helper(): pass", "#| export\ndef shown(): pass"
    notebook = make_site.v4.new_notebook(cells=[make_site.v4.new_markdown_cell("# A"),
                                                *map(make_site.v4.new_code_cell, source)])
    page = "\n".join(cell.source for cell in make_site.as_page(notebook, Path("models/a"), {}).cells)
    assert "### `shown`" in page and "### `helper`" not in page and "def helper" in page
    assert 'code-summary="Internal, anchor_nb/models/a.py"' in page


def test_the_api_page_begins_with_what_the_package_itself_offers(site):
    import anchor_nb
    text = (site/"names.html").read_text(encoding="utf-8")
    first = text[text.index('id="anchor_nb"'):text.index('id="core.settings"')]
    assert re.findall(r'<td[^>]*><a href="[^"]+#([\w.]+)"', first) == [f"{home}.{name}"
                                                                 for name, home in anchor_nb._HOMES.items()]


def test_a_docstring_describes_parameters_and_internal_classes_lend_their_methods():
    "What `help()` shows is on the page as a table; and an embedder's page has `encode`, wherever it is defined."
    source = '''
class Base:
    def say(self, word: str, *more) -> str:
        """Say it.

        Args:
            word: what to say,
                aloud.
            more: words, with a | between.

        Returns:
            What was said.

        Raises:
            ValueError: silence.
        """
        return word
'''
    notebook = make_site.v4.new_notebook(cells=[make_site.v4.new_code_cell("#| exporti" + source)])
    text = make_site.api("class Speaker(Base):\n    'One who speaks.'", "m", make_site.internal_classes(notebook))
    assert "#### `say`{.nolink} {#m.Speaker.say}" in text and "Args" not in text
    for row in ("| `word` | what to say, aloud. |", "| `*more` | words, with a \\| between. |",
                "| returns | `str` What was said. |", "| raises | `ValueError` silence. |"):
        assert row in text, row


def test_a_cell_is_described_as_it_is_written():
    text = make_site.api('''
class Pair:
    "Two texts."
    query: str = "" # what is asked | or told
    def turned(self, times: int = 1, # how often
               *, loud=False) -> str: # the texts, <loud> or not
        "The other way round."
    def _hidden(self): pass

def joined(a, b, *rest) -> str: # a: one; b: another
    pass

def told(folder: Path) -> list: # of lines
    pass

def command(name: Annotated[str, typer.Option("--name", help="who it is")] = ""):
    pass

class Settings:
    steps: int = setting(2000, "optimiser steps", "section 4")

LIMITS, _SECRET = (1, 2), 3
'''.strip(), "pairs")
    assert ("### `Pair`{.nolink} {#pairs.Pair}" in text
            and "| `query` | `str = ''`<br>what is asked \\| or told |" in text)
    assert "turned(times: int = 1, *, loud=False) -> str" in text and "| `times` | how often |" in text
    assert "| returns | `str` the texts, &lt;loud> or not |" in text
    assert "| `a` | one |\n| `b` | another |\n:::" in text and "| returns | `list` of lines |" in text
    assert "command(name: str = '')" in text and "| `name` | who it is |" in text
    assert "| `steps` | `int = 2000`<br>optimiser steps *section 4* |" in text
    assert '<span id="pairs.LIMITS">' in text and "#### `_hidden`" not in text and 'id="pairs._SECRET"' not in text
    assert make_site.api("import json\nfrom pathlib import Path", "pairs") == ""


def test_names_that_mean_two_things_are_not_linked():
    pages = {make_site.NOTEBOOKS/"01_a.ipynb": Path("a"), make_site.NOTEBOOKS/"02_b.ipynb": Path("b")}
    found = [("a", "one", "", make_site.NOTEBOOKS/"01_a.ipynb"), ("a", "both", "", make_site.NOTEBOOKS/"01_a.ipynb"),
             ("b", "both", "", make_site.NOTEBOOKS/"02_b.ipynb")]
    assert make_site.symbols(found, pages) == {"a.one": "/a.html#a.one", "a.both": "/a.html#a.both",
                                               "b.both": "/b.html#b.both", "one": "/a.html#a.one"}


def test_the_front_page_names_the_wings_in_their_order():
    "The map is the folders and WINGS; the list on the front page follows it."
    text = (ROOT/"README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `(\w+)`: ", text[text.index("## Subpackages"):text.index("## Tutorials")], flags=re.M)
    assert listed == [wing for wing in make_site.WINGS if wing != "benchmarks"]


def test_notebooks_named_in_prose_become_links():
    pages = make_site.all_notebooks()
    text = ("See `models/04_pooling`, [there](analysis/01_representation_similarity.html#x), `tutorials/cost`, "
            "`06_nothing`.\n```\n`models/04_pooling`\n```")
    assert (make_site.linked(text, Path("runs"), pages) == "See [`models/04_pooling`](models/pooling.ipynb), "
                                                           "[there](analysis/representation_similarity.ipynb#x), "
                                                           "[`tutorials/cost`](tutorials/cost.ipynb), "
                                                           "`06_nothing`.\n```\n`models/04_pooling`\n```")
    there = make_site.linked("`models/04_pooling`", Path("tutorials/cost"), pages)
    assert there == "[`models/04_pooling`](../models/pooling.ipynb)"


def test_a_folder_that_is_no_site_is_not_replaced(tmp_path):
    (tmp_path/"thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="something else"): make_site.build(tmp_path)
    assert (tmp_path/"thesis.txt").is_file()


def test_with_quarto_nbdevs_own_command_renders(tmp_path, monkeypatch):
    "A stand-in for Quarto: it notes what it is asked, and writes one page."
    fake = tmp_path/"bin/quarto"
    fake.parent.mkdir()
    fake.write_text(f"""#!{sys.executable}
import json, os, pathlib, sys
if sys.argv[1] == "inspect":
    print(json.dumps({{"config": {{"project": {{"type": "default"}}}}, "files": {{"input": []}}}}))
    raise SystemExit
out = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
(out/"site_libs").mkdir(parents=True)
shown = [pathlib.Path("sidebar.yml").read_text(), pathlib.Path("_quarto.yml").read_text()]
(out/"index.html").write_text("".join([*shown, *sorted(str(p) for p in pathlib.Path(".").rglob("*.ipynb"))]))
""")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    few = tmp_path/"few"  # three notebooks: all would take minutes, since nbdev runs their imports
    for name in ("core/01_recipe.ipynb", "index.ipynb", "stages/prepare.ipynb", "_quarto.yml", "styles.css"):
        (few/name).parent.mkdir(parents=True, exist_ok=True)
        (few/name).write_bytes((ROOT/"nbs"/name).read_bytes())
    monkeypatch.setattr(make_site, "NOTEBOOKS", few)
    text = (make_site.build(tmp_path/"site")/"index.html").read_text()
    assert "section: Settings and files" in text and "collapse-level" in text and "stages/prepare.ipynb" in text


# ---- in the browser ----

def test_every_page_opens_without_a_complaint_and_fits_a_phone(pages, address, chromium):
    page = new_page(chromium, size=PHONE)
    bad = {}
    for name in pages:
        page.goto(f"{address}/{name}", wait_until="load")
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        if page.problems or wide > 0: bad[name] = [*page.problems, f"{wide} pixels too wide"]
        page.problems.clear()
    page.context.close()
    assert not bad


def test_equations_are_drawn(site, address, open_page):
    assert 'class="math' in (site/"losses/reconstruction.html").read_text(encoding="utf-8")
    for path in site.rglob("*.html"):
        left = re.search(r"\\[(\[][^<]{2,}\\[)\]]</span>|<m(i|o|text)>\s*\\\w+", path.read_text(encoding="utf-8"))
        assert not left, (path.name, left)
    page = open_page(f"{address}/losses/reconstruction.html")
    for kind in ("block", "inline"):
        box = page.locator(f"math[display={kind}]").first.bounding_box()
        assert box["height"] > 10 and box["width"] > 5


def test_navigation_leads_from_home_to_a_module_and_on(address, open_page):
    page = open_page(f"{address}/index.html")
    page.locator("#quarto-sidebar").get_by_text("Library", exact=True).click()
    page.locator("#quarto-sidebar").get_by_role("button", name="Losses", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator("#quarto-sidebar").get_by_role("link", name="Reconstruction", exact=True).click()
    assert page.url.endswith("/reconstruction.html") and page.locator("h1").inner_text() == "Reconstruction"
    page.locator("#TOC a").last.click()
    assert "#" in page.url
    page.locator(".nav-page-next a").click()
    assert page.url.endswith("/losses/llama2vec.html")


@pytest.mark.parametrize("where", ["web", "disk"])
def test_search_finds_a_function_from_the_web_and_from_the_disk(site, address, open_page, where):
    page = open_page(f"{address}/index.html" if where == "web" else (site/"index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("pool_states")
    first = page.locator(".search-result").first
    first.wait_for()
    first.click()
    page.wait_for_url("**/models/pooling.html#*")
    assert page.locator("h3 code", has_text="pool_states").is_visible()


def background(page):
    return [int(part) for part in re.findall(r"\d+",
                                             page.evaluate("getComputedStyle(document.body).backgroundColor"))][:3]


def test_light_and_dark(address, open_page):
    page = open_page(f"{address}/models/pooling.html", scheme="dark")
    assert max(background(page)) < 60
    page.locator(".quarto-color-scheme-toggle").first.click()
    page.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
    page.goto(f"{address}/tutorials/cost.html")
    assert min(background(page)) == 255, "the choice holds on the next page"


def test_the_map_that_one_can_move_about_in_is_there(address, open_page):
    page = open_page(f"{address}/studies/hrsa.html")
    page.locator(".plotly-graph-div .main-svg").first.wait_for()
    assert page.locator(".plotly-graph-div .main-svg").first.bounding_box()["height"] > 200


def test_sources_fold_out(address, open_page):
    page = open_page(f"{address}/models/pooling.html")
    fold = page.locator("details.code-fold").first
    assert not fold.locator("pre").is_visible()
    fold.locator("summary").click()
    assert "def " in fold.locator("pre").inner_text()


def test_figures_have_a_description(site):
    for path in site.rglob("*.html"):
        for image in re.findall(r'<img[^>]*src="data:image/png[^>]*>', path.read_text(encoding="utf-8")):
            assert re.search(r'alt="[^"]+"', image[-400:] + image[:400]), path
