"""The rows of `make gpu` as a page: what was measured on which GPU, what was not, and which goals were met.

The goals were written before any of this ran on a GPU. A goal without a measurement is "not run", never "met".
"""
import json
from typing import Callable, NamedTuple

OURS, ST = "anchor_nb", "sentence-transformers"
TOO_LATE = "the stage's time was up before it began"

# ---- rows ----


def of_machine(rows: list, device: str) -> list:
    "The rows of one kind of machine."
    return [row for row in rows if row["machine"]["device"] == device]


def last_runs(rows: list) -> dict:  # part -> the row that closed it last
    "How each part ended when it was last run; a session that did not come to it changes nothing."
    found = {}
    for row in rows:
        if "status" in row and (begun(row) or not begun(found.get(row["part"], {}))): found[row["part"]] = row
    return found


def begun(row: dict) -> bool:
    "Whether a part that ended so has been tried."
    return row.get("status", "not run") != "not run" and row["why"] != TOO_LATE


def cases(rows: list, part: str) -> list:  # of rows
    "What the last run of a part measured; of a part that was run twice, the later cases count."
    mine = [row for row in rows if row["part"] == part]
    ends = [k for k, row in enumerate(mine) if begun(row)]
    first = ends[-2] + 1 if len(ends) > 1 else 0
    # a run that was killed has left rows without an end
    return list({(row["case"], row.get("way")): row for row in mine[first:] if "status" not in row}.values())


FIGURES = dict(loss_error="loss off by {:.0e}", gradient_error="gradient off by {:.2g}", cosine="cosine {:.3f}",
               median_error="median of the weights {:.2g}", vector_error="off by {:.0e}",
               tokens_per_second="{:,.0f} tokens/s", rate="matrix products at {:.3g} FLOP/s",
               efficiency="{:.0%} of that", peak_bytes="peak {:.2f} GB", predicted_bytes="{:.2f} GB forecast",
               last_line="{}")


def in_words(row: dict) -> str:
    "A case in one line."
    value = lambda name: row[name]/1e9 if name.endswith("_bytes") else row[name]
    words = [shown.format(value(name)) for name, shown in FIGURES.items() if row.get(name) is not None]
    if row.get("checkpointing"): words.append("with gradient checkpointing")
    verdict = {True: "holds", False: "DOES NOT HOLD"}.get(row.get("holds"))
    return "; ".join([f"{row['case']}{', ' + row['way'] if 'way' in row else ''}: {', '.join(words)}",
                      *filter(None, [verdict, row.get("why")])])


def case_rows(rows: list, part: str) -> list:  # of lines
    "The cases of a part, a line each."
    return [in_words(row) for row in cases(rows, part)]


# ---- goals ----


class Goal(NamedTuple):
    "A number that a GPU has to reach."
    name: str
    part: str           # that measures it
    value: Callable     # (cases of the part, all rows) -> a number, or None where it was not measured
    least: float = 0    # the goal; 0: there is `most` instead
    most: float = 0
    percent: bool = False
    also: str = ""      # a part that measures it in another setting, where `part` has not


# dense bf16 operations per second that the makers state
STATED = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12,
          "H800": 989e12, "B200": 2250e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}
# table 7: 2000 steps of 512 pairs in 4 hours on 8 A100. The paper does not say how long its texts are; 25 and 180
# tokens are the means assumed here, in the paper's favour against a shorter guess
PAPER_TOKENS_PER_HOUR = 2000*512*(25 + 180)/(4*8)


def ours(found: list, **wanted) -> list:
    "The rows of our way that have these values."
    return [row for row in found if row.get("way") == OURS and all(row.get(k) == v for k, v in wanted.items())]


def share(found: list, rows: list):
    "Operations that a step needs at least, over what the machine multiplies in that time."
    return max((row["efficiency"] for row in ours(found) if "efficiency" in row), default=None)


def against_paper(found: list, rows: list):
    "Tokens per GPU-hour over the paper's, both per stated operation of the GPU."
    mine = max(ours(found), key=lambda row: row["tokens_per_second"], default=None)
    stated = next((rate for name, rate in STATED.items() if mine and name in mine["machine"]["device"]), None)
    if not stated: return None
    return 3600*mine["tokens_per_second"]/PAPER_TOKENS_PER_HOUR*STATED["A100"]/stated


def times_as_fast(peers: tuple) -> Callable:
    "Our speed over the fastest of the peers', in the case where that is smallest."
    def value(found: list, rows: list):
        ratios = []
        for row in ours(found):
            rivals = [other["seconds"] for other in found if other["case"] == row["case"] and other["way"] in peers]
            if rivals: ratios.append(min(rivals)/row["seconds"])
        return min(ratios, default=None)
    return value


def of_roofline(found: list, rows: list):
    "The least operations of the texts at the measured matrix rate, over the time taken."
    rates = {row["case"]: row["rate"] for row in cases(rows, "matrix rate")}
    kind = "bfloat16" if any(row["machine"]["kind"] == "cuda" for row in found) else "float32"
    if kind not in rates: return None
    return max((row["flops_least"]/row["seconds"]/rates[kind] for row in ours(found)), default=None)


def forecast_error(found: list, rows: list):
    "How far the largest measured peak is from the planner's, in the case where it is farthest."
    all_parts = [row for part in {row["part"] for row in rows} for row in cases(rows, part)]
    errors = [abs(row["peak_bytes"]/row["predicted_bytes"] - 1) for row in ours(all_parts)
              if row.get("predicted_bytes")]
    return max(errors, default=None)


def worst_scaling(found: list, rows: list):
    "Speed with all ranks, over that many times the speed of one."
    speed = {row["ranks"]: row["tokens_per_second"] for row in found}
    gpus = max((row["machine"]["count"] for row in found if row["machine"]["kind"] == "cuda"), default=0)
    return speed[max(speed)]/max(speed)/speed[1] if len(speed) > 1 and 1 in speed and max(speed) >= gpus else None


def all_hold(found: list, rows: list):
    "The share of the cases that hold; the naive form in bf16 is a yardstick, and not judged."
    judged = [row["holds"] for row in found if "holds" in row]
    return sum(judged)/len(judged) if judged else None


RIGHT = ("kernels", "parity random 135m", "parity 135m", "parity 1b", "encode and export 135m", "kill and resume",
         "two ranks equal one")
FORECAST = ("stage1 1b", "stage1 135m", "stage2 135m", "encode 135m", "encode 1b", "stage2 1b", "micro-batches 1b",
            "encode 3b", "encode 8b")  # parts whose peak the planner forecasts
GOALS = [Goal(f"{part}: cases within the tolerances", part, all_hold, least=1, percent=True) for part in RIGHT] + [
    Goal("stage I, 1B: share of the measured matrix-product rate", "stage1 1b", share, least=0.45, percent=True,
         also="micro-batches 1b"),
    Goal("stage I, 1B: tokens per GPU-hour, times the paper's at equal peak (table 7)", "stage1 1b", against_paper,
         least=5, also="micro-batches 1b"),
    Goal("stage II, 135M: times as fast as sentence-transformers", "stage2 135m",
         times_as_fast((ST, f"{ST} cached")), least=1.3),
    Goal("encode, 135M: times as fast as sentence-transformers", "encode 135m", times_as_fast((ST,)), least=1.3),
    Goal("encode, 1B: times as fast as sentence-transformers", "encode 1b", times_as_fast((ST,)), least=1.3),
    Goal("encode, 1B: share of the roofline", "encode 1b", of_roofline, least=0.6, percent=True),
    Goal("memory: largest error of the forecast", "stage1 1b", forecast_error, most=0.1, percent=True),
    Goal("several GPUs: speed of all, over that many times one", "scaling", worst_scaling, least=0.85, percent=True)]


def verdict(goal: Goal, rows: list) -> tuple:  # (measured as text, met, not reached or not run)
    "What was measured for a goal; a speed counts also where its part did not end well."
    found = cases(rows, goal.part)
    value = goal.value(found, rows)
    by_loss = goal.value is all_hold and any(row.get("why", "").startswith("judged by its loss") for row in found)
    where = ", some cases by their loss alone" if by_loss else ""
    status = last_runs(rows).get(goal.part, {}).get("status", "not run")
    if value is None and goal.also:
        value = goal.value(cases(rows, goal.also), rows)
        where = f" in {goal.also}; {goal.part}: {status}"
    elif goal.value is forecast_error:
        without = [part for part in FORECAST if not any(row.get("predicted_bytes") for row in ours(cases(rows, part)))]
        if without: where = f" so far; without a measurement: {', '.join(without)}"
    elif goal.value is not all_hold and status != "done": where = f" so far; {goal.part}: {status}"
    if value is None: return "–", "not run" if status in ("done", "not run") else f"not measured: {status}"
    shown = f"{value:.0%}" if goal.percent else f"{value:.2f}"
    if all(row["dry"] for row in rows) and goal.value is not all_hold: return shown, "not run (a dry run)"
    good = value >= goal.least if goal.least else value <= goal.most
    unfinished = goal.value is all_hold and status != "done"  # what holds may be less than all there is
    return shown, status if good and unfinished else ("met" if good else "not reached") + where


# ---- the page ----


def table(head: list, lines: list) -> str:
    "A table in Markdown."
    clean = lambda cell: str(cell).replace("|", "/").replace("\n", " ")
    return "\n".join(f"| {' | '.join(map(clean, line))} |" for line in [head, ["---"]*len(head), *lines])


def changed(rows: list, parts: list) -> set:  # of names
    "Parts that were last run with other settings than they have now; a dry run's do not count, nor numbers of GPUs."
    usual = {part.name: dict(json.loads(json.dumps(part.settings)), counts=0) for part in parts}
    return {name for name, row in last_runs(rows).items() if name in usual and "settings" in row and not row["dry"]
            and dict(row["settings"], counts=0) != usual[name]}


def goals_table(rows: list, parts: list) -> str:
    "Every goal with what was measured, and how many were met."
    verdicts, other = [verdict(goal, rows) for goal in GOALS], changed(rows, parts)
    partly = sum(" so far" in said for _, said in verdicts)
    met, missed = [sum(said.startswith(word) and " so far" not in said for _, said in verdicts)
                   for word in ("met", "not reached")]
    limit = lambda goal: ("at least " if goal.least else "at most ") + (
        f"{goal.least or goal.most:.0%}" if goal.percent else f"{goal.least or goal.most}")
    lines = [[goal.name, limit(goal), shown, said + ", with earlier settings"*(goal.part in other)]
             for goal, (shown, said) in zip(GOALS, verdicts)]
    return (f"Of {len(GOALS)} goals, {met} met, {missed} not reached, {partly} measured in part, "
            f"{len(GOALS) - met - missed - partly} not measured.\n\n"
            + table(["goal", "wanted", "measured", "verdict"], lines))


def ending(part, rows: list) -> dict:  # status, why, at, seconds
    "How a part ended; a reason also for one that has never begun."
    ended = last_runs(rows).get(part.name)
    if ended: return dict(ended, seconds=None if ended["status"] == "not run" else ended["seconds"])
    count = max((row["machine"]["count"] for row in rows), default=0)
    short = rows and count < part.gpus
    why = f"needs {part.gpus} GPUs, and there is {count}" if short else "no session has come to it"
    return dict(status="not run", why=why, at="", seconds=None)


def parts_table(rows: list, parts: list, stages: dict) -> str:
    "Every part, how it ended and when."
    lines = []
    for part in parts:
        row = ending(part, rows)
        took = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
        lines.append([f"{part.stage}: {stages[part.stage]}", part.name, row["status"], took, row["at"][:16],
                      row["why"]])
    return table(["stage", "part", "", "took", "at", "why"], lines)


class Asked(NamedTuple):
    "A kernel, a peer or a way to compute whose cases are spread over parts."
    name: str
    parts: tuple    # that have cases of it
    mine: Callable  # row -> whether it is one
    lacks: str = "" # why there may be none although the parts are done


def with_kernel(name: str) -> Callable: return lambda row: f"{name}," in row["case"]
def with_way(name: str) -> Callable: return lambda row: row.get("way") == name


KERNELS = {"packed_sdpa": "packed_sdpa", "packed_varlen": "packed_varlen", **{
    f"FlashAttention {n}": f"flash_attention_{n}" for n in (2, 3, 4)}}
ASKED = [Asked(name, RIGHT, with_kernel(kernel)) for name, kernel in KERNELS.items()] + [
    Asked("the naive padded form, timed", ("stage1 135m", "stage1 1b beside padded", "encode 135m", "encode 1b"),
          with_way("padded")),
    Asked(ST, ("stage2 135m", "encode 135m", "encode 1b"), with_way(ST), "it is not installed"),
    Asked(f"{ST}, cached loss", ("stage2 135m",), with_way(f"{ST} cached")),
    Asked(f"{ST}, fp16", ("encode 135m fp16",), with_way(f"{ST} fp16")),
    Asked(f"{ST}, its unpadded path", ("stage2 135m", "encode 135m", "encode 1b"), lambda row: row.get("unpadded"),
          "it takes a FlashAttention package, and none can run here"),
    Asked("torch.compile", ("compile 1b",), lambda row: row["case"] == "compile=True", "a dry run leaves it out"),
    Asked("DDP (NCCL on GPUs)", ("two ranks equal one",), with_kernel("ddp")),
    Asked("FSDP2 (NCCL on GPUs)", ("two ranks equal one",), with_kernel("fsdp2"))]


def asked_line(asked: Asked, rows: list, parts: list) -> list:  # cells
    "How many cases there are of what was asked; where there is none, why."
    mine = [row for part in asked.parts for row in cases(rows, part) if asked.mine(row)]
    held = [row["holds"] for row in mine if "holds" in row]
    if mine:
        shown = f"{len(mine)} case{'s'*(len(mine) != 1)}" + f", {sum(held)} of {len(held)} hold"*bool(held)
        return [asked.name, shown, ""]
    kernel = KERNELS.get(asked.name)
    if rows and kernel and all(kernel not in row["machine"].get("attention", [kernel]) for row in rows):
        return [asked.name, "not run", "cannot run on this machine: no package for it, or no GPU that it supports"]
    ends = {part.name: ending(part, rows) for part in parts if part.name in asked.parts}
    why = "; ".join(f"{name}: {end['status']}" + f", {end['why']}"*(end["status"] == "not run")
                    for name, end in ends.items() if end["status"] != "done")
    return [asked.name, "not run", why or asked.lacks]


def asked_table(rows: list, parts: list) -> str:
    "Kernels, peers and ways to compute, each with its cases or the reason why there are none."
    return table(["kernel, peer or way", "measured", "why not"], [asked_line(asked, rows, parts) for asked in ASKED])


def circumstances(rows: list) -> str:
    "The machines, versions and commits behind the rows."
    found = {}
    for row in last_runs(rows).values():
        told, code, versions = row["machine"], row["code"], row["versions"]
        commit = code.get("commit", code["version"])[:10] + (" with open changes" if code.get("dirty") else "")
        key = json.dumps([told["device"], told["count"], versions["torch"], versions["transformers"], commit,
                          row["dry"]])
        found.setdefault(key, row["at"][:10])
    lines = []
    for key, day in found.items():
        device, count, torch, transformers, commit, dry = json.loads(key)
        what = "a dry run of the tiny model, which says nothing of speed" if dry else f"{count} GPU{'s'*(count != 1)}"
        lines.append(f"- {day}: {device}, {what}; torch {torch}, transformers {transformers}, commit {commit}")
    return "\n".join(lines)


def as_page(rows: list, parts: list, stages: dict) -> str:
    "All of it in Markdown, a section for each kind of machine."
    devices = list(dict.fromkeys(row["machine"]["device"] for row in rows))
    if devices: return "\n\n".join(of_device(of_machine(rows, name), name, parts, stages) for name in devices)
    return "\n\n".join(["**Not run yet**: no row has been measured on a GPU.", "### Goals", goals_table([], parts),
                        "### Kernels, peers and ways", asked_table([], parts), "### Parts",
                        parts_table([], parts, stages)])


def of_device(rows: list, device: str, parts: list, stages: dict) -> str:
    "One machine's section."
    details = [f"**{part.name}**\n\n" + "\n".join(f"- {line}" for line in case_rows(rows, part.name))
               for part in parts if cases(rows, part.name)]
    return "\n\n".join([f"## {device}", circumstances(rows), "### Goals", goals_table(rows, parts),
                        "### Kernels, peers and ways", asked_table(rows, parts), "### Parts",
                        parts_table(rows, parts, stages), "### Cases", *details])
