"""What a rung of again.py stands beside, on its own test set: BM25, and all-MiniLM-L6-v2 as it is and tuned.

    python nbs/paper/yardsticks.py village
    python nbs/paper/yardsticks.py gpu tuned  # MiniLM on as many of the same pairs as stage II reads, seven seeds

The first is scored by `anchor-nb evaluate`. The second is sentence-transformers' trainer, over as many batches of the
same size as stage II has steps; its rate (after at most 200 batches), and how much of the tuned weights is
taken, come from the pairs on which stage II is tuned too. What is there is not made again. Rows are appended to
nbs/results/carry/again-yardsticks.jsonl.
"""
import json
import random
import sys

import again

RATES = (2e-5, 1e-4, 3e-4)


def untuned(rung):
    "Write a rung's test set as a folder, score it, and keep a row for each yardstick."
    from anchor_nb.experiments.stages import run_stage
    name = again.RUNGS[rung]["data"]
    known = {row["model"] for row in again.rows_of(again.KEPT/"again-yardsticks.jsonl") if row["data"] == name}
    if {"bm25", "minilm"} <= known: return
    _, _, asked, documents = again.prepared(name)
    test = again.ROOT/"yardsticks"/name
    test.mkdir(parents=True, exist_ok=True)
    lines = {"corpus.jsonl": [json.dumps({"_id": f"d{place}", "text": text}) for place, text in enumerate(documents)],
             "queries.jsonl": [json.dumps({"_id": f"q{place}", "text": text}) for place, (text, _) in enumerate(asked)],
             "qrels.tsv": ["query-id\tcorpus-id\tscore", *(f"q{place}\td{right}\t1"
                                                          for place, (_, right) in enumerate(asked))]}
    for file, rows in lines.items(): (test/file).write_text("\n".join(rows) + "\n", encoding="utf-8")
    run_stage("evaluate", dict(models={}, tasks=[str(test)], out=f"{test}-scores", instructions="none"))
    for row in again.rows_of(f"{test}-scores/ledger.jsonl"):
        if row["metric"] == "ndcg_at_10":
            again.keep("again-yardsticks.jsonl", dict(data=name, model=row["label"], queries=len(asked),
                                                      ndcg_at_10=round(100*row["value"], 3), documents=len(documents),
                                                      **again.made()))


def drawn(rows, count, generator):
    "As many rows at random; none comes again before every other has come."
    whole, rest = divmod(count, len(rows))
    return [row for size in [len(rows)]*whole + [rest] for row in generator.sample(rows, size)]


def tuned(rung, seeds=again.SEEDS):
    "MiniLM tuned on the pairs of a rung: the rate with seed 0, then every seed; a row for each."
    from anchor_nb.data.retrieval_sets import Retrieval
    from anchor_nb.training.encoders import tune_encoder
    from sentence_transformers import SentenceTransformer
    plan = again.RUNGS[rung]
    (pairs, _, asked, documents), second = again.prepared(plan["data"]), plan["stage2"]
    rows = [dict(query=row["query"], positives=[row["positive"]], negatives=[])
            for path in sorted(pairs.glob("*.jsonl")) for row in again.rows_of(path)]
    _, _, queries, answers = again.prepared(plan["data"], dev=True)
    dev = Retrieval("dev", "", {f"d{place}": text for place, text in enumerate(answers)},
                    {f"q{place}": text for place, (text, _) in enumerate(queries)},
                    {f"q{place}": {f"d{right}": 1} for place, (_, right) in enumerate(queries)})
    def tune(seed, rate, steps):
        out = again.ROOT/f"yardsticks/{rung}-{seed}-{rate:g}"
        if out.is_dir(): return out, json.loads((out/"training.json").read_text(encoding="utf-8"))
        some = drawn(rows, steps*second["global_batch"], random.Random(seed))
        return out, tune_encoder("minilm", some, dev, str(out), epochs=1, rate=rate, batch=second["global_batch"],
                                 max_length=second["max_length"], seed=seed)
    known = {row["seed"]: row["rate"] for row in again.rows_of(again.KEPT/"again-yardsticks.jsonl")
             if row.get("rung") == rung}
    few = min(200, second["steps"])
    rate = next(iter(known.values()), 0) or max(RATES, key=lambda rate: tune(0, rate, few)[1]["dev"])
    for seed in [seed for seed in seeds if seed not in known]:
        out, facts = tune(seed, rate, second["steps"])
        each = again.ndcg(SentenceTransformer(str(out)), asked, documents)
        again.keep("again-yardsticks.jsonl", dict(
            data=plan["data"], model="minilm, tuned", rung=rung, seed=seed, rate=rate, pairs=facts["pairs"],
            share=facts["share"], queries=len(asked), ndcg_at_10=round(float(each.mean()), 3),
            documents=len(documents), **again.made()))


if __name__ == "__main__": {"": untuned, "tuned": tuned}[" ".join(sys.argv[2:])](sys.argv[1])
