"""The manual pages of this machine as documents, and their one-line descriptions as questions.

    python nbs/results/manual/pages.py write runs/manual # docs/*.txt and questions.csv
    anchor-nb adapt runs/manual/docs --pairs runs/manual/questions.csv --columns '{query: question, positive: page}'
        -o runs/manual/adapted --base minilm --test-documents 400
    python nbs/results/manual/pages.py keep runs/manual  # nbs/results/manual/row.json
"""
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path


def page(source):
    "(what the page says the command does, the page without that line), or None."
    shown = subprocess.run(["man", "-l", str(source)], capture_output=True, text=True,
                           env=os.environ | dict(MANWIDTH="100", MAN_KEEP_FORMATTING="", LC_ALL="C.UTF-8"))
    text = re.sub(".\b", "", shown.stdout) # what a terminal would print in bold
    line = re.search(r"^NAME\n\s+(.+?)\n\n", text, flags=re.M | re.S)
    what = re.split(r"\s+(?:-|–|—|--)\s+", " ".join(line[1].split()), maxsplit=1) if line else []
    return (what[1], text[line.end():]) if len(what) == 2 and len(what[1].split()) >= 3 else None


LONGEST = 600 # words of a page, so that the run fits into an hour on two cores


def write(root):
    "Write the shorter pages of section 1, but none of one vendor, which has 17,000 that differ in a word."
    docs, rows = Path(root)/"docs", []
    docs.mkdir(parents=True, exist_ok=True)
    for source in sorted(Path("/usr/share/man/man1").glob("*.1.gz")):
        if source.is_symlink() or source.name.startswith("gcloud") or not (made := page(source)): continue
        if len(made[1].split()) > LONGEST: continue
        name = source.name.removesuffix(".1.gz") + ".txt"
        (docs/name).write_text(made[1], encoding="utf-8")
        rows.append(dict(question=made[0], page=name))
    with open(Path(root)/"questions.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["question", "page"])
        table.writeheader()
        table.writerows(rows)
    print(f"{len(rows)} pages")


def keep(root):
    "What the tutorial shows of the run: no text of a page."
    from anchor_nb.runs.provenance import code_version, machine
    row = json.loads((Path(root)/"adapted/adapt.json").read_text(encoding="utf-8"))
    systems = {label: {name: value for name, value in system.items() if name != "values"}
               for label, system in row["systems"].items()}
    row = {name: row[name] for name in ("verdict", "curve", "notes", "advice", "seconds", "facts")}
    row |= dict(systems=systems, code=code_version(), machine=machine())
    row["facts"]["pairs"].pop("examples", None)
    Path(__file__).with_name("row.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": dict(write=write, keep=keep)[sys.argv[1]](sys.argv[2])
