"""Ours and theirs on the same work: each in a process of its own, in turns, in one run.

The notebooks beside this file call `run_bench`. First it is checked that all ways do the same work: the same token ids,
the same loss and gradient, the same vectors. Rows are appended as they come, one for each case and way, with machine,
versions and code, so that a stopped run keeps what it has measured.

Why a way is as fast as it is follows from four factors. With R the rate at which this machine multiplies large
matrices, measured in the same process, and F_min the operations that a step needs at least,

    F_min/(t R) = eta_pad  (real tokens / tokens run)     * eta_flop (F_min / (F eta_pad))
                * eta_kernel (F / (t_op R))               * eta_host (t_op / t)

where F are the operations run, t is the time of the step and t_op the part of it that PyTorch's profiler sees inside
operators, or inside kernels on a GPU. On a CPU, eta_kernel also bears norms, softmax and page faults.
"""
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModel, AutoModelForCausalLM, TrainerCallback

from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.data.rows import Example
from anchor_nb.losses.objectives import Objectives, make_objectives
from anchor_nb.models import adapters
from anchor_nb.models.attention import on_gpu, wants_autocast, weight_dtype
from anchor_nb.models.backbone import is_checkpointed, language_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.resolve import resolve_model
from anchor_nb.runs.ledger import append_rows
from anchor_nb.runs.manifest import now
from anchor_nb.runs.provenance import code_version, library_versions, machine
from anchor_nb.training.flops import Shape, checkpointing_share, find_shape, stage2_flops
from anchor_nb.training.memory import matrix_rate, shape_of, stage1_flops
from anchor_nb.training.memory import memory as parts_of
from anchor_nb.training.steps import ReconstructionStep, Steps
from anchor_nb.training.trainer import (AnchorTrainer, Resolved, build_model, check_inputs, planned, setup_of,
                                        training_arguments)
from isolation import OURS, check_same, forget_peak, gpu, in_turns, isolated, memory, merged, status, timed, wait
from peers import (PaddedStep, add_their_lora, closing, encode_padded, fingerprint, is_unpadded, pass_lengths,
                   sentence_transformer, their_ids, their_trainer, triplets)
from workloads import bench_model, corpus_rows, formatter_of, random_model, repeated, text_mix, write_rows

PEERS = ["sentence-transformers", "sentence-transformers cached"]
UNFUSED = f"{OURS}, peft's layers"  # a further way of stage II, without `models/11_adapters`


def device_type() -> str: return "cuda" if on_gpu() else "cpu"


# ---- a step of stage I: forward and backward; the optimizer costs both the same ----


def stage1_module(way: str, recipe: Stage1) -> tuple:  # (module, step)
    "Ours as training runs it; the naive one from the plain model, as transformers loads it."
    resolved = Resolved(recipe)
    plan = planned(resolved, device_type())
    if way == OURS: module, step = build_model(resolved, checkpointing=plan.gradient_checkpointing), ReconstructionStep
    else:
        plain = AutoModelForCausalLM.from_pretrained(resolved.model, dtype=weight_dtype(recipe.precision),
                                                     attn_implementation="sdpa")
        module, step = Objectives(plain, make_objectives(recipe, resolved.formatter)), PaddedStep
    module.to(device_type()).train()
    if wants_autocast(recipe.precision):
        for part in (module, module.lm, module.lm.base_model):
            part.forward = torch.autocast(device_type(), torch.bfloat16)(part.forward)
    return module, step(resolved.recipe, resolved.formatter, plan.micro_tokens)


def busy_seconds(events, on_device: bool) -> float:  # events: `key_averages` of a profile
    "Time inside kernels; without a device, inside operators."
    if not on_device: return sum(event.self_cpu_time_total for event in events)/1e6
    # an operator has the time of its kernels, too, and an annotation that of all between its ends
    return sum(event.self_device_time_total for event in events
               if event.device_type != DeviceType.CPU and not event.is_user_annotation)/1e6


def operator_share(work) -> float:
    "The share of the time that is spent inside operators, or inside kernels on a GPU."
    # noting operators as well would slow down what a GPU waits for
    with profile(activities=[ProfilerActivity.CUDA if gpu() else ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        work()
        wait()
        seconds = time.perf_counter() - start
    return min(1.0, busy_seconds(profiled.key_averages(), bool(gpu()))/seconds)


def efficiency(way: str, recipe: Stage1, batch: list, eos: int, seconds: float, share: float, rate: float,
               checkpointing: bool) -> dict:
    "The four factors of a step of stage I, and their product."
    shape, ours = find_shape(recipe.model), way == OURS
    real, run = pass_lengths(batch, eos, padded=False), pass_lengths(batch, eos, padded=not ours)
    least = sum(stage1_flops(shape, *real).values())
    done = sum(stage1_flops(shape, *run, only_last=ours, recomputed=checkpointing*checkpointing_share(shape)).values())
    pad = sum(map(sum, real))/sum(map(sum, run))
    return dict(flops_least=least, flops_run=done, rate=rate, eta_pad=pad, eta_flop=least/done/pad,
                eta_kernel=done/(share*seconds*rate), eta_host=share, efficiency=least/(seconds*rate))


def predicted(recipe, module, tokens: int, *without: str) -> int:  # bytes; 0 for a model that the planner does not know
    "The peak that the memory planner expects; tokens: of the largest micro-batch; without: parts not measured."
    lm = language_model(module.lm)
    try: parts = parts_of(shape_of(lm), setup_of(Resolved(recipe)), tokens, is_checkpointed(lm))
    except ValueError: return 0
    return int(sum(value for name, value in parts.items() if name not in without))


def process_bytes() -> int:
    "What a process holds before it has done anything; 0 on a GPU, where only what torch allocates is counted."
    return 0 if on_gpu() else memory()[0]


def stage1_way(way: str, pairs: list, repeats: int, profiled: bool = True, **settings) -> dict:
    "Measure one way of a step of stage I on (query, document) pairs; runs in a process of its own."
    recipe = Stage1(global_batch=len(pairs), **settings)
    module, step = stage1_module(way, recipe)
    device, facts = next(module.parameters()).device, {}
    batch = step.prepare([Example(query, document, [], "", "") for query, document in pairs])
    def work():
        module.zero_grad()
        facts.update(step.run(module, batch, lambda loss: loss.backward(), lambda last: nullcontext(), device))
    figures = timed(work, repeats)
    norm = torch.stack([p.grad.float().norm() for p in module.parameters()]).norm().item()
    loss = recipe.alpha*facts["loss_q2d"] + (1 - recipe.alpha)*facts["loss_d2q"]
    lengths = [len(text.ids) for pair in batch["anchor"][0] for text in pair]
    figures |= dict(loss=float(loss), gradient_norm=norm, tokens=sum(lengths), longest=max(lengths),
                    examples=len(pairs))
    if is_checkpointed(language_model(module.lm)): figures["checkpointing"] = True
    if not profiled: return figures
    rate = matrix_rate(device, torch.bfloat16 if wants_autocast(recipe.precision) else module.lm.dtype)
    if way == OURS: figures["predicted_bytes"] = predicted(recipe, module, min(step.budget, sum(lengths)), "optimizer")
    return figures | efficiency(way, recipe, batch["anchor"][0], closing(step.formatter),
                                statistics.median(figures["seconds"]), operator_share(work), rate,
                                "checkpointing" in figures)


# ---- stage II: whole trainers, from rows of text to changed adapters; the first step is the warm-up ----


class Clock(TrainerCallback):
    "Notes when each step ends, and measures memory from the second step on."
    def __init__(self): self.ends = []

    def on_step_end(self, *args, **kwargs):
        wait()
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1: forget_peak()


def our_trainer(recipe: Stage2, inputs, arguments) -> tuple:  # (trainer, losses, its token ids, further figures)
    "Stage II as `train` runs it; the losses fill as it trains."
    trainer, losses = AnchorTrainer(inputs, arguments), []
    run = trainer.step.run
    def noted(*args):
        facts = run(*args)
        losses.append(facts["loss"])
        return facts
    trainer.step.run = noted
    ids = [[text.ids for text in trainer.train_dataset[step].texts] for step in range(recipe.steps)]
    expected = predicted(recipe, trainer.model, min(trainer.step.budget, max(sum(map(len, texts)) for texts in ids)))
    return trainer, losses, sum(ids, []), dict(predicted_bytes=expected)


def peer_trainer(recipe: Stage2, inputs, arguments, mini_batch: int) -> tuple:  # as `our_trainer`
    "Stage II by sentence-transformers on the same examples; mini_batch 0: the plain loss."
    dtype = str(weight_dtype(recipe.precision)).removeprefix("torch.")
    model = sentence_transformer(resolve_model(recipe.model), inputs.formatter, dtype, device_type(), arguments.bf16)
    rows, losses, size = triplets(recipe, inputs), [], recipe.global_batch
    add_their_lora(model, recipe)
    trainer = their_trainer(model, rows, recipe, arguments, mini_batch)
    trainer.loss.register_forward_hook(lambda module, given, loss: losses.append(loss.detach()))
    ids = their_ids(model, [row[name] for step in range(recipe.steps) for name in ("anchor", "positive", "negative")
                            for row in rows[size*step:size*(step + 1)]])
    return trainer, losses, ids, dict(unpadded=is_unpadded(model))


def keep_tables(folder: Path):
    "Have tables cached in a folder, not in the user's."
    try: import datasets
    except ModuleNotFoundError: return  # they stay in memory
    datasets.config.HF_DATASETS_CACHE = folder


def stage2_way(way: str, work: str, mini_batch: int, rated: bool = False, **settings) -> dict:
    """Train a few steps of stage II in one way; runs in a process of its own.

    work: folder for its files. rated: also the least operations of a step, beside the rate of matrix products.
    """
    keep_tables(Path(work)/"cache")
    if way == UNFUSED: adapters.fuse_adapters = lambda model: model
    recipe = Stage2(out=tempfile.mkdtemp(dir=work), negatives=1, mask_false_negatives=False, warmup_steps=0,
                    schedule="constant", save_steps=0, **settings)
    inputs, arguments = check_inputs(recipe), training_arguments(recipe)
    make = our_trainer if way in (OURS, UNFUSED) else partial(
        peer_trainer, mini_batch=mini_batch if way.endswith("cached") else 0)
    trainer, losses, ids, more = make(recipe, inputs, arguments)
    clock, before = Clock(), memory()[0]
    trainer.add_callback(clock)
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    seconds, peak = [b - a for a, b in zip(clock.ends, clock.ends[1:])], memory()[1]
    lengths = [len(text) for text in ids]
    if rated:
        least = sum(stage2_flops(find_shape(recipe.model), lengths, recipe.lora_rank).values())/recipe.steps
        rate = matrix_rate(device_type(), "bfloat16" if wants_autocast(recipe.precision) else "float32")
        more |= dict(flops_least=least, rate=rate, efficiency=least/(statistics.median(seconds)*rate))
    return dict(more, seconds=seconds, before_bytes=before, peak_bytes=peak, losses=[float(loss) for loss in losses],
                gradient_norms=norms, ids=fingerprint(ids), tokens=sum(lengths)/recipe.steps, longest=max(lengths),
                examples=recipe.global_batch)


# ---- encoding: from strings to an array, with tokenizing ----

WARM = 2000  # texts encoded before the clock starts


def encode_way(way: str, texts: list, model: str, max_length: int, micro_tokens: int, precision: str, batch: int,
               repeats: int, vectors: str) -> dict:  # vectors: folder to write them to
    """Encode texts in one way; runs in a process of its own.

    A peer's process loads nothing of ours but the formatter: our loader also tells the C library to keep freed memory,
    which would change the peer's speed and peak.
    """
    folder, formatter, device = resolve_model(model), formatter_of(model, max_length), device_type()
    dtype = "bfloat16" if precision in ("bf16", "pure_bf16") or precision == "auto" and on_gpu() else "float32"
    ids_of, more = lambda: [tokens.ids for tokens in formatter(texts)], {}
    if way == OURS:
        embedder = AnchorEmbedder.from_pretrained(model, max_length=max_length, precision=precision,
                                                  micro_tokens=micro_tokens)
        encode, formatter = embedder.encode, embedder.formatter
    elif way in (PEERS[0], f"{PEERS[0]} fp16"):
        peer = sentence_transformer(folder, formatter, "float16" if way.endswith("fp16") else dtype, device)
        encode, ids_of = partial(peer.encode, batch_size=batch), lambda: their_ids(peer, texts)
        more = dict(unpadded=is_unpadded(peer))
    else:
        trunk = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        trunk.to(device).eval()
        encode = lambda texts: encode_padded(trunk, formatter, texts, batch)
    result = {}
    figures = timed(lambda: result.update(vectors=encode(texts)), repeats, lambda: encode(texts[:WARM]))
    numpy.save(f"{vectors}/{way}.part.npy", result["vectors"])
    os.replace(f"{vectors}/{way}.part.npy", f"{vectors}/{way}.npy")  # whole, whenever it is stopped
    ids = ids_of()
    return figures | dict(ids=fingerprint(ids), tokens=sum(map(len, ids)), longest=max(map(len, ids)),
                          examples=len(texts), **more)


def loading_way(way: str, work: str, **settings) -> dict:  # way: built, then cached; only a name here
    """From files to the first tokenized batch; runs in a process of its own.

    Pages of a mapped file count as resident while the system has no better use for them, so on Linux `own_bytes`, the
    memory that is the process's own, is written beside the peak.
    """
    keep_tables(Path(work)/"cache")
    before, start = memory()[0], time.perf_counter()
    forget_peak()
    inputs = check_inputs(Stage1(out=work, preset="paper", **settings))
    step = ReconstructionStep(inputs.recipe, inputs.formatter, 1024)
    batch = Steps(inputs.tables, inputs.batches, inputs.instructions, step, 0, inputs.recipe.steps)[0]
    own = dict(own_bytes=status("RssAnon")) if sys.platform == "linux" else {}
    return dict(own, seconds=[time.perf_counter() - start], before_bytes=before, peak_bytes=memory()[1],
                examples=sum(map(len, inputs.tables.values())), first=len(batch["anchor"][0]))


# ---- four benchmarks: each yields cases, and for each case the figures of every way ----


def stage1_cases(model: str, corpora: list, batches: list, rounds: int, tolerance: float, ways=(OURS, "padded"),
                 same=("loss", "gradient_norm"), **settings):
    "One step of stage I against four padded passes with full logits."
    for corpus in corpora:
        for batch in batches:
            pairs = [(row["query"], row["positive"]) for row in corpus_rows(corpus, batch)]
            found = in_turns("bench:stage1_way", list(ways), rounds, pairs=pairs, model=bench_model(model), **settings)
            check_same(found, *same, tolerance=tolerance)
            yield dict(corpus=corpus, pairs=batch), found


def stage2_cases(model: str, corpora: list, batches: list, rounds: int, repeats: int, tolerance: float,
                 ways=(OURS, *PEERS), first_only: bool = False, **settings):
    """Training stage II against sentence-transformers, with the plain loss and with the cached one.

    first_only: compare the first loss alone; in half precision two runs have other weights afterwards.
    """
    for corpus in corpora:
        for batch in batches:
            with tempfile.TemporaryDirectory() as work:
                data = write_rows(Path(work)/f"{corpus}.jsonl", corpus_rows(corpus, batch*(repeats + 1), negatives=1))
                found = in_turns("bench:stage2_way", list(ways), rounds, work=work, data=data, steps=repeats + 1,
                                 global_batch=batch, model=bench_model(model), **settings)
            check_same(found, "ids")
            if first_only:
                first = {way: dict(loss=each["losses"][0]) for way, each in found.items()}
                check_same(first, "loss", tolerance=tolerance)
            else: check_same(found, "losses", "gradient_norms", tolerance=tolerance)
            yield dict(corpus=corpus, examples=batch), found


def encode_texts(names: list, rounds: int, tolerance: float, cosine: float = 0, **settings) -> dict:  # way -> figures
    """Encode in turns; RuntimeError when vectors or ids differ.

    tolerance: of every number of a vector. cosine: that 95 % of the texts must have instead, and all of them nearly,
    for half precision, where the largest of a million roundings says little.
    """
    with tempfile.TemporaryDirectory() as work:
        measured = in_turns("bench:encode_way", names, rounds, vectors=work, **settings)
        vectors = {way: numpy.load(f"{work}/{way}.npy") for way in names}
    ways = {way: dict(measured[way], difference=float(abs(vectors[way] - vectors[OURS]).max())) for way in names}
    check_same(ways, "ids")
    for way, figures in ways.items():
        cosines, limit = (vectors[way]*vectors[OURS]).sum(1), f"more than {tolerance:.0e}"
        if cosine:
            figures |= dict(cosine=float(numpy.quantile(cosines, 0.05)), least_cosine=float(cosines.min()))
            limit = f"cosine {figures['cosine']:.3f}, {cosine} wanted, and at least {figures['least_cosine']:.3f}"
            near = figures["cosine"] >= cosine and figures["least_cosine"] >= cosine - 0.1
        else: near = figures["difference"] <= tolerance
        if not near:
            raise RuntimeError(f"vectors of {way} differ from ours by {figures['difference']:.1e}, {limit}; their "
                               "times cannot be compared")
    return ways


def encode_cases(model: str, corpora: list, mixes: list, texts: int, max_length: int, rounds: int,
                 tolerance: float, names=(OURS, PEERS[0], "padded loop"), **settings):
    "Encoding against sentence-transformers and the loop sorted by characters, on several distributions of lengths."
    model = bench_model(model)
    formatter = formatter_of(model, max_length)
    for mix in mixes:
        ways = encode_texts(list(names), rounds, tolerance, model=model,
                            texts=text_mix(mix, corpora, texts, formatter), max_length=max_length, **settings)
        yield dict(mix=mix, texts=texts), ways


def step_cases(work: Path, corpus: str, series: dict, rounds: int, repeats: int):
    "A step of stage I of a small model, one size varied at a time; pairs of two documents, cut at the length."
    usual, known = {name: values[0] for name, values in series.items()}, {}
    lengthened = lambda text, words, length: " ".join([text]*(length//words + 1))
    for name, value in [(name, value) for name, values in series.items() for value in values]:
        sizes = usual | {name: value}
        key, length = tuple(sizes.values()), sizes["length"]
        if key not in known:
            pairs = [(lengthened(row["query"], 2, length), lengthened(row["positive"], 16, length))
                     for row in corpus_rows(corpus, sizes["batch"])]
            shape = Shape(4, 256, 256, 64, 768, sizes["vocabulary"])
            model = random_model(work/str(sizes["vocabulary"]), shape, "tiny")
            known[key] = in_turns("bench:stage1_way", [OURS, "padded"], rounds, pairs=pairs, repeats=repeats,
                                  profiled=False, model=model, max_length=length, micro_tokens=1024)
            check_same(known[key], "loss", "gradient_norm", tolerance=1e-3)
        yield dict(grows=name, value=value, **sizes), known[key]


def growth_cases(corpus: str, texts: list, rows: list, batches: list, lengths: list, vocabularies: list, available: int,
                 rounds: int, repeats: int):
    "Encoding and loading against the size of the corpus, a step of stage I against batch, length and vocabulary."
    known = corpus_rows(corpus, available)
    for count in texts:
        many = [row["query"] for row in repeated(known, count)]
        yield dict(grows="texts", value=count), encode_texts([OURS, PEERS[0]], rounds, 1e-4, texts=many, model="tiny",
                                                             max_length=64, micro_tokens=0, batch=32, precision="auto",
                                                             repeats=repeats)
    with tempfile.TemporaryDirectory() as work:
        for count in rows:
            data = write_rows(Path(work)/f"rows-{count}.jsonl", repeated(known, count))
            yield dict(grows="rows", value=count), {
                way: merged([isolated("bench:loading_way", way=way, work=work, data=data, model="tiny",
                                      global_batch=min(count, 512))]) for way in ("built", "cached")}
        series = dict(batch=batches, length=lengths, vocabulary=vocabularies)
        yield from step_cases(Path(work), corpus, series, rounds, repeats)


CASES = dict(stage1=stage1_cases, stage2=stage2_cases, encode=encode_cases, growth=growth_cases)

# ---- one call ----


def case_name(case: dict) -> str:
    "A case in a few words."
    if "grows" in case: return f"{case['grows']} {case['value']}"
    return ", ".join(value if isinstance(value, str) else f"{value} {name}" for name, value in case.items())


def row_of(way: str, figures: dict) -> dict:
    "The figures of a way, with its speed."
    speeds = {f"{name}_per_second": figures[name]/figures["seconds"] for name in ("examples", "tokens")
              if name in figures}
    return dict(way=way, **figures, **speeds)


def run_bench(name: str,      # stage1, stage2, encode or growth
              out: str = "",  # folder whose `NAME.jsonl` the rows are appended to; empty: nowhere
              **parameters,   # those of the function NAME_cases
             ):                # -> a pandas table with a row for each case and way
    "Run a benchmark; RuntimeError when the ways do not do the same work."
    import pandas
    about = dict(bench=name, at=now(), quick=False, parameters=parameters,  # quick: so that rows keep their fields
                 threads=isolated("torch:get_num_threads"), process_bytes=isolated("bench:process_bytes"),
                 machine=machine(), versions=library_versions(), code=code_version())
    table = []
    for case, ways in CASES[name](**parameters):
        rows = [row_of(way, figures) | case for way, figures in ways.items()]
        if out: append_rows(Path(out)/f"{name}.jsonl", [case | row | about for row in rows])
        table += [dict(case=case_name(case), **row) for row in rows]
        figures = [f"{row['way']} {row['seconds']:.3f} s, {row['peak_bytes']/1e9:.2f} GB" for row in rows]
        print(f"{case_name(case)}: " + ", ".join(figures))
    return pandas.DataFrame(table)


def as_table(rows):  # rows: of `run_bench`; -> a pandas table
    "Time, speed and memory, and as ratios: how many times as fast as the peer ours is, and its part of their memory."
    ours = rows[rows.way == OURS].set_index("case")
    ratio = lambda ours, theirs: (ours/theirs).where(rows.way != OURS)
    own = lambda column: rows.case.map(ours[column])
    ratios = {"our speed / its speed": ratio(rows.seconds, own("seconds")),
              "our memory / its memory": ratio(own("peak_bytes"), rows.peak_bytes)}
    table = rows.assign(GB=rows.peak_bytes/1e9, **ratios)
    columns = ["seconds", "examples_per_second", "tokens_per_second", "GB", *ratios]
    return table.set_index(["case", "way"])[[name for name in columns if name in table]]
