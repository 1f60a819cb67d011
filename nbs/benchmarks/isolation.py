"""Time and memory of one way of doing some work, in a process of its own, in turns with the others.

A speed is worth quoting as a ratio measured in one run, with the same machine, load and versions on both sides. Peak
memory belongs to a process, and so do allocators, threads and compiled code: so every measurement is a function of some
module, called by name in a fresh process. The processes are forked from a server that has imported the libraries and
done nothing else. A machine's speed drifts over minutes, so the ways take turns, every second round in reverse;
the median time is kept, and the largest peak. Times of different work cannot be compared, so a benchmark fails when the
ways disagree.
"""
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

OURS = "anchor_nb"
PRELOADED = ["anchor_nb.training.trainer", "anchor_nb.models.embedder", "sentence_transformers"]


def gpu():
    "`torch.cuda` where this process has used it, else None."
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None


def memory() -> tuple:  # (bytes in use, most bytes since `forget_peak`)
    "What this process holds: GPU memory where it uses a GPU, else resident memory."
    if gpu(): return gpu().memory_allocated(), gpu().max_memory_allocated()
    try: return status("VmRSS"), status("VmHWM")  # not getrusage: there a child inherits its parent's peak
    except OSError:
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*(1 if sys.platform == "darwin" else 1024)


def status(name: str) -> int:  # bytes
    "A line of /proc/self/status; OSError where there is none."
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024*int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def forget_peak():
    "Reset the peak to what is in use; where the system cannot, it stays that of the whole process."
    if gpu(): return gpu().reset_peak_memory_stats()
    try: Path("/proc/self/clear_refs").write_text("5")  # proc(5): reset the peak resident set size
    except OSError: pass


def wait():
    "Wait until the GPU is idle."
    if gpu(): gpu().synchronize()


def timed(work, repeats: int, warm_up=None) -> dict:  # seconds of each, before_bytes, peak_bytes
    "Call `warm_up` (or `work`) once without measuring, then `work` `repeats` times."
    before, seconds = memory()[0], []
    (warm_up or work)()
    wait()
    forget_peak()
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return dict(seconds=seconds, before_bytes=before, peak_bytes=memory()[1])


class OutOfTime(RuntimeError):
    "The work did not end in the time that it was given."


DEADLINES = [float("inf")]  # on the clock of time.monotonic; the last one holds


@contextmanager
def within(seconds: float):
    "A block whose processes are killed when its time is up; a block inside another has no more time than that."
    DEADLINES.append(min(DEADLINES[-1], time.monotonic() + seconds))
    try: yield
    finally: DEADLINES.pop()


def result_of(pipe, log: Path):
    "What a process sends; `OutOfTime` when the deadline comes first, with the last line of its log."
    left = DEADLINES[-1] - time.monotonic()
    if not pipe.poll(None if left == float("inf") else max(0, left)):
        words = log.read_text(errors="replace").split("\n") if log.is_file() else []
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        raise OutOfTime("stopped at its time limit" + f"; its last line: {last[-200:]}"*bool(last))
    return pipe.recv()


SPENT = [0.0]  # seconds of processor time of all isolated processes that have ended well


def cpu_seconds() -> float:
    "The processor time of this process and of its finished children."
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def answer(pipe, function: str, arguments: dict, log: str):
    "What the process runs; its result or its error goes back, what it prints goes to the log."
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2): os.dup2(file, stream)
    began = cpu_seconds()
    try: result, error = resolve_name(function)(**arguments), ""
    except Exception as failure: result, error = None, f"{type(failure).__name__}: {failure}"
    pipe.send((result, error, cpu_seconds() - began))


def why_died(code: int) -> str:  # code: of the exit; a signal's is negative
    "Why a process ended without an answer."
    if code == -signal.SIGKILL: return "it was killed, probably out of memory; use smaller batches or shorter texts"
    return f"it ended without an answer, with exit code {code}"


def isolated(function: str,  # such as bench:stage1_way
             **arguments):   # -> what it returns
    "Call a function in a fresh process; RuntimeError when it fails or is killed, `OutOfTime` when it takes too long."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=answer, args=(there, function, arguments, f"{folder}/log"))
        process.start()
        there.close()
        try:
            result, error, spent = result_of(here, Path(folder)/"log")
            SPENT[0] += spent
        except EOFError: result, error = None, None
        finally:
            if sys.exc_info()[0] in (KeyboardInterrupt, OutOfTime): process.kill()
            process.join()
    if error is None: error = why_died(process.exitcode)
    if error:
        raise RuntimeError(f"{function.partition(':')[2]} {arguments.get('way', '')}: {error}")
    return result


CUT = []  # functions whose last rounds were left out


def in_turns(function: str, ways: list, rounds: int, **arguments) -> dict:  # way -> figures
    """Measure several ways of the same work alternately; the function takes `way`.

    When the time is up, rounds that are whole count, and `CUT` says so; `OutOfTime` where there is none.
    """
    parts = {way: [] for way in ways}
    try:
        for turn in range(rounds):
            for way in ways[::-1] if turn % 2 else ways: parts[way].append(isolated(function, way=way, **arguments))
    except OutOfTime:
        if not all(parts.values()):
            raise
        CUT.append(function)
    whole = min(map(len, parts.values()))
    return {way: merged(each[:whole]) for way, each in parts.items()}


def merged(parts: list) -> dict:  # figures of one way, a part for each process
    "Median time and largest peak."
    seconds = [value for part in parts for value in part["seconds"]]
    return dict(parts[0], seconds=statistics.median(seconds), all_seconds=seconds,
                peak_bytes=max(part["peak_bytes"] for part in parts))


def check_same(ways: dict,           # way -> figures
               *names: str,          # figures that must agree
               tolerance: float = 0, # relative; 0: to the last bit
              ):
    "RuntimeError when the numbers of a way are not ours."
    flat = lambda value: value if isinstance(value, list) else [value]
    close = lambda a, b: a == b if isinstance(a, str) or not tolerance else abs(a - b) <= tolerance*max(abs(a), abs(b))
    for way, figures in ways.items():
        for name in names:
            ours, theirs = flat(ways[OURS][name]), flat(figures[name])
            if len(ours) != len(theirs) or not all(map(close, ours, theirs)):
                raise RuntimeError(f"{way} and {OURS} differ in {name}: {theirs} and {ours}; their times "
                                   "cannot be compared")
