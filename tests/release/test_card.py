"Model cards of real runs, their snippets run on an exported folder, and uploads to a server that acts as the hub."
import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from common import recipe
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from anchor_nb.release import card, hub
from anchor_nb.runs.ledger import append_rows
from anchor_nb.release.lineage import candidates, lineage, public, public_command
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.runs.manifest import finish_run, start_run

TOKEN = "hf_" + "Ab3" * 12


def train_run(settings):
    "What a stage notebook does."
    from anchor_nb.training.inputs import check_inputs
    from anchor_nb.training.trainer import train
    start_run(settings.out, settings, check_inputs(settings).data)
    finish_run(settings.out, **train(settings))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Stage I, stage II on it, and a ledger with scores of both."
    root = tmp_path_factory.mktemp("card")/"runs"
    train_run(recipe(Stage1, root/"stage1", steps=2, instructions="corpora", carry_pairs=16))
    train_run(recipe(Stage2, root/"anchor", steps=2, instructions="corpora", model=str(root/"stage1/model")))
    row = dict(task="toy", type="Retrieval", metric="ndcg_at_10", main=True, queries=80, documents=86, data="abc",
               seed=0, max_length=48, instructions="paper", benchmark="")
    append_rows(root/"ledger.jsonl", [dict(row, label=label, step=step, value=value, model=label,
                                           manifest=manifest and str(root/manifest/"run.json"),
                                           training_seed=42 if manifest else None)
                                      for label, step, value, manifest in (("untrained", 0, 0.1, ""),
                                                                           ("stage1", 0, 0.2, "stage1"),
                                                                           ("anchor", 2, 0.4321, "anchor"))])
    return root


@pytest.fixture(scope="module")
def exported(runs):
    "The stage-II model as a folder to pass on, with its card."
    card.export_with_card(runs/"anchor", runs/"exported", name="somebody/tiny-anchor")
    return runs/"exported"


# ---- the card ----

def test_a_hub_can_read_the_card_and_scores_are_those_of_the_ledger(exported):
    found = ModelCard.load(exported/"README.md")
    assert (found.data.library_name, found.data.pipeline_tag,
            found.data.license) == ("sentence-transformers", "feature-extraction", "apache-2.0")
    assert {"sentence-transformers", "feature-extraction"} <= set(found.data.tags)
    result, = found.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("toy", "ndcg_at_10", 43.21)
    assert "| toy | nDCG@10 | 80 / 86 | 43.2 | 10.0 | 20.0 |" in found.text


def test_scores_are_not_those_of_an_export_with_other_options(runs, tmp_path):
    card.export_with_card(runs/"anchor", tmp_path/"out", pooling="mean", max_length=60)
    found = ModelCard.load(tmp_path/"out/README.md")
    assert "exported with pooling=mean and max_length=60, and scores on record are those of the model" in found.text
    assert found.data.eval_results is None and "| toy | nDCG@10" not in found.text


def test_the_card_tells_both_stages_data_limits_and_nothing_of_this_machine(runs, exported):
    text = (exported/"README.md").read_text()
    assert text.count("### Stage I, ") == text.count("### Stage II, ") == 1
    assert "| toy | I, II | 268 |" in text and "Apache-2.0" in text and "| credit |" in text
    assert "| `learning_rate` | 0.001 | 4e-05 |" in text and "| `learning_rate` | 0.001 | 0.0002 |" in text
    assert "confidential" in text and "Texts were cut at 48 tokens" in text and "@inproceedings" in text
    assert str(runs) not in text and str(Path.home()) not in text and not re.search(r"/(tmp|home|root)/", text)


def test_a_card_names_the_commit_of_a_base_on_a_hub(runs):
    known = card.gather(str(runs/"anchor"))
    assert "trained from a random model with" in card.history(known)
    known.runs[0].manifest["commit"] = f"org/base@{'a'*40}"
    assert "trained from a random model (commit aaaaaaaaaaaa) with" in card.history(known)


def test_a_card_says_whether_anchors_carry(runs, exported):
    "Two steps of stage I teach nothing, and the card says so, under stage I and nowhere else."
    text = (exported/"README.md").read_text()
    assert text.count("Its anchors are empty: it has learned to write") == 1
    assert text.index("### Stage I,") < text.index("Its anchors are empty") < text.index("### Stage II,")
    assert "After 2 steps, on 16 pairs" in text
    facts = json.loads((runs/"stage1/run.json").read_text())
    assert facts["carried_seconds"] > 0 and facts["carried"]["step"] == 2


def test_commands_of_a_card_are_complete(runs, exported):
    "Only places differ from the commands that made the runs."
    text = (exported/"README.md").read_text()
    printed = [shlex.split(line) for line in text.splitlines() if re.match(r"anchor-nb stage", line)]
    made = [shlex.split(run.manifest["command"]) for run in lineage(runs/"anchor")]
    for ours, theirs in zip(printed, made, strict=True):
        differ = {a.partition("=")[0] for a, b in zip(ours, theirs, strict=True) if a != b}
        assert differ <= {"model", "data", "out"}
    assert any("model=runs/stage1/model" in words for words in printed)


def test_a_merge_is_repeated_as_it_was_made():
    parts = [dict(model="runs/my base", weight=0.25), dict(model="runs/b", weight=0.75)]
    merge = dict(models=parts, method="slerp", policy={"*norm*": [1, 0], "*": "first"}, dtype="bfloat16")
    words = shlex.split(card.merge_command(merge, "runs/merged"))
    assert words[:4] == ["anchor-nb", "merge", "runs/my base", "runs/b"]
    given = list(zip(words[4::2], words[5::2], strict=True))
    assert given == [("--out", "runs/merged"), ("--weight", "0.25"), ("--weight", "0.75"), ("--method", "slerp"),
                     ("--dtype", "bfloat16"), ("--policy", "*norm*=[1, 0]"), ("--policy", "*=first")]


def test_a_path_of_here_does_not_become_one_of_the_runs():
    assert (public("./docs", Path()), public("/a/runs/x", Path("/a/runs"))) == ("docs", "runs/x")


def test_secrets_of_the_environment_stay_out_of_a_card(runs, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "stage1-very-secret")
    assert "stage1-very-secret" not in card.model_card(runs/"anchor", name="somebody/stage1-very-secret")


@pytest.mark.parametrize("base", ["/gone/elsewhere/base", "gone/base"])
def test_a_base_that_another_run_has_replaced_is_followed_by_name_not_guessed(runs, tmp_path, base):
    "A run whose base is gone ends the trail there, and the card does not invent one."
    folder = tmp_path/"alone"
    folder.mkdir()
    manifest = json.loads((runs/"anchor/run.json").read_text())
    manifest["recipe"]["model"] = base
    (folder/"run.json").write_text(json.dumps(manifest))
    text = card.model_card(folder)
    data = ModelCard(text).data
    assert (data.get("base_model"), data.license, data.get("license_name")) == (None, "other", "unknown")
    assert "/gone" not in text and "gone/" not in text.partition("## Reproduce")[0]
    assert "No score of this model is on record" in text


def test_a_run_in_the_home_folder_has_its_whole_card(runs, monkeypatch):
    monkeypatch.setenv("HOME", str(runs))
    assert card.model_card("~/anchor") == card.model_card(runs/"anchor")
    assert candidates("~/stage1", runs)[0] == runs/"stage1"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(max_size=20) | st.floats(allow_nan=False) | st.lists(st.integers()), min_size=2,
                         max_size=2), min_size=1, max_size=4))
def test_no_value_breaks_out_of_a_table(lines):
    table = card.markdown_table(["a", "b"], lines)
    rows = table.split("\n")
    assert len(rows) == len(lines) + 2
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3 for row in rows) and "<" not in table


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
                       st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1,
                               max_size=20).filter(lambda text: not text.startswith(("file://", *"/~.[{"))),
                       max_size=4))
def test_a_command_without_places_stays_as_it_was(given):
    values = [word for name, value in given.items() for word in ("-p", f"{name}={value}")]
    command = shlex.join(["anchor-nb", "stage1", *values])
    assert shlex.split(public_command(command, Path("/somewhere"))) == shlex.split(command)


# ---- the code in the card ----

def code_of(text, heading):
    "The Python code below a heading."
    return re.search(rf"^### {heading}\n.*?```python\n(.*?)```", text, flags=re.M | re.S).group(1)


def test_the_code_of_the_card_runs_and_all_libraries_agree(exported):
    text = (exported/"README.md").read_text().replace('"somebody/tiny-anchor"', json.dumps(str(exported)))
    vectors = {}
    for heading in ("sentence-transformers", "anchor_nb", "transformers"):
        names = {}
        exec(code_of(text, heading), names)
        vectors[heading] = [np.asarray(names[side]) for side in ("queries", "documents")]
    for heading, (queries, documents) in vectors.items():
        assert queries.shape == (1, 64) and documents.shape == (2, 64)
        assert np.abs(queries - vectors["anchor_nb"][0]).max() < 1e-5, heading
        assert np.abs(documents - vectors["anchor_nb"][1]).max() < 1e-5, heading


def test_nothing_is_said_to_be_read_that_was_not_run(exported):
    "The export was not checked, so only the rules of the libraries are known; a tag of the hub would be a claim too."
    text = (exported/"README.md").read_text()
    assert text.count("Reads this folder: by its rules, not run.") == 4 and "Reads this folder: yes" not in text
    assert "text-embeddings-inference" not in ModelCard(text).data.tags


# ---- upload ----

class Hub(BaseHTTPRequestHandler):
    "What `create_repo`, `create_branch`, `create_commit` and `list_repo_files` need; uploads are in `server.repos`."
    def log_message(self, *args): pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @property
    def body(self): return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self):
        repos, parts = self.server.repos, self.path.partition("?")[0].split("/")
        name = "/".join(parts[3:5])
        if name not in repos: return self.answer(dict(error="not found"), 404)
        if parts[5:6] == ["tree"]:
            return self.answer([dict(type="file", path=path, size=len(content), oid="0")
                                for path, content in repos[name]["files"].items()])
        self.answer(dict(id=name, private=repos[name]["private"], sha="1" * 40, siblings=[]))

    def do_PUT(self):
        content = self.body
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.server.large[self.path.rpartition("/")[2]] = content
        self.answer({})

    def do_POST(self):
        server, path, body = self.server, self.path.partition("?")[0], self.body
        server.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in server.repos:
                return self.answer(dict(error="You already created this model repo", url=name), 409)
            server.repos[name] = dict(private=asked.get("visibility") == "private" or asked.get("private", False),
                                      files={}, branches=set())
            return self.answer(dict(url=f"{server.url}/{name}"))
        if path == "/api/validate-yaml":
            wrong = "license: no-such-licence" in json.loads(body)["content"]
            return self.answer(dict(warnings=[], errors=[dict(message="\"license\" must be one of the known")] if wrong
                                    else []), 400 if wrong else 200)
        if path.endswith("/info/lfs/objects/batch"):
            return self.answer(dict(transfer="basic",
                                    objects=[dict(oid=item["oid"], size=item["size"],
                                                  actions=dict(upload=dict(href=f"{server.url}/large/{item['oid']}")))
                                             for item in json.loads(body)["objects"]]))
        repo = server.repos["/".join(path.split("/")[3:5])]
        if "/branch/" in path: return repo["branches"].add(path.rpartition("/")[2]) or self.answer({})
        if "/preupload/" in path:
            return self.answer(dict(files=[dict(path=file["path"], uploadMode="lfs"
                                                if file["path"].endswith(".safetensors") and not server.small
                                                else "regular", shouldIgnore=False, oid=None)
                                           for file in json.loads(body)["files"]]))
        for line in body.decode().splitlines():
            item = json.loads(line)
            if item["key"] == "file": repo["files"][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            if item["key"] == "lfsFile": repo["files"][item["value"]["path"]] = server.large[item["value"]["oid"]]
        repo["revision"] = path.rpartition("/")[2]
        self.answer(dict(commitUrl=f"{server.url}/{'/'.join(path.split('/')[3:5])}/commit/1", commitOid="1" * 40,
                         success=True))


@pytest.fixture
def server():
    "A hub on this machine."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repos, server.large, server.tokens, server.small = {}, {}, set(), False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(url, folder, tmp_path, send=True, **how):
    "`push` what was shown here, in a process with another hub and a login; (return code, result or error)."
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path/"home"), HF_HUB_DISABLE_XET="" if how.pop("pipeline",
                                                                                                        False) else "1",
                        HF_HUB_DISABLE_PROGRESS_BARS="1", **how.pop("environment", dict(HF_TOKEN=TOKEN)))
    code = ("import json, sys; from anchor_nb.release.hub import push; "
            "print(json.dumps(push(**json.loads(sys.argv[1]))))")
    if send: how["shown"] = hub.push(folder, "somebody/tiny-anchor", **how)["plan"]
    done = subprocess.run([sys.executable, "-c", code,
                           json.dumps(dict(folder=str(folder), repo_id="somebody/tiny-anchor", **how))],
                          env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


def test_what_arrives_is_what_was_exported(server, exported, tmp_path):
    code, found = push(server.url, exported, tmp_path, revision="v1")
    assert code == 0, found
    repo = server.repos["somebody/tiny-anchor"]
    assert repo["private"] and repo["branches"] == {"v1"} and repo["revision"] == "v1"
    assert repo["files"] == {file["path"]: (exported/file["path"]).read_bytes() for file in found["files"]}
    assert "model.safetensors" in repo["files"] and "1_Pooling/config.json" in repo["files"]
    assert found["url"].endswith("/commit/1") and found["left_there"] == []
    assert server.tokens == {f"Bearer {TOKEN}"}


def test_the_newer_way_of_uploading_sends_the_same(server, exported, tmp_path):
    "With hf_xet the client uploads differently; its storage of large files has no stand-in, so all go as small ones."
    server.small = True
    code, found = push(server.url, exported, tmp_path, pipeline=True)
    assert code == 0, found
    assert server.repos["somebody/tiny-anchor"]["files"] == {file["path"]: (exported/file["path"]).read_bytes()
                                                             for file in found["files"]}


def test_a_dry_run_speaks_to_nobody(exported, tmp_path):
    code, found = push("http://127.0.0.1:9", exported, tmp_path, send=False, environment={})
    assert code == 0, found
    assert found["dry_run"] and found["bytes"] == sum((exported/file["path"]).stat().st_size for file in found["files"])


def test_an_existing_public_repository_gets_nothing_private(server, exported, tmp_path):
    server.repos["somebody/tiny-anchor"] = dict(private=False, files={"old.safetensors": b"x"}, branches=set())
    code, said = push(server.url, exported, tmp_path)
    assert (code == 1 and "exists and is public" in said
            and set(server.repos["somebody/tiny-anchor"]["files"]) == {"old.safetensors"})
    code, found = push(server.url, exported, tmp_path, private=False)
    assert code == 0 and found["left_there"] == ["old.safetensors"], found


def test_no_login_and_no_network_are_said_before_anything_is_sent(server, exported, tmp_path):
    for environment, message in (({}, "hf auth login"), (dict(HF_TOKEN=TOKEN, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is "
                                                                                                   "set")):
        code, said = push(server.url, exported, tmp_path, environment=environment)
        assert code == 1 and message in said
    assert server.repos == {}


def test_a_card_that_the_hub_refuses_uploads_nothing(server, exported, tmp_path):
    folder = tmp_path/"copy"
    subprocess.run(["cp", "-r", exported, folder], check=True)
    (folder/"README.md").write_text("---\nlicense: no-such-licence\n---\n# x\n")
    code, said = push(server.url, folder, tmp_path)
    assert code == 1 and "must be one of the known" in said and server.repos["somebody/tiny-anchor"]["files"] == {}


def test_the_folder_of_a_run_is_refused_and_so_is_its_model(runs):
    "The model folder of a run says where it was trained, and has no card."
    with pytest.raises(ValueError, match="anchor-nb export"): hub.upload_plan(runs/"anchor")
    with pytest.raises(ValueError, match="anchor_nb.json contains a path of this machine.*README.md is missing"):
        hub.upload_plan(runs/"anchor/model")


@pytest.mark.parametrize("name", ["customers.csv", ".npmrc", "secrets.yaml", "ID_RSA", "vocab.joblib", "model.gguf",
                                  "Config.json",
                                  "pytorch_model.bin", "checkpoint-2/model.safetensors", "1_Pooling/secrets.json",
                                  "notes/config.json"])
def test_what_a_model_does_not_consist_of_is_left_out_and_named(exported, tmp_path, name):
    folder = shutil.copytree(exported, tmp_path/"copy")
    before = hub.upload_plan(folder)
    assert before["left_out"] == [] and len(before["files"]) == sum(path.is_file() for path in folder.rglob("*"))
    (folder/name).parent.mkdir(exist_ok=True)
    (folder/name).write_text(TOKEN)
    after = hub.upload_plan(folder)
    assert after["files"] == before["files"] and len(after["left_out"]) == 1 and name.startswith(after["left_out"][0])


def test_what_was_shown_is_what_is_sent_or_nothing_is(server, exported, tmp_path):
    "A file that belongs to a model and was changed or added since then; the server hears nothing."
    folder = shutil.copytree(exported, tmp_path/"copy")
    shown = hub.push(folder, "somebody/tiny-anchor")["plan"]
    for name in ("config.json", "LICENSE"):
        kept = (folder/name).read_bytes() if (folder/name).exists() else None
        (folder/name).write_text("{}")
        code, said = push(server.url, folder, tmp_path, send=False, shown=shown)
        assert code == 1 and "look at the plan again" in said and server.repos == {}
        (folder/name).write_bytes(kept) if kept else (folder/name).unlink()
    assert hub.push(folder, "somebody/tiny-anchor")["plan"] == shown


def test_what_adapt_knows_stays_with_a_model_that_is_exported_again(tmp_path):
    card.export_with_card("tiny", str(tmp_path/"delivered"))
    told = {card.as_loaded("a model of before"): "This is tiny, tuned on texts of its user.",
            card.UNSCORED: "It has 90 nDCG@10.", card.UNTRAINED: "Tuned on 100 pairs."}
    (tmp_path/"delivered/adapted.json").write_text(json.dumps(told))
    for place in ("again", "and again"):
        card.export_with_card(str(tmp_path/"delivered"), str(tmp_path/place))
        for text in ((tmp_path/place/"README.md").read_text(), card.model_card(str(tmp_path/place))):
            assert all(words in text for words in told.values()) and "as loaded by" not in text
    assert Path("adapted.json") in hub.files_of(tmp_path/"again")[0], "or the card of a copy from the hub would lack it"
    card.export_with_card(str(tmp_path/"again"), str(tmp_path/"mean"), pooling="mean")
    card.export_with_card(str(tmp_path/"mean"), str(tmp_path/"mean again"))
    for place in ("mean", "mean again"):
        text = (tmp_path/place/"README.md").read_text()
        assert "exported with pooling=mean" in text and "It has 90" not in text and "Tuned on 100 pairs" in text
    assert "vllm serve 'and again' " in (tmp_path/"and again/README.md").read_text()


def test_a_run_that_was_trained_again_does_not_show_the_old_scores(runs):
    found = lineage(runs/"anchor")
    row = dict(label="mine", manifest=str(runs/"anchor/run.json"))
    begun = found[-1].manifest["starts"][0]
    assert card.label_of([row], found) == card.label_of([dict(row, run=begun)], found) == "mine"
    assert card.label_of([dict(row, run="2026-01-01")], found) == ""
    assert card.label_of([dict(row, run=begun, manifest="elsewhere/anchor/run.json")], found) == "mine"


def test_another_model_in_the_place_of_the_first_stage_is_not_its_parent(runs, tmp_path):
    shutil.copytree(runs, tmp_path/"runs")
    assert [run.folder.name for run in lineage(tmp_path/"runs/anchor")] == ["stage1", "anchor"]
    there = json.loads((tmp_path/"runs/anchor/run.json").read_text())
    there["inputs"]["model"], there["recipe"]["model"] = "0"*64, str(tmp_path/"runs/stage1/model")
    (tmp_path/"runs/anchor/run.json").write_text(json.dumps(there))
    with pytest.warns(UserWarning, match="is not the model that .*anchor was trained from any more"):
        assert [run.folder.name for run in lineage(tmp_path/"runs/anchor")] == ["anchor"]


def test_an_adapter_on_a_base_that_has_changed_warns(runs, tmp_path):
    from anchor_nb.models.embedder import AnchorEmbedder
    train_run(recipe(Stage2, tmp_path/"second", steps=2, snapshot_steps=1, model=str(runs/"stage1/model")))
    snapshot = tmp_path/"second/snapshots/step-1"
    assert AnchorEmbedder.from_pretrained(snapshot).dimension
    facts = json.loads((snapshot/"anchor_nb.json").read_text())
    facts["inputs"]["model"] = "0"*64
    (snapshot/"anchor_nb.json").write_text(json.dumps(facts))
    with pytest.warns(UserWarning, match="which has changed since"): AnchorEmbedder.from_pretrained(snapshot)
