"Short names of models: the same files everywhere, a path or a hub id, and the converted model speaks."
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from anchor_nb.cli.main import app
from anchor_nb.core import names
from anchor_nb.data.packages import sha256
from anchor_nb.evaluation.encoders import candidates, library_of
from anchor_nb.models import resolve as resolving
from common import files


def test_tiny_is_the_same_everywhere(tmp_path, cache):
    first = Path(resolving.resolve_model("tiny"))
    (tmp_path / "again").mkdir()
    resolving.make_tiny(tmp_path / "again")
    assert files(first) == files(tmp_path / "again")
    assert sha256(first / "model.safetensors").startswith("584ad31963a3b4b5")
    before = (first / "config.json").stat().st_mtime_ns
    assert resolving.resolve_model("tiny") == str(first) and (first / "config.json").stat().st_mtime_ns == before


def test_path_or_hub_id(tmp_path, monkeypatch):
    "owner/model goes through, unless a folder `owner` is there: then it is a path that is missing."
    monkeypatch.chdir(tmp_path)
    assert resolving.resolve_model("runs/stage1") == "runs/stage1"
    Path("runs").mkdir()
    with pytest.raises(FileNotFoundError, match="no model folder 'runs/stage1'"): resolving.resolve_model("runs/stage1")
    Path("runs/stage1").mkdir()
    assert resolving.resolve_model("runs/stage1") == "runs/stage1"


# ---- wrong names ----

@pytest.fixture
def asked(monkeypatch):
    "No network, and the hosts that somebody wanted to reach."
    hosts = []
    def no_network(host, *_, **__):
        hosts.append(host)
        raise OSError("no network")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return hosts


@pytest.fixture
def here(tmp_path, monkeypatch):
    "A folder with runs of all kinds."
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/anchor/model", "runs/empty", "runs/begun", "runs/data/pairs"): Path(folder).mkdir(parents=True)
    Path("runs/anchor/model/config.json").write_text("{}")
    Path("runs/begun/run.json").write_text(json.dumps(dict(stage="stage1", status="failed",
                                                           command="anchor-nb stage1 -p data=x")))
    Path("runs/data/run.json").write_text(json.dumps(dict(stage="prepare", status="complete")))
    return tmp_path


LOCAL = {"tyni": "there is no model 'tyni'; did you mean tiny?", "smolm2-135m": "did you mean smollm2-135m?",
         "all-MiniLM-L6": "did you mean minilm?", "bm25": "it is a yardstick, always in the table",
         "./nowhere": "there is no model folder './nowhere'; short names are", "run": "did you mean runs?",
         "runs/anchr": "there is no model folder 'runs/anchr'; did you mean runs/anchor?",
         "runs": "runs holds no model; did you mean runs/anchor?",
         "runs/empty": "runs/empty holds no model: it has none",
         "runs/begun": "without a finished model (failed); to resume it: anchor-nb stage1 -p data=x",
         "runs/data": "runs/data is a run of prepare and holds pairs; give it as data"}


@pytest.mark.parametrize("name", LOCAL)
def test_a_wrong_name_is_answered_at_once_without_asking_the_hub(name, here, asked):
    for find in (resolving.find_model, resolving.start_of):
        with pytest.raises((FileNotFoundError, ValueError)) as error: find(name)
        assert LOCAL[name] in str(error.value)
    if name != "bm25":
        with pytest.raises((FileNotFoundError, ValueError)): candidates({"a": name})
    assert asked == []


@pytest.mark.parametrize("name", ["nobody/has-this", "qqqq", "run/x"])
def test_the_hub_is_asked_once_where_nothing_is_near(name, here, asked):
    with pytest.raises(FileNotFoundError, match="does not answer, your token has expired, or HF_HUB_OFFLINE is set; "):
        resolving.find_model(name)
    assert len(asked) == 1


def test_nobody_is_asked_offline(asked, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"): resolving.find_model("nobody/has-this")
    assert asked == []


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch):
    "Not even while the host's name is looked up, which has no timeout of its own."
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert names.hub_has("nobody/has-this", seconds=0.1) is None and not over.is_set()
    over.set()


@pytest.mark.parametrize("headers, there", [
    ({}, False), ({"X-Error-Message": "Invalid credentials in Authorization header"}, None)])
def test_a_token_that_has_expired_says_nothing_of_the_model(headers, there, monkeypatch):
    reply = SimpleNamespace(status_code=401, headers=headers)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(get=lambda *_, **__: reply))
    assert names.hub_has("nobody/has-this") is there


def test_what_the_hub_says_counts(monkeypatch, here):
    monkeypatch.setattr(resolving, "hub_has", lambda name: name == "owner/model")
    assert resolving.find_model("owner/model") == "owner/model"
    with pytest.raises(FileNotFoundError, match="the hub has none that you may see; short names are"):
        resolving.find_model("owner/modle")


@pytest.mark.parametrize("name, requests", [("minilm", 0), ("all-MiniLM-L6-v2", 0), ("All-MINILM-l6-v2", 0),
                                            ("sentence-transformers/all-MiniLM-L6-v2", 1)])
def test_minilm_comes_from_its_package_where_the_hub_is_not_reachable(name, requests, asked, monkeypatch, tmp_path):
    (tmp_path/"modules.json").write_text("[]")
    monkeypatch.setattr(resolving, "cached_model", lambda short: str(tmp_path) if short == "minilm" else "")
    assert resolving.find_model(name) == str(tmp_path) and len(asked) == requests
    assert library_of(name) == "sentence-transformers"


def test_the_commands_say_so_too(here, asked):
    Path("corpus.jsonl").write_text('{"_id": "a", "text": "b"}\n')
    for command in (["search", "tyni", "corpus.jsonl", "q"], ["export", "tyni", "out"],
                    ["encode", "corpus.jsonl", "--model", "tyni", "--out", "v"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and "there is no model 'tyni'\ndid you mean tiny?" in result.output, result.output
    assert asked == []


@pytest.mark.registry
def test_smollm2():
    "The converted model speaks, and does not pad with its end token."
    transformers = pytest.importorskip("transformers")
    folder = resolving.cached_model("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, model.config.pad_token_id) == (2, 0, 0)
    words = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**words, max_new_tokens=3, do_sample=False)[0])
    assert (Path(folder) / "LICENSE").read_text().strip().startswith("Apache License")
    assert not list(Path(folder).glob("*.gguf"))
