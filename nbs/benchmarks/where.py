"""What each engine and precision costs: accuracy lost against ours in fp32, and speed, memory and start in turns.

    python nbs/results/laptop/tune.py data # after its `prepare`; this and the next two make what the page shows
    anchor-nb stage2 --data runs/laptop/tune.jsonl --out runs/laptop/served --max-length 64 --steps 100
        --learning-rate 1e-3 --warmup-steps 10
    anchor-nb export runs/laptop/served runs/laptop/exported --format onnx --format openvino --format gguf
    python nbs/benchmarks/where.py loss MODEL FOLDER --task LocalVerbRetrieval --task runs/laptop/data/eval/foldoc
    anchor-nb export smollm2-135m runs/certified --format onnx --format openvino --format gguf
    python nbs/benchmarks/where.py speed smollm2-135m runs/certified [--threads 2] [--minutes 8]

FOLDER is what `anchor-nb export MODEL FOLDER --format onnx --format openvino --format gguf` wrote. `loss` encodes
queries and documents of retrieval tasks each way, and the stored forms of our fp32 vectors too; the load of the machine
does not matter to it. `speed` needs a quiet machine: every way in a process of its own, in turns, the second round in
reverse. vLLM runs where ANCHOR_NB_VLLM_PYTHON names an interpreter that has it. Rows go to results/where_loss.jsonl and
results/where_speed.jsonl.
"""
import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isolation import cpu_seconds

RESULTS = Path(__file__).parent/"results"
COMPILED = "int8, compiled"  # precision="int8", compile=True
OURS = [("torch", "fp32"), ("torch", "int8"), ("torch", COMPILED), ("onnx", "fp32"), ("onnx", "int8"),
        ("openvino", "fp32"), ("openvino", "int8"), ("gguf", "fp16"), ("gguf", "int8"), ("gguf", "int4")]
GRAPHS = [("onnxruntime", "dynamic int8"), ("nncf", "static int8")]  # as their libraries quantise by themselves
PEERS = [("sentence-transformers", "fp32"), *GRAPHS, ("vllm", "fp32")]


# ---- accuracy


def task_of(name: str, queries: int, documents: int):
    "A subset of a local task, or of a folder as BEIR has them."
    from anchor_nb.data.retrieval_sets import Retrieval, read_retrieval, subset
    if Path(name).is_dir(): return subset(read_retrieval(Path(name)), queries, documents, 0)
    from anchor_nb.evaluation.local_suite import read_parts
    parts = read_parts(name)
    texts = [{row["_id"]: row["text"] for row in parts[part]} for part in ("corpus", "queries")]
    judged = {row["query-id"]: {row["corpus-id"]: row["score"]} for row in parts["qrels"]}
    return subset(Retrieval(name, "", *texts, judged), queries, documents, 0)


def ndcg(scores, wanted):  # scores: [queries, documents]; wanted: the one document of each query
    "nDCG@10 where every query has one document."
    import numpy as np
    ranks = (scores > scores[range(len(wanted)), wanted][:, None]).sum(1)
    return float(np.where(ranks < 10, 1/np.log2(ranks + 2), 0).mean())


def options(way: tuple) -> dict:
    "What `from_pretrained` is given for one of ours."
    return dict(backend=way[0], precision=way[1].partition(",")[0]) | (dict(compile=True) if way[1] == COMPILED else {})


def vectors_of(way: tuple, model: str, folder: Path, texts: list, max_length: int):
    "Vectors of every list of texts, and bytes of the weights."
    from anchor_nb import AnchorEmbedder
    backend, precision = way
    if way in GRAPHS: embedder = graph_peer(way, folder, max_length)
    else:
        source = model if backend == "torch" else folder
        embedder = AnchorEmbedder.from_pretrained(source, max_length=max_length, **options(way))
    return [embedder.encode(part) for part in texts], weight_bytes(way, folder, embedder)


def weight_bytes(way: tuple, folder: Path, embedder) -> int:
    "Of the file with its weights, or of the tensors."
    from anchor_nb.models.engines import ENGINE_FILES
    if way[0] in ("torch", "sentence-transformers"):
        return sum(part.nbytes for part in [*embedder.lm.parameters(), *embedder.lm.buffers()])
    file = folder/(ENGINE_FILES | GRAPH_FILES)[way]
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.stem}.*"))


def stored_forms(queries, documents) -> dict:  # name -> (bytes of a vector, scores)
    "Scores by smaller stored vectors of documents; queries stay fp32."
    import numpy as np
    from anchor_nb.inference.corpus_encoding import dequantize, quantize
    full, forms = queries @ documents.T, {}
    unit = lambda part: part/np.linalg.norm(part, axis=1, keepdims=True)
    for dtype, size in (("int8", 1), ("binary", 1/8)):
        stored = dequantize(quantize(documents, dtype), dtype, documents.shape[1])
        forms[dtype] = round(documents.shape[1]*size) + 4, queries @ stored.T
    rescored, first = np.full_like(full, -9), np.argsort(-forms["binary"][1], axis=1)[:, :40]
    np.put_along_axis(rescored, first, np.take_along_axis(queries @ dequantize(
        quantize(documents, "int8"), "int8", documents.shape[1]).T, first, 1), 1)
    forms["binary, 40 rescored by int8"] = forms["binary"][0] + forms["int8"][0], rescored
    for size in (384, 256, 128, 64):
        forms[f"first {size}, fp32"] = 4*size, unit(queries[:, :size]) @ unit(documents[:, :size]).T
    return {"fp32": (4*documents.shape[1], full)} | forms


def loss(model: str, folder: Path, tasks: list, queries: int, documents: int, max_length: int, ways: list):
    "Rows of results/where_loss.jsonl: nDCG@10 and cosines of each way and each stored form, on each task."
    import numpy as np
    from anchor_nb.runs.ledger import append_rows
    sets, texts = [task_of(name, queries, documents) for name in tasks], []
    for task in sets: texts += [list(task.queries.values()), list(task.corpus.values())]
    wanted = [[list(task.corpus).index(next(iter(task.qrels[query]))) for query in task.queries] for task in sets]
    shared, exact = facts() | dict(model=model, max_length=max_length), None
    for way in [OURS[0], *(way for way in ways if way != OURS[0])]:
        began = time.process_time()
        try: vectors, size = vectors_of(way, model, folder, texts, max_length)
        except (ModuleNotFoundError, FileNotFoundError) as error: print(*way, error); continue
        exact, rows, spent = exact or vectors, [], time.process_time() - began
        for number, task in enumerate(sets):
            asked, corpus = vectors[2*number:2*number + 2]
            cosine = (corpus*exact[2*number + 1]).sum(1)
            row = shared | dict(task=Path(tasks[number]).name, queries=len(asked), documents=len(corpus))
            kept = stored_forms(asked, corpus) if way == OURS[0] else {"fp32": (0, asked @ corpus.T)}
            rows += [row | dict(backend=way[0], precision=way[1], stored=name, weight_bytes=size, vector_bytes=bytes_,
                                ndcg_at_10=ndcg(scores, wanted[number]), cosine=float(cosine.min()),
                                mean_cosine=float(cosine.mean()), cpu_seconds=spent)
                     for name, (bytes_, scores) in kept.items()]
        for row in rows:
            print(*way, row["task"], row["stored"], f"{row['ndcg_at_10']:.4f} {row['cosine']:.4f}", flush=True)
        append_rows(RESULTS/"where_loss.jsonl", rows)


def facts() -> dict:
    "Machine, versions and commit."
    from importlib import metadata
    from anchor_nb.runs.manifest import now
    from anchor_nb.runs.provenance import code_version, machine
    names = ("torch", "transformers", "sentence-transformers", "onnxruntime", "openvino", "xllamacpp", "nncf")
    installed = {part.name for part in metadata.distributions()}
    return dict(at=now(), code=code_version(), machine=machine(), command=" ".join(["python", *sys.argv]),
                versions={name: metadata.version(name) for name in names if name in installed})


# ---- speed, memory and start


GRAPH_FILES = dict(zip(GRAPHS, ("onnx/model_dynamic.onnx", "openvino/openvino_model_static.xml")))


def quantize_graph(way: tuple, folder: Path, file: Path, tokenizer):
    "ONNX Runtime: a scale for a batch, found as it comes. nncf: scales from 128 texts beforehand, and SmoothQuant."
    if way == GRAPHS[0]:
        from onnxruntime.quantization import QuantType, quantize_dynamic
        quantize_dynamic(folder/"onnx/model.onnx", file, op_types_to_quantize=["MatMul"], per_channel=True,
                         weight_type=QuantType.QInt8)
        return
    import nncf
    import numpy as np
    import openvino
    from anchor_nb.data.packages import toy_items
    rows = [tokenizer([item.text], truncation=True, max_length=64)["input_ids"] for item in toy_items()[:128]]
    texts = nncf.Dataset(rows, lambda ids: (np.array(ids), np.ones((1, len(ids[0])), np.int64)))
    model = openvino.Core().read_model(folder/"openvino/openvino_model.xml")
    openvino.save_model(nncf.quantize(model, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=128), file)


class graph_peer:
    "A graph that its own library quantised, run as others run it: 32 texts at a time, sorted by length."
    def __init__(self, way: tuple, folder: Path, max_length: int = 0):
        from anchor_nb.models.engines import OnnxEngine, OpenvinoEngine
        from transformers import AutoTokenizer
        file, self.tokenizer = folder/GRAPH_FILES[way], AutoTokenizer.from_pretrained(folder)
        if not file.is_file(): quantize_graph(way, folder, file, self.tokenizer)
        self.engine, self.max_length = (OnnxEngine if way == GRAPHS[0] else OpenvinoEngine)(file), max_length or 512

    def encode(self, texts: list):
        import numpy as np
        ids = self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
        rows = [self.engine([ids[number] for number in order[k:k + 32]]) for k in range(0, len(order), 32)]
        return np.concatenate(rows)[np.argsort(order)]


def encoder_of(way: tuple, model: str, folder: str):  # -> a function of texts
    "What a user of this engine starts."
    if way[0] == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its time and memory are those of this process
        from vllm import LLM
        return LLM(folder, runner="pooling", dtype="float32", max_num_batched_tokens=2048).embed
    if way[0] == "sentence-transformers":
        from sentence_transformers import SentenceTransformer
        return SentenceTransformer(folder, device="cpu").encode
    if way in GRAPHS: return graph_peer(way, Path(folder)).encode
    from anchor_nb import AnchorEmbedder
    source = model if way[0] == "torch" else folder
    how = dict(max_length=512) if way[0] == "torch" else {}
    return AnchorEmbedder.from_pretrained(source, **options(way), **how).encode


def measure_one(way: tuple, model: str, folder: str, blocks: list, seconds: float) -> dict:
    "Start an engine, ask it for short texts one at a time, then for as many blocks of mixed lengths as there is time."
    began = time.perf_counter()
    encode = encoder_of(way, model, folder)
    encode(["a first text"])
    if way[1] == COMPILED: encode(blocks[0]["texts"])  # lengths of all kinds, so that nothing is left to compile
    ready, singles = time.perf_counter() - began, []
    for number in range(10):
        start = time.perf_counter()
        encode([f"what is virtual memory, {number}?"])
        singles.append(time.perf_counter() - start)
    tokens, start, cpu = 0, time.perf_counter(), cpu_seconds()
    for block in blocks:
        encode(block["texts"])
        tokens += block["tokens"]
        if time.perf_counter() - start > seconds: break
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return dict(start_seconds=ready, short_ms=1000*sorted(singles)[5], tokens=tokens, seconds=wall, cpu_seconds=cpu,
                peak_bytes=1024*resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def mixed_blocks(folder: str, count: int = 8, texts: int = 64) -> list:  # of {texts, tokens}
    "Blocks of texts of 4 to 400 words, half of them with fewer than 40."
    from transformers import AutoTokenizer
    from anchor_nb.data.packages import toy_items
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(folder)
    words = " ".join(item.text for item in toy_items()).split()
    def text():
        size = min(400, int(4 + draw.expovariate(1)*55))
        start = draw.randrange(len(words) - size)
        return " ".join(words[start:start + size])
    blocks = [[text() for _ in range(texts)] for _ in range(count)]
    count = lambda block: sum(map(len, tokenizer(block, truncation=True, max_length=512)["input_ids"]))
    return [dict(texts=block, tokens=count(block)) for block in blocks]


def in_a_process(way: tuple, model: str, folder: str, blocks: str, threads: int, seconds: float) -> dict:
    "The figures of one way, measured in a fresh interpreter; {} when it is not installed or fails."
    python = os.environ.get("ANCHOR_NB_VLLM_PYTHON", "") if way[0] == "vllm" else sys.executable
    if not python: return {}
    env = os.environ | dict(OMP_NUM_THREADS=str(threads), VLLM_CPU_OMP_THREADS_BIND="nobind",
                            VLLM_CPU_KVCACHE_SPACE="1")
    try: done = subprocess.run([python, __file__, "one", *way, model, folder, blocks, str(seconds)],
                               capture_output=True, text=True, env=env, timeout=300)
    except subprocess.TimeoutExpired:
        print(*way, "took more than five minutes")
        return {}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"start')]
    if not lines: print(*way, "failed:", *done.stderr.splitlines()[-1:]); return {}
    return json.loads(lines[-1])


def speed(model: str, folder: Path, threads: int, minutes: float, ways: list):
    "Rows of results/where_speed.jsonl: each way twice, in turns; the better time and the larger memory."
    from anchor_nb.runs.ledger import append_rows
    from anchor_nb.models.loading import json_or_empty
    longest = json_or_empty(folder/"anchor_nb.json")["layout"]["max_length"]
    if longest < 512:
        raise SystemExit(f"{folder} cuts texts after {longest} tokens, and the texts here are longer; give it another")
    seconds, parts = max(2, minutes*60/2/len(ways) - 14), {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as place:
        blocks = Path(place)/"blocks.json"
        blocks.write_text(json.dumps(mixed_blocks(str(folder))), encoding="utf-8")
        for turn in range(2):
            for way in ways[::-1] if turn else ways:
                if part := in_a_process(way, model, str(folder), str(blocks), threads, min(seconds, 10)):
                    parts[way].append(part)
                    print(*way, f"{part['tokens']/part['seconds']:.0f} tokens/s", flush=True)
    best = lambda kept, name, pick=min: pick(part[name] for part in kept)
    rate = lambda kept, name: max(part["tokens"]/part[name] for part in kept)
    append_rows(RESULTS/"where_speed.jsonl", [facts() | dict(
        model=model, threads=threads, load=os.getloadavg()[1], backend=way[0], precision=way[1],
        tokens_per_second=rate(kept, "seconds"), tokens_per_cpu_second=rate(kept, "cpu_seconds"),
        start_seconds=best(kept, "start_seconds"), short_ms=best(kept, "short_ms"), runs=len(kept),
        peak_bytes=best(kept, "peak_bytes", max)) for way, kept in parts.items() if kept])


def main():
    if sys.argv[1] == "one":
        way, (model, folder, blocks, seconds) = tuple(sys.argv[2:4]), sys.argv[4:]
        print(json.dumps(measure_one(way, model, folder, json.loads(Path(blocks).read_text()), float(seconds))))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", action="append", default=[], help="a local task or a folder; repeat for several")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--way", action="append", default=[], help="such as torch:int8; repeat for several")
    given = parser.parse_args()
    ways = [tuple(name.split(":")) for name in given.way] or OURS + PEERS
    if given.what == "speed": speed(given.model, given.folder, given.threads, given.minutes, ways)
    else:
        loss(given.model, given.folder, given.task, given.queries, given.documents, given.max_length,
             [way for way in ways if way[0] not in ("sentence-transformers", "vllm")])


if __name__ == "__main__": main()
