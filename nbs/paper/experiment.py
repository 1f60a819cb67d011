"""From the ledger of a sweep with seeds to claims that are supported, contradicted or undecided.

A sweep leaves a score for each arm, training seed and query. Whether arm a beats arm b is uncertain in two ways that
must not be mixed: other *queries* might have been asked, and another *seed* might have trained another model. The
difference of each query, averaged over seeds, has a bootstrap interval, which says how far other queries would move it
for these trained models; the difference of each seed, averaged over queries, has a t interval, which is wide because
seeds are few. A claim has to pass both: an interval over queries without zero, and the same sign in every seed.

`python nbs/paper/experiment.py runs/experiment nbs/results/experiment` keeps what `results.ipynb` reads of a sweep.
"""
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pandas as pd
from scipy.stats import t

from anchor_nb.core.files import write_text
from anchor_nb.core.recipe import paper
from anchor_nb.evaluation.measure import load_evaluation
from anchor_nb.evaluation.scores import evaluation_file
from anchor_nb.evaluation.significance import Interval, over_seeds
from anchor_nb.evaluation.tables import comparable
from anchor_nb.experiments.figures import _finish, _panels, _style
from anchor_nb.runs.ledger import read_rows

MINUS = "\N{MINUS SIGN}"

# ---- keeping a sweep's results, without its weights ----

KEPT = ("run.json", "metrics.jsonl", "speed.jsonl")


def query_rows(root: Path) -> list:  # dictionaries label, training_seed, step, task, values (query -> score)
    "The scores of single queries behind the main scores of a sweep's ledger."
    rows = []
    for row in comparable(read_rows(Path(root)/"ledger.jsonl")):
        path = Path(root)/"per_query"/evaluation_file(row)
        items = load_evaluation(path).items if path.is_file() else {}
        if items.get("statistic") == "mean":
            rows.append({name: row[name] for name in ("label", "training_seed", "step", "task")}
                        | dict(values={query: round(value, 5) for query, value in items["values"].items()}))
    return rows


def without_tracebacks(manifest: dict) -> dict:
    "A manifest whose failures keep their reason and time; tracebacks name paths of a machine."
    if "failures" not in manifest: return manifest
    return manifest | dict(failures=[{name: value for name, value in failure.items() if name != "traceback"}
                                     for failure in manifest["failures"]])


def keep_results(root: Path, into: Path) -> list:  # names of the runs
    "Copy a sweep's results, with `runs` in place of the root's path; FileNotFoundError without a ledger."
    root, into = Path(root).resolve(), Path(into)
    if not (root/"ledger.jsonl").is_file():
        raise FileNotFoundError(f"{root}/ledger.jsonl does not exist; give the folder `out` of a sweep with scores")
    def copy(path):
        text = path.read_text(encoding="utf-8")
        if path.name == "run.json":
            text = json.dumps(without_tracebacks(json.loads(text)), indent=1, ensure_ascii=False) + "\n"
        write_text(into/path.relative_to(root), text.replace(str(root), "runs"))
    copy(root/"ledger.jsonl")
    write_text(into/"queries.jsonl", "".join(json.dumps(row) + "\n" for row in query_rows(root)))
    runs = sorted({path.parent for path in root.glob("*/run.json")})
    for path in (run/name for run in runs for name in KEPT):
        if path.is_file(): copy(path)
    return [run.name for run in runs]


# ---- differences ----


@dataclass(frozen=True)
class Claim:
    "One arm is better than another."
    name: str      # such as H1
    better: str    # an arm
    worse: str     # another
    step: int = 0  # of both; 0: each one's last

    def __str__(self):
        return f"{self.name}: {self.better} {MINUS} {self.worse}" + (f", step {self.step}" if self.step else "")


def arm_scores(rows: list, label: str, step: int = 0) -> dict:  # training seed -> task -> query -> value
    "The scores of an arm, out of `query_rows`; ValueError lists the arms, or the steps, that there are."
    arm = [row for row in rows if row["label"] == label]
    if not arm:
        raise ValueError(f"no scores of {label!r}; there are {', '.join(sorted({row['label'] for row in rows}))}")
    step, scores = step or max(row["step"] for row in arm), {}
    for row in arm:
        if row["step"] == step: scores.setdefault(row["training_seed"], {})[row["task"]] = row["values"]
    if not scores:
        raise ValueError(f"{label!r} was not scored at step {step}, only at {sorted({row['step'] for row in arm})}")
    return scores


def differences_of(rows: list, claim: Claim) -> dict:  # training seed -> task -> query -> better minus worse
    """A claim's differences, query by query; ValueError where the two were not measured alike.

    A model without a training seed stands beside every seed of the other arm.
    """
    better, worse = (arm_scores(rows, label, claim.step) for label in (claim.better, claim.worse))
    if list(better) == [None]: better = dict.fromkeys(worse, better[None])
    if list(worse) == [None]: worse = dict.fromkeys(better, worse[None])
    if better.keys() != worse.keys():
        raise ValueError(f"{claim.name}: {claim.better!r} has the seeds {sorted(better)}, {claim.worse!r} "
                         f"{sorted(worse)}; run the sweep to its end")
    queries = lambda arm: {(seed, task): values.keys() for seed, tasks in arm.items() for task, values in tasks.items()}
    if queries(better) != queries(worse):
        raise ValueError(f"{claim.name}: {claim.better!r} and {claim.worse!r} were asked different queries; evaluate "
                         "both on the same cut of the same tasks")
    return {seed: {task: {query: value - worse[seed][task][query] for query, value in values.items()}
                   for task, values in tasks.items()} for seed, tasks in better.items()}


def by_queries(differences: dict) -> list:  # of arrays [queries], one per task
    "Differences averaged over seeds."
    first = next(iter(differences.values()))
    return [np.array([fmean(tasks[task][query] for tasks in differences.values()) for query in sorted(first[task])])
            for task in sorted(first)]


def by_training_seed(differences: dict) -> dict:  # training seed -> mean over tasks
    "Differences averaged over queries, then over tasks."
    return {seed: fmean(fmean(values.values()) for values in tasks.values()) for seed, tasks in differences.items()}


# ---- many comparisons at once ----


@dataclass(frozen=True)
class Compared(Interval):
    "A mean difference, with the interval that holds beside the others of its family."
    p: float     # two-sided, of the bootstrap
    level: float # what the interval covers, 1 - alpha/(m - k + 1)


def mean_draws(parts: list, generator, samples: int) -> np.ndarray:  # [samples]; parts: [queries] of each task
    "Means over tasks of queries drawn within each task."
    return np.mean([part[generator.integers(0, len(part), (samples, len(part)))].mean(1) for part in parts], axis=0)


def two_sided(draws: np.ndarray) -> float:  # in (0, 1]
    "Twice the smaller share of the draws on one side of zero, never zero."
    return float(min(1, 2*(1 + min((draws <= 0).sum(), (draws >= 0).sum()))/(1 + len(draws))))


def holm(differences: dict,      # name -> arrays [queries], one for each task
         alpha: float = 0.05,    # chance of any difference that is none
         seed: int = 0,          # of the draws
         samples: int = 20_000,  # draws; the strictest of nine intervals ends 56 from the edge
        ) -> dict:               # name -> Compared, in the given order
    """Mean differences with intervals that hold together; ValueError for an empty task.

    Nine comparisons at 95 % each find something in noise in a third of all experiments. Holm's rule keeps the chance of
    any such find below alpha: of m comparisons in the order of their p values, the k-th must hold at
    alpha/(m - k + 1), and where one does not, neither do those behind it. The intervals are at those same levels, so
    that a comparison holds exactly where its interval excludes zero.
    """
    parts = {name: [np.asarray(part, np.float64) for part in tasks] for name, tasks in differences.items()}
    if empty := [name for name, tasks in parts.items() if not tasks or not all(map(len, tasks))]:
        raise ValueError(f"{empty[0]!r} has no task, or a task without queries; compare what was measured")
    draws = {name: mean_draws(tasks, np.random.default_rng(seed), samples) for name, tasks in parts.items()}
    p, compared, share = {name: two_sided(draws[name]) for name in draws}, {}, alpha/max(1, len(draws))
    for rank, name in enumerate(sorted(draws, key=p.get)):
        if all(other.p <= 1 - other.level for other in compared.values()): share = alpha/(len(draws) - rank)
        low, high = np.percentile(draws[name], [50*share, 100 - 50*share])
        mean = float(np.mean([part.mean() for part in parts[name]]))
        compared[name] = Compared(mean, float(low), float(high), p[name], 1 - share)
    return {name: compared[name] for name in differences}


# ---- verdicts ----


def verdict(seeds, interval, margin: float) -> str:
    """supported, contradicted, no difference that matters, or undecided.

    `seeds` are differences, one for each training seed; `interval` is over queries; a difference below `margin` does
    not matter. The first two need the sign of every seed and of the interval, the third the interval within the margin.
    """
    if min(seeds) > 0 and interval.low > 0: return "supported"
    if max(seeds) < 0 and interval.high < 0: return "contradicted"
    return "no difference that matters" if -margin < interval.low and interval.high < margin else "undecided"


def seeds_needed(values, most: int = 1000) -> int | None:  # values: one difference for each training seed
    """The least n for which a t interval of this mean and spread would leave out zero; None beyond `most`.

    An experiment with so many seeds, whose mean and spread are just these, leaves out zero about every second time.
    """
    mean, spread = abs(fmean(values)), stdev(values)
    return next((n for n in range(2, most + 1) if t.ppf(0.975, n - 1)*spread/math.sqrt(n) < mean), None)


@dataclass(frozen=True)
class Answer:
    "What came of a claim; differences from -1 to 1."
    claim: Claim
    queries: object  # Compared: over queries, beside the other claims
    seeds: dict      # training seed -> difference
    verdict: str


def answers(rows: list, claims: list, margin: float = 0.02) -> list:  # of `Answer`; claims: one family
    "Every claim with its intervals and verdict, by default at a margin of 2 points."
    differences = {claim.name: differences_of(rows, claim) for claim in claims}
    compared = holm({name: by_queries(each) for name, each in differences.items()})
    seeds = {name: by_training_seed(each) for name, each in differences.items()}
    return [Answer(claim, compared[claim.name], seeds[claim.name],
                   verdict(seeds[claim.name].values(), compared[claim.name], margin)) for claim in claims]


def answer_table(found: list) -> pd.DataFrame:  # of text; found: of `Answer`
    "The answers to read: differences in points, with Holm's intervals over queries and 95 % ones over seeds."
    points = lambda *values: [f"{100*value:+.1f}".replace("-", MINUS) for value in values]
    span = lambda interval: "{} [{}, {}]".format(*points(interval.mean, interval.low, interval.high))
    return pd.DataFrame.from_dict({str(answer.claim): {
        "over queries": span(answer.queries), "over seeds": span(over_seeds(answer.seeds.values())),
        "each seed": ", ".join(points(*answer.seeds.values())),
        "seeds needed": str(seeds_needed(answer.seeds.values()) or "over 1000"), "verdict": answer.verdict}
        for answer in found}, orient="index")


# ---- the figure ----

COLOURS = {"supported": "#0173b2", "contradicted": "#d55e00", "no difference that matters": "#029e73",
           "undecided": "#777777"}


def draw_answer(axes, line: int, answer: Answer, theirs):
    "One claim: both intervals, the seeds, and the paper's difference where there is one."
    name, colour = answer.claim.name, COLOURS[answer.verdict]
    seeds, queries = over_seeds(answer.seeds.values()), answer.queries
    axes.plot([100*seeds.low, 100*seeds.high], [line, line], color=colour, linewidth=1, gid=f"{name} seeds")
    axes.plot([100*queries.low, 100*queries.high], [line, line], color=colour, linewidth=5, alpha=0.45,
              solid_capstyle="butt", gid=f"{name} queries")
    axes.plot([100*value for value in answer.seeds.values()], [line]*len(answer.seeds), "o", color=colour,
              markersize=4.5, markeredgecolor="white", markeredgewidth=0.6, gid=name)
    if theirs is not None:
        axes.plot(theirs, line + 0.25, "D", color="white", markeredgecolor="#333333", markersize=4.5,
                  gid=f"{name} paper")
    axes.annotate(answer.verdict, (1.01, line), xycoords=("axes fraction", "data"), color=colour, va="center",
                  fontsize=8.5, annotation_clip=False)


def answers_figure(found: list, theirs: dict = {}, margin: float = 0.02):
    """All claims with both intervals, those over seeds cut where the dots end; ValueError without a claim.

    `theirs`: the paper's differences in points, by name of claim; `margin`: the same as for the verdicts.
    """
    if not found:
        raise ValueError("no answers to draw; give the claims to `answers`")
    with _style():
        figure, ((axes,),) = _panels(1, 1, 7.6, 0.8 + 0.42*len(found))
        axes.axvspan(-100*margin, 100*margin, color="#eeeeee", zorder=0)
        axes.axvline(0, color="#999999", linewidth=1)
        for line, answer in enumerate(found): draw_answer(axes, line, answer, theirs.get(answer.claim.name))
        values = [value for answer in found
                  for value in (*answer.seeds.values(), answer.queries.low, answer.queries.high)]
        reach = 100*max(map(abs, values)) + 3
        label = "points; dots: seeds, thick: over queries, thin: over seeds" + ("; diamond: paper" if theirs else "")
        axes.set(yticks=range(len(found)), yticklabels=[str(answer.claim) for answer in found],
                 ylim=(len(found) - 0.5, -0.5), xlim=(-reach, reach), xlabel=label)
        axes.grid(axis="y", visible=False)
        return _finish(figure)


# ---- the claims of plan.ipynb ----


def planned_claims(early: int) -> list:  # of `Claim`; early: step of stage II for H2
    "The comparisons of the plan, in its order."
    return [Claim("H1", "anchor", "baseline"), Claim("H2", "anchor", "baseline", early),
            Claim("H3a", "anchor", "only query-to-document"), Claim("H3b", "anchor", "only document-to-query"),
            Claim("H4", "stage I alone", "untrained"), Claim("H5", "anchor", "baseline, same compute"),
            Claim("H6", "anchor", "all parameters, same compute"), Claim("H7", "anchor", "language modelling"),
            Claim("H8", "anchor", "strangers")]


def paper_differences() -> dict:  # name of a planned claim -> points
    "What the paper reports for the planned claims, with Llama-3.2-1B."
    stages = paper()["table10_stages_subset15"]["llama-3.2-1b"]
    directions = paper()["table3_objectives_llama-3.2-1b_mteb56"]
    steps = paper()["table5_steps_llama-3.2-1b_subset15"]
    early = paper()["table9_early_stage2_subset15"]["llama-3.2-1b"]
    whole = directions["anchor (alpha 0.2)"]["Average"]
    return dict(H1=stages["stage1+stage2"] - stages["stage2_only"], H2=early["anchor"][0] - early["baseline"][0],
                H3a=whole - directions["only_q2d (alpha 1)"]["Average"],
                H3b=whole - directions["only_d2q (alpha 0)"]["Average"],
                H4=stages["stage1_only"] - stages["unsupervised"],
                H5=steps["stage I 2000 + stage II 1000 steps"] - steps["stage II only, 3000 steps"])


if __name__ == "__main__": print(*keep_results(sys.argv[1], sys.argv[2]), sep="\n")
