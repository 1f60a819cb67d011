"""The first hour of a new user, as commands: what is typed, what comes, the processor seconds, and whether it is right.

    python nbs/results/first_hour/tasks.py OUT.jsonl [TASK ...]

Everything happens in `runs/first_hour` with the model `tiny` and pairs made of this package's documentation, so scores
mean nothing here. `first`, the verdict of the first try by hand, stays in the row it was written into.
"""
import csv
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = "--columns '{query: Frage, positive: Antwort}'"
TRAIN = "anchor-nb stage2 --data mine/pairs --model tiny"

# task -> commands; each with its exit code and words that must be among what comes
TASKS = {
    "check my CSV": [("anchor-nb check faq.csv", 1, "say which is which"),
                     (f"anchor-nb check faq.csv {COLUMNS}", 0, "next: anchor-nb split")],
    "split it": [(f"anchor-nb split faq.csv --out mine {COLUMNS}", 0, "next: anchor-nb stage2 --data mine/pairs")],
    "train": [(f"{TRAIN} --out runs/mine --steps 60", 0, "preset laptop (no GPU here)")],
    "what would be run": [(f"{TRAIN} --dry-run", 0, "global_batch: 16")],
    "evaluate": [("anchor-nb evaluate runs/mine --task mine/test", 0, "minus all-MiniLM-L6-v2")],
    "a test set with an instruction": [("anchor-nb evaluate runs/mine --task instructed --out runs/inst", 0,
                                        "Evaluate it as it was trained: --instructions none")],
    "search": [("anchor-nb search runs/mine mine/test 'How do I search?' --k 3", 0, "How do I search?"),
               ("anchor-nb search runs/mine faq.csv 'How?' --k 3 --columns text=Antwort", 0, "How?"),
               ("anchor-nb search runs/mine faq.parquet 'How?' --k 3 --columns text=Antwort", 0, "How?")],
    "export": [("anchor-nb export runs/mine model --check", 0, "sentence-transformers gives the same vectors")],
    "a BEIR folder without task.json": [("anchor-nb evaluate tiny --task beir --out runs/beir", 0, "beir: Retrieval"),
                                        ("anchor-nb evaluate tiny --task half", 1, "half has 2 faults")],
    "compare two models": [("anchor-nb compare runs/mine minilm --task mine/test", 0, "of the queries, mine is")],
    "interrupt and resume": [(f"INTERRUPT {TRAIN} --out runs/cut --steps 200 --save-steps 20", 130,
                              "run the same command to resume"),
                             (f"{TRAIN} --out runs/cut --steps 200 --save-steps 20", 0, "resumed as it began"),
                             (f"{TRAIN} --out runs/cut --steps 100", 1, "holds another run: steps is 200")],
    "names of models": [("anchor-nb search tyni mine/test x", 1, "did you mean tiny?"),
                        ("anchor-nb stage2 --data mine/pairs --model bm25", 1, "ranks by words"),
                        ("anchor-nb search all-MiniLM-L6-v2 mine/test 'How do I search?' --k 2", 0, "0.")],
    "a folder that is not there": [("anchor-nb stage2 --data mine/pears", 1, "did you mean mine/pairs?"),
                                   ("anchor-nb search runs/nix mine/test x", 1, "there is no model"),
                                   ("anchor-nb evaluate runs/mine --task nixda", 1, "there is no task 'nixda'")],
    "lr=3": [(f"{TRAIN} --out runs/lr --lr 3 --steps 40", 0, "little or nothing was learned"),
             (f"{TRAIN} --out runs/lr2 -p lr=3 --dry-run", 0, "learning_rate: 3.0"),
             ("anchor-nb stage2 lr=3", 1, "an option is written --lr 3"),
             (f"{TRAIN} -p lr 3", 1, "write -p name=value")],
    "check a broken CSV": [(f"anchor-nb check broken.csv {COLUMNS}", 1, "line 3: text follows a closing quote"),
                           ("anchor-nb check faq.csv --columns '{query: Fragen, positive: Antwort}'", 1,
                            "columns names Fragen, which no row has")],
    "check other formats": [(f"anchor-nb check faq.parquet {COLUMNS}", 0, "300 rows"),
                            (f"anchor-nb check faq.jsonl.gz {COLUMNS}", 0, "300 rows"),
                            (f"anchor-nb check faq.xlsx {COLUMNS}", 1, "anchor_nb[spreadsheets]")],
    "train on a parquet file": [(f"anchor-nb stage2 --data faq.parquet {COLUMNS} --model tiny --steps 3 --out runs/pq",
                                 0, "the model is in runs/pq/model")],
    "a task of the hub, without a network": [("anchor-nb evaluate runs/mine --task SciFact", 1, "--data-root"),
                                             ("anchor-nb evaluate runs/mine --task SciFakt", 1, "did you mean")],
    "mine, then train": [("anchor-nb mine --data mine/pairs --model bm25 --out m2", 0, "stage2 --data m2"),
                         ("anchor-nb stage2 --data m2 --model tiny --steps 5 --out runs/m2", 0, "the model is in")],
    "dedup against a BEIR folder": [("anchor-nb dedup mine/pairs --against beir --out dd", 0, "queries seen")],
    "search a folder with corpus.jsonl.gz": [("anchor-nb search minilm beirgz 'How do I search?' --k 2", 0, "0.")],
    "report on my ledger": [("anchor-nb report runs/evaluate", 0, "The report: runs/evaluate/report.html")],
    "plan": [("anchor-nb plan --data mine/pairs", 0, "CPU hours")],
    "hello": [("anchor-nb hello --out hello", 0, "the picture: hello")],
    "Python": [("python python.py", 0, "vectors are expected, and 'a' is a text"),
               ("python names.py", 0, "here it is encode_query")],
    "papermill with an unknown parameter": [("papermill STAGE2 out.ipynb -p lr 3 -p data mine/pairs", 1,
                                             "stage2 has no parameter 'lr'; did you mean learning_rate?")],
    "a preset, two ways": [(f"{TRAIN} --preset paper --dry-run", 0, "global_batch: 512"),
                           (f"{TRAIN} -p preset=paper --dry-run", 0, "global_batch: 512")],
    "an instruction of my own": [(f"{TRAIN} --steps 2 --out runs/ins --instructions 'Given a question, find it'",
                                  0, "the model is in runs/ins/model")],
}

PYTHON = """
from anchor_nb import AnchorEmbedder
model = AnchorEmbedder.from_pretrained("tiny")
print(model)
for wrong in (lambda: AnchorEmbedder.from_pretrained("tyni"), lambda: model.similarity("a", "b"),
              lambda: AnchorEmbedder.from_pretrained("tiny", device="cuda")):
    try: wrong()
    except (ValueError, OSError) as error: print(error)
help(model.encode)
"""

NAMES = """
from anchor_nb import AnchorEmbedder
model = AnchorEmbedder.from_pretrained("tiny")
for name in ("encode_queries", "save", "push_to_hub", "encode_multi_process"):
    try: getattr(model, name)
    except AttributeError as error: print(error)
"""
NOISE = ("[IPKernelApp]", "KeyboardInterrupt", "Traceback (most", "Warning:") # never in front of a person


def make_data():
    "The tables that the tasks need, in the current folder."
    import pandas
    from anchor_nb.experiments.hello import documentation
    rows = [(f"What is {name}?", text, "IT") for name, text in list(documentation().items())[:300]]
    rows = [("Frage", "Antwort", "Abteilung"), *rows]
    with open("faq.csv", "w", newline="") as file: csv.writer(file).writerows(rows)
    table = pandas.read_csv("faq.csv")
    table.to_parquet("faq.parquet")
    table.to_json("faq.jsonl.gz", orient="records", lines=True)
    Path("faq.xlsx").write_bytes(b"PK")
    Path("broken.csv").write_text('Frage,Antwort\n"Was ist das?","Ein Ding"\n"offen,"x"\n')
    Path("python.py").write_text(PYTHON)
    Path("names.py").write_text(NAMES)


def make_folders():
    "Evaluation sets as others write them, of the test set that `split` has made."
    for name in ("beir", "beirgz", "half"): Path(name, "qrels").mkdir(parents=True)
    for name in ("beir", "beirgz"):
        shutil.copy("mine/test/queries.jsonl", name)
        shutil.copy("mine/test/qrels/test.tsv", f"{name}/qrels")
    shutil.copy("mine/test/corpus.jsonl", "beir")
    Path("beirgz/corpus.jsonl.gz").write_bytes(gzip.compress(Path("mine/test/corpus.jsonl").read_bytes()))
    shutil.copy("mine/test/queries.jsonl", "half")
    shutil.copytree("mine/test", "instructed")
    Path("instructed/task.json").write_text('{"instruction": "Given a question, find its answer"}')


def as_in_a_terminal():
    "Ctrl-C is heard, also where these tasks run behind an `&`."
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: str) -> tuple: # (exit code, what came, processor seconds)
    "Run a command as a shell does; INTERRUPT before it sends Ctrl-C after its first checkpoint."
    before, cut = resource.getrusage(resource.RUSAGE_CHILDREN), command.startswith("INTERRUPT ")
    shown = Path(f"came-{os.getpid()}.txt")
    with open(shown, "w") as file:
        process = subprocess.Popen("exec " + command.removeprefix("INTERRUPT "), shell=True, stdout=file, stderr=file,
                                   start_new_session=True, preexec_fn=as_in_a_terminal)
        while cut and process.poll() is None and not list(Path("runs/cut").glob("checkpoint-*")): time.sleep(0.2)
        if cut and process.poll() is None: os.killpg(process.pid, signal.SIGINT) # a terminal sends it to all
        code = process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, shown.read_text(), sum(after[:2]) - sum(before[:2])


def main(out: Path, wanted: list):
    from anchor_nb.experiments.stages import stage_folder
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    rows = {(row["task"], row["typed"]): row for row in kept}
    place = Path("runs/first_hour")
    if not wanted: shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    if not Path("faq.csv").exists(): make_data()
    for task, commands in TASKS.items():
        if wanted and task not in wanted: continue
        for command, expected, words in commands:
            typed = command.removeprefix("INTERRUPT ") + " [Ctrl-C]"*command.startswith("INTERRUPT ")
            code, came, seconds = run(command.replace("STAGE2", str(stage_folder()/"stage2.ipynb")))
            line = next((line.strip() for line in came.splitlines() if words.split("\n")[0] in line), "")
            noise = [] if command.startswith("papermill") else [text for text in NOISE if text in came]
            verdict = "as it should be" if code == expected and line and not noise else " ".join(["a fault", *noise])
            last = [text for text in came.splitlines() if text.strip()][-1:]
            row = dict(task=task, typed=typed, exit=code, came=(line or "".join(last))[:240],
                       cpu_seconds=round(seconds, 1), verdict=verdict)
            first = rows.get((task, typed), {}).get("first")
            rows[task, typed] = row | (dict(first=first) if first else {})
            print(json.dumps(row), flush=True)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
            out.write_text(text)
        if task == "split it" and not Path("beir").exists(): make_folders()


if __name__ == "__main__": main(Path(sys.argv[1]).resolve(), sys.argv[2:])
