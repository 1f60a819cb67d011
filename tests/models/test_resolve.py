"Short names of models: the same files everywhere, a path or a hub id, and the converted model speaks."
from pathlib import Path

import pytest

from anchor_nb.data.packages import sha256
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


def test_hub_first_when_configured(monkeypatch, cache):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("ANCHOR_NB_HUB", "1")
    assert resolving.resolve_model("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"


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
