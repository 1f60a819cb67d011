"""JupyterLab for real: a headless browser opens a stage notebook, runs all cells, sees the widget move and the figure."""
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from browser import chromium, free_port, open_page  # noqa: F401 (fixtures)

from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.resolve import resolve_model
from anchor_nb.release.lab import copy_notebooks, lab_command, notebook_files

NO_QUESTIONS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
                # or cells out of sight are not in the page
                "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"}}
TOKEN = "a-token-for-this-test"


def reachable(address):
    try: return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError: return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "What `anchor-nb lab` copies, stage I set to 30 steps, beside the toy corpus that `prepare` would leave."
    place = tmp_path_factory.mktemp("lab")/"work"
    copy_notebooks(place)
    shutil.copytree(build_corpus("toy")/"pairs", place/"stages/runs/smoke/data/pairs")
    path = place/"stages/stage1.ipynb"
    text, count = re.subn(r"steps: int = 6\b", "steps: int = 30", path.read_text(encoding="utf-8"))
    assert count == 1
    path.write_text(text, encoding="utf-8")
    resolve_model("tiny")
    return place


@pytest.fixture(scope="module")
def lab(folder):
    "Address of a JupyterLab with nobody's settings."
    home, port = folder.parent, free_port()
    for name, values in NO_QUESTIONS.items():
        file = home/"settings"/f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {f"JUPYTER_{name.upper()}_DIR": str(home/name) for name in ("config", "data",
                                                                         "runtime")} | dict(JUPYTERLAB_SETTINGS_DIR=str(home/"settings"), JUPYTERLAB_WORKSPACES_DIR=str(home/"workspaces"), IPYTHONDIR=str(home/"ipython"))
    quiet = dict(JUPYTER_PREFER_ENV_PATH="1", OMP_NUM_THREADS="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    words = lab_command(folder, port, browser=False, arguments=["--ServerApp.port_retries=0",
                                                                f"--IdentityProvider.token={TOKEN}", "--allow-root"])
    with open(home/"log", "w") as log:
        server = subprocess.Popen(words, env=os.environ | places | quiet, stdout=log, stderr=subprocess.STDOUT,
                                  cwd=home)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while not reachable(f"{address}/api") and time.monotonic() < deadline and server.poll() is None: time.sleep(0.2)
        assert reachable(f"{address}/api"), (home/"log").read_text()[-3000:]
        yield address
    finally:
        server.terminate()
        server.wait(20)


def test_whatever_a_tutorial_reads_is_copied_with_it():
    names, root = notebook_files(), Path(__file__).resolve().parent.parent.parent/"nbs/tutorials"
    read = {found for path in root.glob("*.ipynb")
            for found in re.findall(r'["\']\.\./((?:results|benchmarks)/[\w./-]+)', path.read_text().replace('\\"',
                                                                                                             '"'))}
    assert len(read) > 2 and not (missing := [found for found in read if not any(name.startswith(found)
                                                                                 for name in names)]), missing


def test_an_installed_copy_offers_the_same_files(tmp_path, monkeypatch):
    "Stages lie in anchor_nb/notebooks, all else in folders below it."
    from anchor_nb.release import lab as module
    here = module.notebook_files()
    assert module.checkout(), "the tests run in a checkout"
    for name, file in here.items():
        target = tmp_path/"anchor_nb/notebooks"/(Path(name).name if name.startswith("stages/") else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    (tmp_path/"anchor_nb/notebooks/tutorials/__pycache__").mkdir()
    monkeypatch.setattr(module, "package_folder", lambda: tmp_path/"anchor_nb")
    assert module.checkout() is None
    assert list(module.notebook_files()) == list(here)


def watch_bars(page):
    "Keep each text that a progress widget shows, from now on."
    page.evaluate("""() => { window.seen = []; new MutationObserver(() => { for (const bar of document.querySelectorAll('.jp-OutputArea .jupyter-widgets.widget-hbox')) {
        const text = bar.innerText.replaceAll('\\u2007', ' ').replaceAll('\\n', ' ').trim(); if (text && !window.seen.includes(text)) window.seen.push(text) } }).observe(document.body, {subtree: true, childList: true, characterData: true}) }""")


def test_a_stage_notebook_runs_in_jupyterlab(lab, folder, open_page):
    page = open_page(f"{lab}/lab/tree/stages/stage1.ipynb?token={TOKEN}")
    page.context.set_default_timeout(180_000)
    page.wait_for_selector('.jp-Toolbar-kernelName:has-text("Python 3")')
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
    page.wait_for_selector(".jp-Notebook .jp-CodeCell >> nth=6")
    watch_bars(page)
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
    page.wait_for_selector(".jp-CodeCell >> nth=-1 >> .jp-InputPrompt:text-matches('\\\\[\\\\d+\\\\]')")
    page.wait_for_selector(".jp-OutputArea-output img, .jp-OutputArea-output svg")
    if shots := os.environ.get("ANCHOR_NB_SCREENSHOTS"):
        page.locator(".jp-OutputArea-output img").first.scroll_into_view_if_needed()
        page.screenshot(path=Path(shots)/"lab.png")
        page.locator(".jupyter-widgets.widget-hbox").first.scroll_into_view_if_needed()
        page.screenshot(path=Path(shots)/"lab-widget.png")
    figure = page.locator(".jp-OutputArea-output img").first.bounding_box()
    assert figure["width"] > 200 and figure["height"] > 100
    assert not page.locator('[data-mime-type="application/vnd.jupyter.error"], '
                            '[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()
    shown = [text for text in page.evaluate("window.seen") if text.startswith("Stage1:")]
    assert len(shown) > 2 and "30/30" in shown[-1] and "loss" in shown[-1], shown
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 30
    while "image/png" not in (text := (folder/"stages/stage1.ipynb").read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.2)
    outputs = [output for cell in nbformat.reads(text, 4).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs) and not any(output.output_type == "error"
                                                                                        for output in outputs)
    assert len((folder/"stages/runs/smoke/stage1/metrics.jsonl").read_text().splitlines()) == 30


def test_jupyterlab_opens_at_the_tutorials_and_asks_for_the_token(lab, folder, open_page):
    page = open_page(f"{lab}/?token={TOKEN}")
    page.wait_for_selector('.jp-DirListing-itemText:has-text("evaluation.ipynb")', timeout=180_000)
    page.wait_for_selector('.jp-NotebookPanel h1:has-text("Quickstart")', timeout=180_000)
    if shots := os.environ.get("ANCHOR_NB_SCREENSHOTS"): page.screenshot(path=Path(shots)/"lab-open.png")
    with pytest.raises(urllib.error.HTTPError): urllib.request.urlopen(f"{lab}/api/contents", timeout=10)
