"""The documentation site: `python nbs/_site/make_site.py` turns the notebooks into `_docs/`, offline.

Where Quarto is installed, nbdev's own docs command renders them; elsewhere smalldocs does, from the same
`nbs/_quarto.yml`. With smalldocs no code is run and nothing of the package is imported: signatures, descriptions and
sources are read from the exported cells, outputs from the notebooks, equations become MathML, and plotly's script is
copied from the installed package. The folder can be read from any web server and from the disk.
"""
import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml
from nbformat import NotebookNode, v4

from exported import api, directives, folded, internal_classes, module_of, names, names_page, read, symbols

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parent
ROOT = NOTEBOOKS.parent

# ---- which page is where ----

# The wings of the library in their order: each imports only from those before it. Tests read this.
WINGS = dict(core="Settings and files", data="Texts and data", models="Models", runs="Runs", losses="Losses",
             training="Training", inference="Search and mining", evaluation="Evaluation", analysis="Analysis",
             experiments="Experiments and figures", release="Export and release", cli="The command line")
TUTORIALS = ["documents", "five_thousand", "quickstart", "own_data", "anchor", "village", "search_page", "evaluation",
             "ablations", "relatives", "cost", "survival", "cluster"]
STAGES = ["adapt", "prepare", "mine", "stage1", "stage2", "evaluate", "analyse", "report"]
BEFORE = {"tutorials": ("Tutorials", TUTORIALS), "stages": ("Stages", STAGES),
          "pages": ("Results and reference", ["results", "speed", "where_to_run", "methods", "commands"])}
AFTER = {"studies": ("Studies", []), "benchmarks": ("Benchmarks", []), "paper": ("The paper", [])}
PAPERS = {"CHANGELOG": "Changes", "CONTRIBUTING": "Contributing"} # Markdown files of the repository that become pages


def page_of(notebook):
    "Path of a notebook's page, without its ending: models/08_embedder -> models/embedder."
    return notebook.relative_to(NOTEBOOKS).with_name(re.sub(r"^\d+_", "", notebook.stem)).with_suffix("")


def all_notebooks():
    "Notebook -> page, wing by wing; two notebooks must not share one."
    # what a reader's tutorials have run lies in a folder `runs` beside them
    hidden = lambda path: any(part.startswith((".", "_")) or part == "runs" and depth
                              for depth, part in enumerate(path.relative_to(NOTEBOOKS).parts))
    order = [*WINGS, *BEFORE, *AFTER]
    place = lambda path: (order.index(path.parent.name) if path.parent.name in order else -1, path)
    pages = {path: page_of(path) for path in sorted(NOTEBOOKS.rglob("*.ipynb"), key=place) if not hidden(path)}
    twice = {page for page in pages.values() if list(pages.values()).count(page) > 1}
    if twice:
        raise SystemExit(f"two notebooks would become the same page: {', '.join(map(str, twice))}; rename one")
    return pages


def sidebar(pages, papers):
    "The contents of the sidebar, in the order in which a newcomer needs them."
    entry = lambda path: {"text": titled(path), "href": path.relative_to(NOTEBOOKS).as_posix()}
    def section(title, paths): return [{"section": title, "contents": [entry(path) for path in paths]}] if paths else []
    def inside(folder, numbered):
        there = [path for path in pages if path.parent == NOTEBOOKS/folder]
        return {path.stem: path for path in there if path.stem[0].isdigit() == numbered}
    def ordered(folder, order):
        there = inside(folder, numbered=False)
        return [there[name] for name in dict.fromkeys([*order, *there]) if name in there]
    def rooms(folders):
        return [part for folder, (title, order) in folders.items() for part in section(title, ordered(folder, order))]
    wings = [part for wing, title in WINGS.items() for part in section(title, inside(wing, numbered=True).values())]
    start = [{"text": "Home", "href": "index.ipynb"}, api_section(pages)]
    end = [{"text": title, "href": f"{name}.md"} for name, title in papers.items()]
    return [*start, *rooms(BEFORE), {"section": "Library", "contents": wings}, *rooms(AFTER), *end]


def api_section(pages):
    "The sidebar's way to what `from anchor_nb import ...` offers, and to everything else that is public."
    of = {module_of(read(path)): page for path, page in pages.items()}
    entries = [{"text": name, "href": f"/{of[home]}.html#{home}.{name}"} for name, home in first_names().items()
               if home in of] # a preview of a few notebooks has not all
    return {"section": "API", "contents": [*entries, {"text": "All names", "href": "names.md"}]}


# ---- a notebook as a page ----

def titled(path):
    "The first heading of a notebook."
    return heading(read(path).cells[0].source)[0]


def heading(markdown):
    "Title, subtitle and the rest of a notebook's first cell."
    title, *lines = markdown.strip().splitlines()
    quotes = [line for line in lines if line.startswith(">")]
    rest = "\n".join(line for line in lines if line not in quotes).strip()
    return title.lstrip("# "), " ".join(line.lstrip("> ") for line in quotes), rest


KEPT = ["echo", "output", "include", "label", "column", "layout-ncol", "layout-nrow"]
KEPT += [f"{kind}-{what}" for kind in ("fig", "tbl", "code") for what in ("cap", "alt", "align", "fold", "summary")]


@cache
def by_name(pages):
    "What a notebook may be called in backticks -> its page."
    pages = dict(pages)
    return {**{path.stem: where for path, where in pages.items() if "_" in path.stem},
            **{path.relative_to(NOTEBOOKS).with_suffix("").as_posix(): where for path, where in pages.items()}}


LINK = re.compile(r"\]\(([\w./-]+)\.(ipynb|html)(#[^)]*)?\)")


def linked(markdown, page, pages):
    "Notebooks named in backticks become links, and links to notebooks lead to their pages."
    up = "../"*len(page.parent.parts)
    called = by_name(tuple(pages.items()))
    def named(match):
        if match[1] not in called or match[1] == "index": return match[0]
        return f"[`{match[1]}`]({up}{called[match[1]]}.ipynb)"
    def target(match):
        wanted = (NOTEBOOKS/page.parent/match[1]).resolve()
        here = next((where for path, where in pages.items()
                     if path.with_suffix("") == wanted or where == Path(match[1])), None)
        return f"]({up}{here}.ipynb{match[3] or ''})" if here else match[0]
    def prose(part): return LINK.sub(target, re.sub(r"(?<!\[)`([\w/]+)`(?!\])", named, part))
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else prose(part) for part in parts)


def output_kept(output, up):
    "An output as the page shows it: plotly's script from the site's own folder."
    for kind, value in (output.get("data") or {}).items():
        if kind == "text/html":
            output["data"][kind] = re.sub(r'src="[^"]*plotly[^"]*\.js"', f'src="{up}assets/plotly.min.js"', value)
    return output


def cell(kind, source, **more):
    "A cell of a notebook."
    return NotebookNode(cell_type=kind, metadata=NotebookNode(), source=source, **more)


def as_page(notebook, page, pages):
    "A notebook of nbformat 4 with front matter, prose, code, outputs, and what exported cells offer."
    title, subtitle, rest = heading(notebook.cells[0].source)
    module, up, section = module_of(notebook), "../"*len(page.parent.parts), title
    internal = internal_classes(notebook)
    cells = [cell("raw", "---\n" + yaml.safe_dump(dict(title=title, description=subtitle), allow_unicode=True) + "---")]
    if rest: cells.append(cell("markdown", linked(rest, page, pages)))
    for old in notebook.cells[1:]:
        if old.cell_type == "markdown":
            section = next((line.lstrip("# ") for line in reversed(old.source.splitlines()) if line.startswith("#")),
                           section)
            cells.append(cell("markdown", linked(old.source, page, pages)))
        if old.cell_type != "code": continue
        asked, code = directives(old.source)
        if {"hide", "default_exp"} & set(asked) or DRAWN in code: continue
        if {"export", "exporti"} & set(asked):
            block = api(code, module, internal) if "export" in asked else folded(code, module, "Internal")
            if block: cells.append(cell("markdown", block))
            continue
        outputs = [output_kept(output, up) for output in old.outputs]
        if any("image/png" in (output.get("data") or {}) for output in outputs):
            asked.setdefault("fig-alt", json.dumps(f"Figure: {section}"))
        kept = [f"#| {name}: {value}" for name, value in asked.items() if name in KEPT and value]
        cells.append(cell("code", "\n".join([*kept, code]), outputs=outputs, execution_count=None))
    return NotebookNode(cells=cells, metadata=notebook.metadata, nbformat=4, nbformat_minor=5)


# ---- the home page ----

DRAWN = "def method_figure" # what home.html draws, drawn for readers of README.md

CARDS = [("tutorials/documents", "Your documents, in an hour", "Tune search on your files; see if it got better."),
         ("tutorials/five_thousand", "Five thousand pairs, one hour", "From a CSV of yours to a search model in use."),
         ("tutorials/quickstart", "What is an embedder?", "From a checkpoint to embeddings to training, in minutes."),
         ("pages/commands", "Commands", "Everything the command line does, by kind of work."),
         ("losses/reconstruction", "The losses", "The equation, the idea, the code, the assertion."),
         ("pages/results", "Does it help?", "What each part is worth, beside BM25 and MiniLM."),
         ("names", "API", "Every public function and class, with what it does.")]


def home(pages):
    "What stands above the text of the home page."
    there = {str(page) for page in pages.values()} | {"names"}
    card = '<a class="card-link" href="{}.html"><strong>{}</strong><span>{}</span></a>'
    cards = "\n".join(card.format(page, title, text) for page, title, text in CARDS if page in there)
    return (HERE/"home.html").read_text(encoding="utf-8").replace("{cards}", cards)


# ---- rendering ----

FROM_DISK = """<script>
if (location.protocol === "file:") { const web = window.fetch, at = document.currentScript;
  window.fetch = (url, ...rest) => !String(url).endsWith("search.json") ? web(url, ...rest) : new Promise((ok, no) => {
    const s = document.createElement("script"); s.src = String(url).replace(/json$/, "js"); s.onerror = no;
    s.onload = () => ok({json: async () => window.searchIndex}); document.head.append(s); }); }
</script>"""  # a page on the disk may not fetch a file, but it may load a script


def staged(folder):
    "Write everything that smalldocs reads into a folder."
    pages = all_notebooks()
    for path, page in pages.items():
        notebook = as_page(read(path), page, pages)
        if path == NOTEBOOKS/"index.ipynb":
            notebook.cells.insert(2, cell("markdown", f"```{{=html}}\n{home(pages)}\n```"))
        (folder/page).parent.mkdir(parents=True, exist_ok=True)
        (folder/f"{page}.ipynb").write_text(v4.writes(notebook), encoding="utf-8")
    papers = {name: title for name, title in PAPERS.items() if (ROOT/f"{name}.md").is_file()}
    for name, title in papers.items():
        text = re.sub(r"\A(<!--.*?-->\s*)?# .*\n", "", (ROOT/f"{name}.md").read_text(encoding="utf-8"))
        text = re.sub(r"\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)", lambda link: f"[{link[1]}]({pages[ROOT/link[2]]}.ipynb)"
                      if ROOT/link[2] in pages else link[1], text) # other files of the repository are not on the site
        (folder/f"{name}.md").write_text(f"---\ntitle: {title}\n---\n\n{text}", encoding="utf-8")
    public = list(names(pages))
    (folder/"names.md").write_text(names_page(public, pages, first_names()), encoding="utf-8")
    (folder/"_symbols.json").write_text(json.dumps(symbols(public, pages)), encoding="utf-8")
    (folder/"disk.html").write_text(FROM_DISK, encoding="utf-8")
    shutil.copytree(HERE/"assets", folder/"assets")
    if any("assets/plotly.min.js" in path.read_text(encoding="utf-8") for path in folder.rglob("*.ipynb")):
        shutil.copy2(plotly_script(), folder/"assets")
    shutil.copy2(NOTEBOOKS/"styles.css", folder)
    (folder/"_quarto.yml").write_text(yaml.safe_dump(configuration(sidebar(pages, papers), pages), sort_keys=False),
                                      encoding="utf-8")


def first_names():
    "Name -> module of what `from anchor_nb import ...` offers, which the API page shows first."
    tree = ast.parse((ROOT/"anchor_nb/__init__.py").read_text(encoding="utf-8"))
    homes = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES")
    return {word.arg: word.value.value for word in homes.keywords}


def plotly_script():
    "The script that figures one can move about in need; it comes with plotly."
    if not (plotly := find_spec("plotly")):
        raise SystemExit('a notebook holds a plotly figure, whose script comes with plotly: pip install '
                         '"anchor_nb[analysis]"')
    return Path(plotly.origin).parent/"package_data/plotly.min.js"


def renamed(part, pages):
    "A part of the configuration with pages for notebooks."
    if isinstance(part, dict): return {key: renamed(value, pages) for key, value in part.items()}
    if isinstance(part, list): return [renamed(value, pages) for value in part]
    return f"{pages[NOTEBOOKS/part]}.ipynb" if isinstance(part, str) and NOTEBOOKS/part in pages else part


def configuration(contents, pages):
    "nbs/_quarto.yml with what only a build knows."
    asked = yaml.safe_load((NOTEBOOKS/"_quarto.yml").read_text(encoding="utf-8"))
    asked.pop("metadata-files", None)
    asked["project"] |= {"output-dir": "_site", "resources": ["assets/**"]}
    asked["format"]["html"] |= {"include-in-header": ["disk.html"]}
    asked["website"] |= {"title": "anchor_nb", "favicon": "assets/favicon.svg",
                         "description": heading(read(NOTEBOOKS/"index.ipynb").cells[0].source)[1],
                         "sidebar": asked["website"].get("sidebar", {}) | {"contents": contents}}
    return renamed(asked, pages) | {"smalldocs": {"linkify": True}}


# gets a space before its argument
FUNCTION = re.compile(r"(<mi>(?:log|ln|exp|max|min|cos|sin)</mi>)"
                      r"(?=<m(?:i|n|frac|sup|sub|text|over|under|row><m(?:i|n)\b))")
FOLDS = re.compile(r'data-bs-target="(#quarto-sidebar-section[^"]*)" role="navigation"')
MATHS = re.compile(r'<span class="math (inline|display)">\\[\(\[](.*?)\\[\)\]]</span>', re.S)
REMOTE = re.compile(r"<(?:link|script)[^>]*katex[^>]*>(?:</script>)?|@import url\([^)]*googleapis[^)]*\);?")


def equation(match):
    "One equation as MathML, which browsers draw without a script; the LaTeX stays beside it for copying."
    import html
    from latex2mathml.converter import convert
    latex = re.sub(r"\\(arg)\b", r"\\operatorname{\1}", html.unescape(match[2]))
    latex = latex.replace(r"\tfrac", r"\frac").replace(r"\textstyle", "")
    drawn = convert(latex, display="block" if match[1] == "display" else "inline")
    # few fonts have the set minus
    drawn = FUNCTION.sub(r'\1<mspace width="0.17em"/>', drawn).replace("<mi>&#x029F5;</mi>", "<mo>\\</mo>")
    alternative = json.dumps(html.escape(latex)).replace("&quot;", "")
    drawn = drawn.replace("<math ", f"<math alttext={alternative} ", 1)
    return f'<span class="math {match[1]}">{drawn}</span>'


def offline(site):
    "Equations drawn, nothing fetched from elsewhere, the index also as a script, the sidebar open to the keyboard."
    for path in [*site.rglob("*.html"), *(site/"site_libs").rglob("*.css")]:
        text = before = path.read_text(encoding="utf-8")
        if path.suffix == ".html": # without href, the keyboard does not reach the folds
            text = FOLDS.sub(r'href="\1" data-bs-target="\1" role="button"', MATHS.sub(equation, text))
        text = REMOTE.sub("", text)
        if text != before: path.write_text(text, encoding="utf-8")
    entries = json.loads((site/"search.json").read_text(encoding="utf-8"))
    for entry in entries: entry["text"] = re.sub(r"\\[\(\[].*?\\[\)\]]", "", entry["text"], flags=re.S)
    (site/"search.json").write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
    (site/"search.js").write_text(f"window.searchIndex = {json.dumps(entries)};\n", encoding="utf-8")


def smalldocs(folder):
    "Render with smalldocs; the folder of the site."
    if not find_spec("smalldocs") or not find_spec("latex2mathml"):
        raise SystemExit('neither Quarto nor smalldocs is installed: pip install "anchor_nb[docs]"')
    from smalldocs import highlight, site
    highlight.css_class = cache(highlight.css_class) # a third of the time is spent on asking it the same
    staged(folder)
    made = site.build(folder, quiet=True)
    if made.warnings:
        raise SystemExit("the site has faults:\n" + "\n".join(made.warnings))
    offline(folder/"_site")
    return folder/"_site"


def idle(path):
    "nbdev runs every cell that imports something, in a kernel that has not run the others: only exported cells may."
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code" and "import" in cell.source and "export" not in directives(cell.source)[0]:
            cell.source = f"#| eval: false\n{cell.source}"
    path.write_text(v4.writes(notebook), encoding="utf-8")


def quarto(folder):
    "Render with nbdev's own command in a copy of the project, which its files for Quarto may litter; the site."
    if not find_spec("nbdev"):
        raise SystemExit('nbdev renders with Quarto: pip install "anchor_nb[dev]", or say --engine smalldocs')
    shutil.copytree(ROOT/"anchor_nb", folder/"anchor_nb", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(NOTEBOOKS, folder/"nbs", ignore=shutil.ignore_patterns(".*", HERE.name))
    for path in (folder/"nbs").rglob("*.ipynb"): idle(path)
    project = (ROOT/"pyproject.toml").read_text(encoding="utf-8")
    project = project.replace("[tool.nbdev]", "[tool.nbdev]\ncustom_sidebar = true")
    (folder/"pyproject.toml").write_text(project, encoding="utf-8")
    # that page is ours alone
    contents = [entry for entry in sidebar(all_notebooks(), {}) if entry.get("section") != "API"]
    (folder/"nbs/sidebar.yml").write_text(yaml.safe_dump({"website": {"sidebar": {"contents": contents}}},
                                                         sort_keys=False), encoding="utf-8")
    subprocess.run([Path(sys.executable).with_name("nbdev-docs")], cwd=folder, check=True)
    return folder/"_docs"


ENGINES = {"smalldocs": smalldocs, "quarto": quarto}


def build(out, engine="auto"):
    "Build the site into a folder, which is replaced when all is well; refuses to replace what is no site."
    out = Path(out).resolve()
    if out.exists() and any(out.iterdir()) and not (out/"site_libs").is_dir():
        raise SystemExit(f"{out} holds something else than a site; choose another --out")
    chosen = engine if engine != "auto" else "quarto" if shutil.which("quarto") else "smalldocs"
    with tempfile.TemporaryDirectory() as name:
        made = ENGINES[chosen](Path(name).resolve())
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(made, out)
    print(f"{len(list(out.rglob('*.html')))} pages by {chosen}: {os.path.relpath(out/'index.html')}")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=["auto", *ENGINES], default="auto",
                        help="auto takes Quarto where it is installed")
    parser.add_argument("--out", default=ROOT/"_docs", help="folder of the site (default: _docs in the project)")
    asked = parser.parse_args()
    build(asked.out, asked.engine)
