"The benchmarks run, on a tiny model, and both sides do the same work; how fast they are is not tested."
import json
import math
import subprocess
import sys
from pathlib import Path

import papermill
import pytest

from anchor_nb.benchmarks.bench import CASES, QUICK, bench_parameters, run_bench
from anchor_nb.benchmarks.isolation import OURS, check_same, isolated
from anchor_nb.runs.ledger import read_rows

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent/"nbs"/"benchmarks"
WAYS = dict(stage1={"padded"}, stage2={"sentence-transformers", "sentence-transformers cached"},
            encode={"sentence-transformers", "padded loop"},
            growth={"sentence-transformers", "padded"})
every_benchmark = pytest.mark.parametrize("name", CASES)


@every_benchmark
def test_a_quick_benchmark_gives_figures_and_ratios(name, tmp_path):
    result = run_bench(name, quick=True, out=str(tmp_path))
    assert set(result["throughput_ratio"]) == set(result["memory_ratio"]) == WAYS[name]
    ratios = [ratio for kind in ("throughput_ratio", "memory_ratio") for cases in result[kind].values()
              for ratio in cases.values()]
    assert ratios and all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
    rows = read_rows(tmp_path/f"{name}.jsonl")
    assert {row["way"] for row in rows if row["way"] in WAYS[name] | {OURS}} == WAYS[name] | {OURS}
    for row in rows:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("seconds", "peak_bytes"))
        assert {"machine", "versions", "code", "parameters", "at"} <= set(row)
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("name", ["stage2"])
def test_a_notebook_shows_what_its_module_measures(name, tmp_path):
    papermill.execute_notebook(str(NOTEBOOKS/f"{name}.ipynb"), str(tmp_path/"out.ipynb"),
                               QUICK[name] | dict(results=str(tmp_path)), progress_bar=False)
    assert len(read_rows(tmp_path/f"{name}.jsonl")) == 1 + len(WAYS[name])


@every_benchmark
def test_the_parameters_of_a_notebook_are_those_of_its_benchmark(name):
    found = papermill.inspect_notebook(str(NOTEBOOKS/f"{name}.ipynb"))
    assert all(about["help"] and about["inferred_type_name"] != "None" for about in found.values())
    defaults = {key: json.loads(about["default"]) for key, about in found.items()}
    assert defaults.pop("results") == "results"
    assert defaults == bench_parameters(name)
    bench_parameters(name, quick=True)


def test_ways_that_differ_are_not_compared():
    with pytest.raises(RuntimeError, match="peer and anchor_nb differ in loss"):
        check_same({OURS: dict(loss=1.0), "peer": dict(loss=1.01)}, "loss", tolerance=1e-3)
    with pytest.raises(RuntimeError, match="differ in losses"):
        check_same({OURS: dict(losses=[1.0]), "peer": dict(losses=[1.0, 1.0])}, "losses", tolerance=1e-3)
    with pytest.raises(RuntimeError, match="peer and anchor_nb differ in loss"):
        check_same({OURS: dict(loss=1.0), "peer": dict(loss=float("nan"))}, "loss", tolerance=1e-3)
    with pytest.raises(RuntimeError, match="vectors differ from ours"): run_bench("encode", quick=True, tolerance=1e-12)


def test_memory_of_one_process_is_not_that_of_another():
    block = bytearray(1_500_000_000)
    block[::4096] = b"x"*len(block[::4096])
    assert isolated("anchor_nb.benchmarks.isolation:memory")[1] < 1_500_000_000


def test_importing_the_benchmarks_loads_no_heavy_library():
    code = ("import sys, anchor_nb.benchmarks.bench; print([name for name in ('torch', 'transformers', "
            "'sentence_transformers', 'datasets', 'pandas') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
