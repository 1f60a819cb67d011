"""What each engine and precision costs in accuracy, size and CPU time, against ours in fp32.

    python nbs/benchmarks/where.py MODEL FOLDER [--task LocalVerbRetrieval] [--documents 600] [--queries 300]

FOLDER is what `anchor-nb export MODEL FOLDER --format onnx --format openvino --format gguf` wrote. All ways take turns
in one process, on the threads that OMP_NUM_THREADS allows; the time is that of the process on the CPU, so that other
work on the machine counts as little as it can. A row for each way goes to nbs/benchmarks/results/where.jsonl.
"""
import argparse
import math
import time
from pathlib import Path

import numpy as np

from anchor_nb.data.packages import cache_dir
from anchor_nb.data.retrieval_sets import Retrieval, subset
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.engines import ENGINE_FILES
from anchor_nb.runs.ledger import append_rows, read_rows
from anchor_nb.runs.manifest import now
from anchor_nb.runs.provenance import code_version, machine


def local_task(name: str) -> Retrieval:
    "A retrieval task of the local suite, which `anchor-nb evaluate` has built."
    corpus, queries, qrels = (read_rows(cache_dir()/"local"/name/f"{part}.jsonl") for part in ("corpus", "queries",
                                                                                               "qrels"))
    texts = [{row["_id"]: row["text"] for row in rows} for rows in (corpus, queries)]
    return Retrieval(name, "", *texts,
                     {row["query-id"]: {row["corpus-id"]: row["score"]} for row in qrels})


def ndcg(queries: np.ndarray, documents: np.ndarray, wanted: list) -> float: # wanted: the one document of each query
    "nDCG@10 where every query has one document."
    scores = queries @ documents.T
    ranks = (scores > scores[range(len(wanted)), wanted][:, None]).sum(1)
    return float(np.mean([1/math.log2(rank + 2) if rank < 10 else 0 for rank in ranks]))


def ways_of(model: str, folder: Path, settings: dict) -> dict: # (backend, precision) -> (embedder, bytes of weights)
    "Ours in fp32, bf16 and int8, and every file that is there and whose engine is installed."
    found = {}
    for precision in ("fp32", "bf16", "int8"):
        try: embedder = AnchorEmbedder.from_pretrained(model, precision=precision, device="cpu", **settings)
        except ModuleNotFoundError as error: print(f"torch {precision}: {error}")
        else: # torchao's tensors do not say how large they are
            size = None if precision == "int8" else sum(w.nbytes for w in embedder.lm.parameters())
            found["torch", precision] = embedder, size
    for (backend, precision), name in ENGINE_FILES.items():
        if not (file := folder/name).is_file(): continue
        try: embedder = AnchorEmbedder.from_pretrained(folder, backend=backend, precision=precision,
                                                       max_length=settings.get("max_length", 0))
        except ModuleNotFoundError as error: print(f"{backend} {precision}: {error}")
        else: found[backend, precision] = embedder, sum(part.stat().st_size
                                                        for part in file.parent.glob(f"{file.stem}.*"))
    return found


def measure(model: str, folder: Path, task: str, documents: int, queries: int, rounds: int = 2, **settings) -> list:
    "Rows: nDCG@10, cosine with ours in fp32, bytes, and CPU seconds of ours over theirs."
    retrieval = subset(local_task(task), queries, documents, 0)
    corpus, asked = list(retrieval.corpus.items()), list(retrieval.queries.items())
    place = {name: number for number, (name, _) in enumerate(corpus)}
    wanted = [place[next(iter(retrieval.qrels[name]))] for name, _ in asked]
    texts = [text for _, text in asked], [text for _, text in corpus]
    ways, seconds, vectors = ways_of(model, folder, settings), {}, {}
    for _ in range(rounds):
        for way, (embedder, _) in ways.items():
            started = time.process_time()
            vectors[way] = embedder.encode(texts[0]), embedder.encode(texts[1])
            seconds.setdefault(way, []).append(time.process_time() - started)
    ours = vectors["torch", "fp32"][1]
    return [dict(at=now(), code=code_version(), machine=machine(), model=model, settings=settings, task=task,
                 documents=len(corpus), queries=len(asked), backend=way[0], precision=way[1], bytes=ways[way][1],
                 ndcg_at_10=ndcg(*vectors[way], wanted), cosine=float((ours*vectors[way][1]).sum(1).min()),
                 mean_cosine=float((ours*vectors[way][1]).sum(1).mean()),
                 speed=min(seconds["torch", "fp32"])/min(seconds[way]), cpu_seconds=min(seconds[way]))
            for way in ways]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("model")
    options.add_argument("folder", type=Path)
    options.add_argument("--task", default="LocalVerbRetrieval")
    options.add_argument("--documents", type=int, default=600)
    options.add_argument("--queries", type=int, default=300)
    options.add_argument("--pooling", default="")
    options.add_argument("--max-length", type=int, default=0)
    given = options.parse_args()
    extra = {name: value for name, value in dict(pooling=given.pooling, max_length=given.max_length).items() if value}
    found = measure(given.model, given.folder, given.task, given.documents, given.queries, **extra)
    for row in found:
        print(f"{row['backend']:9} {row['precision']:5} {(row['bytes'] or 0)/1e6:7.1f} MB  "
              f"nDCG@10 {row['ndcg_at_10']:.4f}  cosine {row['cosine']:.5f}  CPU time 1/{row['speed']:.2f}")
    append_rows(Path(__file__).parent/"results/where.jsonl", found)
