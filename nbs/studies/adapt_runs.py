"""The runs behind the study of `adapt`, one call each; rows go to nbs/results/adapt/rows.jsonl.

    python nbs/studies/adapt_runs.py foldoc seed=1 base=minilm,smollm2-135m test_documents=0
    python nbs/studies/adapt_runs.py debian draw=2 seed=2 base=minilm    # texts 2,400 to 3,600 of a corpus
    python nbs/studies/adapt_runs.py wordnet pairs=no seed=0 base=minilm # documents only
    python nbs/studies/adapt_runs.py kinds debian                        # which made queries to learn from
    python nbs/studies/adapt_runs.py negatives wordnet                   # MiniLM with and without mined negatives
    python nbs/studies/adapt_runs.py seeds wordnet fp32 0 1 2            # the decoder again on the pairs of a run
    python nbs/studies/adapt_runs.py again debian warmed 1 2             # from the definitions, or `taught` by MiniLM
    python nbs/studies/adapt_runs.py memory                              # what tuning MiniLM holds, with both losses
    python nbs/studies/adapt_runs.py halves                              # two rules of choosing, on halves of test sets
    python nbs/studies/adapt_runs.py fusion                              # two ways to put BM25 beside MiniLM
    python nbs/studies/adapt_runs.py averages                            # weights of before and after training

A target is 1,200 texts of a corpus of ours, each cut after 60 words, with the query of each as a pair. Without pairs,
documents have the titles that they would have in a folder, and what was trained is scored on the corpus's own queries
too, which no step has seen.
"""
import hashlib
import json
import sys
import time
from pathlib import Path

from anchor_nb.core.recipe import Adapt
from anchor_nb.core.settings import coerce, from_yaml
from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.writers import write_lines
from anchor_nb.release.adapt import adapt
from anchor_nb.runs.provenance import code_version, machine

TEXTS, WORDS = 1200, 60


def titled(name, row):
    "A text with the title that its document has, where there is one."
    title = dict(foldoc=row["query"].removeprefix("What is ").removesuffix("?"), debian=row["id"]).get(name, "")
    return dict(_id=row["id"], text=row["positive"]) | (dict(title=title) if title else {})


def target(name, root, own, draw=0):
    "documents.jsonl and pairs.jsonl of a corpus, the same ones each time; no two draws share a text."
    lines = (build_corpus(name)/"pairs"/f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    rows = rows[draw*TEXTS:][:TEXTS]
    for row in rows: row["positive"] = " ".join(row["positive"].split()[:WORDS])
    write_lines(root/"documents.jsonl", [dict(_id=row["id"], text=row["positive"]) if own else titled(name, row)
                                   for row in rows])
    write_lines(root/"pairs.jsonl", [dict(query=row["query"], positive=row["id"]) for row in rows])


def real_test(root):
    "The queries of a corpus as a test set."
    from anchor_nb.data.retrieval_sets import Retrieval
    documents, pairs = ([json.loads(line) for line in open(root/f"{file}.jsonl", encoding="utf-8")]
                        for file in ("documents", "pairs"))
    texts = {row["_id"]: "\n".join(filter(None, (row.get("title"), row["text"]))) for row in documents}
    queries = {f"q{n}": row["query"] for n, row in enumerate(pairs)}
    return Retrieval("real", "", texts, queries, {f"q{n}": {row["positive"]: 1} for n, row in enumerate(pairs)})


def real_queries(root, out):
    "BM25, MiniLM as it is and tuned without pairs, on the queries of the corpus: scores, and gains on MiniLM."
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import score_systems, verdict
    test = real_test(root)
    systems = {label: Candidate(label, source, library="sentence-transformers")
               for label, source in (("minilm", "minilm"), ("minilm tuned", str(out/"steps/train-minilm/model")))}
    weights = json.loads((out/"steps/choose/step.json").read_text(encoding="utf-8"))["facts"]["weights"]
    sheet = score_systems(test, dict(bm25=Candidate("bm25", "bm25", library="bm25")) | systems, weights=weights)
    return dict(scores={label: system["score"] for label, system in sheet.items()}, weights=weights,
                tuned=verdict(sheet, "minilm tuned", ["minilm"]), fused=verdict(sheet, "minilm + BM25", ["minilm"]))


def kinds(name, rate=5e-5):
    "MiniLM after an epoch on each kind of made query, on the queries of the corpus."
    from anchor_nb.data.documents import first_sentence
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import score_one, verdict
    from anchor_nb.evaluation.verdict import opened as ready
    from anchor_nb.runs.ledger import read_rows
    from anchor_nb.training.encoders import fit, opened
    root, steps = Path("runs/adapt")/name/"made", Path("runs/adapt")/name/"adapted-made-0/steps"
    test, made, read = real_test(root), {}, list(read_rows(steps/"read/passages.jsonl"))
    passages, titles = [row["text"] for row in read], {row["title"] for row in read}
    for row in read_rows(steps/"pairs/pairs.jsonl"):
        kind = "titles" if row["query"] in titles else "questions"
        made.setdefault(kind, []).append((row["query"], passages[row["passage"]]))
    made["sentences"] = [first_sentence(passages[row["passage"]]) for row in read_rows(steps/"pairs/sentences.jsonl")]
    score = lambda source: score_one(ready(Candidate(source, source, library="sentence-transformers")), test)
    plain = score("minilm")
    for kind, pairs in made.items():
        encoder, folder = opened("minilm", 256), Path("runs/adapt")/name/f"kind-{kind}"
        fit(encoder, [dict(query=query, positives=[text], negatives=[]) for query, text in pairs], None, rate, 1, 32, 0)
        encoder.save(str(folder), create_model_card=False)
        hits = verdict(dict(tuned=score(str(folder)), minilm=plain), "tuned", ["minilm"])
        row = dict(target=name, kind=kind, pairs=len(pairs), rate=rate, minilm=round(100*plain["score"], 1),
                   **{end: round(hits[end], 2) for end in ("difference", "low", "high")}, code=code_version())
        with open("nbs/results/adapt/kinds.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def main(name, *settings):
    "Run `adapt` on a target and keep what it found."
    given = dict(text.split("=", 1) for text in settings)
    own, draw = given.pop("pairs", "yes") == "yes", int(given.pop("draw", 0))
    root = Path("runs/adapt")/(f"{name}-{draw}" if draw else name)
    kinds = {field: f.type for field, f in Adapt.__dataclass_fields__.items()}
    values = {field: coerce(field, from_yaml(field, text), kinds[field]) for field, text in given.items()}
    root, out = root/("own" if own else "made"), root/f"adapted-{'own' if own else 'made'}-{values['seed']}"
    target(name, root, own, draw)
    began = time.time(), time.process_time()
    result = adapt(Adapt(documents=str(root/"documents.jsonl"), pairs=str(root/"pairs.jsonl") if own else "",
                         out=str(out), **values))
    for system in result["systems"].values(): system.pop("values", None)
    kept = ("verdict", "each", "systems", "curve", "notes", "seconds", "facts")
    row = dict(target=name, draw=draw, pairs=own, settings=values, **{field: result[field] for field in kept},
               wall_minutes=round((time.time() - began[0])/60, 1), differences=differences(out),
               cpu_minutes=round((time.process_time() - began[1])/60, 1), fresh=result["fresh"],
               command=" ".join(["python", *sys.argv]), code=code_version(), machine=machine())
    if not own: row["real"] = real_queries(root, out)
    with open("nbs/results/adapt/rows.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
    print(result["verdict"]["sentence"])


def differences(out):
    "All candidates against MiniLM and against each other, over the queries of a test set."
    from anchor_nb.evaluation.significance import paired_bootstrap
    systems, rows = json.loads((out/"steps/test/step.json").read_text(encoding="utf-8"))["facts"]["systems"], []
    names = [name for name in systems if name == "minilm" or name.endswith(" tuned")]
    for k, first in enumerate(names):
        for second in names[:k]:
            hits = paired_bootstrap(systems[first]["values"], systems[second]["values"])
            rows.append(dict(first=first, second=second, difference=100*hits.mean, low=100*hits.low,
                             high=100*hits.high))
    return rows


def halves(splits=400):
    "Choose by one half of a test set, by the mean or by the lower end of the gain, and judge the choice by the other."
    import numpy as np
    from anchor_nb.release.adapt import HAVE
    rng, rows = np.random.default_rng(0), []
    for path in sorted(Path("runs/adapt").glob("*/*/steps/test/step.json")):
        systems = json.loads(path.read_text(encoding="utf-8"))["facts"]["systems"]
        values = {name: np.array([system["values"][query] for query in sorted(system["values"])])
                  for name, system in systems.items()}
        candidates = [name for name in values if " tuned" in name]
        if len(candidates) < 4: continue # one candidate, alone and with BM25
        def gain(name, part): # mean and lower end, over the best of what was there
            apart = values[name][part] - max((values[have][part] for have in HAVE), key=np.mean)
            return 100*apart.mean(), 100*(apart.mean() - 1.96*apart.std()/np.sqrt(len(apart)))
        found = []
        for _ in range(splits):
            first, second = np.array_split(rng.permutation(len(values["bm25"])), 2)
            found.append([gain(max(candidates, key=lambda name: gain(name, first)[rule]), second) for rule in (0, 1)])
        found = np.array(found) # [splits, rules, (mean, lower end)]
        rows.append(dict(target=path.parts[2], seed=int(path.parts[3].rpartition("-")[2]), splits=splits,
                         found_better=(found[..., 1] > 0).mean(0).tolist(), gain=found[..., 0].mean(0).tolist(),
                         code=code_version()))
        print(rows[-1], flush=True)
    write_lines(Path("nbs/results/adapt/halves.jsonl"), rows)


def reciprocal(*rankings, k=60): # query -> document -> score; k: Cormack et al. 2009
    "Rankings fused by reciprocal ranks."
    fused = {query: {} for query in rankings[0]}
    for ranking in rankings:
        for query, hits in ranking.items():
            for rank, document in enumerate(sorted(hits, key=lambda name: (-hits[name], name)), 1):
                fused[query][document] = fused[query].get(document, 0.0) + 1/(k + rank)
    return fused


def fusion():
    "MiniLM with BM25 beside it on the test sets of three targets and seeds: reciprocal ranks, and added scores."
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import Ranked, score_one, score_systems
    from anchor_nb.release.adapt import Steps, prepared
    systems, rows = dict(bm25=Candidate("bm25", "bm25", library="bm25"),
                         minilm=Candidate("minilm", "minilm", library="sentence-transformers")), []
    for name in ("wordnet", "foldoc", "debian"):
        root = Path("runs/adapt")/name/"own"
        target(name, root, True)
        for seed in range(3):
            steps = Steps(f"runs/adapt/{name}/fusion-{seed}")
            prepared(Adapt(documents=str(root/"documents.jsonl"), pairs=str(root/"pairs.jsonl"), out=str(steps.out),
                           test_documents=0, seed=seed), steps)
            dev, test = (read_retrieval(steps.folder("split")/part) for part in ("dev", "test"))
            weight = score_systems(dev, systems)["minilm + BM25"]["weight"]
            sheet = score_systems(test, systems, weights=dict(minilm=weight))
            ranks = score_one(Ranked("ranks", reciprocal(sheet["bm25"]["ranking"], sheet["minilm"]["ranking"])), test)
            scores = dict(bm25=sheet["bm25"], minilm=sheet["minilm"], ranks=ranks, added=sheet["minilm + BM25"])
            rows.append(dict(target=name, seed=seed, weight=weight, code=code_version(),
                             **{way: round(100*system["score"], 2) for way, system in scores.items()}))
            print(rows[-1], flush=True)
    write_lines(Path("nbs/results/adapt/fusion.jsonl"), rows)


def averages():
    """MiniLM as it is, tuned and averaged, alone and with BM25, on the test sets of draws 1 to 3.

    The development split chooses share and weight. What was saved is an average; the tuned weights follow from it.
    Rows that are there already stay.
    """
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import best_of, score_systems, verdict
    from anchor_nb.training.encoders import SHARES, mix, opened, weights_of
    gain = lambda sheet, label, other: {name: round(value, 2) for name, value in verdict(sheet, label, [other]).items()
                                        if name in ("difference", "low", "high")}
    kept = Path("nbs/results/adapt/averages_fresh.jsonl")
    rows = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.is_file() else []
    for path in sorted(Path("runs/adapt").glob("*-?/adapted-own-*/steps")):
        models, (name, draw) = {"0": "minilm"}, path.parts[2].split("-")
        there = any((row["target"], row["draw"]) == (name, int(draw)) for row in rows)
        if there or not (path/"test/step.json").is_file(): continue # or not finished
        encoder, saved = opened("minilm", 256), weights_of(opened(str(path/"train-minilm/model"), 256))
        before = weights_of(encoder)
        mix(encoder, before, saved, 1/json.loads((path/"train-minilm/step.json").read_text())["facts"]["share"])
        after = weights_of(encoder)
        for share in (*SHARES, 1):
            mix(encoder, before, after, share)
            models[f"{share:g}"] = str(path.parent/f"average-{share:g}")
            encoder.save_pretrained(models[f"{share:g}"], create_model_card=False)
        systems, known = dict(bm25=Candidate("bm25", "bm25", library="bm25")), {}
        systems |= {share: Candidate(share, model, library="sentence-transformers") for share, model in models.items()}
        dev = score_systems(read_retrieval(path/"split/dev"), systems, known=known)
        weights = {share: dev[f"{share} + BM25"]["weight"] for share in models}
        test = score_systems(read_retrieval(path/"split/test"), systems, known=known, weights=weights)
        row = dict(target=name, draw=int(draw), seed=int(path.parts[3].rpartition("-")[2]),
                   **{part: {label: round(100*system["score"], 2) for label, system in sheet.items()}
                      for part, sheet in (("dev", dev), ("test", test))})
        for way, words in (("alone", ""), ("with_bm25", " + BM25")):
            chosen = best_of(dev, [share + words for share in models])
            row[way] = dict(chosen=chosen.removesuffix(" + BM25"), on_minilm=gain(test, chosen, f"0{words}"),
                            on_tuned=gain(test, chosen, f"1{words}"))
        rows.append(row | dict(code=code_version()))
        print(rows[-1], flush=True)
        write_lines(kept, sorted(rows, key=lambda row: (row["target"], row["draw"])))


def seeds(name, precision, *numbers):
    "Stage II of SmolLM2 once more on the pairs of a target's latest run, scored on its development split."
    from anchor_nb import Stage2, train
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import opened, score_one
    place = Path("runs/adapt")/name/"adapted-own-0"
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
        score = 100*score_one(opened(Candidate(str(seed), str(out))), dev)["score"]
        row = dict(target=name, precision=precision, seed=seed, steps=facts["steps"], dev_ndcg_at_10=round(score, 1),
                   loss=round(sum(step["loss"] for step in steps[-10:])/10, 3), command=" ".join(["python", *sys.argv]),
                   code=code_version(), machine=machine())
        with open("nbs/results/adapt/seeds.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def warm(steps=400):
    "SmolLM2 after stage II on the definitions, with a batch of 16: a base."
    from anchor_nb import Stage2, train
    out = Path("runs/adapt/warm")
    if not (out/"model").is_dir():
        train(Stage2(model="smollm2-135m", data=str(build_corpus("wordnet")/"pairs"), out=str(out), steps=steps,
                     instructions="none", preset="laptop", max_length=64, save_steps=100))
    return str(out/"model")


def again(name, way, *numbers):
    """The decoder of finished runs once more, on the same test sets: `warmed`, from the definitions, or `taught`, by
    scores of the tuned MiniLM beside InfoNCE."""
    from anchor_nb import Stage2, train
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.data.rows import load_pairs
    from anchor_nb.evaluation.encoders import Candidate
    from anchor_nb.evaluation.verdict import opened, score_one, verdict
    from anchor_nb.inference.filtering import filter_pairs
    from anchor_nb.release.adapt import BATCH, best_snapshot, decoder_step
    base, before = warm() if way == "warmed" else "", {}
    if base:
        speed = (Path(base).parent/"speed.jsonl").read_text(encoding="utf-8").splitlines()
        before = dict(warming_minutes=round(sum(json.loads(line)["seconds"] for line in speed)/60, 1))
    for seed in map(int, numbers):
        place = Path("runs/adapt")/name/f"adapted-own-{seed}"
        facts = json.loads((place/"steps/train-smollm2-135m/step.json").read_text(encoding="utf-8"))["facts"]
        pairs, steps = Path(facts["run"]).with_name("pairs"), facts["steps"]
        dev, test = (read_retrieval(place/"steps/split"/part) for part in ("dev", "test"))
        out, began = Path("runs/adapt")/f"{way}-{name}-{seed}", time.process_time()
        if way == "warmed":
            rows = [row for table in load_pairs(str(pairs)).values() for row in table]
            made = decoder_step(Adapt(documents="-", out=str(out), seed=seed), base, rows, dev, out/"runs",
                                dict(steps=steps, seeds=1), {})
            model = out/made["model"]
        else:
            filter_pairs(str(pairs), str(out/"scored"), model=str(place/"steps/train-minilm/model"),
                         instructions="none")
            train(Stage2(model="smollm2-135m", data=str(out/"scored/pairs"), out=str(out/"run"), instructions="none",
                         preset="laptop", steps=steps, seed=seed, save_steps=50, distillation="kl",
                         snapshot_steps=facts["pairs"]//BATCH))
            made = best_snapshot(str(out/"run"), dev, facts["precision"], {})
            model = made["model"]
        took = (time.process_time() - began)/60
        sheet = json.loads((place/"steps/test/step.json").read_text(encoding="utf-8"))["facts"]["systems"]
        sheet[way] = score_one(opened(Candidate(way, str(model), precision=facts["precision"])), test)
        ends = ("difference", "low", "high")
        row = dict(target=name, way=way, seed=seed, steps=steps, snapshots=made["snapshots"],
                   test={label: round(100*sheet[label]["score"], 2) for label in
                         ("minilm", "minilm tuned", "smollm2-135m tuned", way)}, cpu_minutes=round(took, 1), **before,
                   **{f"on_{other}": {end: round(gain[end], 2) for end in ends}
                      for other, label in (("decoder", "smollm2-135m tuned"), ("minilm_tuned", "minilm tuned"))
                      for gain in [verdict(sheet, way, [label])]},
                   command=" ".join(["python", *sys.argv]), code=code_version(), machine=machine())
        with open("nbs/results/adapt/again.jsonl", "a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def tuned_once(name, words, loss):
    "An epoch of MiniLM on 128 pairs, each text cut after so many words, in a process of its own: its peak and time."
    from resource import RUSAGE_SELF, getrusage
    from anchor_nb.training import encoders
    rows, cut = [], lambda text: " ".join(text.split()[:words])
    with open(build_corpus(name)/"pairs"/f"{name}.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["negatives"]: rows.append(dict(query=row["query"], positives=[cut(row["positive"])],
                                                  negatives=[cut(row["negatives"][0])]))
            if len(rows) == 128: break
    if loss == "plain": # whatever the device
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        encoders.loss_of = MultipleNegativesRankingLoss
    began, encoder = time.process_time(), encoders.opened("minilm", 256)
    encoders.fit(encoder, rows, None, 1e-4, 1, 32, 0)
    print(json.dumps(dict(corpus=name, words=words, loss=loss, cpu_seconds=round(time.process_time() - began, 1),
                          peak_gb=round(getrusage(RUSAGE_SELF).ru_maxrss*1024/1e9, 2), code=code_version(),
                          machine=machine())))


def memory():
    "`tuned_once` for texts of two lengths and both losses."
    import subprocess
    rows = []
    for name, words in (("debian", 60), ("wiki", 160)):
        for loss in ("plain", "cached"):
            call = [sys.executable, __file__, "tuned_once", name, str(words), loss]
            rows.append(json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout))
            print(rows[-1], flush=True)
    write_lines(Path("nbs/results/adapt/memory.jsonl"), rows)


def negatives(name, rate=1e-4, epochs=3):
    "MiniLM on a target's pairs without negatives and with mined ones; scores on the test set, and after each epoch."
    from anchor_nb.data.retrieval_sets import read_retrieval
    from anchor_nb.data.rows import load_pairs
    from anchor_nb.release.adapt import Steps, prepared, with_negatives
    from anchor_nb.runs.ledger import read_rows
    from anchor_nb.training.encoders import SCORE, evaluator_of, fit, opened
    root = Path("runs/adapt")/name/"own"
    target(name, root, True)
    steps = Steps(root/"negatives")
    prepared(Adapt(documents=str(root/"documents.jsonl"), pairs=str(root/"pairs.jsonl"), out=str(steps.out),
                   test_documents=0), steps)
    mined = [row for table in load_pairs(str(steps.folder("mine")/"pairs")).values() for row in table]
    pool = [row["text"] for row in read_rows(steps.folder("split")/"pool.jsonl")]
    dev, test = (evaluator_of(read_retrieval(steps.folder("split")/part)) for part in ("dev", "test"))
    for kind, rows in dict(none=[row | dict(negatives=[]) for row in mined],
                           mined=with_negatives(mined, pool, 0)).items():
        encoder = opened("minilm", 256)
        scores = fit(encoder, rows, dev, rate, epochs, 32, 0)
        row = dict(target=name, negatives=kind, rate=rate, pairs=len(rows), epochs=scores,
                   test=round(float(test(encoder)[SCORE]), 4), code=code_version())
        with open("nbs/results/adapt/negatives.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "seeds": seeds(*sys.argv[2:])
    elif sys.argv[1] == "memory": memory()
    elif sys.argv[1] == "tuned_once": tuned_once(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "again": again(*sys.argv[2:])
    elif sys.argv[1] == "halves": halves()
    elif sys.argv[1] == "fusion": fusion()
    elif sys.argv[1] == "averages": averages()
    elif sys.argv[1] == "kinds": kinds(sys.argv[2])
    elif sys.argv[1] == "negatives": negatives(sys.argv[2])
    else: main(*sys.argv[1:])
