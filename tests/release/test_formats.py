"Other engines give our vectors: each format in each precision, architectures, refusals, and the certificate."
import importlib.util
import json
import re
import sys
from functools import partial

import numpy as np
import pytest

from anchor_nb.inference.search import Index
from anchor_nb.models import embedder
from anchor_nb.models.backbone import compile_layers
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.engines import ENGINE_FILES
from anchor_nb.release import formats
from anchor_nb.release.certificate import as_table, by_program, certify, export_everywhere, python_of, with_table
from anchor_nb.release.export import LONG, SHORT, export
from anchor_nb.release.formats import add_formats
from anchor_nb.release.hub import files_of
from test_export import checkpoint

NEEDS = dict(onnx=("onnxruntime", "onnx", "onnxscript"), openvino=("openvino", "nncf"), gguf=("xllamacpp", "gguf"))
TEXTS = [*SHORT, LONG*60, "x", "naïve 文字 👩‍👧 1808 3.14"]
# largest difference of one number, least cosine: rounding of sums; of f16 weights; of int8 and int4 weights of 64 rows
ALLOWED = {("onnx", "fp32"): (1e-5, 0.99999), ("openvino", "fp32"): (1e-5, 0.99999), ("gguf", "fp16"): (2e-3, 0.9999),
           ("onnx", "int8"): (0.05, 0.995), ("openvino", "int8"): (0.05, 0.995), ("gguf", "int8"): (0.05, 0.998),
           ("gguf", "int4"): (0.3, 0.93)}


def need(backend):
    missing = [name for name in NEEDS[backend] if not importlib.util.find_spec(name)]
    if missing: pytest.skip(f"{', '.join(missing)} not installed: pip install anchor_nb[{backend}]")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "The tiny model in every format whose library is here."
    folder = tmp_path_factory.mktemp("formats")/"tiny"
    export("tiny", folder, query="Find the passage")
    add_formats(folder, [name for name, modules in NEEDS.items() if all(map(importlib.util.find_spec, modules))])
    return folder


@pytest.mark.parametrize("backend, precision", list(ENGINE_FILES))
def test_every_format_gives_our_vectors(exported, backend, precision):
    "Queries, documents, truncated texts and shortened vectors, in fp32 and smaller."
    need(backend)
    ours = AnchorEmbedder.from_pretrained("tiny")
    theirs = AnchorEmbedder.from_pretrained(exported, backend=backend, precision=precision)
    largest, cosine = ALLOWED[backend, precision]
    for a, b in ((ours.encode_query(TEXTS, "Find the passage"), theirs.encode_query(TEXTS)),
                 (ours.encode_document(TEXTS), theirs.encode_document(TEXTS, batch_size=2)),
                 (ours.encode(TEXTS, truncate_dim=16), theirs.encode(TEXTS, truncate_dim=16))):
        assert abs(a - b).max() < largest*(1 + (a.shape[1] == 16)) and (a*b).sum(1).min() > 1 - 3*(1 - cosine)
    assert theirs.encode([]).shape == (0, 64) and theirs.encode("a cat").shape == (64,)
    with pytest.raises(ValueError, match="holds no weights in torch"): theirs.lm


@pytest.mark.parametrize("kind, said", [
    ("llama", {}), ("qwen2", {}), ("qwen3", dict(pooling="mean")), ("mistral", dict(pooling="first")),
    ("llama", dict(pooling="mean", bidirectional=True))])
def test_llama_cpp_knows_every_architecture(tmp_path, kind, said):
    "Rotations, biases, norms of queries and keys, poolings, and both directions."
    need("gguf")
    model = checkpoint(tmp_path/"m", kind, **said)
    export(model, tmp_path/"out")
    add_formats(tmp_path/"out", ["gguf"])
    theirs = AnchorEmbedder.from_pretrained(tmp_path/"out", backend="gguf").encode(TEXTS)
    assert abs(AnchorEmbedder.from_pretrained(model).encode(TEXTS) - theirs).max() < 3e-3


def test_a_gguf_that_llama_cpp_could_not_follow_is_refused(tmp_path):
    pytest.importorskip("gguf")
    export(checkpoint(tmp_path/"m", pooling="weighted_mean"), tmp_path/"out")
    with pytest.raises(ValueError, match="with any pooling but weighted_mean"): add_formats(tmp_path/"out", ["gguf"])
    for model, words, message in ((str(tmp_path/"m"), {}, "with any pooling but weighted_mean"),
                                  ("minilm", {}, "bert with pooling=mean has no GGUF"),
                                  ("tiny", dict(adapter=True), "an adapter alone has no other formats")):
        with pytest.raises(ValueError, match=message):
            export_everywhere(model, tmp_path/"early", ["gguf"], **words)
    assert not (tmp_path/"early").exists(), "the same command can be given again"


@pytest.mark.parametrize("config, message", [
    (dict(hidden_act="gelu"), "a GGUF cannot store hidden_act='gelu'"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)),
     r"positions are scaled by 1.13863 \(rope_type=yarn\)")])
def test_what_the_settings_of_a_gguf_cannot_say_is_refused(tmp_path, config, message):
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match=message):
        export_everywhere(checkpoint(tmp_path/"m", **config), tmp_path/"out", ["gguf"])
    assert not (tmp_path/"out").exists()


def test_scaled_positions_go_into_the_gguf(tmp_path):
    "Llama 3.1 and 3.2 stretch their positions; llama.cpp gets the factors."
    need("gguf")
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64)
    model = checkpoint(tmp_path/"m", rope_parameters=rope)
    export(model, tmp_path/"out")
    add_formats(tmp_path/"out", ["gguf"])
    theirs = AnchorEmbedder.from_pretrained(tmp_path/"out", backend="gguf").encode(TEXTS)
    assert abs(AnchorEmbedder.from_pretrained(model).encode(TEXTS) - theirs).max() < 3e-3


def test_what_a_file_cannot_do_is_said_before_anything_is_loaded(exported, tmp_path):
    for words, message in ((dict(backend="onnx", pooling="mean"), "pooling cannot be changed in a file"),
                           (dict(backend="onnx", compile=True), "compile cannot be changed in a file"),
                           (dict(backend="onnx", precision="bf16"), "choose auto or fp32, int8"),
                           (dict(backend="tensorrt"), "choose torch, onnx, openvino or gguf"),
                           (dict(precision="int4"), "int4")):
        with pytest.raises((ValueError, KeyError), match=message): AnchorEmbedder.from_pretrained(exported, **words)
    with pytest.raises(FileNotFoundError, match="write it with `anchor-nb export MODEL OUT --format onnx`"):
        AnchorEmbedder.from_pretrained("tiny", backend="onnx")
    with pytest.raises(ValueError, match="choose onnx, openvino or gguf"): add_formats(exported, ["onnx", "tflite"])
    assert files_of(exported)[1] == []


def test_a_format_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    broken = [True, False]
    def write(folder, out):
        for precision in ("fp16", "int8", "int4"):
            (out/ENGINE_FILES["gguf", precision]).write_text(precision)
            if precision == "int8" and broken.pop(0):
                raise ValueError("the disk is full")
    monkeypatch.setattr(formats, "check_formats", lambda names: None)
    monkeypatch.setattr(formats, "write_gguf", write)
    with pytest.raises(ValueError, match="the disk is full"): add_formats(tmp_path, ["gguf"])
    assert not [*tmp_path.iterdir()]
    assert add_formats(tmp_path, ["gguf"]) == {ENGINE_FILES["gguf", name]: 4 for name in ("fp16", "int8", "int4")}
    assert [path.name for path in tmp_path.iterdir()] == ["gguf"]


def test_a_reason_stays_in_its_cell():
    row = dict(engine="vLLM", version="", precision="fp32", reason="failed: ValueError: a | b\nand c")
    line, = as_table([row]).splitlines()[2:]
    assert line == "| vLLM | fp32 | not run: failed: ValueError: a \\| b and c |  |  |  |  |"


def test_int8_in_torch_stays_close():
    ours, int8 = (AnchorEmbedder.from_pretrained("tiny", precision=name, device="cpu") for name in ("fp32", "int8"))
    assert 0.99 < (ours.encode(TEXTS)*int8.encode(TEXTS)).sum(1).min() < 1 - 1e-7


def test_encoders_keep_the_values_of_attention_too():
    from torch import nn
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel
    from anchor_nb.models.engines import Int8Linear, int8_linears
    sizes = dict(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    small = dict(vocab_size=9, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    for lm, kept in ((BertModel(BertConfig(**sizes)), "value"), (DistilBertModel(DistilBertConfig(**small)), "v_lin")):
        layers = dict(int8_linears(lm).named_modules())
        plain = [name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        assert plain == [kept] and sum(isinstance(layer, Int8Linear) for layer in layers.values()) >= 5


def test_parts_of_a_state_in_a_graph_do_not_take_the_name_of_another():
    "Layers of one kind are numbered, such as gelu and gelu_1."
    onnx = pytest.importorskip("onnx")
    product = lambda states, out: formats.int8_product(onnx.helper.make_node("MatMul", [states, "w"], [out]), 2, set())
    made = [name for states, out in (("gelu", "linear"), ("gelu_1", "linear_1")) for node in product(states, out)
            for name in node.output]
    assert len({*made, "gelu", "gelu_1"}) == len(made) + 2


def test_a_compiled_model_gives_the_same_vectors(monkeypatch):
    "Of one text and of many, as traced; the compiled code itself is measured in benchmarks/where.py."
    monkeypatch.setattr(embedder, "compile_layers", partial(compile_layers, backend="eager"))
    for precision in ("fp32", "int8"):
        plain, compiled = (AnchorEmbedder.from_pretrained("tiny", precision=precision, device="cpu", compile=flag)
                           for flag in (False, True))
        for texts in (TEXTS, TEXTS[:1]):
            np.testing.assert_allclose(compiled.encode(texts), plain.encode(texts), atol=1e-6)


def test_what_other_engines_cannot_do_is_said(exported, tmp_path):
    need("onnx")
    onnx = AnchorEmbedder.from_pretrained(exported, backend="onnx")
    with pytest.raises(ValueError, match="file normalises too"): onnx.encode(TEXTS, normalize_embeddings=False)
    Index(onnx, TEXTS).save(tmp_path/"index")
    assert Index.load(onnx, tmp_path/"index").search(TEXTS[0], k=1)[0].id == "0"
    with pytest.raises(ValueError, match="weights in int8 cannot be saved"):
        AnchorEmbedder.from_pretrained("tiny", precision="int8", device="cpu").save_pretrained(tmp_path/"int8")


def test_the_certificate_notices_another_model(exported):
    "Equal to the model it was made of, and unlike another; engines that are not here are not run."
    same = certify("tiny", exported, 30, ["sentence-transformers", "vLLM"])
    assert same[0]["largest"] < 1e-5 and same[0]["refused"] == 0 and same[0]["texts"] == 30
    assert json.loads((exported/"certificate.json").read_text()) == same
    if not importlib.util.find_spec("vllm"): assert "not run: not installed here" in as_table(same)
    assert "### The same vector" in with_table("# x\n\n## Scores\n", same)


def test_an_engine_may_live_in_another_interpreter(exported, tmp_path, monkeypatch):
    "It refuses a text with null, and its last words are the reason when it gives no answer."
    monkeypatch.setenv("ANCHOR_NB_VLLM_PYTHON", str(tmp_path/"python"))
    assert python_of("vLLM") == str(tmp_path/"python")
    answer = "import json, sys; json.dump([None, dict(vector=[1, 2], ids=[3])], open(sys.argv[3], 'w'))"
    vectors, ids = by_program([sys.executable], answer, exported, ["a", "b"])
    assert vectors[0] is None and vectors[1].tolist() == [1, 2] and ids == [None, [3]]
    with pytest.raises(RuntimeError, match="^no room for it$"):
        by_program([sys.executable], "raise SystemExit('no room for it')", exported, ["a"])


def test_another_model_is_noticed(exported, tmp_path):
    other = checkpoint(tmp_path/"m")
    export(other, tmp_path/"out", query="Find the passage")
    (tmp_path/"out/model.safetensors").unlink()
    torch_weights = checkpoint(tmp_path/"n", attention_bias=False, rms_norm_eps=0.1)
    (tmp_path/"n/model.safetensors").rename(tmp_path/"out/model.safetensors")
    config = json.loads((tmp_path/"out/config.json").read_text()) | dict(rms_norm_eps=0.1)
    (tmp_path/"out/config.json").write_text(json.dumps(config))
    row = certify(other, tmp_path/"out", 30, ["sentence-transformers"])[0]
    assert torch_weights and row["largest"] > 1e-3


def test_llama_cpp_is_given_texts_and_says_its_ids(exported):
    "Only texts that spell special tokens differ, which llama.cpp takes for the tokens; long texts are refused."
    need("gguf")
    rows = certify("tiny", exported, 60, ["llama.cpp"])
    assert [row["precision"] for row in rows] == ["fp16", "int8", "int4"]
    assert rows[0]["largest"] < 2e-3 and rows[0]["other_kinds"] == ["special"]
    assert rows[0]["refused_kinds"] == ["long"]


def test_the_card_carries_the_table(tmp_path):
    result = export_everywhere("tiny", tmp_path/"out", servers=True)
    card = (tmp_path/"out/README.md").read_text()
    assert re.search(r"\| sentence-transformers [\d.]+ \| fp32 \| \d+ \| 1\.000000 \|", card)
    assert card.index("### The same vector") < card.index("## Scores") and len(result["certificate"]) > 9
    assert np.isclose(result["certificate"][0]["cosine"], 1)


def test_an_engine_whose_interpreter_is_gone_is_not_installed(monkeypatch):
    from anchor_nb.release.certificate import version_of
    monkeypatch.setenv("ANCHOR_NB_VLLM_PYTHON", "/gone/python")
    assert version_of("vLLM", "vllm") == ""
