"""The doctor on machines that have something wrong, and on this one, without the network."""
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from anchor_nb.cli.doctor import check_environment, check_hub, check_kernel, check_smoke, found_by
from anchor_nb.runs.launch import LAUNCHERS

NO_NETWORK = """
import socket
connect = socket.socket.connect
def local_only(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"the network was asked: {address}")
    return connect(self, address)
def no_names(name, *rest, **how):
    if name not in ("127.0.0.1", "::1", "localhost", None, "", socket.gethostname()):
        raise AssertionError(f"the network was asked for {name}")
    return lookup(name, *rest, **how)
socket.socket.connect, lookup, socket.getaddrinfo = local_only, socket.getaddrinfo, no_names
"""
ALL = NO_NETWORK + """
import json
from anchor_nb.cli.doctor import checks, summary
print(json.dumps(summary(checks())))
"""


def run(code, cwd, **variables):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | variables)


def test_this_machine_is_well_and_the_network_is_left_alone(tmp_path):
    done = run(ALL, tmp_path, ANCHOR_NB_TEST_TOKEN="planted-0123456789", HF_TOKEN="planted-9876543210")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # one object and nothing else: training is silent
    assert found["ok"] and not found["failed"], found
    assert [check["name"] for check in found["checks"]][-1] == "smoke" and "a login" in done.stdout
    assert "planted" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_folder_that_cannot_be_written_to_fails_and_the_rest_is_looked_at(tmp_path):
    (tmp_path/"cache").write_text("a file where a folder should be")
    code = ("import json; from anchor_nb.cli.doctor import checks, summary; "
            "print(json.dumps(summary(checks(smoke=False))))")
    found = json.loads(run(code, tmp_path, ANCHOR_NB_CACHE=str(tmp_path/"cache")).stdout)
    assert found["failed"] == ["cache"] and not found["ok"]
    cache, = [check for check in found["checks"] if check["name"] == "cache"]
    assert "ANCHOR_NB_CACHE" in cache["fix"] and found["checks"][-1]["name"] == "environment"


def test_a_kernel_of_another_environment_fails(tmp_path, monkeypatch):
    (tmp_path/"kernels/python3").mkdir(parents=True)
    (tmp_path/"kernels/python3/kernel.json").write_text(json.dumps(dict(argv=["/opt/other/bin/python", "-m",
                                                                              "ipykernel_launcher", "-f",
                                                                              "{connection_file}"],
                                                                        display_name="other", language="python")))
    assert check_kernel().status == "ok"
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))  # comes before the environment's own
    found = check_kernel()
    assert found.status == "fail" and "/opt/other/bin/python" in found.found and "--sys-prefix" in found.fix


@contextmanager
def hub(status):
    "An address that answers everything with this status."
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self): self.send_response(status); self.end_headers()
        def log_message(self, *args): pass
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield f"127.0.0.1:{server.server_address[1]}"
        finally: server.shutdown()


@pytest.mark.parametrize("status, verdict", [(200, "ok"), (404, "ok"), (503, "fail")])
def test_a_hub_that_answers(status, verdict, monkeypatch):
    with hub(status) as address:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        found = check_hub(online=True)
    assert found.status == verdict and address in found.found, found


def test_a_hub_that_is_silent_costs_no_more_than_was_allowed(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://someone:secret-password@127.0.0.1:{silent.getsockname()[1]}")
        found = found_by("hub", check_hub, True, 0.2)
    assert found.status == "fail" and "timed out" in found.found and "secret-password" not in str(found)


def test_ranks_are_noticed_and_those_that_are_left_over_are_told_from_true_ones(monkeypatch):
    for name in LAUNCHERS: monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = check_environment()
    assert found.status == "warn" and "left over: RANK=0, WORLD_SIZE=8" in found.found and "unset them" in found.fix
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert check_environment().status == "fail"


def test_broken_training_is_noticed(monkeypatch):
    import anchor_nb.training.trainer
    monkeypatch.setattr(anchor_nb.training.trainer, "train",
                        lambda recipe: (_ for _ in ()).throw(RuntimeError("CUDA error: no kernel image is available")))
    found = found_by("smoke", check_smoke)
    assert found.status == "fail" and "no kernel image" in found.found
