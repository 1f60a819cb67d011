"""Processes that start warm: forks of a server that has imported the heavy libraries and has done nothing else.

`Popen` and `run` take what those of `subprocess` take. A command of this interpreter or of `anchor-nb` becomes a fork,
which saves the seconds that torch and its companions need to be imported; any other command starts as usual. A fork
has its own pid, working directory, environment, streams and exit status. The modules of anchor_nb are not imported
before it. Variables that libraries read when they are imported must be those of the server; where a test sets others,
the second command with the same ones gets a server of its own, and the first an interpreter of its own.
"""

import atexit
import gc
import importlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT  # noqa: F401 (so that this module can stand in for subprocess)

LIBRARIES = ("torch", "torch.profiler", "torch.distributed.launcher.api", "torch.distributed.fsdp", "transformers",
             "transformers.trainer", "transformers.models.auto.modeling_auto",
             "transformers.models.llama.modeling_llama", "peft", "accelerate", "datasets", "scipy.stats",
             "sklearn.metrics", "pandas", "matplotlib.pyplot", "seaborn", "papermill", "IPython", "typer", "yaml")
FREE = re.compile(  # read when they are needed, so that they may differ
    r"ANCHOR_NB_\w+|ACCELERATE_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|NNODES|NODE_RANK|MASTER_\w+|SLURM_\w+|PYTEST_\w+|"
    r"PATH|PWD|OLDPWD|COLUMNS|LINES|TERM|NO_COLOR|FORCE_COLOR|"
    r"TORCHELASTIC_\w+|_RJEM_MALLOC_CONF|KMP_\w+|TOKENIZERS_PARALLELISM|SUBMITIT_\w+|\w+_PROJECT|GCS_\w+")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not burn the cores that others need
os.environ.setdefault("GOMP_SPINCOUNT", "0")
ENVIRONMENT = dict(os.environ)
USUAL = {"stdin", "stdout", "stderr", "cwd", "text", "encoding", "start_new_session"}  # what a fork can be given
MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
MAIN = "from anchor_nb.cli.main import main; main()"


# ---- the server ----

def receive(connection) -> tuple:
    "One request and its files, or None when nobody will ask any more."
    size = connection.recv(4, socket.MSG_WAITALL)
    if len(size) < 4: return None
    message, files, *_ = socket.recv_fds(connection, 1, 4)
    length = int.from_bytes(size, "big")
    while len(message) < length: message += connection.recv(length - len(message))
    return json.loads(message), files


def serve(connection, libraries) -> tuple:
    "Fork at each request and report each child's end; returns only in a child, with what it is to run."
    for name in libraries: importlib.import_module(name)
    gc.collect()
    gc.freeze()
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end the server
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    children = {}
    while True:
        ready, _, _ = select.select([connection, awake], [], [])
        if connection in ready:
            if not (request := receive(connection)): os._exit(0)
            wanted, (*streams, status) = request
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                for file in (connection.detach(), awake, waker, status, *children.values()): os.close(file)
                return wanted, streams
            children[pid] = status
            for file in streams: os.close(file)
            os.write(status, pid.to_bytes(4, "big"))
        if awake in ready:
            os.read(awake, 4096)
            for pid in list(children):
                done, code = os.waitpid(pid, os.WNOHANG)
                if not done: continue
                status = children.pop(pid)
                try: os.write(status, code.to_bytes(4, "big"))
                except BrokenPipeError: pass
                os.close(status)


def become(wanted: dict, streams: list):
    "Make this fork look like an interpreter that has just been started."
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if wanted["session"]: os.setsid()
    for place, file in enumerate(streams):
        os.dup2(file, place)
        os.close(file)
    encoding = dict(encoding="utf-8", closefd=False)
    sys.stdin, sys.stdout = open(0, **encoding), open(1, "w", **encoding)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", **encoding)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    import datasets.fingerprint
    import numpy
    numpy.random.seed()  # a fork has its parent's generators
    datasets.fingerprint.fingerprint_rng.seed()
    random.seed()


def execute(wanted: dict):
    "Run the code as `python -c` does."
    sys.argv, sys.path[0] = wanted["argv"], wanted["path"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(wanted["code"], "<string>", "exec", dont_inherit=True), main.__dict__)


def end(error):
    "End this fork as the interpreter would, but for taking down every module, which takes most of a second."
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int): print(error.code, file=sys.stderr)
    elif error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try: stream.flush()
        except (OSError, ValueError): pass  # the reader is gone, or the code has closed it
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


# ---- the client ----

def order(command) -> dict:
    "What a fork is to run for this command, or None where it is no command of ours."
    words = [os.fspath(word) for word in command] if isinstance(command, (list, tuple)) else []
    if len(words) > 2 and words[0] == sys.executable and words[1] == "-c":
        return dict(code=words[2], argv=["-c", *words[3:]], path="")
    if len(words) > 2 and words[0] == sys.executable and words[1] == "-m":
        return dict(code=MODULE.format(words[2]), argv=words[2:], path="")
    if words and Path(words[0]) == Path(sys.executable).with_name("anchor-nb"):
        return dict(code=MAIN, argv=words, path=os.path.dirname(words[0]))


def bound(environment: dict) -> frozenset:
    "The variables that a server and its forks must share."
    return frozenset((name, value) for name, value in environment.items() if not FREE.fullmatch(name))


class Server:
    "A process that forks others."
    def __init__(self, environment):
        self.connection, theirs = socket.socketpair()
        self.process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno()), *LIBRARIES], env=environment,
                                        pass_fds=[theirs.fileno()], stdin=DEVNULL)
        theirs.close()
        self.lock = threading.Lock()

    def fork(self, wanted: dict, streams: list) -> tuple:
        "Pid of a new fork, and a file that will tell its exit status."
        report, status = os.pipe()
        message = json.dumps(wanted).encode()
        with self.lock:
            self.connection.sendall(len(message).to_bytes(4, "big"))
            socket.send_fds(self.connection, [message[:1]], [*streams, status])
            self.connection.sendall(message[1:])
        os.close(status)
        report = open(report, "rb", buffering=0)
        return int.from_bytes(report.read(4), "big"), report


SERVERS, ASKED = {}, Counter()


@atexit.register
def close():
    "Let the servers go; they do when nobody can ask them any more."
    for server in SERVERS.values():
        server.connection.close()
        server.process.wait()


def server_of(environment: dict):
    "The server for forks with this environment; None where an interpreter of its own is cheaper."
    key = bound(environment)
    ASKED[key] += 1
    if key not in SERVERS and (key == bound(ENVIRONMENT) or ASKED[key] > 1): SERVERS[key] = Server(environment)
    return SERVERS.get(key)


class Popen(subprocess.Popen):
    "As `subprocess.Popen`; a fork of a server where the command allows it."
    server = None

    def __init__(self, command, *args, env=None, **how):
        environment = {name: os.fspath(value) for name, value in (os.environ if env is None else env).items()}
        self.wanted = order(command) if how.keys() <= USUAL else None
        if self.wanted: self.server = server_of(environment)
        if self.server: self.wanted |= dict(environment=environment)
        super().__init__(command, *args, env=env, **how)

    def _execute_child(self, command, *rest):
        if not self.server: return super()._execute_child(command, *rest)
        folder, pipes, new_session = rest[4], rest[9:15], rest[20]
        wanted = self.wanted | dict(folder=os.path.abspath(folder or os.getcwd()), session=bool(new_session))
        streams = [theirs if theirs != -1 else own for own, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid, self.report = self.server.fork(wanted, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags):
        if not self.server: return super()._try_wait(flags)
        if flags and not select.select([self.report], [], [], 0)[0]: return 0, 0
        status = self.report.read(4)
        return self.pid, int.from_bytes(status, "big") if status else 1 << 8  # no word: the server is gone

    def _internal_poll(self, *args, **kwargs):
        if not self.server: return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid: self._handle_exitstatus(status)
            finally: self._waitpid_lock.release()
        return self.returncode


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **how):
    "As `subprocess.run`, with `Popen` above."
    if capture_output: how |= dict(stdout=PIPE, stderr=PIPE)
    if input is not None: how["stdin"] = PIPE
    with Popen(command, **how) as process:
        try: output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check: done.check_returncode()
    return done


if __name__ == "__main__":
    wanted = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    error = None
    try:
        become(*wanted)
        execute(wanted[0])
    except BaseException as caught: error = caught
    end(error)
