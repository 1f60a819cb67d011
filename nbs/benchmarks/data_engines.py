"""Near-duplicate removal by engines that exist, beside our own index: rows/s, memory, precision, recall.

`python data_engines.py make N` writes N rows of real text with planted near-duplicates whose truth is known, and
`python data_engines.py run N ENGINE ...` measures each engine in a process of its own, or a data tool of the package
as a whole: `dedup`, `table` and `stream` (rows as training reads them, from a local table and from an address),
`mine_words`, `mine_vectors`, `mine_corpus`, `encode` and `filter`; with `--light` a smaller model encodes fewer
tokens, so that one core gets through 10^7 rows. The rows are the pairs of the package's corpora, without those that
repeat each other; where there are too few, three of them are joined to one. An exact engine joins the rarest runs of
words, as `anchor_nb.data.deduplication` does with DuckDB; datatrove has its own, approximate way (MinHash) and its own
words.

The others are not dependencies: `pip install datatrove[io,processing] dask[dataframe] "ray[data]"` into an environment
of their own.
"""
import argparse
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl

from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.deduplication import alike, plain, word_runs
from anchor_nb.data.rows import generator

SHARDS, THRESHOLD = 20, 0.8
CORPORA = ("wordnet", "foldoc", "wiki", "debian")
SHARES = dict(base=0.8, equal=0.08, near=0.08, decoy=0.04)  # of the rows; a decoy has 40 to 70 % in common
CELLS = 2**22


# ---- the rows ----


def real_pairs() -> list:  # of (query, positive)
    "The pairs of the corpora, in a fixed order, without those that repeat an earlier one."
    from anchor_nb.data.deduplication import duplicates
    files = [build_corpus(name)/"pairs"/f"{name}.jsonl" for name in CORPORA]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [dict(query=row["query"], positives=[row["positive"]]) for row in rows]
    repeated = duplicates(rows, 0.5)
    rows = [(row["query"], row["positives"][0]) for n, row in enumerate(rows) if n not in repeated]
    return [rows[n] for n in generator("pairs").permutation(len(rows))]


def base_row(pairs: list, number: int) -> tuple:  # (query, positive)
    "A row that repeats none: a real pair, or three real pairs joined."
    if number < len(pairs): return pairs[number]
    chosen = [pairs[n] for n in generator("base", number).choice(len(pairs), 3, replace=False)]
    return "; ".join(query for query, _ in chosen), " ".join(text for _, text in chosen)


def share(a: str, b: str) -> float:
    "The part of all runs of two texts that they share."
    return alike(word_runs(a), word_runs(b))


def changed(text: str, words: list, low: float, high: float, draw) -> str:  # empty where no edit hits the range
    "A text with some of its words replaced, so that it shares `low` to `high` of its runs with the original."
    parts = text.split()
    for n in draw.permutation(len(parts))[:max(1, len(parts)//2)]:
        parts[n] = words[draw.integers(len(words))]
        new = " ".join(parts)
        if (alike := share(text, new)) < low: return ""
        if alike < high: return new
    return ""


def planted(pair: tuple, kind: str, words: list, draw) -> tuple:  # (query, positive, kind)
    "A copy of a row; where it is too short to be nearly the same, an equal one."
    query, text = pair
    limits = dict(near=(THRESHOLD, 1.0), decoy=(0.4, 0.7)).get(kind)
    if limits and (new := changed(text, words, *limits, draw)): return query, new, kind
    return query.upper(), "  ".join(text.split()), "equal"


def make(rows: int, folder: Path):
    "Shards of rows, and their truth: what each is, and the row that it was made from."
    pairs, draw = real_pairs(), generator("rows", rows)
    words = sorted({word for _, text in pairs[:20000] for word in text.split()})
    kinds = draw.choice(list(SHARES), rows, p=list(SHARES.values()))
    bases, truth, count = [], [], 0
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        lines = []
        for number in range(shard*rows//SHARDS, (shard + 1)*rows//SHARDS):
            kind = str(kinds[number]) if bases else "base"
            if kind == "base":
                of, line = number, base_row(pairs, count)
                bases.append((number, count))
                count += 1
            else:
                of, origin = bases[draw.integers(len(bases))]
                *line, kind = planted(base_row(pairs, origin), kind, words, draw)
            lines.append(dict(id=number, query=line[0], positive=line[1]))
            truth.append((number, kind, of))
        pl.DataFrame(lines).write_parquet(folder/f"rows-{shard:03}.parquet")
    pl.DataFrame(truth, schema=["id", "kind", "of"], orient="row").write_parquet(folder/"truth.parquet")


def judged(folder: Path, dropped: np.ndarray) -> dict:
    "Precision and recall: of each family, a row and its copies, one must stay."
    truth = pl.read_parquet(folder/"truth.parquet")
    family = truth.with_columns(family=pl.when(pl.col("kind") == "decoy").then("id").otherwise("of"),
                                gone=pl.col("id").is_in(pl.Series(dropped).implode()))
    sums = family.group_by("family").agg(size=pl.len(), gone=pl.col("gone").sum())
    right = sums.select(pl.min_horizontal("gone", pl.col("size") - 1).sum()).item()
    return dict(planted=int((sums["size"] - 1).sum()), dropped=len(dropped),
                precision=right/max(1, len(dropped)), recall=right/int((sums["size"] - 1).sum()))


# ---- what the exact engines share: runs, and the rarest of each row ----


def flat_runs(texts: list) -> tuple:  # (number of the text, run), unique
    "The runs of many texts as hashes, as `word_runs` defines them."
    cut = pl.col("text").str.replace_all(r"(\w)\s*[.,;:!?]+(\s|$)", "${1}${2}").str.extract_all(r"\w+|[^\w\s]")
    frame = pl.DataFrame(dict(text=[plain(text) for text in texts])).with_row_index("owner")
    frame = frame.select("owner", word=cut).explode("word", empty_as_null=True)
    owner, run = frame["owner"].to_numpy(), frame["word"].fill_null("").hash().to_numpy()
    words, keep = run, np.r_[True, owner[1:] != owner[:-1]]  # a first run stays, however short
    for k in (1, 2):
        same = np.r_[owner[k:] == owner[:-k], np.zeros(min(k, len(owner)), bool)]
        with np.errstate(over="ignore"):
            run = run*np.uint64(0x9E3779B97F4A7C15) + np.where(same, np.roll(words, -k), np.uint64(0))
    keep |= same
    flat = pl.DataFrame(dict(owner=owner[keep], run=run[keep])).unique()
    return flat["owner"].to_numpy(), flat["run"].to_numpy()


def front(folder: Path, work: Path) -> None:
    "runs: row, part, run, and prefix: row, run, size, of the rows that are equal to no earlier one."
    counts, seen, equal = np.zeros(CELLS, np.uint32), set(), []
    for file in sorted(folder.glob("rows-*.parquet")):
        rows = pl.read_parquet(file)
        keys = [hash((plain(query), plain(text))) for _, query, text in rows.iter_rows()]
        new = np.array([not (key in seen or seen.add(key)) for key in keys])
        equal.append(rows["id"].to_numpy()[~new])
        rows = rows.filter(pl.Series(new))
        parts = []
        for part, name in enumerate(("query", "positive")):
            owner, run = flat_runs(rows[name].to_list())
            run = run ^ np.uint64(part*0x5851F42D4C957F2D)
            parts.append(pl.DataFrame(dict(row=rows["id"].to_numpy()[owner], part=np.full(len(run), part, np.int8),
                                           run=run)))
        flat = pl.concat(parts)
        counts += np.bincount((flat["run"].to_numpy() % CELLS).astype(np.int64), minlength=CELLS).astype(np.uint32)
        flat.write_parquet(work/f"runs-{file.stem[5:]}.parquet")
    np.save(work/"equal.npy", np.concatenate(equal))
    for file in sorted(work.glob("runs-*.parquet")):
        flat = pl.read_parquet(file)
        row, run = flat["row"].to_numpy(), flat["run"].to_numpy()
        order = np.lexsort((run, counts[(run % CELLS).astype(np.int64)], row))
        row, run = row[order], run[order]
        starts = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
        size = np.diff(np.r_[starts, len(row)])
        place, size = np.arange(len(row)) - np.repeat(starts, size), np.repeat(size, size)
        keep = place <= size - np.ceil(THRESHOLD*size - 1e-9)
        pl.DataFrame(dict(row=row[keep], run=run[keep], size=size[keep].astype(np.int32),
                          place=place[keep].astype(np.int32))).write_parquet(work/f"prefix-{file.stem[5:]}.parquet")


def greedy(near: list) -> set:  # near: (earlier row, later row), sorted by the later one
    "Rows that nearly repeat an earlier row that stays."
    gone = set()
    for earlier, later in near:
        if earlier not in gone: gone.add(later)
    return gone


# ---- the engines: each from a folder of shards to the numbers of the rows to drop ----


def anchor_nb(folder: Path, work: Path, threads: int) -> np.ndarray:
    "What `anchor-nb dedup` does, in DuckDB."
    from anchor_nb.data.deduplication import database, find_repeated, rows_of
    def rows():
        for file in sorted(folder.glob("rows-*.parquet")):
            for _, query, text in pl.read_parquet(file).iter_rows(): yield dict(query=query, positives=[text])
    with database(work/"search.duckdb", threads=threads) as db:
        find_repeated(db, rows(), THRESHOLD)
        dropped = rows_of(db, "SELECT row FROM equal UNION ALL SELECT row FROM near ORDER BY 1")
    return np.array(dropped)[:, 0]


def polars(folder: Path, work: Path, threads: int, parts: int = 8) -> np.ndarray:
    front(folder, work)
    col, t = pl.col, THRESHOLD
    prefix, found = pl.scan_parquet(work/"prefix-*.parquet"), []
    for part in range(parts):
        some = prefix.filter(col("run") % parts == part).collect(engine="streaming")
        shared = some.lazy().filter(col("run").is_duplicated()).collect()
        room = pl.min_horizontal(col("size") - col("place"), col("size_b") - col("place_b"))
        found.append(shared.lazy().join(shared.lazy(), on="run", suffix="_b").filter(
            col("row") < col("row_b"), col("size_b") >= t*col("size"), col("size") >= t*col("size_b"),
            (1 + t)*room >= t*(col("size") + col("size_b"))).select(a="row", b="row_b").unique().collect(
                engine="streaming"))
    pairs = pl.concat(found).unique()
    wanted = pl.concat([pairs["a"], pairs["b"]]).unique()
    involved = pl.scan_parquet(work/"runs-*.parquet").join(wanted.to_frame("row").lazy(), on="row", how="semi").collect(
        engine="streaming")
    sizes = involved.group_by("row", "part").len("n").lazy()
    common = pairs.lazy().join(involved.lazy(), left_on="a", right_on="row").join(
        involved.lazy(), left_on=["b", "part", "run"], right_on=["row", "part", "run"], how="semi").group_by(
            "a", "b", "part").len("n")
    alike = common.join(sizes, left_on=["a", "part"], right_on=["row", "part"], suffix="_a").join(
        sizes, left_on=["b", "part"], right_on=["row", "part"], suffix="_b").with_columns(
            j=col("n")/(col("n_a").cast(pl.Int64) + col("n_b") - col("n")))
    near = alike.group_by("a", "b").agg(col("j").min(), parts=pl.len()).filter(col("j") >= t, col("parts") == 2)
    near = near.select("a", "b").sort("b", "a").collect(engine="streaming")
    print(len(pairs), len(near))
    return np.array(sorted({*np.load(work/"equal.npy").tolist(), *greedy(near.rows())}))


def dask(folder: Path, work: Path, threads: int) -> np.ndarray:
    import dask
    import dask.dataframe as dd
    front(folder, work)
    dask.config.set(scheduler="threads", num_workers=threads)
    prefix, t = dd.read_parquet(work/"prefix-*.parquet"), THRESHOLD
    both = prefix.merge(prefix, on="run", suffixes=("_a", "_b"), shuffle_method="disk")
    both = both[(both.row_a < both.row_b) & (both.size_b >= t*both.size_a) & (both.size_a >= t*both.size_b)]
    room = (both.size_a - both.place_a).where(both.size_a - both.place_a < both.size_b - both.place_b,
                                              both.size_b - both.place_b)
    pairs = both[(1 + t)*room >= t*(both.size_a + both.size_b)][["row_a", "row_b"]].drop_duplicates().compute()
    wanted = np.unique(pairs.to_numpy())
    runs = dd.read_parquet(work/"runs-*.parquet")
    involved = runs[runs.row.isin(wanted)].compute()
    sizes = involved.groupby(["row", "part"]).size().rename("n").reset_index()
    first = dd.from_pandas(pairs, npartitions=16).merge(involved, left_on="row_a", right_on="row")
    common = first.merge(involved, left_on=["row_b", "part", "run"], right_on=["row", "part", "run"])
    common = common.groupby(["row_a", "row_b", "part"]).size().rename("c").reset_index().compute()
    common = common.merge(sizes, left_on=["row_a", "part"], right_on=["row", "part"])
    common = common.merge(sizes, left_on=["row_b", "part"], right_on=["row", "part"], suffixes=("_1", "_2"))
    good = common[common.c/(common.n_1 + common.n_2 - common.c) >= t].groupby(["row_a", "row_b"]).size()
    near = sorted(good[good == 2].index.tolist(), key=lambda pair: pair[::-1])
    return np.array(sorted({*np.load(work/"equal.npy").tolist(), *greedy(near)}))


def ray(folder: Path, work: Path, threads: int) -> np.ndarray:
    import ray
    front(folder, work)
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=2*2**30, runtime_env=dict(env_vars={"PYTHONPATH": os.environ["PYTHONPATH"]}))
    ray.data.DataContext.get_current().enable_progress_bars = False
    t, runs_of = THRESHOLD, ray.data.read_parquet(sorted(map(str, work.glob("runs-*.parquet"))))
    prefix = ray.data.read_parquet(sorted(map(str, work.glob("prefix-*.parquet"))))
    other = prefix.rename_columns(dict(row="row_b", size="size_b", place="place_b"))
    def match(both):
        both = both[(both.row < both.row_b) & (both.size_b >= t*both["size"]) & (both["size"] >= t*both.size_b)]
        room = np.minimum(both["size"] - both.place, both.size_b - both.place_b)
        return both[(1 + t)*room >= t*(both["size"] + both.size_b)][["row", "row_b"]].drop_duplicates()
    little = dict(num_cpus=0.1, memory=2**26)  # by default it reserves more
    pairs = prefix.join(other, "inner", 8, on=("run",), aggregator_ray_remote_args=little)
    pairs = pairs.map_batches(match, batch_format="pandas").to_pandas()
    pairs = pairs.drop_duplicates()
    wanted = np.unique(pairs.to_numpy())
    involved = runs_of.map_batches(lambda batch: batch[batch.row.isin(wanted)], batch_format="pandas").to_pandas()
    sizes = involved.groupby(["row", "part"]).size().rename("n").reset_index()
    common = pairs.rename(columns=dict(row="row_a")).merge(involved, left_on="row_a", right_on="row")
    common = common.merge(involved, left_on=["row_b", "part", "run"], right_on=["row", "part", "run"])
    common = common.groupby(["row_a", "row_b", "part"]).size().rename("c").reset_index()
    common = common.merge(sizes, left_on=["row_a", "part"], right_on=["row", "part"])
    common = common.merge(sizes, left_on=["row_b", "part"], right_on=["row", "part"], suffixes=("_1", "_2"))
    good = common[common.c/(common.n_1 + common.n_2 - common.c) >= t].groupby(["row_a", "row_b"]).size()
    near = sorted(good[good == 2].index.tolist(), key=lambda pair: pair[::-1])
    ray.shutdown()
    return np.array(sorted({*np.load(work/"equal.npy").tolist(), *greedy(near)}))


def datatrove(folder: Path, work: Path, threads: int, language="en") -> np.ndarray:  # en: words by spaCy
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.hashing import HashConfig
    at = lambda name: str(work/name)
    config = MinhashConfig(n_grams=3, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64))
    adapter = lambda self, row, path, n: dict(id=str(row["id"]), text=row["query"] + "\n" + row["positive"])
    reader = lambda: ParquetReader(str(folder), glob_pattern="rows-*.parquet", adapter=adapter, doc_progress=False)
    run = lambda name, tasks, *steps: LocalPipelineExecutor(list(steps), tasks=tasks, workers=threads,
                                                            logging_dir=at(f"logs-{name}")).run()
    run("sign", SHARDS, reader(), MinhashDedupSignature(at("signatures"), config, language))
    run("buckets", 14, MinhashDedupBuckets(at("signatures"), at("buckets"), config=config))
    run("cluster", 1, MinhashDedupCluster(at("buckets"), at("remove"), config=config))
    run("filter", SHARDS, reader(), MinhashDedupFilter(at("remove"), exclusion_writer=ParquetWriter(at("gone"))))
    gone = [pl.read_parquet(file)["id"].to_list() for file in (work/"gone").rglob("*.parquet")]
    return np.array(sorted(int(number) for part in gone for number in part))


def datatrove_regex(folder: Path, work: Path, threads: int) -> np.ndarray:
    "MinHash of words that a regular expression finds."
    from datatrove.utils.word_tokenizers import WordTokenizer
    class Words(WordTokenizer):
        def word_tokenize(self, text): return re.findall(r"\w+|[^\w\s]", text)
        def sent_tokenize(self, text): return [text]
        def span_tokenize(self, text): return [(0, len(text))]
    return datatrove(folder, work, threads, Words())


ENGINES = dict(anchor_nb=anchor_nb, polars=polars, datatrove=datatrove, datatrove_regex=datatrove_regex, dask=dask,
               ray=ray)


# ---- the package's tools, each from the address of the shards to a few facts ----


def dedup(address: str, work: Path, threads: int, light: bool) -> dict:
    "The whole command: read and check, search, look for texts of a test set, write."
    from anchor_nb.data.deduplication import dedup_pairs
    tests = [str(build_corpus("foldoc")/"eval")]
    facts = dedup_pairs(address, str(work/"out"), against=tests, threads=threads)["datasets"]
    return dict(*facts.values())


def drawn(tables: dict, began: float, steps: int = 1000, batch: int = 256) -> dict:
    "The rate at which training could read."
    from anchor_nb.data.rows import Batches, Stream, examples
    groups = {name: table.groups for name, table in tables.items() if isinstance(table, Stream)}
    batches = Batches({name: len(table) for name, table in tables.items()}, batch, groups=groups)
    opened = time.process_time() - began
    def step(number):
        drawn = batches(number)
        return len(examples(tables[drawn.dataset], drawn, None))
    began = time.process_time()
    step(0)
    first, began = time.process_time() - began, time.process_time()
    rows = sum(map(step, range(1, steps)))
    return dict(open_seconds=opened, first_step_seconds=first, rows_per_second=rows/(time.process_time() - began))


def stream(address: str, work: Path, threads: int, light: bool) -> dict:
    from anchor_nb.data.rows import load_pairs
    began = time.process_time()
    return drawn(load_pairs(address), began)


def table(address: str, work: Path, threads: int, light: bool) -> dict:
    from anchor_nb.data.rows import load_pairs
    (work/"data").mkdir()
    for file in Path(address.removeprefix("file://")).parent.glob("rows-*.parquet"):
        (work/"data"/file.name).symlink_to(file)
    began = time.process_time()
    return drawn(load_pairs(str(work/"data"), work/"cache"), began)


def reading(work: Path, light: bool) -> dict:
    "Model, tokens of a text, and which text: the long one by `tiny`, or the short one by a model of 16 dimensions."
    if not light: return dict(model="tiny", max_length=64, columns=dict(text="positive"))
    if (work/"light").is_dir(): return dict(model=str(work/"light"), max_length=16, columns=dict(text="query"))
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from anchor_nb.models.resolve import resolve_model
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1)
    for part in (tokenizer, LlamaForCausalLM(config)): part.save_pretrained(work/"light")
    return dict(model=str(work/"light"), max_length=16, columns=dict(text="query"))


def mine_words(address: str, work: Path, threads: int, light: bool, **settings) -> dict:
    from anchor_nb.core.recipe import Mine
    from anchor_nb.inference.hard_negatives import mine
    given = dict(data=address, model="bm25", out=str(work/"mined"), instructions="none", max_length=64) | settings
    facts = next(iter(mine(Mine(**given)).values()))
    return {name: facts[name] for name in ("documents", "negatives", "search") if name in facts}


def mine_vectors(address: str, work: Path, threads: int, light: bool, **settings) -> dict:
    how = reading(work, light)
    return mine_words(address, work, threads, light, model=how["model"], max_length=how["max_length"],
                      search="approximate", **settings)


def mine_corpus(address: str, work: Path, threads: int, light: bool) -> dict:
    "Negatives for the first 50,000 rows, among the texts of all."
    (work/"asked").mkdir(exist_ok=True)
    pl.scan_parquet(Path(address.removeprefix("file://")).parent/"rows-*.parquet").head(50_000).select(
        "query", "positive").sink_parquet(work/"asked/rows.parquet")
    columns = dict(text="query" if light else "positive")
    return mine_vectors(str(work/"asked"), work, threads, light, corpus=address, columns=columns)


def encode(address: str, work: Path, threads: int, light: bool) -> dict:
    from anchor_nb.inference.corpus_encoding import encode_corpus
    facts = encode_corpus(address, out=str(work/"vectors"), **reading(work, light))
    return {name: facts[name] for name in ("shards", "bytes")}


def filter(address: str, work: Path, threads: int, light: bool) -> dict:
    "Query and positive of each row scored and written with their scores; the rows have no negatives."
    from anchor_nb.inference.filtering import filter_pairs
    how = reading(work, light)
    facts = next(iter(filter_pairs(address, str(work/"left"), model=how["model"], instructions="none",
                                   max_length=how["max_length"]).values()))
    return dict(written=facts["written"])


TOOLS = dict(dedup=dedup, table=table, stream=stream, mine_words=mine_words, mine_vectors=mine_vectors,
             mine_corpus=mine_corpus, encode=encode, filter=filter)


# ---- measuring ----


def used(session: int) -> tuple:  # (bytes held now, process number -> processor seconds so far)
    "What the processes of a session use; shared pages count once."
    total, seconds = 0, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = stat.read_text().rpartition(")")[2].split()
            if int(facts[3]) != session: continue
            roll = (stat.parent/"smaps_rollup").read_text()
        except OSError: continue
        total += sum(1024*int(size) for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", roll, re.M))
        seconds[stat.parent.name] = (int(facts[11]) + int(facts[12]))/os.sysconf("SC_CLK_TCK")
    return total, seconds


def lines_of(engine: str) -> int:
    "Lines of code that would be ours."
    count = lambda part: sum(1 for line in inspect.getsource(part).splitlines() if line.strip())
    shared = (front, flat_runs, greedy) if engine in ("polars", "dask", "ray") else ()
    if engine != "anchor_nb": return sum(map(count, (ENGINES[engine], *shared)))
    from anchor_nb.data import deduplication as ours
    names = ("database", "rows_of", "once", "feed", "batched", "runs_of", "count_runs", "first_runs", "rarest",
             "shared", "near_blocks", "plain_rows", "find_equal", "find_near", "repeated", "find_repeated")
    return sum(map(count, (getattr(ours, name) for name in names)))


def measure(rows: int, engine: str, folder: Path, threads: int, limit: int, light: bool, resume: bool) -> dict:
    "One engine in a process of its own, with the peak of what it and its children held."
    work = folder.parent/f"work-{engine}-{rows}{'-light'*light}"
    if not resume:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
    threads_env = {name: str(threads) for name in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "ARROW_NUM_THREADS")}
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, __file__, "one", str(rows), engine, "--folder", str(folder.parent),
                              "--threads", str(threads), *(["--light"] if light else [])],
                             env=os.environ | threads_env, start_new_session=True)
    peak, seconds, code = 0, {}, None
    while code is None:
        held, spent = used(child.pid)
        peak, seconds = max(peak, held), seconds | spent
        if time.perf_counter() - start > limit:
            os.killpg(child.pid, signal.SIGKILL)
            code = "out of time"
        try: code = code or child.wait(0.5)
        except subprocess.TimeoutExpired: pass
    cpu = sum(seconds.values())  # but for the last half second of each
    row = dict(engine=engine, rows=rows, threads=threads, seconds=time.perf_counter() - start, processor_seconds=cpu,
               peak_bytes=peak, rows_per_processor_second=rows/cpu,
               disk_bytes=sum(f.stat().st_size for f in work.rglob("*") if f.is_file() and not f.is_symlink()))
    if code != 0: row |= dict(failed=str(code))
    elif engine in TOOLS: row |= json.loads((work/"facts.json").read_text())
    else: row |= judged(folder, np.load(work/"dropped.npy"))
    row |= {name: True for name, holds in dict(light=light, resumed=resume).items() if holds}
    if engine in ENGINES: row["lines"] = lines_of(engine)
    shutil.rmtree(work)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "run", "one"])
    parser.add_argument("rows", type=int)
    parser.add_argument("engines", nargs="*", default=list(ENGINES), help="or tools")
    parser.add_argument("--folder", type=Path, required=True, help="for the rows, and for what the engines write")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=1800, help="seconds for each engine")
    parser.add_argument("--light", action="store_true", help="encode the rows' short texts with a smaller model")
    parser.add_argument("--resume", action="store_true", help="go on in the folder of a run that was stopped")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent/"results", help="where the rows go")
    given = parser.parse_args()
    if given.light and (heavy := {*given.engines} - {"encode", "mine_vectors", "mine_corpus", "filter"}):
        parser.error(f"--light makes no difference to {', '.join(sorted(heavy))}")
    folder = given.folder/f"rows-{given.rows}"
    if given.what == "make": make(given.rows, folder)
    elif given.what == "one":
        name, = given.engines
        work = given.folder/f"work-{name}-{given.rows}{'-light'*given.light}"
        if name in ENGINES: np.save(work/"dropped.npy", ENGINES[name](folder, work, given.threads))
        else:
            facts = TOOLS[name](f"file://{folder.resolve()}/rows-*.parquet", work.resolve(), given.threads,
                                given.light)
            (work/"facts.json").write_text(json.dumps(facts))
    else:
        from anchor_nb.runs.manifest import now
        from anchor_nb.runs.provenance import code_version, machine
        for engine in given.engines:
            row = measure(given.rows, engine, folder, given.threads, given.limit, given.light,
                          given.resume)
            row |= dict(at=now(), code=code_version(), machine=machine())
            print(json.dumps(row))
            kept = given.out/("data_engines.jsonl" if engine in ENGINES else "data_tools.jsonl")
            with open(kept, "a") as file: file.write(json.dumps(row) + "\n")


if __name__ == "__main__": main()
