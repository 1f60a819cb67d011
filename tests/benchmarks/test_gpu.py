"`make gpu` as a dry run in short: rows as they come, limits, what a failure leaves behind, and the page."
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from anchor_nb.runs.ledger import append_rows, read_rows

BENCHMARKS = Path(__file__).resolve().parent.parent.parent/"nbs"/"benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu
import gpu_kit
import isolation
from gpu_page import ASKED, GOALS, TOO_LATE, as_page, asked_line, cases, ending, last_runs, verdict
from isolation import OutOfTime, in_turns, isolated, within

MACHINE = dict(device="NVIDIA H100", kind="cuda", count=1)
ABOUT = dict(dry=False, machine=MACHINE, versions=dict(torch="2.13", transformers="5.23"), at="2026-11-23T00:00:00",
             code=dict(version="0.1.0", commit="0123456789", dirty=False))


@pytest.fixture
def command(monkeypatch, capsys):
    "What `make gpu` prints, in this process: it starts others enough."
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"): monkeypatch.setenv(name, "1")
    def run(*words):
        gpu.main(list(map(str, words)))
        return capsys.readouterr().out
    return run


def test_the_short_dry_run_measures_goes_on_where_it_was_and_shows_the_page(tmp_path, command):
    rows = tmp_path/"rows.jsonl"
    shown = command("--device", "cpu", "--short", "--rows", rows)
    ends, kept = last_runs(read_rows(rows)), read_rows(rows)
    assert set(ends) == gpu.SHORT and {row["status"] for row in ends.values()} == {"done"}, shown
    assert all({"machine", "versions", "code", "at", "dry"} <= set(row) for row in kept)
    assert all(row["holds"] for row in kept if "holds" in row) and any("holds" in row for row in kept)
    resumed, = cases(kept, "kill and resume")
    assert resumed["same_bits"] and resumed["loss_error"] == 0
    second, = cases(kept, "stage2 1b")
    assert second["way"] == "anchor_nb" and 0 < second["efficiency"] < 1
    assert "| parity 1b: cases within the tolerances | at least 100% | 100% | met |" in shown
    assert "says nothing of speed" in shown and "| not run |" in shown
    again = command("--device", "cpu", "--short", "--rows", rows)
    assert again.count("done before") == len(gpu.SHORT) and read_rows(rows) == kept


def test_some_parts_alone(tmp_path, command, capsys):
    rows = tmp_path/"rows.jsonl"
    command("--device", "cpu", "--parts", "matrix rate, kernels", "--rows", rows)
    assert set(last_runs(read_rows(rows))) == {"matrix rate", "kernels"}
    with pytest.raises(SystemExit): command("--device", "cpu", "--parts", "kernel", "--rows", rows)
    assert "no part kernel; there are kernels," in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.registry
def test_the_whole_dry_run_does_every_part(tmp_path, command):
    rows = tmp_path/"rows.jsonl"
    shown = command("--device", "cpu", "--rows", rows)
    ends, kept = last_runs(read_rows(rows)), read_rows(rows)
    assert {name: end["why"] for name, end in ends.items() if end["status"] != "done"} == {}
    assert set(ends) == {part.name for part in gpu.PARTS}
    assert sum(end["cpu_seconds"] for end in ends.values()) < 180 # three minutes, where nothing else runs
    assert all(cases(kept, name) for name in ends) and all(row["holds"] for row in kept if "holds" in row)
    assert all(row["predicted_bytes"] > 0 for name in ends if name.startswith("encode 1")
               for row in cases(kept, name) if row["way"] == "anchor_nb")
    assert "| torch.compile | not run | a dry run leaves it out |" in shown


def parts_of(*functions, seconds=60, **more):
    return [gpu.Part("a", function.__name__, function, seconds, {}, {}, **more) for function in functions]


def test_a_part_that_fails_or_takes_too_long_or_lacks_a_package_does_not_stop_the_rest(tmp_path, monkeypatch):
    def breaks():
        yield dict(case="before it broke")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    def works(): yield dict(case="fine", holds=True)
    monkeypatch.setattr(gpu, "isolated", lambda *args, **how: dict(MACHINE, kind="cpu"))
    said, rows = [], tmp_path/"rows.jsonl"
    gpu.run(parts_of(breaks, works), rows, True, 1, said.append)
    ends = last_runs(read_rows(rows))
    assert (ends["breaks"]["status"], ends["works"]["status"]) == ("failed", "done")
    assert "illegal memory access" in ends["breaks"]["why"] and cases(read_rows(rows), "breaks")[0]["case"]
    gpu.run(parts_of(works, needs=("no_such_package",)), tmp_path/"other.jsonl", True, 1, said.append)
    assert last_runs(read_rows(tmp_path/"other.jsonl"))["works"]["why"] == "no_such_package is not installed"
    assert gpu.why_not(parts_of(works, gpus=2)[0], False, dict(count=1)) == "needs 2 GPUs, and there is 1"


def test_a_part_that_had_its_turn_waits_for_those_that_had_none(tmp_path, monkeypatch):
    ran = []
    def slow():
        ran.append("slow")
        yield dict(case="half")
        raise OutOfTime("stopped at its time limit")
    def new():
        ran.append("new")
        yield dict(case="fine")
    monkeypatch.setattr(gpu, "isolated", lambda *args, **how: dict(MACHINE, kind="cpu"))
    rows = tmp_path/"rows.jsonl"
    gpu.run(parts_of(slow), rows, True, 1, ran.append)
    append_rows(rows, [last_runs(read_rows(rows))["slow"] | dict(part="new", why=TOO_LATE)])  # it was not reached
    gpu.run(parts_of(slow, new), rows, True, 1, lambda text: None)
    assert [name for name in ran if name in ("slow", "new")] == ["slow", "new", "slow"]


def test_what_goals_need_comes_first_and_only_the_same_code_is_left_out(tmp_path, monkeypatch):
    ran, commits = [], iter(["1", "1", "2"])
    monkeypatch.setattr(gpu, "isolated", lambda *args, **how: dict(MACHINE, kind="cpu"))
    monkeypatch.setattr(gpu, "code", lambda: dict(version="0.1.0", dirty=True, files=next(commits)))
    monkeypatch.setattr(gpu, "NEEDED", {"judged"})
    def part(name):
        def rows():
            ran.append(name)
            yield dict(case="fine")
        return gpu.Part("a", name, rows, 60, {}, {})
    for _ in range(3): gpu.run([part("other"), part("judged")], tmp_path/"rows.jsonl", True, 1, lambda text: None)
    assert ran == ["judged", "other"]*2 # the second run left both out


def test_what_was_measured_before_the_time_was_up_is_kept(monkeypatch):
    calls = iter([dict(seconds=[value], peak_bytes=1) for value in (1.0, 2.0, 9.0)])
    def until_the_end(function, rows="", **arguments):
        if rows: append_rows(Path(rows), [dict(case="first")])
        for figures in ([] if rows else calls): return figures
        raise OutOfTime("stopped at its time limit")
    monkeypatch.setattr(isolation, "isolated", until_the_end)
    monkeypatch.setattr(gpu, "isolated", until_the_end)
    measured = in_turns("bench:some_way", ["a", "b"], 2) # the second round has b alone
    assert {way: each["all_seconds"] for way, each in measured.items()} == {"a": [1.0], "b": [2.0]}
    assert isolation.CUT.pop() == "bench:some_way" # so its part is out of time
    with pytest.raises(OutOfTime): in_turns("bench:some_way", ["a", "b"], 2)
    kept = []
    with pytest.raises(OutOfTime):
        for row in gpu.as_they_come("gpu:parity_way"): kept.append(row["case"])
    assert kept == ["first"]


def test_the_last_stage_has_the_time_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "isolated", lambda *args, **how: dict(MACHINE))
    monkeypatch.setattr(gpu, "LIMITS", dict(a=0, b=0, c=0))
    def works(): yield dict(case="fine")
    for stages, ended in (("a", ["done"]), ("ab", ["out of time", "done"])):
        rows = tmp_path/f"{stages}.jsonl"
        gpu.run([gpu.Part(stage, stage, works, 60, {}, {}) for stage in stages], rows, False, 1, lambda text: None)
        assert [end["status"] for end in last_runs(read_rows(rows)).values()] == ended


def test_a_session_that_does_not_come_to_a_part_hides_nothing():
    half = [dict(part="encode 135m", case="short", way=way, seconds=seconds, **ABOUT)
            for way, seconds in (("anchor_nb", 1.0), ("sentence-transformers", 2.0))]
    ends = [dict(part="encode 135m", status="out of time", why=why, seconds=seconds, **ABOUT)
            for why, seconds in (("stopped at its time limit", 120.0), (TOO_LATE, 0.0))]
    goal = next(goal for goal in GOALS if goal.part == "encode 135m")
    assert verdict(goal, [*half, *ends]) == ("2.00", "met so far; encode 135m: out of time")
    assert last_runs([*half, *ends])["encode 135m"]["seconds"] == 120.0


def test_a_process_is_stopped_at_its_deadline_and_its_last_line_is_told(tmp_path):
    (tmp_path/"log").write_text("loading\n\n")
    here, _ = multiprocessing.Pipe()
    with within(0.0), pytest.raises(OutOfTime, match="limit; its last line: loading"):
        isolation.result_of(here, tmp_path/"log")
    began = time.monotonic()
    with within(1.0), pytest.raises(OutOfTime): isolated("test_gpu:sleeper")
    assert time.monotonic() - began < 280, "the process was waited for"


def sleeper(): time.sleep(300)


def test_the_command_says_that_there_is_no_gpu(tmp_path, command):
    with pytest.raises(SystemExit, match="torch sees no GPU here\n`anchor-nb doctor` says why"):
        command("--rows", tmp_path/"rows.jsonl")


def measured(part, *rows): return [dict(part=part, **row, **ABOUT) for row in rows] + [
    dict(part=part, status="done", why="", seconds=1.0, **ABOUT)]


def test_goals_are_judged_from_rows_and_nothing_unmeasured_is_met():
    assert {verdict(goal, [])[1] for goal in GOALS} == {"not run"}
    speed = dict(case="256 pairs", way="anchor_nb", efficiency=0.47, tokens_per_second=60_000.0, peak_bytes=52*10**9,
                 predicted_bytes=50*10**9)
    peers = [dict(case="mixed", way=way, seconds=seconds) for way, seconds in (("anchor_nb", 2.0),
                                                                              ("sentence-transformers", 2.4))]
    rows = [*measured("stage1 1b", speed), *measured("encode 135m", *peers),
            *measured("parity 1b", dict(case="a", holds=True), dict(case="b", holds=False))]
    found = {goal.name.partition(":")[0] + ":" + goal.part: verdict(goal, rows) for goal in GOALS}
    assert found["stage I, 1B:stage1 1b"][1] == "met"
    assert found["encode, 135M:encode 135m"] == ("1.20", "not reached")
    assert found["parity 1b:parity 1b"] == ("50%", "not reached")
    assert found["memory:stage1 1b"][0] == "4%" and found["memory:stage1 1b"][1].startswith("met so far;")
    loss_alone = measured("parity 135m", dict(case="a", holds=True, why="judged by its loss; rounding ..."))
    assert verdict(next(goal for goal in GOALS if goal.part == "parity 135m"), loss_alone) == (
        "100%", "met, some cases by their loss alone")
    page = as_page(rows, gpu.PARTS, gpu.STAGES)
    first = next(part for part in gpu.PARTS if part.name == "parity 1b")
    rows[-1] |= dict(settings=first.settings | dict(pairs=4))
    assert "| not reached, with earlier settings |" in as_page(rows, gpu.PARTS, gpu.STAGES)
    assert "## NVIDIA H100" in page and "goals, 2 met, 2 not reached, 1 measured in part" in page
    assert "**Not run yet**" in as_page([], gpu.PARTS, gpu.STAGES)


def test_what_was_not_measured_says_why():
    rows = measured("parity 1b", dict(case="stage1, packed_varlen, bf16", holds=True))
    for row in rows: row["machine"] = MACHINE | dict(attention=["packed_varlen", "packed_sdpa"])
    lines = {asked.name: asked_line(asked, rows, gpu.PARTS)[1:] for asked in ASKED}
    assert lines["packed_varlen"] == ["1 case, 1 of 1 hold", ""]
    assert lines["FlashAttention 3"][1].startswith("cannot run on this machine")
    assert lines["FSDP2 (NCCL on GPUs)"][1] == "two ranks equal one: not run, needs 2 GPUs, and there is 1"
    assert all(measured != "not run" or why for measured, why in lines.values())
    assert all(end["status"] == "done" or end["why"] for end in (ending(part, rows) for part in gpu.PARTS))
    assert {name for asked in ASKED for name in asked.parts} <= {part.name for part in gpu.PARTS}


def test_goals_and_parts_name_each_other():
    assert {goal.part for goal in GOALS} <= {part.name for part in gpu.PARTS} >= gpu.SHORT
    for part in gpu.PARTS: assert set(part.dry) - set(part.settings) <= {
        "model", "precision", "stages", "names", "micro_tokens", "workers", "max_length"}, part.name


# ---- the kit ----

def test_a_kit_joins_by_hash_and_says_which_piece_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kit, "PIECE", 1024)
    stub = tmp_path/"gpu.py"
    stub.write_text("import os, sys\nprint(*sys.argv[1:], os.getcwd(), os.environ['HF_HUB_OFFLINE'])\n")
    monkeypatch.setattr(gpu_kit, "tracked", lambda: [(Path(__file__), "tests/this.py"),
                                                     (stub, "nbs/benchmarks/gpu.py")])
    def fetched(names, folder, pythons):
        for tags in ("py3-none-any", "cp27-cp27m-win32"):
            with zipfile.ZipFile(folder/f"{names[0]}-1.0-{tags}.whl", "w") as wheel: wheel.writestr(f"{tags}.py", "")
    monkeypatch.setattr(gpu_kit, "fetch_wheels", fetched)
    about = gpu_kit.make_kit(tmp_path/"kit", ["nowhere_else"], cache=False)
    assert len(about["pieces"]["source"]) > 1
    assert all((tmp_path/"kit"/piece["file"]).stat().st_size <= 1024 for piece in about["pieces"]["source"])
    unpack = [sys.executable, "-I", str(tmp_path/"kit"/"unpack.py"), str(tmp_path/"kit"), str(tmp_path/"work")]
    subprocess.run(unpack, check=True)
    assert (tmp_path/"work/source/tests/this.py").read_bytes() == Path(__file__).read_bytes()
    assert "version" in json.loads((tmp_path/"work/source/commit.json").read_text())
    assert [file.name for file in (tmp_path/"work/site-packages").iterdir()] == ["py3-none-any.py"]
    start = (tmp_path/"kit"/"start.sh").read_text()
    assert "$work/site-packages" in start and not {"pip", "curl", "wget", "conda"} & set(re.split(r"\W+", start))
    ran = subprocess.run(["sh", str(tmp_path/"kit"/"start.sh"), "--device", "cpu"], text=True, capture_output=True,
                         env=os.environ | dict(PYTHON=sys.executable, WORK=str(tmp_path/"elsewhere")), check=True)
    assert ran.stdout.splitlines()[-1].split() == ["--device", "cpu", str(tmp_path/"elsewhere"/"source"), "1"]
    refused = subprocess.run(["sh", str(tmp_path/"kit"/"start.sh")], text=True, capture_output=True,
                             env=os.environ | dict(PYTHON="false"))
    assert refused.returncode == 1 and "false is not Python 3.11 or later" in refused.stderr
    measured, result = '{"old": 1}\n{"measured": 2}\n', tmp_path/"rows.jsonl"
    result.write_text('{"old": 1}\n{"newer": 3}\n')
    monkeypatch.setattr(gpu_kit, "tracked", lambda: [(result, "results/rows.jsonl"), (stub, "nbs/benchmarks/gpu.py")])
    gpu_kit.make_kit(tmp_path/"newer", [], cache=False)
    (tmp_path/"work/source/results").mkdir()
    (tmp_path/"work/source/results/rows.jsonl").write_text(measured)
    ran = subprocess.run(["sh", str(tmp_path/"newer"/"start.sh")], text=True, capture_output=True, check=True,
                         cwd=tmp_path, env=os.environ | dict(PYTHON=sys.executable, WORK="work"))
    assert ran.stdout.splitlines()[-1].split()[0] == str(tmp_path/"work"/"source")
    assert read_rows(tmp_path/"work/source/results/rows.jsonl") == [dict(old=1), dict(newer=3), dict(measured=2)]
    piece, = list((tmp_path/"kit").glob("source-000"))
    piece.write_bytes(b"x" + piece.read_bytes()[1:])
    (tmp_path/"work/done.json").unlink()
    done = subprocess.run(unpack, capture_output=True, text=True)
    assert done.returncode == 1 and "source-000 is damaged\ncopy it from the kit again" in done.stderr


def test_a_kit_brings_nothing_that_comes_with_torch():
    wheels = gpu_kit.lacking(gpu_kit.TRAIN + gpu_kit.COMPARE)
    assert {"accelerate", "peft", "sentence-transformers"} <= set(wheels)
    assert not {"torch", "numpy", "transformers", "tokenizers", "triton"} & set(wheels)
    assert not [name for name in wheels if name.startswith("nvidia")]
