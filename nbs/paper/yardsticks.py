"""BM25 and all-MiniLM-L6-v2, not tuned, on the queries and documents of a rung of again.py.

    python nbs/paper/yardsticks.py village

They are scored by `anchor-nb evaluate`; rows are appended to nbs/results/carry/again-yardsticks.jsonl.
"""
import json
import sys

import again


def main(rung):
    "Write a rung's exam as a folder, score it, and keep a row for each yardstick."
    from anchor_nb.experiments.stages import run_stage
    _, _, asked, documents = again.prepared(again.RUNGS[rung]["data"])
    name = again.RUNGS[rung]["data"]
    exam = again.ROOT/"yardsticks"/name
    exam.mkdir(parents=True, exist_ok=True)
    lines = {"corpus.jsonl": [json.dumps({"_id": f"d{place}", "text": text}) for place, text in enumerate(documents)],
             "queries.jsonl": [json.dumps({"_id": f"q{place}", "text": text}) for place, (text, _) in enumerate(asked)],
             "qrels.tsv": ["query-id\tcorpus-id\tscore", *(f"q{place}\td{right}\t1"
                                                          for place, (_, right) in enumerate(asked))]}
    for file, rows in lines.items(): (exam/file).write_text("\n".join(rows) + "\n", encoding="utf-8")
    run_stage("evaluate", dict(models={}, tasks=[str(exam)], out=f"{exam}-scores", instructions="none"))
    for row in again.rows_of(f"{exam}-scores/ledger.jsonl"):
        if row["metric"] == "ndcg_at_10":
            again.keep("again-yardsticks.jsonl", dict(data=name, model=row["label"], queries=len(asked),
                                                      ndcg_at_10=round(100*row["value"], 3), documents=len(documents)))


if __name__ == "__main__": main(sys.argv[1])
