"""Draws the picture at the top of each stage notebook: what it reads, does and writes.

    python nbs/_site/stage_pictures.py
"""
import json
from html import escape
from pathlib import Path
from urllib.parse import quote

STAGES = Path(__file__).resolve().parent.parent/"stages"
# stage -> boxes from left to right, each a heading and its lines; the last is what the stage writes
BOXES = dict(
    adapt=[("documents, pairs", "a folder or a table;", "pairs are made if need be"),
           ("set aside", "a test set by document,", "no near-duplicates"),
           ("train", "MiniLM and a decoder,", "mined negatives"),
           ("score", "beside BM25, MiniLM,", "and both fused"), ("out", "verdict.html", "model/, if it is better")],
    prepare=[("packages", "pinned versions,", "checked by hash"), ("prepare", "fetch, deduplicate,", "split, sample"),
             ("out", "pairs/: training data", "eval/: evaluation sets")],
    mine=[("data, corpus", "pairs, and texts", "to choose from"), ("search", "encode, or BM25;", "rank for each query"),
          ("limits", "drop what scores", "like the answer"), ("out", "pairs/ with negatives", "report.json")],
    stage1=[("a pair", "query and document"), ("pass A", "each text to its", "anchor, the state at [EOS]"),
            ("pass B", "decode each text from", "the other's anchor"), ("out", "model/, metrics.jsonl", "checkpoints")],
    stage2=[("an example", "query, document,", "hard negatives"), ("embed", "each text to its", "state at [EOS]"),
            ("InfoNCE", "the document must win", "among all of the batch"),
            ("out", "model/, metrics.jsonl", "snapshots/")],
    evaluate=[("models", "runs, folders,", "hub ids, BM25"), ("tasks", "a benchmark, names,", "or folders"),
              ("score", "encode, rank,", "one task at a time"), ("out", "ledger.jsonl", "per_query/, summary.json")],
    analyse=[("a, b, again", "before, after,", "another seed"), ("states", "the same texts", "through every layer"),
             ("compare", "similarity, geometry,", "beside null values"), ("out", "ledger.jsonl, figures", "map.html")],
    report=[("run folders", "manifests, metrics"), ("ledger.jsonl", "scores"),
            ("report", "tables and figures,", "no new numbers"), ("this page", "beside the paper")])
WIDTH, HEIGHT, GAP = 172, 84, 34


def box(place, name, *lines):
    "One box: a bold heading and lines under it."
    x, text = place*(WIDTH + GAP) + 8, ""
    for number, line in enumerate((name, *lines)):
        weight = "bold" if number == 0 else "normal"
        text += (f"<text x='{x + WIDTH/2:g}' y='{36 + 20*number}' text-anchor='middle' font-weight='{weight}' "
                 f"fill='#1f2937'>{escape(line)}</text>")
    return f"<rect x='{x}' y='8' width='{WIDTH}' height='{HEIGHT}' rx='8' fill='#eef4fb' stroke='#4477aa'/>{text}"


def arrow(place):
    "The arrow behind a box."
    x = place*(WIDTH + GAP) + 8 + WIDTH
    return (f"<path d='M{x + 4} 50h{GAP - 12}' stroke='#4477aa' stroke-width='2'/>"
            f"<path d='M{x + GAP - 10} 44l8 6l-8 6z' fill='#4477aa'/>")


def picture(boxes):
    "All boxes in a row as one SVG."
    width = len(boxes)*(WIDTH + GAP) - GAP + 16
    drawn = "".join(box(place, *lines) for place, lines in enumerate(boxes))
    drawn += "".join(arrow(place) for place in range(len(boxes) - 1))
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} 100' width='{width}' "
            f"font-family='sans-serif' font-size='14'><rect width='{width}' height='100' fill='white'/>{drawn}</svg>")


def draw(stage, boxes):
    "Put a stage's picture behind the first lines of its notebook."
    path = STAGES/f"{stage}.ipynb"
    content = json.loads(path.read_text(encoding="utf-8"))
    first = content["cells"][0]
    lines = "".join(first["source"]).partition("\n\n![")[0]
    says = ", then ".join(f"{name}: {' '.join(rest)}" for name, *rest in boxes)
    image = f"![{says}](data:image/svg+xml,{quote(picture(boxes), safe='=:,;/')})"
    first["source"] = f"{lines}\n\n{image}".splitlines(keepends=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for stage, boxes in BOXES.items(): draw(stage, boxes)
