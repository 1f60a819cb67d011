"""A real Slurm of one machine.

`eval "$(tests/slurm/setup.sh start)"`, then `pytest tests/slurm`, then `tests/slurm/setup.sh stop`.
"""
import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent)) # for `common`
from common import rows, toy_pairs

from anchor_nb.runs import ledger as ledgers
from anchor_nb.runs import manifest as runs
from anchor_nb.experiments import slurm as submit

pytestmark = pytest.mark.slurm
TRAINING = dict(model="tiny", global_batch=8, warmup_steps=2, learning_rate=1e-3, max_length=48, micro_tokens=300)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def slurm(*words): return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def state(job):
    if job.job_id not in slurm("squeue", "--noheader", "--format=%i"): return ""
    return slurm("squeue", "--noheader", "--format=%T", f"--jobs={job.job_id}").strip()


def wait_until(done, seconds, what):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline: time.sleep(1)
    assert done(), f"{what} within {seconds} s\n" + slurm("squeue") + slurm("scontrol", "show", "job")


def test_a_job_of_one_minute_trains_for_several(tmp_path):
    """Time runs out, Slurm sends its signal, the run writes a checkpoint, the job is requeued and resumes.

    No step is lost or done twice."""
    parameters = TRAINING | dict(data=toy_pairs(), out=str(tmp_path/"run"), steps=400, save_steps=0)
    job = submit.submit_stage("stage1", parameters, dict(time=1, signal_delay_s=20))
    wait_until(lambda: job.paths.result_pickle.exists(), 540, "the job did not finish")
    manifest, log = runs.read_manifest(tmp_path/"run"), job.stdout()
    print(log, slurm("scontrol", "show", "job", job.job_id), *(f"{failure['at']} {failure['reason']}"
                                                               for failure in manifest["failures"]), sep="\n")
    assert manifest["status"] == "complete" and job.result() == str(tmp_path/"run")
    assert len(manifest["starts"]) >= 2 and all(failure["reason"].startswith("Stopped: stopped by SIGTERM after step")
                                                for failure in manifest["failures"])
    assert log.count("Requeued job") == len(manifest["failures"]) == len(manifest["starts"]) - 1
    assert f"Restarts={len(manifest['failures'])}" in slurm("scontrol", "show", "job", job.job_id)
    assert [row["step"] for row in rows(tmp_path/"run")] == list(range(1, 401))


def test_a_cancelled_job_has_its_checkpoint_and_can_be_submitted_again(tmp_path):
    parameters = TRAINING | dict(data=toy_pairs(), out=str(tmp_path/"run"), steps=5000, save_steps=0)
    job = submit.submit_stage("stage1", parameters, dict(time=30))
    wait_until(lambda: (tmp_path/"run/metrics.jsonl").exists(), 120, "training did not start")
    slurm("scancel", job.job_id)
    wait_until(lambda: list((tmp_path/"run").glob("checkpoint-*")), 60, "no checkpoint")
    wait_until(lambda: not state(job), 90, "the job did not go")
    assert runs.read_manifest(tmp_path/"run")["status"] == "stopped"
    assert not [line for line in slurm("ps", "-eo", "args").splitlines()
                if str(tmp_path) in line], "a process was left behind"


TOOLS = dict(dedup=("pairs", "dedup {rows} --out {out} --threads 2"),
             mine=("pairs", "mine {rows} --out {out} --model bm25 --instructions none"),
             filter=("pairs", "filter {rows} --out {out} --model tiny --instructions none --gpus 2"),
             encode=("shard-000001.safetensors", "encode {rows} --out {out} --model tiny --gpus 2 "
                                                     "--columns '{{text: positive}}' -p shard_rows=512"))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_data_tool_that_is_requeued_ends_as_if_it_had_not_been(tool, tmp_path):
    "It leaves the same bytes as without Slurm."
    numbers = random.Random(0)
    words = [f"{a}{b}" for a in "kmptsl" for b in ("a", "en", "or", "ix", "un", "el", "ist")]
    text = lambda length: " ".join(numbers.choices(words, k=length))
    (tmp_path/"rows.jsonl").write_text("".join(json.dumps(dict(query=text(8), positive=text(24))) + "\n"
                                               for _ in range(8192)))
    made, command = TOOLS[tool]
    line = lambda out: shlex.join([str(Path(sys.executable).parent/"anchor-nb"), *shlex.split(
        command.format(rows=tmp_path/"rows.jsonl", out=tmp_path/out))])
    subprocess.run(line("alone"), shell=True, check=True, capture_output=True)
    number = slurm("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--output={tmp_path}/log.txt",
                   "--cpus-per-task=2", f"--wrap={line('job')}").strip()
    working = lambda: any((tmp_path/"job").rglob("*.duckdb")) or any((tmp_path/"job").rglob("*.safetensors")) or any(
        (tmp_path/"job").rglob("*-found.bin")) or any((tmp_path/"job/.scores").rglob("*.jsonl"))
    wait_until(working, 120, "the job did not begin")
    slurm("scontrol", "requeue", number)
    wait_until(lambda: "COMPLETED" in slurm("scontrol", "show", "job", number), 240, "the job did not finish")
    assert "Restarts=1" in slurm("scontrol", "show", "job", number)
    assert (tmp_path/"job"/made).exists()
    files = lambda out: {file.relative_to(tmp_path/out): file.read_bytes() for file in (tmp_path/out).rglob("*")
                         if file.is_file() and file.suffix in (".jsonl", ".safetensors")}
    assert files("job") == files("alone") and files("job")


def test_a_sweep_goes_through_arrays_and_outlives_its_driver(tmp_path):
    small = {"stage1.steps": 4, "stage1.global_batch": 4, "stage1.max_length": 32, "evaluate.documents": 20,
             "evaluate.queries": 8, "evaluate.max_length": 32, "evaluate.instructions": "none"}
    (tmp_path/"s.yaml").write_text(yaml.safe_dump(dict(preset="smoke", base=small, arms={"a": {"stages": ["stage1"]},
                                                                                         "b": {"stages": ["stage1"],
                                                                                               "stage1.alpha": 0.7}})))
    drive = ("import sys; from anchor_nb.experiments.sweeps import run_sweep; print(run_sweep(sys.argv[1], "
             "sys.argv[2], at_once=1, slurm={'time': '10', 'evaluate.time': '5'}, every=1))")
    root = tmp_path/"root"
    driver = subprocess.Popen([sys.executable, "-c", drive, tmp_path/"s.yaml", root])
    wait_until(lambda: list(root.glob("stage1-*/run.json")), 200, "stage I did not start")
    queue = ledgers.read_json(root/"jobs/queue.json")
    driver.kill()
    driver.wait()
    done = subprocess.run([sys.executable, "-c", drive, tmp_path/"s.yaml", root], capture_output=True, text=True,
                          timeout=400)
    assert "'done': 5" in done.stdout and "'failed': {}" in done.stdout, done.stdout + done.stderr
    numbers = {number.partition("_")[2] for name, number in queue.items() if name.startswith("stage1")}
    assert numbers == {"0", "1"}, "stage I is one array"
    assert all(len(ledgers.read_json(path)["starts"]) == 1
               for path in root.glob("*/run.json")), "nothing was queued twice"
    assert {row["label"] for row in ledgers.read_rows(root/"ledger.jsonl")} == {"a", "b"}
