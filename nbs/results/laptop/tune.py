"""The runs behind the preset `laptop` and the page "Five thousand pairs, one hour", one call each.

    anchor-nb prepare -p 'corpora=[foldoc]' -p out=runs/laptop/data
    python nbs/results/laptop/tune.py data                             # the files of both
    python nbs/results/laptop/tune.py try LABEL learning_rate=1e-3 ... # 800 pairs, scored on the development split
    python nbs/results/laptop/tune.py against A B                      # the difference of two tries, over the queries
    python nbs/results/laptop/tune.py minilm NAME EPOCHS RATE          # MiniLM tuned by sentence-transformers
    anchor-nb stage2 --data runs/laptop/glossary/pairs --out runs/laptop/five/glossary --max-length 64
    anchor-nb evaluate -p 'tasks=["runs/laptop/data/eval/foldoc"]' -p out=runs/laptop/five -p instructions=none
        -p max_length=512
        -p 'models={"glossary": "runs/laptop/five/glossary", "minilm-tuned": "runs/laptop/minilm-glossary"}'
    python nbs/results/keep.py runs/laptop/five nbs/results/five_thousand # instructed.jsonl: without instructions=none
"""
import csv
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from anchor_nb.data.writers import write_lines

ROOT, KEPT = Path("runs/laptop"), Path("nbs/results/laptop")
DEV = dict(queries=300, documents=400) # of the development split; the test set has 1,000 queries and 2,688 documents


def read(path):
    "The rows of a JSONL file."
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def data():
    "glossary.csv with 5,000 pairs; 800 of them for tuning; a development split that is in neither."
    rows = read(ROOT/"data/pairs/foldoc.jsonl")
    rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    dev, own = rows[:DEV["documents"]], rows[DEV["documents"]:][:5000]
    pairs = [dict(query=row["query"], positive=row["positive"]) for row in own]
    write_lines(ROOT/"tune.jsonl", pairs[:800])
    write_lines(ROOT/"dev.jsonl", [dict(query=row["query"], positive=row["positive"]) for row in dev])
    with open(ROOT/"glossary.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["question", "article"])
        table.writeheader()
        table.writerows(dict(question=row["query"], article=row["positive"]) for row in pairs)
    write_lines(ROOT/"glossary/pairs/glossary.jsonl", pairs)


def ndcg(model):
    "nDCG@10 of each query of the development split, in per cent; each has one document."
    rows = read(ROOT/"dev.jsonl")
    queries = model.encode_query([row["query"] for row in rows[:DEV["queries"]]])
    documents = model.encode_document([row["positive"] for row in rows])
    scores = np.asarray(queries) @ np.asarray(documents).T
    ranks = (scores > np.diagonal(scores)[:, None]).sum(1) # 0: the right one comes first
    return 100*np.where(ranks < 10, 1/np.log2(ranks + 2), 0)


def against(one, other):
    "How much more one try scores than another, with the interval over queries."
    from anchor_nb.evaluation.significance import bootstrap
    difference = bootstrap(np.load(ROOT/f"tries/{one}.npy") - np.load(ROOT/f"tries/{other}.npy"))
    print(f"{one} minus {other}: {difference.mean:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})")


def keep(label, settings, scores, began):
    "A row of tuning.jsonl; the score of each query stays in `runs`."
    (ROOT/"tries").mkdir(parents=True, exist_ok=True)
    np.save(ROOT/f"tries/{label.replace(' ', '-')}.npy", scores)
    score = round(float(scores.mean()), 1)
    wall, cpu = time.time() - began[0], time.process_time() - began[1]
    row = dict(label=label, pairs=5000 if "glossary" in label else 800, **settings, dev_ndcg_at_10=score,
               minutes=round(wall/60, 1), cpu_minutes=round(cpu/60, 1), command=" ".join(["python", *sys.argv]))
    with open(KEPT/"tuning.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def attempt(label, *pairs):
    "Stage II with the given settings on 800 pairs."
    from anchor_nb import AnchorEmbedder, Stage2, train
    from anchor_nb.core.settings import from_yaml
    given = {name: from_yaml(name, value) for name, value in (pair.split("=") for pair in pairs)}
    epochs = given.pop("epochs", 1)
    settings = dict(model="smollm2-135m", instructions="none", max_length=64, global_batch=16, learning_rate=1e-3,
                    negatives=0, warmup_steps=5, save_steps=0, seed=1, precision="fp32") | given
    settings["steps"] = round(800*epochs/settings["global_batch"])
    began, out = (time.time(), time.process_time()), ROOT/"tries"/label
    train(Stage2(data=str(ROOT/"tune.jsonl"), out=str(out), **settings))
    trained = time.process_time() - began[1]
    score = ndcg(AnchorEmbedder.from_pretrained(str(out)))
    keep(label, dict(epochs=epochs, **settings, train_cpu_minutes=round(trained/60, 1)), score, began)


def minilm(name, epochs, rate):
    "all-MiniLM-L6-v2, trained on `tune` or `glossary` by sentence-transformers' own trainer, cut at 64 tokens as ours."
    from datasets import Dataset
    from sentence_transformers import (SentenceTransformer, SentenceTransformerTrainer,
                                       SentenceTransformerTrainingArguments)
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from anchor_nb.models.resolve import resolve_model
    model, began = SentenceTransformer(str(resolve_model("minilm")), device="cpu"), (time.time(), time.process_time())
    if float(epochs):
        longest, model.max_seq_length = model.max_seq_length, 64
        source = dict(tune=ROOT/"tune.jsonl", glossary=ROOT/"glossary/pairs/glossary.jsonl")[name]
        rows = Dataset.from_list([dict(anchor=row["query"], positive=row["positive"]) for row in read(source)])
        args = SentenceTransformerTrainingArguments(
            str(ROOT/"st"), num_train_epochs=float(epochs), per_device_train_batch_size=32, learning_rate=float(rate),
            warmup_ratio=0.1, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, seed=1,
            batch_sampler="no_duplicates")
        SentenceTransformerTrainer(model, args, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)).train()
        model.max_seq_length = longest # as it is used
        model.save_pretrained(str(ROOT/f"minilm-{name}"))
    settings = dict(epochs=float(epochs), learning_rate=float(rate), global_batch=32, max_length=64)
    trained = time.process_time() - began[1]
    keep(f"minilm {name}", settings | dict(train_cpu_minutes=round(trained/60, 1)), ndcg(model), began)


if __name__ == "__main__":
    {"data": data, "try": attempt, "against": against, "minilm": minilm}[sys.argv[1]](*sys.argv[2:])
