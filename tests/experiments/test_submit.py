"Jobs: what to do and how it ended, requeueing by submitit's local executor, several nodes; see also tests/slurm."
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from common import recipe, rows, run, toy_pairs

from anchor_nb.runs import launch, manifest as runs
from anchor_nb.experiments import slurm as submit
from anchor_nb.core.recipe import Stage1

TRAINING = dict(model="tiny", global_batch=8, warmup_steps=2, learning_rate=1e-3, max_length=48, micro_tokens=300)


def wait_for(test, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not test() and process.poll() is None and time.monotonic() < deadline: time.sleep(0.05)
    assert test(), f"ended with {process.poll()}"


# ---- what is refused before anything is queued ----

@pytest.mark.parametrize("parameters, slurm, message", [
    (dict(stepz=1), {}, "did you mean steps"),
    (dict(alpha=2), {}, r"alpha must lie in \[0, 1\]"),
    (dict(data="nowhere.csv"), {}, "nowhere.csv"),
    (dict(data=""), {}, "stage1 has no data"),
    (dict(model="tyni"), {}, "did you mean tiny"),
    ({}, dict(time="1:30:00"), "give the minutes"),
    (dict(out="run"), dict(additional_parameters="gpu"), "is no mapping"),
    ({}, dict(partitoin="gpu"), "partitoin"),
])
def test_mistakes_are_found_before_the_queue(tmp_path, parameters, slurm, message):
    given = dict(data=toy_pairs()) | parameters | dict(out=str(tmp_path/"run"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        submit.submit_stage("stage1", given, slurm, dry_run=not parameters)
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="submit from a machine of the cluster, or look at the job with --dry-run"):
        submit.submit_stage("stage1", dict(data=toy_pairs(), out=str(tmp_path/"run")))


def test_a_dry_run_shows_the_job_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-0123456789")
    text = submit.submit_stage("stage1", dict(out=str(tmp_path/"run"), model="https://x:planted-0123456789@y/m"),
                               dict(partition="gpu", nodes="2", **{"gpus-per-node": "8"}), dry_run=True)
    assert "#SBATCH --nodes=2" in text and "#SBATCH --gpus-per-node=8" in text and "#SBATCH --time=60" in text
    assert "planted" not in text and list(tmp_path.iterdir()) == []


def test_a_secret_is_not_written_into_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-0123456789")
    with pytest.raises(ValueError, match="model holds a token or password; put that into an environment variable"):
        submit.submit_stage("stage1", dict(data=toy_pairs(), out=str(tmp_path/"run"), model="planted-0123456789"))
    assert not (tmp_path/"run/jobs").exists()


# ---- the process of a job ----

def test_a_job_says_how_it_ended_and_forgets_it_when_it_is_started_again(tmp_path):
    job = submit.write_job(tmp_path, "j", "prepare", dict(corpora="[nothing]", model="", out=str(tmp_path/"data")))
    process = submit.start_job(job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert (process.wait(120) == 1 and submit.outcome_of(job)["code"] == 1
            and "nothing" in submit.outcome_of(job)["reason"])
    submit.write_job(tmp_path, "j", "prepare", dict(corpora="[toy]", model="", out=str(tmp_path/"data")))
    assert submit.outcome_of(job) == {}


def test_a_job_dies_with_the_one_that_started_it(tmp_path):
    job = submit.write_job(tmp_path, "j", "stage1", TRAINING | dict(data=toy_pairs(), out=str(tmp_path/"run"),
                                                                    steps=100000))
    code = ("import sys, time; from anchor_nb.experiments.slurm import start_job; p = start_job(sys.argv[1]); "
            "print(p.pid, flush=True); time.sleep(300)")
    parent = subprocess.Popen([sys.executable, "-c", code, str(job)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    wait_for((tmp_path/"run/metrics.jsonl").exists, parent)
    parent.kill()
    deadline = time.monotonic() + 20
    held = lambda: subprocess.run([sys.executable, "-c", "import sys; from pathlib import Path; from "
                                                         "anchor_nb.runs.checkpoints import locked\nwith "
                                                         "locked(Path(sys.argv[1])): pass", tmp_path/"run"],
                                  capture_output=True).returncode
    while (Path(f"/proc/{child}").exists() or held()) and time.monotonic() < deadline: time.sleep(0.2)
    assert not Path(f"/proc/{child}").exists() and not held(), "the kernel trains on without anybody"


# ---- several nodes ----

def test_which_node_this_is(monkeypatch):
    for name, value in dict(SUBMITIT_EXECUTOR="slurm", SLURM_JOB_ID="70123", SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="2",
                            SLURM_NODEID="1", SLURM_PROCID="1", SLURM_LOCALID="0",
                            SLURM_JOB_NODELIST="node[03-04]").items():
        monkeypatch.setenv(name, value)
    assert submit.node_variables() == dict(nnodes=2, node_rank=1, master_addr="node03", master_port=30123)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert submit.node_variables() == {}


def test_two_nodes_train_what_one_does(tmp_path):
    "Two nodes of one process each, here on loopback: the first runs the stage, the second takes part in its training."
    alone = recipe(Stage1, tmp_path/"alone", steps=4)
    run(alone)
    job = submit.write_job(tmp_path, "two", "stage1", asdict(alone) | dict(out=str(tmp_path/"two")))
    port = 21000 + os.getpid() % 8000
    both = []
    for rank in (1, 0):
        with launch.environment(nnodes=2, node_rank=rank, master_addr="127.0.0.1", master_port=port,
                                accelerate_use_cpu=1, omp_num_threads=1):
            both.append(submit.start_job(job if rank == 0 else submit.write_job(tmp_path, "second", "stage1",
                                                                                asdict(alone)
                                                                                | dict(out=str(tmp_path/"two"))),
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said[0][-1500:] + said[1][-1500:]
    assert runs.read_manifest(tmp_path/"two")["processes"] == 2
    for here, there in zip(rows(tmp_path/"alone"), rows(tmp_path/"two"), strict=True):
        assert here == pytest.approx(there, rel=1e-4)


# ---- requeued ----

def submitted(folder, parameters):
    "Stage I as a job of submitit's local executor."
    from submitit import LocalExecutor
    queue = LocalExecutor(folder/"jobs")
    queue.update_parameters(timeout_min=5, signal_delay_s=75)
    return queue.submit(submit.StageJob(submit.write_job(folder/"jobs", "stage1", "stage1", parameters)))


def test_a_job_whose_time_is_up_is_requeued_and_goes_on(tmp_path):
    whole = recipe(Stage1, tmp_path/"whole", steps=30)
    run(whole)
    parameters = TRAINING | dict(data=toy_pairs(), out=str(tmp_path/"run"), steps=30, save_steps=0)
    job = submitted(tmp_path/"run", parameters)
    wait_for(lambda: (tmp_path/"run/metrics.jsonl").exists() and len(rows(tmp_path/"run")) >= 3, job._process)
    before = len(rows(tmp_path/"run"))
    # what its controller does when the time is up
    psutil.Process(job._process.pid).children()[0].send_signal(signal.SIGUSR2)
    assert job.result() == str(tmp_path/"run")
    manifest, log = runs.read_manifest(tmp_path/"run"), job.stdout()
    assert (manifest["status"], len(manifest["starts"]),
            "stopped by SIGTERM after step" in manifest["failures"][0]["reason"]) == ("complete", 2, True)
    assert int(manifest["failures"][0]["reason"].split("step ")[1].split()[0]) >= before, "no step was lost"
    assert "Calling checkpoint method" in log and "Requeued job" in log
    assert rows(tmp_path/"run") == rows(tmp_path/"whole")


def test_a_job_that_fails_says_why(tmp_path):
    job = submitted(tmp_path/"run", TRAINING | dict(data=str(tmp_path/"nowhere"), out=str(tmp_path/"run")))
    from submitit.core.utils import FailedJobError
    with pytest.raises(FailedJobError, match="is neither a folder nor a file"): job.result()
