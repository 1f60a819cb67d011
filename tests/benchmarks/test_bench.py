"The benchmarks run, on a tiny model, and both sides do the same work; how fast they are is not tested."
import json
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import matplotlib
import papermill
import pytest
import torch
import transformers
from matplotlib import pyplot
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from transformers import AutoModelForCausalLM

from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.rows import Example
from anchor_nb.runs.ledger import read_rows
from anchor_nb.training.flops import SHAPES, shape_of
from anchor_nb.training.inputs import check_inputs
from anchor_nb.training.memory import Setup
from anchor_nb.training.memory import memory as memory_of

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent/"nbs"/"benchmarks"
sys.path.insert(0, str(NOTEBOOKS))
from bench import CASES, busy_seconds, encode_cases, stage1_module
from isolation import OURS, check_same, isolated, memory, merged
from peers import closing, pass_lengths, triplets
from workloads import bench_model, corpus_rows, formatter_of, llama_config, repeated, text_mix

QUICK = dict(stage1=dict(model="tiny", corpora=["toy"], batches=[8], max_length=64, micro_tokens=256, rounds=1),
             stage2=dict(model="tiny", corpora=["toy"], batches=[8], max_length=64, micro_tokens=300, mini_batch=4,
                         learning_rate=1e-2, rounds=1),
             encode=dict(model="tiny", corpora=["toy"], mixes=["mixed"], texts=48, max_length=64, batch=8, rounds=1),
             growth=dict(corpus="toy", texts=[200], rows=[500], batches=[4], lengths=[64], vocabularies=[1024],
                         available=100),
             analyse=dict(layers=2, width=32, corpus="toy", texts=[120], max_length=32))
WAYS = dict(stage1=["padded"], stage2=["sentence-transformers", "sentence-transformers cached"],
            encode=["sentence-transformers", "padded loop"],
            growth=["sentence-transformers", "built", "cached", "padded"])


@pytest.mark.parametrize("name", QUICK)
def test_a_notebook_runs_and_keeps_a_row_for_each_way(name, tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    pyplot.switch_backend("agg")
    space = dict(__name__="__main__")
    with matplotlib.rc_context():
        for cell in json.loads((NOTEBOOKS/f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code": exec("".join(cell["source"]), space)
            if "parameters" in cell["metadata"].get("tags", []): space |= QUICK[name] | dict(results=str(tmp_path))
    pyplot.close("all")
    transformers.utils.logging.enable_progress_bar() # which a notebook has turned off
    rows = read_rows(tmp_path/f"{name}.jsonl")
    assert {row["way"] for row in rows} == ({OURS, *WAYS[name]} if name in CASES else {"streaming", "extract all"})
    for row in rows:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("seconds", "peak_bytes"))
        assert set(row) >= {"bench", "at", "parameters", "threads", "machine", "versions", "code", "all_seconds"}
    if name in CASES: assert list(read_rows(NOTEBOOKS/f"results/{name}.jsonl")[0]) == list(rows[0])


@pytest.mark.parametrize("name", QUICK)
def test_every_parameter_of_a_notebook_is_described(name):
    parameters = papermill.inspect_notebook(str(NOTEBOOKS/f"{name}.ipynb"))
    assert all(each["help"] and each["inferred_type_name"] != "None" for each in parameters.values())
    assert json.loads(parameters["results"]["default"]) == "results" and set(QUICK[name]) < set(parameters)


def test_ways_that_differ_are_not_compared():
    check_same({OURS: dict(loss=[1.0, 2.0]), "peer": dict(loss=[1.00001, 2.0])}, "loss", tolerance=1e-4)
    for theirs in (1.01, [1.0, 1.0], float("nan")):
        with pytest.raises(RuntimeError, match="peer and anchor_nb differ in loss"):
            check_same({OURS: dict(loss=1.0), "peer": dict(loss=theirs)}, "loss", tolerance=1e-3)
    settings = dict(QUICK["encode"], repeats=1, micro_tokens=0, precision="auto")
    with pytest.raises(RuntimeError, match="differ from ours by"): list(encode_cases(**settings, tolerance=1e-12))


def test_memory_of_one_process_is_not_that_of_another():
    block = bytearray(1_500_000_000)
    block[::4096] = b"x"*len(block[::4096])
    assert isolated("isolation:memory")[1] < 1_500_000_000 < memory()[1]
    with pytest.raises(RuntimeError, match="memory x: TypeError"): isolated("isolation:memory", way="x")
    with pytest.raises(RuntimeError, match="it ended without an answer, with exit code -6"): isolated("os:abort")
    assert merged([dict(seconds=[1.0, 1.2], peak_bytes=5), dict(seconds=[3.0], peak_bytes=7)])["seconds"] == 1.2


@pytest.mark.parametrize("name", ["llama-3.2-3b", "llama-3.1-8b"])
def test_encoding_is_planned_with_the_head_that_an_embedder_loads(name):
    with torch.device("meta"): loaded = AutoModelForCausalLM.from_config(llama_config(SHAPES[name]))
    weights = memory_of(SHAPES[name], Setup("encode", "pure_bf16"), 1)["weights"]
    assert weights == 2*sum(p.numel() for p in loaded.parameters())


def test_the_time_of_a_kernel_counts_once():
    event = partial(FunctionEvent, thread=1, start_us=0, use_device="cuda", device_index=0)
    operator = event(1, "aten::mm", end_us=7)
    operator.append_kernel("gemm", 0, 50)
    kernel = event(2, "gemm", end_us=50, device_type=DeviceType.CUDA)
    note = event(3, "a step", end_us=90, device_type=DeviceType.CUDA, is_user_annotation=True)
    assert operator.self_device_time_total == 50, "the time of the kernel stands in both"
    assert busy_seconds([operator, kernel, note], True) == pytest.approx(50e-6)
    assert busy_seconds([operator], False) == pytest.approx(7e-6)


def test_both_steps_count_the_tokens_they_run():
    recipe = Stage1(model="tiny", data="unused", out="unused", max_length=64, micro_tokens=256, precision="fp32")
    for way, padded in ((OURS, False), ("padded", True)):
        module, step = stage1_module(way, recipe)
        items = step.prepare([Example(row["query"], row["positive"], [], "", "") for row in corpus_rows("toy", 12)])
        device = next(module.parameters()).device
        facts = step.run(module, items, torch.Tensor.backward, lambda last: nullcontext(), device)
        assert facts["tokens"] == sum(map(sum, pass_lengths(items["anchor"][0], closing(step.formatter), padded)))


def test_a_peer_needs_a_hard_negative_in_each_example(tmp_path):
    recipe = Stage2(model="tiny", data=str(build_corpus("toy")/"pairs"), out=str(tmp_path), steps=2, global_batch=8,
                    max_length=64, negatives=2, save_steps=0)
    with pytest.raises(ValueError, match="has an example with 2 hard negatives"): triplets(recipe, check_inputs(recipe))


def test_texts_are_as_long_as_their_mix_says():
    formatter = formatter_of("tiny", 64)
    lengths = {mix: [len(text.ids) for text in formatter(text_mix(mix, ["toy"], 12, formatter))]
               for mix in ("short", "uniform", "mixed", "long")}
    assert set(lengths["uniform"]) == {32} and set(lengths["long"]) == {64} and max(lengths["short"]) < 64
    assert all(len(each) == 12 for each in lengths.values())
    assert len({row["query"] for row in repeated(corpus_rows("toy", 20), 50)}) == 50
    with pytest.raises(ValueError, match="no mix 'odd'"): text_mix("odd", ["toy"], 12, formatter)
    with pytest.raises(ValueError, match="not 10000"): corpus_rows("toy", 10_000)


@pytest.mark.parametrize("name", SHAPES)
def test_a_random_model_has_the_sizes_of_the_planner(name):
    made, shape = shape_of(llama_config(SHAPES[name])), SHAPES[name]
    for part in ("layers", "hidden", "query", "key", "mlp", "vocabulary", "tied"):
        assert getattr(made, part) == getattr(shape, part)
    with pytest.raises(ValueError, match="there are random:llama-3.2-1b"): bench_model("random:gpt5")
