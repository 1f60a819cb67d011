"""Reproduce what hrsa.ipynb reads, in a quarter of an hour on two CPU cores.

    python nbs/studies/hrsa_runs.py runs/hrsa nbs/results/hrsa

Trains the demo's stage I, both stages and stage II alone with two seeds, and compares them. Existing runs are resumed.
"""
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"
from anchor_nb.analysis import analyse as analysis
from anchor_nb.data.corpora import build_corpus
from anchor_nb.evaluation.encoders import candidates
from anchor_nb.runs.ledger import read_json, write_json
from anchor_nb.experiments.pipeline import full_preset
from anchor_nb.core.recipe import Analyse
from anchor_nb.experiments.torchrun import train_stage
from anchor_nb.analysis.hidden_states import Settings
from anchor_nb.analysis.compare import compare

runs, results = Path(sys.argv[1]), Path(sys.argv[2])
MODEL, SEEDS, LENGTH = "smollm2-135m", (42, 43), 40
corpus = build_corpus("wiki")
places = {seed: dict(untrained=MODEL) | {label: str(runs/f"seed-{seed}"/label) for label in ("stage1", "anchor",
                                                                                             "baseline")}
          for seed in SEEDS}
for seed, at in places.items():
    for label, stage, model in (("stage1", "stage1", MODEL), ("anchor", "stage2", f"{at['stage1']}/model"),
                                ("baseline", "stage2", MODEL)):
        settings = full_preset("first-experiment", stage)
        train_stage(stage, settings | dict(data=str(corpus/"pairs"), model=model, out=at[label], seed=seed))

first, second = places.values()
settings = Analyse(a=MODEL, b=MODEL, data=str(corpus/"eval"), out=str(runs), texts=200, max_length=LENGTH)
sample = analysis.draw(settings)
for a, b, rows, random in (("untrained", "stage1", "pooled", False), ("stage1", "anchor", "pooled", False),
                           ("untrained", "baseline", "pooled", True), ("baseline", "anchor", "pooled", False),
                           ("stage1", "anchor", "tokens", False)):
    found = compare(first[a], first[b], sample.texts, Settings(rows=rows, max_length=LENGTH, random_init=random),
                    twin=second[b])
    write_json(results/f"similarity-{a}-{b}{'-tokens' if rows == 'tokens' else ''}.json", found)

models = [*candidates(dict(untrained=MODEL))]
for seed, at in places.items():
    models += [dataclasses.replace(each, training_seed=seed) for label in ("stage1", "anchor", "baseline")
               for each in candidates({label: at[label]}, seed == SEEDS[0])]
measured = analysis.measured(models, sample, settings)
write_json(results/"geometry.json", dict(a="baseline", b="anchor", checkpoints=measured,
                                         isotropic=analysis.by_random_points(measured, sample, settings)[0]))
last = {each.label: each for each in models if each.training_seed in (None, SEEDS[0])}
write_json(results/"map.json", analysis.map_of(list(last), [analysis.embeddings(each, sample, settings)
                                                            for each in last.values()], sample))
manifests = {f"{label}, seed {seed}": read_json(Path(at[label])/"run.json") for seed, at in places.items()
             for label in ("stage1", "anchor", "baseline")}
write_json(results/"manifests.json", json.loads(json.dumps(manifests).replace(str(Path.home()), "~")))
