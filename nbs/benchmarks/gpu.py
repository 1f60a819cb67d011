"""Is this GPU machine right, and is it fast? `make gpu` runs this file; `gpu.ipynb`, beside it, shows the rows.

Four stages of rising cost: a parity, b speed and memory, c several GPUs, d the experiment. Each is a list of parts, and
each part has its own time limit and its own processes. A part that fails, runs out of time or lacks a package leaves a
row that says so, and the next one begins. Rows are written as they come, with hardware, versions and commit. The same
command leaves out what is done already on this machine with this code. Tolerances and goals are data, written before
the first GPU was seen: `anchor_nb.experiments.parity.TOLERANCES`, `PARTS` below, `GOALS` in gpu_page.py.

    python nbs/benchmarks/gpu.py                  all of it, 25 minutes
    python nbs/benchmarks/gpu.py --device cpu     a dry run on the tiny model, to see that everything would run
"""
import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Callable, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]  # also for the processes of isolation.py; the machine may have no anchor_nb

from anchor_nb.core.recipe import RECIPES, Stage1, Stage2  # noqa: E402
from anchor_nb.data.corpora import build_corpus  # noqa: E402
from anchor_nb.data.rows import Example  # noqa: E402
from anchor_nb.runs.ledger import append_rows, read_json, read_rows  # noqa: E402
from anchor_nb.runs.manifest import now  # noqa: E402
from anchor_nb.runs.provenance import code_version, library_versions, machine  # noqa: E402
from gpu_page import GOALS, ST as PEER, TOO_LATE, as_page, begun, case_rows, last_runs, of_machine  # noqa: E402
from isolation import CUT, OURS, SPENT, OutOfTime, cpu_seconds, isolated, within  # noqa: E402

ROWS = HERE/"results"/"gpu.jsonl"
ST = "sentence_transformers"

# ---- a: parity ----


def as_they_come(function: str, **settings):
    "The rows that a process of its own writes to the file `rows`; those that it had written when it was stopped, too."
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder)/"rows.jsonl"
        try: isolated(function, rows=str(rows), **settings)
        finally:
            if rows.is_file(): yield from read_rows(rows)


def parity_way(rows: str, stage: str, model: str, corpus: str, pairs: int, max_length: int, pieces: int,
               carry: float = 0):
    """A stage's loss and gradient beside the naive form in fp32; runs in a process of its own.

    pieces: tokens of a piece of GradCache (stage II) or of an accumulated step (stage I), which every kernel runs too.
    carry: the anchor times this, behind a sink, where 0 is the paper's form.
    """
    from anchor_nb.experiments.parity import (TOLERANCES, UNSETTLED, naive_gradient, packed_gradient, parity_of,
                                              ways_here)
    from workloads import bench_model, corpus_rows
    how = dict(model=bench_model(model), data="unused", out="unused", max_length=max_length, global_batch=pairs)
    more = dict(anchor_scale=carry, anchor_sink=True) if carry else {}
    recipe = Stage1(**how, **more) if stage == "stage1" else Stage2(**how, negatives=1, lora_rank=0,
                                                                    mask_false_negatives=False)
    examples = [Example(row["query"], row["positive"], row["negatives"][:1], "", "")
                for row in corpus_rows(corpus, pairs, negatives=1)]
    name = f"{stage}, anchor times {carry} behind a sink" if carry else stage
    reference = naive_gradient(recipe, examples)
    yardsticks = {"naive, bf16": parity_of(naive_gradient(recipe, examples, "bf16"), reference),
                  "naive, fp32, weights moved by half a bit of bf16":
                      parity_of(naive_gradient(recipe, examples, moved=1), reference)}
    keep = lambda row: append_rows(Path(rows), [row])
    for what, found in yardsticks.items(): keep(dict(case=f"{name}, {what}") | found._asdict())
    unsettled = max(found.gradient_error for found in yardsticks.values()) > UNSETTLED
    for (attention, precision), budget in product(ways_here(), (0, pieces)):
        row = dict(case=f"{name}, {attention}, {precision}" + (", in pieces" if budget else ""),
                   tolerances=TOLERANCES[precision])
        if unsettled and precision == "bf16": row["why"] = "judged by its loss; rounding alone exceeds the gradient"
        try:
            tried = replace(recipe, attention=attention, precision=precision, micro_tokens=budget)
            found = parity_of(packed_gradient(tried, examples), reference)
            rounding = yardsticks.values() if precision == "bf16" else ()
            keep(row | found._asdict() | dict(holds=found.holds(precision, rounding)))
        except Exception as error: keep(row | dict(holds=False, why=f"{type(error).__name__}: {error}"))
        gc.collect()  # a wrapped forward is a circle, and would keep the model


def attention_alone(attention: str, dtype, packed, heads: tuple, reach: str, sink: float) -> list:
    """Output and three gradients of one call on random states, [1, heads, tokens, size].

    heads: of queries, of keys, and their size. reach: causal, both ways or last token, the queries of each text's last
    token alone. sink: added to the first key of each text along a direction that all queries share: nearly all
    attention rests there, as in a language model.
    """
    from types import SimpleNamespace
    import torch
    from anchor_nb.models.attention import attention_inputs, packed_sdpa, packed_varlen
    from anchor_nb.models.last_layer import attend_from_last
    device, tokens, (of_query, of_key, size), scaling = packed.ids.device, len(packed.ids), heads, heads[2]**-0.5
    generator = torch.Generator(device).manual_seed(1)
    query, key, value, towards = [torch.randn(1, count, tokens, size, device=device, generator=generator)
                                  for count in (of_query, of_key, of_key, of_query)]
    query[..., 0] += sink
    key[:, :, packed.starts[:-1].long(), 0] += sink
    inputs = [states.to(dtype).requires_grad_() for states in (query, key, value)]
    if reach == "last token":
        output = attend_from_last(inputs[0][:, :, packed.last], *inputs[1:], packed, scaling,
                                  kernel=attention == "packed_varlen").unflatten(1, (of_query, size))[None]
        towards = towards[:, :, packed.last]
    else:
        layer = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention), is_causal=reach == "causal")
        layer.config.is_causal = layer.is_causal
        call = dict(packed_sdpa=packed_sdpa, packed_varlen=packed_varlen)[attention]
        output, _ = call(layer, *inputs, **attention_inputs(attention, packed), scaling=scaling)
    (output.float()*towards.transpose(1, 2)).sum().backward()
    return [found.detach().double() for found in (output, *(states.grad for states in inputs))]


def kernel_way(lengths: list, heads: list, tolerance: float) -> list:  # heads: of (queries, keys, size); -> of rows
    "Each attention alone, forward and backward, in bf16 beside fp32; at most `tolerance` or twice packed_sdpa's error."
    import torch
    from anchor_nb.models.attention import on_gpu, usable_attention
    from anchor_nb.models.packing import pack
    packed, rows = pack([[1]*n for n in lengths]).to("cuda" if on_gpu() else "cpu"), []
    for sizes, reach, sink in product(heads, ("causal", "both ways", "last token"), (0.0, 9.0)):
        alone = lambda attention, dtype: attention_alone(attention, dtype, packed, sizes, reach, sink)
        wanted, limit = alone("packed_sdpa", torch.float32), tolerance
        for attention in sorted({"packed_sdpa", "packed_varlen"} & set(usable_attention("bf16"))):
            errors = [float((a - b).norm()/b.norm()) for a, b in zip(alone(attention, torch.bfloat16), wanted)]
            if attention == "packed_sdpa": limit = max(tolerance, 2*max(errors))
            of_query, of_key, size = sizes
            name = f"{attention}, {of_query} and {of_key} heads of {size}, {reach}" + ", with a sink"*bool(sink)
            rows.append(dict(case=name, vector_error=errors[0], gradient_error=max(errors[1:]), tolerances=limit,
                             holds=max(errors) <= limit))
    return rows


def kernel_rows(**settings):
    "Attention alone."
    yield from isolated("gpu:kernel_way", **settings)


def parity_rows(stages: tuple = ("stage1", "stage2"), carry: float = 0, **settings):
    "Parity of both stages on one model; with carry, of stage I with a shorter anchor too."
    for stage in stages: yield from as_they_come("gpu:parity_way", stage=stage, **settings)
    if carry: yield from as_they_come("gpu:parity_way", stage="stage1", carry=carry, **settings)


def encode_way(model: str, corpus: str, texts: int, max_length: int, tolerances: dict) -> list:  # of rows
    """Vectors of every kernel, of a saved model and of an exported one beside padded ones in fp32.

    In bf16 the error may be twice that of padded vectors in bf16, as a gradient's may.
    """
    import numpy
    import torch
    from transformers import AutoModel
    from anchor_nb.core.progress import without_bars
    from anchor_nb.models.attention import on_gpu
    from anchor_nb.models.embedder import AnchorEmbedder
    from anchor_nb.models.resolve import resolve_model
    from anchor_nb.release.export import export
    from anchor_nb.experiments.parity import ways_here
    from peers import encode_padded
    from workloads import corpus_rows, formatter_of
    formatter, device = formatter_of(model, max_length), "cuda" if on_gpu() else "cpu"
    words = [row["positive"] for row in corpus_rows(corpus, texts)]
    def padded(folder, dtype=torch.float32):
        with without_bars():
            trunk = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        return encode_padded(trunk, formatter, words)
    wanted = padded(resolve_model(model))
    error_of = lambda vectors: float(abs(vectors - wanted).max())
    rounding = error_of(padded(resolve_model(model), torch.bfloat16))
    rows = [dict(case="encode, naive, bf16", vector_error=rounding)]
    def beside(case: str, vectors, precision: str):
        error, most = error_of(vectors), max(tolerances[precision], 2*rounding*(precision == "bf16"))
        rows.append(dict(case=case, vector_error=error, tolerances=most,
                         holds=bool(numpy.isfinite(error) and error <= most)))
    for attention, precision in ways_here():
        embedder = AnchorEmbedder.from_pretrained(model, max_length=max_length, attention=attention,
                                                  precision=precision)
        beside(f"encode, {attention}, {precision}", embedder.encode(words), precision)
    with tempfile.TemporaryDirectory() as folder:
        embedder.save_pretrained(f"{folder}/saved")
        again = AnchorEmbedder.from_pretrained(f"{folder}/saved", max_length=max_length, precision="fp32")
        beside("saved and loaded, fp32", again.encode(words), "fp32")
        export(model, f"{folder}/exported", max_length=max_length)
        beside("exported, read by transformers, fp32", padded(f"{folder}/exported"), "fp32")
    return rows


def encode_rows(**settings):
    "Encoding and export on one model."
    yield from isolated("gpu:encode_way", **settings)


def kill_later(metrics: Path, rows: int):
    "Kill this process, the hard way, once so many steps are logged."
    def watch():
        while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= rows): time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()


def trained(stage: str, processes: int = 1, kill_after: int = 0, hashed: bool = False, **settings) -> dict:
    "Train, in a process of its own: the loss of each step, seconds, tokens, and what identifies the weights."
    from anchor_nb.data.tables import content_hash
    from anchor_nb.runs.launch import launch
    from anchor_nb.training.trainer import train
    recipe = RECIPES[stage](**settings)
    out = Path(recipe.out)
    if kill_after: kill_later(out/"metrics.jsonl", kill_after)
    launch(train, recipe, processes=processes, run_dir=recipe.out)
    speed = read_rows(out/"speed.jsonl")
    return dict(losses=[row["loss"] for row in read_rows(out/"metrics.jsonl")],
                seconds=[row["seconds"] for row in speed], tokens=[row["tokens"] for row in speed],
                weights=content_hash(str(out/"model"/"model.safetensors")) if hashed else "")


def training(corpus: str, out: str, model: str, **settings) -> dict:
    "Settings of a short run on a corpus."
    return dict(model=isolated("workloads:bench_model", model=model), data=str(build_corpus(corpus)/"pairs"), out=out,
                save_steps=0, warmup_steps=1, learning_rate=1e-4, **settings)


def largest_error(losses: list, wanted: list) -> float:
    "The largest relative difference of two curves; infinite when one is shorter."
    if len(losses) != len(wanted): return float("inf")
    return max(abs(a - b)/abs(b) for a, b in zip(losses, wanted))


def resume_rows(corpus: str, steps: int, kill_after: int, tolerance: float, **settings):
    "A run that is killed and resumed beside one that is left alone."
    with tempfile.TemporaryDirectory() as work:
        how = lambda name: dict(training(corpus, f"{work}/{name}", **settings), steps=steps, save_steps=2)
        whole = isolated("gpu:trained", stage="stage1", hashed=True, **how("whole"))
        try: isolated("gpu:trained", stage="stage1", kill_after=kill_after, **how("killed"))
        except OutOfTime:
            raise
        except RuntimeError as error:
            if not list(Path(work, "killed").glob("checkpoint-*")):
                raise RuntimeError(f"the run left no checkpoint: {error}") from None
        else:
            raise RuntimeError("the run ended before it could be killed; give it more steps")
        again = isolated("gpu:trained", stage="stage1", hashed=True, **how("killed"))
    error = largest_error(again["losses"], whole["losses"])
    yield dict(case="killed and resumed", loss_error=error, same_bits=again["weights"] == whole["weights"],
               tolerances=tolerance, holds=error <= tolerance)


# ---- b: speed and memory; the benchmarks beside this file, with other sizes ----


def rate_way() -> dict:
    "The rate of matrix products, in a process of its own."
    from anchor_nb.models.attention import on_gpu
    from anchor_nb.training.memory import matrix_rate
    device = "cuda" if on_gpu() else "cpu"
    return {kind: matrix_rate(device, kind) for kind in ("bfloat16", "float32")}


def rate_rows():
    "What this machine multiplies in a second: the yardstick of all shares."
    rates = isolated("gpu:rate_way")
    yield from (dict(case=kind, rate=rate) for kind, rate in rates.items())


def bench_rows(bench: str, model: str, ways: tuple = (), **settings):
    "One of the benchmarks beside this file: a row for each case and way."
    from bench import CASES, case_name, row_of
    isolated("workloads:bench_model", model=model)  # a random model is made once, on the GPU where there is one
    only = {"names" if bench == "encode" else "ways": ways} if ways else {}
    for case, found in CASES[bench](model=model, **only, **settings):
        for way, figures in found.items():
            yield dict(row_of(way, figures), case=case_name(case), model=model, bench=bench)


def encode_speed_rows(model: str, corpora: list, mixes: list, texts: int, max_length: int, **settings):
    "Encoding, with the least operations that the texts cost, and the memory that the planner expects."
    from anchor_nb.models.attention import on_gpu
    from anchor_nb.training.flops import find_shape, forward_flops
    from anchor_nb.training.memory import Setup, memory
    from bench import bench_model
    from workloads import formatter_of, text_mix
    isolated("workloads:bench_model", model=model)
    formatter, shape, known = formatter_of(bench_model(model), max_length), find_shape(bench_model(model)), {}
    settings |= dict(corpora=corpora, mixes=mixes, texts=texts, max_length=max_length)
    names = settings.pop("names", (OURS, PEER, "padded loop"))
    settings["names"] = [name for name in names if find_spec(ST) or not name.startswith(PEER)]
    for row in bench_rows("encode", model, **settings):
        mix = row["case"].partition(",")[0]
        if mix not in known: known[mix] = [len(t.ids) for t in formatter(text_mix(mix, corpora, texts, formatter))]
        lengths = known[mix]
        row |= dict(flops_least=sum(forward_flops(shape, lengths, only_last=True).values()))
        tokens = min(settings["micro_tokens"] or (16384 if on_gpu() else 1024), sum(lengths))  # as the embedder has it
        expected = memory(shape, Setup("encode", "pure_bf16" if on_gpu() else "fp32"), tokens)
        yield row | (dict(predicted_bytes=sum(expected.values())) if row["way"] == OURS else {})


def swept_rows(name: str, values: list, **settings):
    "One setting of a step of stage I varied."
    for value in values:
        for row in bench_rows("stage1", **settings | {name: value}):
            yield row | dict(case=f"{name}={value}", swept=name)


def plan_rows(shapes: list, tokens: int):
    "What the planner expects of models that are not loaded here."
    from anchor_nb.training.flops import SHAPES
    from anchor_nb.training.memory import Setup, memory
    for shape in shapes:
        for stage, rank in (("stage1", 0), ("stage2", 16), ("encode", 0)):
            precision = "pure_bf16" if stage == "encode" else "bf16"
            parts = memory(SHAPES[shape], Setup(stage, precision, rank=rank), tokens, stage != "encode")
            yield dict(case=f"{stage}, {shape}, {tokens} tokens a micro-batch",
                       predicted_bytes=int(sum(parts.values())))


# ---- c: several processes ----


def ranks_rows(corpus: str, stages: tuple, shardings: tuple, tolerance: float, **settings):
    "Two ranks beside one: the same losses, with DDP (NCCL on GPUs, gloo on a CPU) and with FSDP2."
    with tempfile.TemporaryDirectory() as work:
        for stage in stages:
            more = dict(negatives=1) if stage == "stage2" else {}
            alone = isolated("gpu:trained", stage=stage, **training(corpus, f"{work}/{stage}", **settings, **more))
            for kind in shardings:
                how = training(corpus, f"{work}/{stage}-{kind}", sharding=kind, **settings, **more)
                error = largest_error(isolated("gpu:trained", stage=stage, processes=2, **how)["losses"],
                                      alone["losses"])
                yield dict(case=f"{stage}, {kind}, 2 ranks", loss_error=error, tolerances=tolerance,
                           holds=error <= tolerance)


def scaling_rows(corpus: str, counts: list, **settings):
    "Tokens per second with more and more ranks; the first step is the warm-up."
    with tempfile.TemporaryDirectory() as work:
        for count in counts:
            found = isolated("gpu:trained", stage="stage1", processes=count,
                             **training(corpus, f"{work}/{count}", **settings))
            shutil.rmtree(f"{work}/{count}")  # 5 GB a count
            yield dict(case=f"{count} ranks", ranks=count,
                       tokens_per_second=sum(found["tokens"][1:])/sum(found["seconds"][1:]))


# ---- d: the experiment ----


def experiment_rows(command: list, left: Callable):
    "The registered runs of nbs/paper/again.py in the time that is left; the same command resumes them."
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # anchor_nb need not be installed
    process = subprocess.Popen([sys.executable, "nbs/paper/again.py", *command], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                               env=os.environ | dict(PYTHONPATH=paths))
    shown = " ".join(["python nbs/paper/again.py", *command])
    try: output, _ = process.communicate(timeout=max(1, left()))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # it runs many processes; runs that have ended stay
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise OutOfTime(f"stopped at its time limit; to resume: {shown}") from None
    if process.returncode:
        raise RuntimeError(" ".join(output.strip().splitlines()[-2:])[-400:] or f"exit code {process.returncode}")
    yield dict(case=shown, last_line=(output.strip().splitlines() or [""])[-1][:400])


# ---- the parts ----


class Part(NamedTuple):
    "Some rows, with a limit."
    stage: str          # a, b, c or d
    name: str
    rows: Callable      # -> yields rows
    seconds: int        # at most, on a GPU
    settings: dict      # on a GPU
    dry: dict           # what is different on the tiny model and a CPU
    needs: tuple = ()   # packages
    gpus: int = 1       # at least; on a CPU, processes take their place
    repeats: bool = False # whether to run it again although it is done: a command that resumes


SMALL, BIG = "smollm2-135m", "random:llama-3.2-1b"
STAGES = dict(a="parity", b="speed and memory", c="several GPUs", d="the experiment")
LIMITS = dict(a=240, b=420, c=480)  # seconds of a stage that others follow; the last one has what is left
PARITY = dict(corpus="wiki", pairs=8, max_length=192, pieces=512)
DRY_PARITY = dict(model="tiny", corpus="toy", pairs=6, max_length=48, pieces=96)
STEP = dict(corpora=["wiki"], max_length=512, micro_tokens=0, precision="auto", rounds=2, repeats=3, tolerance=2e-2)
DRY_STEP = dict(model="tiny", corpora=["toy"], batches=[6], max_length=48, micro_tokens=256, rounds=1, repeats=1,
                precision="fp32")
SECOND = dict(STEP, mini_batch=32, learning_rate=2e-4, repeats=2, tolerance=5e-2, first_only=True, rated=True)
DRY_SECOND = dict(DRY_STEP, learning_rate=1e-2, mini_batch=4, first_only=False)
TEXTS = dict(corpora=["wiki"], mixes=["short", "mixed", "long"], texts=4096, max_length=512, micro_tokens=0, batch=128,
             precision="auto", rounds=2, repeats=2, cosine=0.95, tolerance=0)
DRY_TEXTS = dict(model="tiny", corpora=["toy"], mixes=["mixed"], texts=24, max_length=48, batch=8, rounds=1, repeats=1,
                 cosine=0, tolerance=1e-4)
RANKS = dict(corpus="wiki", model=SMALL, steps=4, global_batch=16, max_length=192, precision="fp32", tolerance=1e-3,
             stages=("stage1", "stage2"), shardings=("ddp", "fsdp2"))
DRY_RANKS = dict(corpus="toy", model="tiny", steps=2, global_batch=4, max_length=48, micro_tokens=256, workers=0)
BIG_ALONE = dict(STEP, model=BIG, ways=(OURS,), rounds=1)

PARTS = [
    Part("a", "kernels", kernel_rows, 30, dict(
        lengths=[7, 33, 64, 1, 120, 15], heads=[[9, 3, 64], [32, 8, 64], [24, 8, 128]], tolerance=1e-2),
        dict(heads=[[4, 2, 64]])),
    Part("a", "parity random 135m", parity_rows, 60, dict(PARITY, model="random:smollm2-135m"), DRY_PARITY),
    Part("a", "parity 135m", parity_rows, 90, dict(PARITY, model=SMALL, carry=0.07), DRY_PARITY), # an embedding's norm
    Part("a", "encode and export 135m", encode_rows, 40, dict(
        model=SMALL, corpus="wiki", texts=128, max_length=192, tolerances=dict(fp32=1e-4, bf16=2e-2)),
        dict(model="tiny", corpus="toy", texts=16, max_length=48)),
    Part("a", "kill and resume", resume_rows, 90, dict(
        corpus="wiki", model=SMALL, steps=8, kill_after=4, global_batch=16, max_length=128, precision="fp32",
        carry_pairs=0, workers=0,
        tolerance=1e-3),  # in fp32, since a gradient in bf16 turns with the order of sums, which a GPU leaves open
        dict(corpus="toy", model="tiny", global_batch=4, max_length=48, micro_tokens=256, workers=0, tolerance=0.0)),
    Part("a", "parity 1b", parity_rows, 180, dict(PARITY, model=BIG), dict(DRY_PARITY, stages=("stage2",))),
    Part("b", "matrix rate", rate_rows, 30, {}, {}),
    Part("b", "plans 3b and 8b", plan_rows, 10, dict(shapes=["llama-3.2-3b", "llama-3.1-8b"], tokens=16384), {}),
    Part("b", "stage1 1b", bench_rows, 120, dict(BIG_ALONE, bench="stage1", batches=[256]), DRY_STEP),
    Part("b", "stage1 135m", bench_rows, 120, dict(  # same: rounding alone exceeds the gradient of this model in bf16
        STEP, bench="stage1", model=SMALL, batches=[64], same=["loss"]), DRY_STEP),
    Part("b", "stage2 135m", bench_rows, 180, dict(SECOND, bench="stage2", model=SMALL, batches=[128]), DRY_SECOND,
         (ST, "datasets")),
    Part("b", "encode 135m", encode_speed_rows, 120, dict(TEXTS, model=SMALL), DRY_TEXTS),
    Part("b", "encode 1b", encode_speed_rows, 120, dict(TEXTS, model=BIG, mixes=["mixed"], texts=1024),
         DRY_TEXTS),
    Part("b", "stage2 1b", bench_rows, 60, dict(SECOND, bench="stage2", model=BIG, batches=[64], ways=(OURS,),
                                                rounds=1), DRY_SECOND),
    Part("b", "micro-batches 1b", swept_rows, 150, dict(
        BIG_ALONE, name="micro_tokens", values=[2048, 4096, 8192, 16384, 32768], batches=[256], repeats=2),
        dict(DRY_STEP, values=[128, 256])),
    Part("b", "compile 1b", swept_rows, 150, dict(
        BIG_ALONE, name="compile", values=[False, True], batches=[128], repeats=2), dict(DRY_STEP, values=[False])),
    Part("b", "stage1 1b beside padded", bench_rows, 90, dict(STEP, bench="stage1", model=BIG, batches=[16], rounds=1),
         DRY_STEP),
    Part("b", "stage2 1b beside its peer", bench_rows, 120, dict(
        SECOND, bench="stage2", model=BIG, batches=[64], ways=(OURS, PEER), rounds=1), DRY_SECOND, (ST, "datasets")),
    Part("b", "encode 135m fp16", encode_speed_rows, 60, dict(
        TEXTS, model=SMALL, mixes=["mixed"], names=(OURS, f"{PEER} fp16")),
        dict(DRY_TEXTS, cosine=0.999, names=(OURS, f"{PEER} fp16")), (ST,)), # by itself: vectors in fp16 may overflow
    Part("b", "encode 3b", encode_speed_rows, 90, dict(TEXTS, model="random:llama-3.2-3b", mixes=["mixed"], texts=1024,
                                                       names=(OURS,), rounds=1), dict(DRY_TEXTS, names=(OURS,))),
    Part("b", "encode 8b", encode_speed_rows, 150, dict(TEXTS, model="random:llama-3.1-8b", mixes=["mixed"], texts=512,
                                                        names=(OURS,), rounds=1), dict(DRY_TEXTS, names=(OURS,))),
    Part("c", "two ranks equal one", ranks_rows, 240, RANKS, DRY_RANKS, gpus=2),
    Part("c", "scaling", scaling_rows, 240, dict(
        corpus="wiki", model=BIG, steps=5, global_batch=512, max_length=512, counts=[1, 2, 4, 8], carry_pairs=0),
        dict(DRY_RANKS, steps=3, counts=[1, 2]), gpus=2),
    Part("d", "experiment", experiment_rows, 10**9,
         dict(command=["all", "gpu-long", "--jobs", "0", "--arms", "ASWBL"]),
         dict(command=["run", "dry", "--seeds", "1", "--arms", "W"]), needs=("scipy",), repeats=True)]

NEEDED = {"matrix rate", *(goal.part for goal in GOALS)}  # what goals are judged by comes before the rest
SHORT = {"kernels", "parity 1b", "kill and resume", "matrix rate", "stage2 1b", "plans 3b and 8b"}  # of the tests

# ---- running them ----


def device_facts() -> dict:
    "What computes: its name and memory, how many there are, the kernels that can run; in a process of its own."
    import torch
    from anchor_nb.models.attention import on_gpu, usable_attention
    if not on_gpu():
        return dict(device=machine()["processor"] or "CPU", kind="cpu", count=0, attention=usable_attention())
    facts = torch.cuda.get_device_properties(0)
    return dict(device=facts.name, kind="cuda", count=torch.cuda.device_count(), memory=facts.total_memory,
                capability=f"{facts.major}.{facts.minor}", cuda=torch.version.cuda, attention=usable_attention("bf16"))


def code() -> dict:
    """Version, commit, and a hash of the files that run: a tree with open changes has no commit of its own.

    A kit without git says in a file what it was made from.
    """
    told, files = ROOT/"commit.json", [*(ROOT/"anchor_nb").rglob("*"), *HERE.glob("*.py")]
    content = b"".join(file.read_bytes() for file in sorted(files) if file.is_file() and file.suffix != ".pyc")
    return (read_json(told) if told.is_file() else code_version()) | dict(files=sha256(content).hexdigest()[:16])


def settings_of(part: Part, dry: bool, gpus: int) -> dict:
    "What a part is called with."
    settings = part.settings | part.dry if dry else dict(part.settings)
    if "counts" in settings and not dry:  # one and all of them first, which the goal compares
        counts = {n for n in settings["counts"] if n < gpus} | {gpus}
        settings["counts"] = sorted(counts, key=lambda n: (1 < n < gpus, n))
    return settings


def why_not(part: Part, dry: bool, facts: dict) -> str:  # empty: it can run
    "Why a part cannot run here."
    if absent := [name for name in part.needs if not find_spec(name)]: return f"{', '.join(absent)} is not installed"
    if not dry and facts["count"] < part.gpus: return f"needs {part.gpus} GPUs, and there is {facts['count']}"
    return ""


def run_part(part: Part, settings: dict, limit: float, keep: Callable) -> tuple:  # limit: seconds; -> (status, why)
    "Keep the rows of a part as they come; what ends it early is said, not raised."
    ends, cut = time.monotonic() + limit, len(CUT)
    if limit < 1: return "out of time", TOO_LATE
    if part.stage == "d": settings = dict(settings, left=lambda: ends - time.monotonic())
    try:
        with within(limit):
            for row in part.rows(**settings): keep(row)
            if len(CUT) > cut:
                raise OutOfTime("its last comparison has fewer rounds")
    except OutOfTime as error: return "out of time", str(error)
    except Exception as error: return "failed", f"{type(error).__name__}: {str(error)[:600]}"
    return "done", ""


def run(parts: list, rows: Path, dry: bool, minutes: float, say=print):
    "Run parts stage by stage; rows go to a file as they come."
    facts = isolated("gpu:device_facts")
    if not dry and facts["kind"] != "cuda":
        raise SystemExit("gpu.py: torch sees no GPU here\n`anchor-nb doctor` says why; --device cpu makes a dry run")
    about = dict(dry=dry, machine=machine() | facts, versions=library_versions(), code=code())
    ends = time.monotonic() + 60*minutes
    known = last_runs(of_machine(read_rows(rows), facts["device"])) if rows.is_file() else {}
    same_code = lambda row: row.get("code", {}).get("files") == about["code"]["files"]
    def turn(part):  # in vain with this code: after those that it has not tried
        before = known.get(part.name, {})
        return before.get("status") == "done", begun(before) and same_code(before), part.name not in NEEDED
    for stage in sorted({part.stage for part in parts}):
        last = dry or stage == max(part.stage for part in parts)
        stage_ends = ends if last else min(ends, time.monotonic() + LIMITS[stage])
        for part in sorted([part for part in parts if part.stage == stage], key=turn):
            settings = settings_of(part, dry, facts["count"])
            told = json.loads(json.dumps(settings))  # as a row has it
            before = known.get(part.name, {})
            same = same_code(before) and all(before.get(name) == value for name, value in dict(
                dry=dry, machine=about["machine"], versions=about["versions"], settings=told).items())
            if same and before["status"] == "done" and not part.repeats:
                say(f"{stage} {part.name}: done before, at {before['at'][:16]}")
                continue
            head, began, before = dict(part=part.name, stage=stage), time.monotonic(), cpu_seconds() + SPENT[0]
            limit = min(10**9 if dry else part.seconds, stage_ends - began)  # a CPU may be slow, and is not judged
            why = why_not(part, dry, facts)
            keep = lambda row: append_rows(rows, [head | row | dict(at=now()) | about])
            status, why = ("not run", why) if why else run_part(part, settings, limit, keep)
            spent = dict(seconds=time.monotonic() - began, cpu_seconds=cpu_seconds() + SPENT[0] - before)
            append_rows(rows, [head | dict(status=status, why=why, settings=told, at=now(), **spent) | about])
            say(f"{stage} {part.name}: {status}, {spent['seconds']:.0f} s ({spent['cpu_seconds']:.0f} s of the CPU)"
                + (f": {why}" if why else ""))
            if status != "not run":
                for line in case_rows(of_machine(read_rows(rows), facts["device"]), part.name): say(f"    {line}")


def main(words: list | None = None):
    "The command."
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run on the tiny model")
    parser.add_argument("--minutes", type=float, default=25, help="for everything; the experiment gets what is left")
    parser.add_argument("--rows", type=Path, help="the file of rows; default: results/gpu.jsonl, or runs/gpu/dry.jsonl")
    parser.add_argument("--stages", default="abcd", help="such as ab")
    parser.add_argument("--parts", default="", help="such as 'encode 1b, compile 1b'; default: all of the stages")
    parser.add_argument("--short", action="store_true", help="the few parts that the tests run")
    asked = parser.parse_args(words)
    dry = asked.device == "cpu"
    if dry: os.environ |= dict(ACCELERATE_USE_CPU="1", CUDA_VISIBLE_DEVICES="")
    if dry: os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a GPU waits for its tokens
    rows = asked.rows or (ROOT/"runs"/"gpu"/"dry.jsonl" if dry else ROWS)
    only = [name.strip() for name in asked.parts.split(",") if name.strip()] or [part.name for part in PARTS]
    if unknown := set(only) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    parts = [part for part in PARTS if part.stage in asked.stages and part.name in only
             and (not asked.short or part.name in SHORT)]
    run(parts, rows, dry, asked.minutes, lambda text: print(text, flush=True))
    print("\n" + as_page(read_rows(rows), PARTS, STAGES) + f"\n\nrows: {rows}")


if __name__ == "__main__": main()
