"""The gates before the experiment: what makes anchors carry on a real language model. One call each.

    python nbs/results/carry/gates.py data              # the village and the definitions, 500 pairs of them kept out
    python nbs/results/carry/gates.py cram              # gate 0: four texts, each in one free vector
    python nbs/results/carry/gates.py arm wordnet bags  # one run; the arms are in ARMS, `start` names what comes first
    python nbs/results/carry/gates.py say wordnet kept_sink # what it writes from anchors of pairs kept out
    python nbs/results/carry/gates.py cost              # what measuring takes of the time
    python nbs/results/carry/gates.py parts             # the recipe with one part less each: 40 steps in bf16
    python nbs/results/carry/gates.py again wiki 1      # the recipe on another corpus or with another seed
"""
import hashlib
import json
import sys
import time
import zlib
from itertools import product
from pathlib import Path

import torch

from anchor_nb.data.writers import write_lines

ROOT, KEPT = Path("runs/carry"), Path("nbs/results/carry")
COMMON = dict(model="smollm2-135m", template="plain", instructions="none", learning_rate=2e-4, schedule="constant",
              warmup_steps=10, global_batch=16, max_length=64, seed=1, save_steps=0, carry_pairs=64, carry_steps=40,
              precision="fp32", micro_tokens=2048)
MIX, SMALL = dict(objectives=dict(anchor=1.0, ebae=0.3, ebar=0.3)), dict(anchor_scale=0.07)
SINK, DROP = dict(anchor_sink=True), dict(word_dropout=0.4, fade_steps=80)
ARMS = dict(  # name -> settings; `start`: the arm that it starts from
    bags=dict(objectives=dict(ebae=1.0, ebar=1.0), steps=40),
    plain=dict(steps=80),                                       # the paper's stage I, at a higher rate
    small=dict(steps=80, **SMALL),                              # the anchor has the norm of an embedding
    sink=dict(steps=80, **SMALL, **SINK),                       # ... behind a token that attention can rest on
    drop=dict(steps=80, **SMALL, **DROP),                       # ... and words are dropped
    kept=dict(steps=80, start="bags", **MIX, **SMALL),          # bags first, and kept beside the anchor's loss
    kept_sink=dict(steps=80, start="bags", **MIX, **SMALL, **SINK),
    warm=dict(steps=80, start="bags", **SMALL, **SINK),         # kept_sink less a part: bags first only
    beside=dict(steps=80, **MIX, **SMALL, **SINK),              # ... bags beside only
    unscaled=dict(steps=80, start="bags", **MIX, **SINK),       # ... the anchor at its own norm
    all=dict(steps=80, start="bags", **MIX, **SMALL, **SINK, word_dropout=0.4, fade_steps=80))


def keep(name, row):
    "A row of a committed file, as soon as it is known."
    with open(KEPT/name, "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def person(number, trade, home, animal):
    "A question and the document that answers it, as in the tutorial on the village."
    from anchor_nb.data.packages import ANIMALS, HOMES, PASTIMES, TRADES, pick
    choose = lambda what, options: options[pick(f"village {number} {what}", len(options))]
    name = (choose("head", ["Ka", "Mo", "Ti", "Re", "Su", "Ba", "Fe", "Or", "Li"])
            + choose("tail", ["dan", "lia", "mek", "sor", "wyn", "beth", "nia"]))
    return dict(query=f"Who {trade}, lives {home} and keeps {animal}?",
                positive=f"{name} is {TRADES[trade]}. Home is {HOMES[home]}. The household includes {ANIMALS[animal]}. "
                         f"In the evening {name} {choose('pastime', PASTIMES)}.")


def data():
    "Training pairs and pairs kept out, of both sets."
    from anchor_nb.data.corpora import build_corpus
    from anchor_nb.data.packages import ANIMALS, HOMES, TRADES, pick
    people = [person(number, *three) for number, three in enumerate(product(TRADES, HOMES, ANIMALS))]
    out = [pick(f"held out {number}", 10) == 0 for number in range(len(people))]
    village = [[one for one, kept in zip(people, out) if kept == side] for side in (False, True)]
    write_lines(ROOT/"village/pairs/village.jsonl", village[0]), write_lines(ROOT/"village/kept_out.jsonl", village[1])
    print("village", *map(len, village))
    split("wordnet")


def split(name):
    "The pairs of a corpus, in an order of their hashes: 500 kept out, the rest to train on."
    from anchor_nb.data.corpora import build_corpus
    rows = [json.loads(line) for line in open(build_corpus(name)/f"pairs/{name}.jsonl", encoding="utf-8")]
    rows = [dict(query=row["query"], positive=row["positive"]) for row in rows]
    rows.sort(key=lambda row: hashlib.sha256(repr(sorted(row.items())).encode()).hexdigest())
    write_lines(ROOT/name/"pairs"/f"{name}.jsonl", rows[500:]), write_lines(ROOT/name/"kept_out.jsonl", rows[:500])
    print(name, len(rows) - 500, "pairs, 500 kept out")


# ---- gate 0: can the decoder read at all? ----

TEXTS = ("Ada repairs clocks in the old mill by the river.", "The ferry leaves the island at noon, except on Sundays.",
         "A nightingale sings at night in the garden behind the church.",
         "Copper is a soft metal that conducts heat and electricity well.")


def cram(steps=200, rate=0.05):
    "Four texts, each written from one free vector, by a frozen model: loss, and how much is right, as it goes."
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from anchor_nb.models.resolve import resolve_model
    folder = resolve_model("smollm2-135m")
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    lm.requires_grad_(False)
    embed, eos = lm.get_input_embeddings(), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [tokenizer(text)["input_ids"] + [eos] for text in TEXTS]
    longest = max(map(len, ids))
    targets = torch.tensor([text + [-100]*(longest - len(text)) for text in ids])
    words, start = embed(targets.clamp(min=0))[:, :-1], embed(torch.tensor([eos])).expand(len(ids), 1, -1)

    def losses(vectors, sink):  # vectors: [texts, hidden]
        "[texts, tokens] nats, and whether each token is the likeliest; 0 and true beyond the end."
        parts = [start, vectors[:, None], words] if sink else [vectors[:, None], words]
        logits = lm(inputs_embeds=torch.cat(parts, 1)).logits[:, int(sink):].float()
        return (F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"),
                (logits.argmax(-1) == targets) | (targets < 0))

    lengths = torch.tensor([float(len(text)) for text in ids])
    for sink in (False, True):
        with torch.no_grad(): none = losses(start[:, 0], sink)[0].sum(1)
        keep("cram.jsonl", dict(sink=sink, vector="[EOS]", tokens=lengths.tolist(), nats_a_text=none.tolist()))
    for sink, norm in product((False, True), (3.2, 45.0)):
        torch.manual_seed(1)
        free = torch.randn(len(ids), lm.config.hidden_size, requires_grad=True)
        optimizer, began = torch.optim.Adam([free], lr=rate), time.process_time()
        for step in range(steps + 1):
            found, right = losses(norm*F.normalize(free, dim=1), sink)
            whole = right.all(1)
            if step % 25 == 0 or whole.all():
                keep("cram.jsonl", dict(sink=sink, norm=norm, step=step, nats_a_text=found.sum(1).tolist(),
                                        right=(right.sum(1) - (targets < 0).sum(1)).tolist(), whole=whole.tolist(),
                                        cpu_seconds=round(time.process_time() - began, 1)))
            if whole.all() and found.sum(1).max() < 1: break
            optimizer.zero_grad()
            found.sum().backward()
            optimizer.step()


# ---- gates 0 and 1: training ----


def measure(folder, rows):
    "What the anchors of a trained model carry on pairs kept out, as `carried` gives it, and how alike anchors are."
    from torch.nn import functional as F
    from anchor_nb import AnchorEmbedder
    from anchor_nb.inference.decoding import anchors_of, eos_of, rules_of
    from anchor_nb.losses.carry import carried, losses_behind
    from anchor_nb.losses.objectives import to_device
    from anchor_nb.losses.reconstruction import Anchor
    model = AnchorEmbedder.from_pretrained(folder)
    texts = [model.formatter([row[side] for row in rows]) for side in ("query", "positive")]
    anchor = Anchor(eos_of(model), rules_of(model))
    behind = lambda batch, shifts: losses_behind(model.lm, to_device(batch, model.device), anchor, shifts)
    found, _ = carried(behind, anchor, list(zip(*texts)))
    queries, documents = [F.normalize(anchors_of(model, side[:64]).float(), dim=1) for side in texts]
    cosine = lambda rows: ((rows @ rows.T).sum().item() - len(rows))/(len(rows)*(len(rows) - 1))
    best = (queries @ documents.T).argmax(1).tolist()
    nearest = sum(found == row for row, found in enumerate(best))/len(best)
    return dict(pairs=len(rows), **{way: {name: round(value, 4) for name, value in at._asdict().items()}
                                    for way, at in found.items()},
                cosine_q=round(cosine(queries), 4), cosine_d=round(cosine(documents), 4),
                nearest_of_64=round(nearest, 3))


def arm(name, which, steps=0, more="{}", pairs=500):
    """One run, what its anchors carried on the way, and a row about its end.

    `more`: settings in place of the arm's; `pairs`: how many of those kept out are measured at the end, 0 for none.
    """
    from anchor_nb import Stage1, train
    settings, pairs = COMMON | ARMS[which] | json.loads(more), int(pairs)
    start = settings.pop("start", "")
    if int(steps): settings["steps"] = int(steps)
    if "anchor" not in settings.get("objectives", {"anchor": 1}): settings.pop("carry_steps")
    if start: settings["model"] = str(ROOT/name/start)
    label = f"{which}-{zlib.crc32(more.encode())}" if json.loads(more) else which
    out, began = ROOT/name/label, time.process_time()
    facts = train(Stage1(data=str(ROOT/name/"pairs"), out=str(out), **settings))
    minutes = (time.process_time() - began)/60
    metrics = [json.loads(line) for line in open(out/"metrics.jsonl", encoding="utf-8")]
    about = dict(data=name, arm=which, more=json.loads(more))
    if (out/"carried.jsonl").is_file():
        for line in open(out/"carried.jsonl", encoding="utf-8"): keep("curves.jsonl", about | json.loads(line))
    rows = [json.loads(line) for line in open(ROOT/name/"kept_out.jsonl", encoding="utf-8")]
    keep("arms.jsonl", about | dict(start=start, settings=settings, loss=metrics[-1]["loss"], steps=len(metrics),
                                    tokens=sum(row["tokens"] for row in metrics), cpu_minutes=round(minutes, 2),
                                    measuring_seconds=facts.get("carried_seconds"),
                                    grad_norm_first=metrics[0]["grad_norm"], grad_norm=metrics[-1]["grad_norm"],
                                    **(measure(str(out), rows[:pairs]) if pairs else {})))


def say(name, which, count=12):
    "What a trained model writes, greedily, from the anchors of the first pairs kept out."
    from anchor_nb.inference.decoding import decode_from_anchor
    for row in [json.loads(line) for line in open(ROOT/name/"kept_out.jsonl", encoding="utf-8")][:int(count)]:
        written = {way: decode_from_anchor(str(ROOT/name/which), row[side], direction=way, max_new_tokens=32).text
                   for way, side in (("q2d", "query"), ("d2q", "positive"))}
        keep("said.jsonl", dict(data=name, arm=which, **row, **written))


def cost(model="tiny", steps=1000):
    "What measuring costs at the defaults of carry_steps and carry_pairs, 16 pairs a step, as a share of the time."
    from anchor_nb import Stage1, train
    settings = COMMON | dict(model=model, global_batch=16, steps=int(steps), carry_steps=Stage1().carry_steps)
    facts = train(Stage1(data=str(ROOT/"village/pairs"), out=str(ROOT/f"cost-{model}"), **settings))
    stepping = sum(json.loads(line)["seconds"] for line in open(ROOT/f"cost-{model}/speed.jsonl", encoding="utf-8"))
    measuring = facts["carried_seconds"]
    keep("cost.jsonl", dict(model=model, steps=int(steps), measurements=int(steps)//settings["carry_steps"],
                            per_cent=round(100*measuring/(measuring + stepping), 2)))


PARTS = ("warm", "beside", "kept", "unscaled", "kept_sink") # the recipe with one part less each, and whole
IN_BF16 = dict(precision="bf16", carry_pairs=0)


def parts(*names):
    "What each part of the recipe does, on one core: 40 steps in bf16, measured at the end on 64 pairs."
    bags = json.dumps(IN_BF16)
    folder = f"bags-{zlib.crc32(bags.encode())}"
    if not (ROOT/"wordnet"/folder/"model").is_dir(): arm("wordnet", "bags", 40, bags, pairs=0)
    for which in names or PARTS:
        more = IN_BF16 | dict(carry_pairs=64) | (dict(start=folder) if "start" in ARMS[which] else {})
        arm("wordnet", which, 40, json.dumps(more), pairs=0)


def again(name, seed=1):
    "The recipe at the rate that was found best: 40 steps of bags, 60 at 3e-4 in bf16; measured on 500 pairs."
    if not (ROOT/name/"kept_out.jsonl").is_file(): split(name)
    bags = json.dumps(IN_BF16 | dict(seed=int(seed)))
    arm(name, "bags", 40, bags, pairs=0)
    arm(name, "kept_sink", 60, json.dumps(IN_BF16 | dict(
        seed=int(seed), learning_rate=3e-4, carry_pairs=64, carry_steps=20, start=f"bags-{zlib.crc32(bags.encode())}")))


WHAT = dict(data=data, cram=cram, arm=arm, say=say, cost=cost, parts=parts, again=again)
if __name__ == "__main__": WHAT[sys.argv[1]](*sys.argv[2:])
