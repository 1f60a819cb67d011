"""The runs behind the study of `adapt`, one call each; rows go to nbs/results/adapt/rows.jsonl.

    python nbs/studies/adapt_runs.py foldoc base=minilm exam_queries=200
    python nbs/studies/adapt_runs.py wordnet pairs=no exam_queries=100 # documents only
    python nbs/studies/adapt_runs.py differences                       # between the systems of each exam
    python nbs/studies/adapt_runs.py seeds wordnet fp32 0 1 2          # the decoder again on the pairs of a run

A target is 1,200 texts of a corpus of ours, with the queries of 900 of them as pairs.
"""
import hashlib
import json
import sys
import time
from pathlib import Path

from anchor_nb.core.recipe import Adapt
from anchor_nb.core.settings import coerce, from_yaml
from anchor_nb.data.corpora import build_corpus
from anchor_nb.release.adapt import adapt
from anchor_nb.runs.provenance import code_version, machine

TEXTS, PAIRS = 1200, 900


def write(path, rows):
    "Rows as JSONL."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def target(name, root):
    "documents.jsonl and pairs.jsonl of a corpus, the same ones each time."
    lines = (build_corpus(name)/"pairs"/f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())[:TEXTS]
    write(root/"documents.jsonl", [dict(_id=row["id"], text=row["positive"]) for row in rows])
    write(root/"pairs.jsonl", [dict(query=row["query"], positive=row["id"]) for row in rows[:PAIRS]])


def main(name, *settings):
    "Run `adapt` on a target and keep what it found."
    given = dict(text.split("=", 1) for text in settings)
    own, root = given.pop("pairs", "yes") == "yes", Path("runs/adapt")/name
    kinds = {field: f.type for field, f in Adapt.__dataclass_fields__.items()}
    values = {field: coerce(field, from_yaml(field, text), kinds[field]) for field, text in given.items()}
    target(name, root)
    began = time.time(), time.process_time()
    found = adapt(Adapt(documents=str(root/"documents.jsonl"), pairs=str(root/"pairs.jsonl") if own else "",
                        out=str(root/f"adapted-{'own' if own else 'made'}"), **values))
    for system in found["systems"].values(): system.pop("values", None)
    kept = ("verdict", "each", "systems", "curve", "notes", "seconds", "facts")
    row = dict(target=name, pairs=own, settings=values, **{field: found[field] for field in kept},
               wall_minutes=round((time.time() - began[0])/60, 1),
               cpu_minutes=round((time.process_time() - began[1])/60, 1), fresh=found["fresh"],
               command=" ".join(["python", *sys.argv]), code=code_version(), machine=machine())
    with open("nbs/results/adapt/rows.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
    print(found["verdict"]["sentence"])


def differences():
    "All candidates against MiniLM and against each other, over the queries of each exam that is still on this disk."
    from anchor_nb.evaluation.significance import paired_bootstrap
    rows = []
    for step in sorted(Path("runs/adapt").glob("*/adapted-*/steps/exam/step.json")):
        systems = json.loads(step.read_text(encoding="utf-8"))["facts"]["systems"]
        names = [name for name in systems if name == "minilm" or name.endswith(" tuned")]
        for k, first in enumerate(names):
            for second in names[:k]:
                found = paired_bootstrap(systems[first]["values"], systems[second]["values"])
                rows.append(dict(target=step.parts[2], first=first, second=second, difference=100*found.mean,
                                 low=100*found.low, high=100*found.high))
    write(Path("nbs/results/adapt/differences.jsonl"), rows)


def seeds(name, precision, *numbers):
    "Stage II of SmolLM2 once more on the pairs of a target's latest run, scored on its development split."
    from anchor_nb import Stage2, train
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.evaluation.encoders import Candidate, load
    from anchor_nb.evaluation.exam import score_one
    place = Path("runs/adapt")/name/"adapted-own"
    pairs = max(place.glob("runs/smollm2-135m-*/pairs/pairs.jsonl"), key=lambda path: path.stat().st_mtime)
    began = json.loads((pairs.parent.parent/"run/run.json").read_text(encoding="utf-8"))["recipe"]
    alike = {field: began[field] for field in ("model", "instructions", "preset", "max_length", "global_batch", "steps",
                                               "learning_rate", "warmup_steps", "negatives")}
    dev = read_retrieval(place/"steps/split/dev")
    for seed in map(int, numbers):
        out = Path("runs/adapt")/f"seeds-{name}-{precision}-{seed}"
        facts = train(Stage2(data=str(pairs.parent), out=str(out), seed=seed, precision=precision, save_steps=0,
                             **alike))
        steps = [json.loads(line) for line in open(out/"metrics.jsonl", encoding="utf-8")]
        score = 100*score_one(load(Candidate(str(seed), str(out)), "dev", 256), dev)["score"]
        row = dict(target=name, precision=precision, seed=seed, steps=facts["steps"], dev_ndcg_at_10=round(score, 1),
                   loss=round(sum(step["loss"] for step in steps[-10:])/10, 3), command=" ".join(["python", *sys.argv]),
                   code=code_version(), machine=machine())
        with open("nbs/results/adapt/seeds.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    {"differences": differences, "seeds": seeds}.get(sys.argv[1], lambda *rest: main(sys.argv[1], *rest))(*sys.argv[2:])
