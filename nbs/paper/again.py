"""The question again, on models where anchors carry: one command for each rung of the ladder, resumed where it stopped.

    python nbs/paper/again.py run dry --seeds 2     # seconds: every step of it, on a random model
    python nbs/paper/again.py tune village          # rate and temperature of stage II, each arm alike
    python nbs/paper/again.py run village           # 0.1 M weights
    python nbs/paper/again.py run small             # 5 M, trained here first; its pairs are WordNet's
    python nbs/paper/again.py all descriptions-long # on package descriptions; the first half is `descriptions`
    python nbs/paper/again.py all wiki-long         # on encyclopedia articles, with the settings of the descriptions
    python nbs/paper/again.py run smollm2           # 135 M, the same pairs
    python nbs/paper/again.py all gpu --jobs 0      # 135 M, larger: tunes and runs, as many as fit the GPUs
    python nbs/paper/again.py all gpu-long --jobs 0 # stage II twice as long, as the plan asks where it was too short
    python nbs/paper/again.py run gpu-longer --arms W # stage II alone until it has read as many pairs as A
    OMP_NUM_THREADS=1 python nbs/paper/again.py run gpu-longer --arms W --jobs 2 # on two cores: two runs side by side

Rows are appended to nbs/results/carry/ as they are known; weights stay in runs/again. The plan is paper/again.ipynb.
"""
import argparse
import json
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from scipy import stats

ROOT, KEPT = Path("runs/again"), Path("nbs/results/carry")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent/"results/carry")) # gates.py
SEEDS = (1, 2, 3, 4, 5, 6, 7)
MARGIN = 2.0  # points of nDCG@10 within which a difference does not matter
CARRIED = 3.0 # nats a text that own anchors must save, with 95 % confidence and in both directions, before A counts

# ---- rungs: what is trained, on what, for how long ----

# from the gates: a term that keeps anchors apart, the norm of a token's embedding, behind a token to rest on
KEPT_APART = dict(objectives=dict(anchor=1.0, ebae=0.3, ebar=0.3), anchor_scale=0.07, anchor_sink=True)
COMMON = dict(instructions="none", template="plain", schedule="constant", precision="fp32", save_steps=200,
              keep_last=1, micro_tokens=2048)
LARGE = dict(precision="bf16", attention="packed_sdpa", micro_tokens=8192, save_steps=0, workers=0,
             gradient_checkpointing="never") # pairs are far shorter than the plan allows for; as it was on the GPU
VILLAGE = dict(data="village", stage1=dict(steps=400, global_batch=32, learning_rate=3e-3, warmup_steps=20,
                                           max_length=64, carry_pairs=0),
               stage2=dict(steps=100, global_batch=32, learning_rate=1e-3, warmup_steps=20, max_length=64, negatives=0,
                           snapshot_steps=25, save_steps=0))
WORDNET = dict(data="wordnet", stage1=dict(steps=600, global_batch=16, learning_rate=1e-3, warmup_steps=50,
                                           max_length=64, carry_pairs=64, carry_steps=100, **KEPT_APART),
               stage2=dict(steps=150, global_batch=32, learning_rate=1e-3, warmup_steps=20, max_length=64, negatives=0,
                           snapshot_steps=75, save_steps=0))
DESCRIPTIONS = dict(data="debian", model=str(ROOT/"descriptions-lm"), lm_steps=600, warm=150,
                    stage1=WORDNET["stage1"] | dict(steps=800, warmup_steps=20, carry_pairs=0),
                    stage2=WORDNET["stage2"] | dict(steps=300, snapshot_steps=150))
WIKI = DESCRIPTIONS | dict(data="wiki", model=str(ROOT/"wiki-lm"))
SMOLLM2 = dict(data="wordnet", model="smollm2-135m", warm=40) # steps of bags before; see nbs/results/carry/gates.py
RUNGS = dict(
    dry=dict(VILLAGE, model="tiny", stage1=VILLAGE["stage1"] | dict(steps=4), stage2=VILLAGE["stage2"] | dict(
        steps=4, snapshot_steps=2)),
    village=dict(VILLAGE, model="tiny"),
    small=dict(WORDNET, model=str(ROOT/"small-lm")),
    descriptions=DESCRIPTIONS,
    wiki=WIKI,
    smollm2=dict(SMOLLM2, scored="int8", grid=dict(learning_rate=(2e-4, 5e-4, 1e-3), temperature=(0.05,)),
                 stage1=WORDNET["stage1"] | dict(learning_rate=2e-4, steps=100, warmup_steps=10, carry_pairs=0,
                                                 save_steps=50),
                 stage2=WORDNET["stage2"] | dict(steps=150, global_batch=16, snapshot_steps=150, save_steps=75)),
    gpu=dict(SMOLLM2, scored="bf16",
             stage1=WORDNET["stage1"] | dict(learning_rate=3e-4, steps=125, global_batch=64, warmup_steps=20,
                                             **LARGE),
             stage2=WORDNET["stage2"] | dict(steps=200, global_batch=64, snapshot_steps=100, **LARGE)))
def twice(rung, every):
    "A rung with twice the steps of stage II, scored every so many."
    return rung | dict(stage2=rung["stage2"] | dict(steps=2*rung["stage2"]["steps"], snapshot_steps=every))


SMALL = ("small", "descriptions", "wiki") # language models that are trained here
LONG = "-long" # rungs again, from the same stage I, with the same rates and temperatures
RUNGS |= {"dry" + LONG: twice(RUNGS["dry"], 2), "village" + LONG: twice(RUNGS["village"], 50),
          "descriptions" + LONG: twice(DESCRIPTIONS, 150), "wiki" + LONG: twice(WIKI, 150),
          "gpu" + LONG: twice(RUNGS["gpu"], 100)}
LONGER = "-longer"
RUNGS["gpu" + LONGER] = RUNGS["gpu"] | dict(stage2=RUNGS["gpu"]["stage2"] | dict(steps=600, snapshot_steps=200))


def shortest(rung):
    "The rung with the fewest steps of stage II, on which rates and temperatures were tuned."
    return rung.removesuffix(LONGER).removesuffix(LONG)


BAGS = dict(objectives=dict(ebae=1.0, ebar=1.0)) # LLaMA2Vec's two
ARMS = dict(A=dict(pairing="own"), S=dict(pairing="strangers"), W=None, # own pairs, strangers, no stage I
            B=dict(pairing="own", anchor_scale=1.0, anchor_sink=False, carry_pairs=0, **BAGS), # bags alone
            L=dict(pairing="own", anchor_scale=1.0, anchor_sink=False, carry_pairs=0, # language modelling
                   objectives=dict(lm=1.0), alpha=0.5),
            C=dict(pairing="own", objectives=dict(anchor=0.3, ebae=1.0, ebar=1.0))) # bags as in B, and reconstruction
SECONDARY = "BLC" # without a share in the verdicts


def keep(name, row, kept=KEPT):
    "Append a row to a committed file."
    kept.mkdir(parents=True, exist_ok=True)
    with open(kept/name, "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key != "each"}, flush=True)


def rows_of(path):
    "The rows of a JSONL file; none where it is not there."
    return [json.loads(line) for line in open(path, encoding="utf-8")] if Path(path).is_file() else []


def made():
    "Code and device of a run; a kit without git says in a file what it was made from."
    import torch
    from anchor_nb.runs.provenance import code_version, machine
    told = Path(__file__).resolve().parent.parent.parent/"commit.json"
    code = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else code_version()
    return dict(code=code, device=torch.cuda.get_device_name() if torch.cuda.is_available()
                else machine()["processor"])


# ---- data ----


def prepared(name, dev=False):
    """(folder of training pairs, pairs kept out, [(query, its document's row)], documents); made where it is not there.

    `dev`: queries and documents to tune on, which no test uses: pairs kept out of training, of the village a third.
    """
    from anchor_nb.data.corpora import build_corpus
    import gates
    folder = gates.ROOT/name
    if not (folder/"kept_out.jsonl").is_file(): gates.data() if name == "village" else gates.split(name)
    out = rows_of(folder/"kept_out.jsonl")
    if dev or name == "village":
        asked = out if name != "village" else out[:50] if dev else out[50:]
        return folder/"pairs", out, [(row["query"], k) for k, row in enumerate(asked)], [
            row["positive"] for row in asked]
    test = build_corpus(name)/"eval"
    documents = {row["_id"]: row["text"] for row in rows_of(test/"corpus.jsonl")}
    places, judged = {key: place for place, key in enumerate(documents)}, {}
    for line in (test/"qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, _ = line.split("\t")
        assert query not in judged, "one document a query"
        judged[query] = places[document]
    asked = [(row["text"], judged[row["_id"]]) for row in rows_of(test/"queries.jsonl")]
    return folder/"pairs", out, asked, list(documents.values())


# ---- one run ----


def ndcg(model, asked, documents):
    "nDCG@10 of each query, in per cent; a query has one document."
    queries = np.asarray(model.encode_query([query for query, _ in asked]))
    scores = queries @ np.asarray(model.encode_document(documents)).T
    right = scores[np.arange(len(asked)), [place for _, place in asked]]
    ranks = (scores > right[:, None]).sum(1) # 0: the right one comes first
    return 100*np.where(ranks < 10, 1/np.log2(ranks + 2), 0)


def first_stage(rung, arm, seed, pairs):
    "(the model that stage II starts from, what stage I's run says of itself); a stage that is finished stays."
    from anchor_nb import Stage1, train
    plan, place = RUNGS[rung], ROOT/shortest(rung)/f"{arm}-{seed}"
    if ARMS[arm] is None: return plan["model"], {}
    model, how, steps = plan["model"], dict(data=str(pairs), seed=seed), plan["stage1"]["steps"]
    if arm == "L": steps += plan.get("warm", 0) # one part: bags have no place in it
    elif plan.get("warm"):
        bags = dict(BAGS, steps=plan["warm"], carry_pairs=0)
        first = {name: value for name, value in plan["stage1"].items() if name not in KEPT_APART} | bags
        train(Stage1(model=model, out=str(place/"bags"), **how, **COMMON | first | ARMS[arm] | bags))
        model = str(place/"bags")
    facts = train(Stage1(model=model, out=str(place/"stage1"), **how,
                         **COMMON | plan["stage1"] | dict(steps=steps) | ARMS[arm]))
    return str(place/"stage1"), facts


def run_one(rung, arm, seed, data, kept=KEPT):
    "Stage I if the arm has one, stage II, and the rows of both."
    from anchor_nb import AnchorEmbedder, Stage2, train
    import gates
    plan, (pairs, out, asked, documents) = RUNGS[rung], data
    place, about = ROOT/rung/f"{arm}-{seed}", dict(rung=rung, arm=arm, seed=seed)
    short, by = about | dict(rung=shortest(rung)), made() # at a constant rate a long run begins as a short one
    there = lambda name, row: any(row.items() <= known.items() for known in rows_of(kept/name))
    model, facts = first_stage(rung, arm, seed, pairs)
    objectives = (plan["stage1"] | (ARMS[arm] or {})).get("objectives", dict(anchor=1.0))
    known = "anchor" not in objectives or any(there("again-carried.jsonl", row | dict(loss=facts["last"]["loss"]))
                                              for row in (short, about) if facts)
    if facts and not known: # of this very run: stage I may have been made again
        first = Path(model)
        seconds = sum(row["seconds"] for row in rows_of(first/"speed.jsonl"))
        under = about if there("again-carried.jsonl", short) else short # one measurement for each rung
        for row in rows_of(first/"carried.jsonl"): keep("again-curves.jsonl", under | row, kept)
        keep("again-carried.jsonl", under | dict(
            loss=facts["last"]["loss"], steps=facts["steps"], weights=facts["parameters"], seconds=round(seconds, 1),
            of_them_measuring=round(facts.get("carried_seconds", 0), 1), **gates.measure(model, out), **by), kept)
    settings = tuned(rung, arm, kept)
    train(Stage2(model=model, data=str(pairs), out=str(place/"stage2"), seed=seed,
                 **COMMON | plan["stage2"] | settings))
    last, most = plan["stage2"]["steps"], RUNGS[short["rung"]]["stage2"]["steps"]
    for step in scored(rung)[::-1]: # what decides comes first
        rows = [row | dict(step=step) for row in ([about] if step > most or about == short else [about, short])]
        if not (rows := [row for row in rows if not there("again.jsonl", row)]): continue
        source = place/"stage2" if step == last else place/f"stage2/snapshots/step-{step}"
        model = AnchorEmbedder.from_pretrained(str(source), precision=plan.get("scored", "auto"))
        each = ndcg(model, asked, documents)
        for row in rows: keep("again.jsonl", row | dict(ndcg_at_10=round(float(each.mean()), 3), queries=len(asked),
                                                        documents=len(documents), **settings, **by), kept)


GRID = dict(learning_rate=(3e-4, 1e-3, 3e-3), temperature=(0.02, 0.05))


def tuned(rung, arm, kept=KEPT):
    "The settings of stage II that `tune` found best for an arm; none before."
    which = (shortest(rung), arm)
    rows = [row for row in rows_of(kept/"again-tuning.jsonl") if (row["rung"], row["arm"]) == which]
    best = max(rows, key=lambda row: row["ndcg_at_10"], default={})
    return {name: best[name] for name in GRID if name in best}


def side_by_side(work, todo, jobs):
    """`work` of each item of `todo`, several at a time, each in a fresh process; returns how many failed.

    An error in one leaves the rest alone, unless they run one after the other in this process; a process that is
    killed takes those with it that have not ended.
    """
    cards, context, failed = visible(), get_context("spawn"), 0
    places = fitting(cards) if not jobs else [cards[k % len(cards)] if cards else "" for k in range(jobs)]
    if len(places) == 1:
        for one in todo: work(*one)
        return 0
    turns = context.SimpleQueue()
    for card in places: turns.put(card)
    if len(cards) > 1: work = partial(on_its_card, work)
    with ProcessPoolExecutor(len(places), context, take_turns, (turns,), max_tasks_per_child=1) as pool:
        done = [(one, pool.submit(work, *one)) for one in todo]
        for one, result in done:
            if error := result.exception(): print(*one, f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed += error is not None
    return failed


def visible():
    "The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."
    import torch
    if not torch.cuda.is_available(): return []
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] or [str(k) for k in range(count)]


def take_turns(turns):
    "In each process: the queue of GPUs that have room for one more run."
    global TURNS
    TURNS = turns


def on_its_card(work, *one):
    "`work` on a GPU that has room; CUDA has not begun in this process."
    os.environ["CUDA_VISIBLE_DEVICES"] = card = TURNS.get()
    try: work(*one)
    finally: TURNS.put(card)


def fitting(cards):
    "A GPU for each run that fits beside the others, all GPUs in turn; 16 of them took 139 of 150 GB."
    import torch
    room = [max(1, int(torch.cuda.mem_get_info(k)[0]//9e9)) for k in range(len(cards))]
    return [card for turn in range(max(room, default=0)) for card, most in zip(cards, room) if turn < most] or [""]


def tune_one(rung, data, kept, arm, *values):
    "One rate and temperature of stage II."
    from anchor_nb import AnchorEmbedder, Stage2, train
    settings, half, by = dict(zip(GRID, values)), RUNGS[rung]["stage2"]["steps"]//2, made()
    place = ROOT/rung/f"{arm}-0"/"-".join(f"{value:g}" for value in values)
    train(Stage2(model=first_stage(rung, arm, 0, data[0])[0], data=str(data[0]), out=str(place), seed=0,
                 **COMMON | RUNGS[rung]["stage2"] | dict(snapshot_steps=half) | settings))
    score = lambda folder: round(float(ndcg(AnchorEmbedder.from_pretrained(str(folder)), *data[2:]).mean()), 3)
    keep("again-tuning.jsonl", dict(rung=rung, arm=arm, **settings, ndcg_at_10=score(place),
                                    half_way=score(place/f"snapshots/step-{half}"), **by), kept)


def untuned(rung, arms, kept):
    "(arm, rate, temperature) of what `tune` has yet to try."
    done = {tuple(row[name] for name in ("arm", *GRID)) for row in rows_of(kept/"again-tuning.jsonl")
            if row["rung"] == rung}
    return [one for one in product(arms, *RUNGS[rung].get("grid", GRID).values()) if one not in done]


def scored(rung):
    "The steps of stage II after which a rung is scored."
    every = RUNGS[rung]["stage2"]["snapshot_steps"]
    return list(range(every, RUNGS[rung]["stage2"]["steps"] + 1, every))


def missing(rung, seeds, arms, kept):
    "(arm, seed) of the runs that have yet to be made, seed by seed, so that what is there is balanced."
    done = {(row["arm"], row["seed"], row["step"]) for row in rows_of(kept/"again.jsonl") if row["rung"] == rung}
    return [(arm, seed) for seed, arm in product(seeds, arms)
            if any((arm, seed, step) not in done for step in scored(rung))]


def tune(rung, arms="ASW", kept=KEPT, jobs=1):
    "Stage II at every rate and temperature, each arm alike, seed 0, scored on pairs that no test uses."
    data, todo = start(rung, dev=True), untuned(rung, arms, kept)
    first = [(arm, 0, data[0]) for arm in dict.fromkeys(arm for arm, *_ in todo) if ARMS[arm]]
    return side_by_side(partial(first_stage, rung), first, jobs) + side_by_side(
        partial(tune_one, rung, data, kept), todo, jobs)


def run(rung, seeds=SEEDS, arms="ASW", kept=KEPT, jobs=1):
    "Every arm with every seed."
    data = start(rung)
    return side_by_side(partial(run_one, rung), [(*one, data, kept) for one in missing(rung, seeds, arms, kept)], jobs)


def start(rung, dev=False):
    "The data of a rung, as `prepared` gives it; a small language model is trained where it is not there."
    data = prepared(RUNGS[rung]["data"], dev)
    usual = shortest(rung)
    if usual in SMALL and not Path(RUNGS[rung]["model"]).is_dir(): small_lm(usual, data[0])
    return data


def run_all(rung, seeds=SEEDS, arms="ASW", kept=KEPT, jobs=1):
    """Stage I of all that is missing first, so that no process waits for another; then `tune` and `run`.

    RuntimeError where a setting could not be tried: the runs would differ in what was chosen.
    """
    tried = shortest(rung)
    first = [(arm, 0) for arm in dict.fromkeys(arm for arm, *_ in untuned(tried, arms, kept))]
    todo, pairs = first + missing(rung, seeds, arms, kept), start(rung)[0]
    failed = side_by_side(partial(first_stage, rung), [(*one, pairs) for one in todo if ARMS[one[0]]], jobs)
    failed += tune(tried, arms, kept, jobs)
    if left := untuned(tried, arms, kept):
        raise RuntimeError(f"{len(left)} settings of stage II could not be tried: {left}; repeat the command")
    return failed + run(rung, seeds, arms, kept, jobs)


# ---- the small language model ----


def small_lm(rung, pairs):
    "A Llama of 5 M weights, first random, then trained on both texts of the pairs; its loss goes to small-lm.jsonl."
    from anchor_nb import Stage1, train
    from anchor_nb.core.presets import read_preset
    from anchor_nb.models.resolve import random_llama
    texts = [row[side] for path in sorted(Path(pairs).glob("*.jsonl")) for row in rows_of(path)
             for side in ("query", "positive")]
    random, training = ROOT/rung/"random", ROOT/rung/"training"
    random_llama(random, texts, vocabulary=4096, hidden=256, mlp=688, layers=6, heads=4)
    settings = COMMON | read_preset("small-lm", "stage1") | dict(
        model=str(random), data=str(pairs), out=str(training), seed=1, steps=RUNGS[rung].get("lm_steps", 1000))
    facts = train(Stage1(**settings))
    known = any(row["rung"] == rung for row in rows_of(KEPT/"small-lm.jsonl")) # of an earlier machine, for example
    for row in [] if known else rows_of(training/"metrics.jsonl"):
        if row["step"] % 50 == 0 or row["step"] == 1:
            keep("small-lm.jsonl", dict(rung=rung) | {name: round(row[name], 4) for name in (
                "step", "loss", "loss_documents", "loss_queries", "tokens")})
    seconds = sum(row["seconds"] for row in rows_of(training/"speed.jsonl"))
    size = dict(rung=rung, weights=facts["parameters"], seconds=round(seconds, 1), **made())
    if not known: keep("small-lm.jsonl", size)
    shutil.copytree(training/"model", RUNGS[rung]["model"])


# ---- analysis: decided before the runs ----


def sign_flip(differences):
    "Two-sided p of a mean difference over seeds, exact: all 2**n ways in which the signs could have fallen."
    found = stats.permutation_test((np.asarray(differences, float),), lambda rows, axis: np.mean(rows, axis=axis),
                                   permutation_type="samples", vectorized=True, n_resamples=np.inf)
    return float(found.pvalue)


def holm(p):
    "p values of one family after Holm's correction, by name."
    adjusted, highest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        highest = max(highest, min(1.0, p[name]*(len(p) - rank)))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p}


def equivalent(differences, margin=MARGIN):
    "p of two one-sided t tests: the larger one, of the mean lying at or beyond either margin."
    low = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    high = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(low, high))


def interval(differences):
    "(low, high), 95 % of a t interval over seeds."
    found = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return float(found.low), float(found.high)


def power(effect, seeds=len(SEEDS), level=0.025, draws=4000, generator=None):
    "Chance that the exact test at `level` finds a true mean of `effect` standard deviations of the difference."
    draws = (generator or np.random.default_rng(0)).normal(effect, 1, (draws, seeds))
    signs = np.array(list(product((1, -1), repeat=seeds))).T/seeds
    means = draws @ signs # [draws, 2**seeds]
    own = draws.mean(1, keepdims=True)
    beyond = np.minimum((means >= own - 1e-12).mean(1), (means <= own + 1e-12).mean(1))
    return float((np.minimum(1, 2*beyond) <= level + 1e-12).mean())


@dataclass(frozen=True)
class Contrast:
    "A contrast: the difference in points of nDCG@10 at the last step, seed by seed, and what it says."
    name: str
    differences: tuple
    p: float           # exact, two-sided
    adjusted: float    # after Holm over the contrasts that were asked for
    low: float
    high: float
    equivalence: float # p of the mean lying beyond the margin

    @property
    def verdict(self):
        "What may be said; the first rule that holds."
        mean = np.mean(self.differences)
        if self.adjusted <= 0.05: return "greater" if mean > 0 else "smaller"
        return "no difference that matters" if self.equivalence <= 0.05 else "undecided"


def contrasts(rows, rung, step=0, others="SW", first="A"):
    "`first` less each of the others, of a rung; ValueError unless every arm has the same seeds, at least two."
    rows = [row for row in rows if row["rung"] == rung]
    last = RUNGS[rung]["stage2"]["steps"] if rung in RUNGS else max((row["step"] for row in rows), default=0)
    step = step or last
    scores = {arm: {row["seed"]: row["ndcg_at_10"] for row in rows if row["arm"] == arm and row["step"] == step}
              for arm in first + others}
    seeds = sorted(scores[first])
    if len(seeds) < 2 or any(sorted(each) != seeds for each in scores.values()):
        raise ValueError(f"{rung} has the seeds " + ", ".join(f"{arm}: {sorted(each)}" for arm, each in scores.items())
                         + "; run it to its end")
    found = {f"{first} - {arm}": tuple(scores[first][seed] - scores[arm][seed] for seed in seeds) for arm in others}
    p = {name: sign_flip(each) for name, each in found.items()}
    adjusted = holm(p)
    return [Contrast(name, each, p[name], adjusted[name], *interval(each), equivalent(each))
            for name, each in found.items()]


def early_against_late(rows, rung, early, late):
    """A after `early` steps of stage II less W after `late`: a `Contrast` by itself.

    ValueError unless both have the same seeds, at least two.
    """
    rows = [row | dict(step=1) for row in rows
            if row["rung"] == rung and (row["arm"], row["step"]) in (("A", early), ("W", late))]
    return contrasts(rows, rung, 1, "W")[0]


def carries(row):
    "Whether a row of again-carried.jsonl passes the gate: both directions, lower end of the interval."
    return all(row[way]["gap"] - row[way]["margin"] >= CARRIED for way in ("q2d", "d2q"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["run", "tune", "all"])
    parser.add_argument("rung", choices=RUNGS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; the plan has seven")
    parser.add_argument("--arms", default="ASW", help="A own pairs, S strangers, W none; B bags alone, C bags of that "
                        "weight beside reconstruction, L language modelling")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; 0: as many as fit the GPUs")
    parser.add_argument("--trial", action="store_true", help="seeds that the plan does not use, rows kept apart")
    given = parser.parse_args()
    place = ROOT/"dry-rows" if given.rung.startswith("dry") else KEPT/"trial" if given.trial else KEPT
    seeds = [seed + 10*given.trial for seed in SEEDS[:given.seeds]]
    work, more = dict(tune=tune, run=run, all=run_all)[given.what], () if given.what == "tune" else (seeds,)
    failed = 0
    for later in (False, True): # what the verdicts need comes first
        if arms := "".join(arm for arm in given.arms if (arm in SECONDARY) == later):
            failed += work(given.rung, *more, arms, place, given.jobs)
    sys.exit(bool(failed))
