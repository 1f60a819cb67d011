"""Merging on many small cases, on layouts of others, and on the stages of a run."""
import fnmatch
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from anchor_nb.data.corpora import build_corpus
from anchor_nb.models.resolve import resolve_model
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.release.merging import METHODS, PARALLEL, linear, merge_models, slerp
from anchor_nb.core.recipe import Stage1, Stage2
from anchor_nb.data.retrieval_sets import read_retrieval, relevant
from common import recipe, run

TEXTS = ["a cat sleeps", "the river floods in spring"]


def slerp_slowly(a, b, t):
    "The arc between two vectors by the formula, number by number."
    norms = math.sqrt(sum(x*x for x in a))*math.sqrt(sum(x*x for x in b))
    cosine = sum(x*y for x, y in zip(a, b))/norms if norms else 1
    if abs(cosine) > PARALLEL: return [(1 - t)*x + t*y for x, y in zip(a, b)]
    angle = math.acos(cosine)
    return [(math.sin((1 - t)*angle)*x + math.sin(t*angle)*y)/math.sin(angle) for x, y in zip(a, b)]


def vectors(seed, count, size): return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0, 1), st.floats(0.01, 100))
def test_two_tensors_are_merged_as_the_slow_formula_says(seed, size, t, scale):
    a, b = vectors(seed, 2, size).double().float()
    b = b*scale
    slow = slerp_slowly(a.double().tolist(), b.double().tolist(), t)
    np.testing.assert_allclose(slerp([a, b], [1 - t, t]).numpy(), slow, rtol=1e-4,
                               atol=1e-4*float(max(a.norm(), b.norm())))
    np.testing.assert_allclose(slerp([a, b], [1 - t, t]).numpy(), slerp([b, a], [t, 1 - t]).numpy(), rtol=1e-4,
                               atol=1e-5*scale + 1e-5)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0, 1))
def test_an_arc_keeps_the_length_and_a_chord_does_not_lengthen(seed, size, t):
    a, b = torch.nn.functional.normalize(vectors(seed, 2, size), dim=1)
    assert linear([a, b], [1 - t, t]).norm() <= 1 + 1e-5
    if abs(a @ b) < 0.999: assert slerp([a, b], [1 - t, t]).norm().item() == pytest.approx(1, abs=1e-4)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from(list(METHODS)))
def test_one_model_with_all_the_weight_is_the_result(seed, count, method):
    tensors = list(vectors(seed, count, 7))
    for k in range(count):
        torch.testing.assert_close(METHODS[method](tensors, [float(k == n) for n in range(count)]), tensors[k])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    "The tiny model, and one a little way off."
    folder = tmp_path_factory.mktemp("models")
    for k, name in enumerate("ab"):
        shutil.copytree(resolve_model("tiny"), folder/name)
        weights = load_file(folder/name/"model.safetensors")
        draw = torch.Generator().manual_seed(k)
        save_file({key: value + 0.02*k*torch.randn(value.shape, generator=draw) for key, value in weights.items()},
                  folder/name/"model.safetensors", metadata=dict(format="pt"))
    return folder


def merged(pair, out, *names, **given): return merge_models([str(pair/name) for name in names], str(out), **given)


@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_weights_and_policies_do_what_they_say(data, pair, tmp_path_factory):
    weight, most = data.draw(st.floats(0, 1)), data.draw(st.integers(1000, 10**6))
    out = tmp_path_factory.mktemp("out")/"m"
    policy = data.draw(st.dictionaries(st.sampled_from(["*embed*", "*.0.*", "*norm*", "*mlp*"]),
                                       st.sampled_from(["first", "second", "linear", [0.1, 0.9]]), max_size=3))
    merged(pair, out, "a", "b", weights=[1 - weight, weight], policy=policy, shard_bytes=most)
    a, b = (load_file(pair/name/"model.safetensors") for name in "ab")
    found = {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}
    assert found.keys() == a.keys()
    for name in a:
        said = next((how for pattern, how in policy.items() if fnmatch.fnmatchcase(name, pattern)), "linear")
        share = {"first": 0, "second": 1, "linear": weight}.get(said, 0.9) if isinstance(said, str) else 0.9
        torch.testing.assert_close(found[name], (1 - share)*a[name] + share*b[name])
    assert np.isfinite(AnchorEmbedder.from_pretrained(str(out)).encode(TEXTS)).all()


def test_a_model_in_many_files_is_read(pair, tmp_path):
    merged(pair, tmp_path/"many", "b", "b", shard_bytes=20_000)
    merged(pair, tmp_path/"out", "a", "b")
    merge_models([str(pair/"a"), str(tmp_path/"many")], str(tmp_path/"both"))
    assert len(list((tmp_path/"many").glob("*.safetensors"))) > 5
    assert load_file(tmp_path/"both/model.safetensors").keys() == load_file(tmp_path/"out/model.safetensors").keys()
    for name, value in load_file(tmp_path/"both/model.safetensors").items():
        torch.testing.assert_close(value, load_file(tmp_path/"out/model.safetensors")[name])
    next((tmp_path/"many").glob("model-00003*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00003.*which its index names"):
        merge_models([str(pair/"a"), str(tmp_path/"many")], str(tmp_path/"again"))


def test_a_grown_vocabulary_is_refused(pair, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(pair/"b"), AutoTokenizer.from_pretrained(pair/"b")
    tokenizer.add_tokens(["<extra>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path/"larger"), tokenizer.save_pretrained(tmp_path/"larger")
    for models in ([str(pair/"a"), str(tmp_path/"larger")], [str(tmp_path/"larger"), str(pair/"a")]):
        with pytest.raises(ValueError, match="token '<extra>' is in only one of .* only models of one tokenizer"):
            merge_models(models, str(tmp_path/"out"))
    (tmp_path/"larger/tokenizer.json").write_bytes((pair/"a/tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="embed_tokens.weight is .* only models of one shape"):
        merge_models(models, str(tmp_path/"out"))


def test_a_missing_tensor_is_no_zero(pair, tmp_path):
    shutil.copytree(pair/"b", tmp_path/"c")
    weights = load_file(tmp_path/"c/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path/"c/model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is in .* and not in .*c; merge models that were trained from the"):
        merge_models([str(pair/"a"), str(tmp_path/"c")], str(tmp_path/"out"))


def test_what_does_not_belong_together_is_refused(pair, tmp_path):
    def changed(name, **config):
        shutil.copytree(pair/"b", tmp_path/name)
        path = tmp_path/name/"config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return str(tmp_path/name)
    cases = [("model_type is 'llama' in .* and 'mistral'", [str(pair/"a"), changed("kind", model_type="mistral")]),
             ("is_causal is None in .* and False", [str(pair/"a"), changed("both", is_causal=False)]),
             ("name two or more", [str(pair/"a")]), ("no model folder './nowhere'", [str(pair/"a"), "./nowhere"])]
    for message, models in cases:
        with pytest.raises((ValueError, OSError), match=message): merge_models(models, str(tmp_path/"out"))
    shutil.copytree(pair/"b", tmp_path/"wide")
    weights = load_file(tmp_path/"wide/model.safetensors")
    save_file({key: value[..., :3].contiguous() if "mlp.up" in key else value for key, value in weights.items()},
              tmp_path/"wide/model.safetensors")
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight is \[128, 64\] in"):
        merge_models([str(pair/"a"), str(tmp_path/"wide")], str(tmp_path/"out"))
    (tmp_path/"adapter").mkdir()
    (tmp_path/"adapter/adapter_config.json").write_text(json.dumps(dict(base_model_name_or_path="tiny")))
    with pytest.raises(ValueError, match="is an adapter; merge it into its base first"):
        merge_models([str(pair/"a"), str(tmp_path/"adapter")], str(tmp_path/"out"))
    assert not (tmp_path/"out").exists()
    (tmp_path/"mine").mkdir()
    with pytest.raises(ValueError, match="not made by a merge"): merged(pair, tmp_path/"mine", "a", "b")


def test_embedders_that_make_vectors_in_different_ways_are_refused(pair, tmp_path):
    facts = dict(layout=dict(head="", tail="</s>", eos="</s>"), pooling="eos", stage="stage2", base="tiny",
                 data=dict(toy={}), recipe=dict(seed=1))
    def saying(name, source="b", **changes):
        shutil.copytree(pair/source, tmp_path/name)
        (tmp_path/name/"anchor_nb.json").write_text(json.dumps(facts | changes))
        (tmp_path/name/"facts.json").write_text("{}")
        return str(tmp_path/name)
    first = saying("first", "a")
    for name, changes, message in [("mean", dict(pooling="mean"), "anchor_nb.json: pooling is 'eos' in .*first and "
                                                                  "'mean' in .*mean; merge embedders"),
                                   ("both", dict(bidirectional=True), "bidirectional is False in .* and True"),
                                   ("plain", dict(layout=facts["layout"]
                                                  | dict(instruction_format="{instruction} {text}")),
                                    "layout.instruction_format is '{instruction}; {text}' in"),
                                   ("long", dict(normalize=False), "normalize is True in"),
                                   ("asked", dict(prompts=dict(query="q: ")), "prompts is {} in")]:
        with pytest.raises(ValueError, match=message):
            merge_models([first, saying(name, **changes)], str(tmp_path/"out"))
    (tmp_path/"theirs").mkdir()
    shutil.copytree(pair/"b", tmp_path/"theirs", dirs_exist_ok=True)
    (tmp_path/"theirs/modules.json").write_text("[]")
    with pytest.raises(ValueError, match="kind is .anchor_nb. in .* and .sentence-transformers. in"):
        merge_models([first, str(tmp_path/"theirs")], str(tmp_path/"out"))
    same = saying("same", layout=facts["layout"] | dict(template="chat", max_length=64), bidirectional=False,
                  prompts={}, recipe=dict(seed=2)) # the defaults, spelled out
    for models in ([first, same], [str(pair/"b"), first]): # the base of an embedder says nothing about its use
        merge_models(models, str(tmp_path/"out"))
        assert json.loads((tmp_path/"out/anchor_nb.json").read_text()) == dict(layout=facts["layout"], pooling="eos")
        assert not (tmp_path/"out/facts.json").exists()
    merge_models([same, first], str(tmp_path/"out"))
    assert json.loads((tmp_path/"out/anchor_nb.json").read_text()).keys() == {"layout", "pooling", "bidirectional",
                                                                              "prompts"}


@pytest.mark.parametrize("changes, message", [
    (dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32), "num_attention_heads is 4 in .* and 2 in"),
    (dict(hidden_act="gelu"), "hidden_act is 'silu' in .* and 'gelu'"),
    (dict(rms_norm_eps=0.1), "rms_norm_eps is .* and 0.1 in"), (dict(head_dim=None), "")])
def test_tensors_of_one_shape_with_another_meaning_are_refused(pair, tmp_path, changes, message):
    shutil.copytree(pair/"b", tmp_path/"b")
    config = json.loads((tmp_path/"b/config.json").read_text()) | changes
    (tmp_path/"b/config.json").write_text(json.dumps(config))
    if not message: merge_models([str(pair/"a"), str(tmp_path/"b")], str(tmp_path/"out"))
    else:
        with pytest.raises(ValueError, match=message):
            merge_models([str(pair/"a"), str(tmp_path/"b")], str(tmp_path/"out"))


@pytest.mark.parametrize("changes, message", [
    (dict(pooling="cls"), "^pooling is 'mean' in .* and 'first' in"), (dict(normalize=False), "normalize is True in"),
    (dict(prompts=dict(query="q: ")), "prompts is {} in"), ({}, "")])
def test_folders_of_sentence_transformers_with_another_use_are_refused(pair, tmp_path, changes, message):
    for name, changed in dict(a={}, b=changes).items():
        shutil.copytree(pair/name, tmp_path/name)
        how = dict(pooling="mean", normalize=True, prompts={}) | changed
        kinds = dict(Transformer="", Pooling="1_Pooling") | (dict(Normalize="2_Normalize") if how["normalize"] else {})
        (tmp_path/name/"1_Pooling").mkdir()
        for file, content in {"modules": [dict(type=f"sentence_transformers.models.{kind}", path=path)
                                          for kind, path in kinds.items()],
                              "1_Pooling/config": dict(pooling_mode=how["pooling"]),
                              "config_sentence_transformers": dict(prompts=how["prompts"])}.items():
            (tmp_path/name/f"{file}.json").write_text(json.dumps(content))
    merge = lambda: merge_models([str(tmp_path/name) for name in "ab"], str(tmp_path/"out"))
    if not message: merge()
    else:
        with pytest.raises(ValueError, match=message): merge()


@pytest.mark.parametrize("given, message", [
    (dict(weights=[0.5, -0.5, 1], method="slerp"),
     r"weights=\[0.5, -0.5, 1\]: slerp needs weights of 0 or more; use method=linear"),
    (dict(weights=[0.5, -0.5, 1], policy={"*norm*": "slerp"}), "slerp needs weights of 0 or more"),
    (dict(method="slerp", policy={"*norm*": [0.5, -0.5, 1]}), r"policy '\*norm\*': slerp needs weights"),
    (dict(policy={"*norm*": ["a", 1, 0]}), r"policy '\*norm\*' contains 'a', which is not a finite number"),
    (dict(weights=[float("inf"), 0, 0]), "weights contains inf"),
    (dict(policy={"*norms*": "first"}), r"policy '\*norms\*' matches none of the .* tensors.*leave it out"),
])
def test_weights_and_policies_that_do_nothing_or_harm_are_refused(pair, tmp_path, given, message):
    with pytest.raises(ValueError, match=message): merged(pair, tmp_path/"out", "a", "b", "a", **given)
    assert not (tmp_path/"out").exists()


def test_a_model_is_subtracted(pair, tmp_path):
    merged(pair, tmp_path/"out", "a", "b", "a", weights=[0.5, -0.5, 1], policy={"*norm*": "first"})
    a, b = (load_file(pair/name/"model.safetensors") for name in "ab")
    for name, value in load_file(tmp_path/"out/model.safetensors").items():
        torch.testing.assert_close(value, a[name] if "norm" in name else 1.5*a[name] - 0.5*b[name])


def test_a_folder_of_sentence_transformers_stays_one(pair, tmp_path):
    for name in "ab":
        shutil.copytree(pair/name, tmp_path/name)
        (tmp_path/name/"2_Dense").mkdir()
        save_file(dict(weight=torch.ones(2)), tmp_path/name/"2_Dense/model.safetensors")
        (tmp_path/name/"modules.json").write_text("[]")
        (tmp_path/name/"optimizer.bin").write_text("state")
        for file in ("README.md", "search.json", "onnx/model.onnx"): # true of this model, not of the merged one
            (tmp_path/name/file).parent.mkdir(exist_ok=True)
            (tmp_path/name/file).write_text("{}")
    merge_models([str(tmp_path/name) for name in "ab"], str(tmp_path/"out"))
    assert not any((tmp_path/"out"/file).exists() for file in ("README.md", "search.json", "onnx"))
    assert (tmp_path/"out/2_Dense/model.safetensors").is_file() and (tmp_path/"out/modules.json").is_file()
    assert not (tmp_path/"out/optimizer.bin").exists()


def test_whole_numbers_stay_what_they_are(pair, tmp_path):
    "Old folders of BERT hold the numbers of their positions beside the weights."
    numbers = torch.arange(512)[None]
    for name in "ab":
        shutil.copytree(pair/name, tmp_path/name)
        weights = load_file(tmp_path/name/"model.safetensors") | {"embeddings.position_ids": numbers}
        save_file(weights, tmp_path/name/"model.safetensors", metadata=dict(format="pt"))
    merge_models([str(tmp_path/"a"), str(tmp_path/"b")], str(tmp_path/"out"), [0.1, 0.9])
    assert load_file(tmp_path/"out"/"model.safetensors")["embeddings.position_ids"].equal(numbers)


def test_models_in_the_home_folder(pair, tmp_path, monkeypatch):
    for name in "ab": (tmp_path/name).symlink_to(pair/name)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = merge_models(["~/a", "~/b"], "~/soup")
    assert (tmp_path/"soup"/"merge.json").is_file() and made["out"] == str(tmp_path/"soup")
    assert [part["model"] for part in made["models"]] == [str(tmp_path/"a"), str(tmp_path/"b")]


def test_a_failed_merge_leaves_what_was_there(pair, tmp_path, monkeypatch):
    merged(pair, tmp_path/"out", "a", "b")
    before = (tmp_path/"out/model.safetensors").read_bytes()
    import anchor_nb.release.merging as merging
    def full(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(merging, "save_file", full)
    with pytest.raises(OSError, match="the disk is full"): merged(pair, tmp_path/"out", "b", "a")
    assert (tmp_path/"out/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_stages_of_a_run_are_merged_and_scored(tmp_path):
    "A soup of stage I and stage II loads as any model, lies between the two, and ranks documents as well as they do."
    run(recipe(Stage1, tmp_path/"stage1", steps=2))
    run(recipe(Stage2, tmp_path/"anchor", steps=2, model=str(tmp_path/"stage1/model")))
    merge_models([str(tmp_path/"stage1"), str(tmp_path/"anchor")], str(tmp_path/"soup"), method="slerp")
    task = read_retrieval(build_corpus("toy")/"eval")
    found = {}
    for name in ("stage1", "anchor", "soup"):
        embedder = AnchorEmbedder.from_pretrained(str(tmp_path/name))
        scores = embedder.encode_query(list(task.queries.values()),
                                       task.instruction) @ embedder.encode_document(list(task.corpus.values())).T
        place = {number: k for k, number in enumerate(task.corpus)}
        own = np.array([[place[d] for d in relevant(judged)][0] for judged in task.qrels.values()])
        found[name] = embedder.encode(TEXTS), (scores > scores[np.arange(len(own)), own][:, None]).sum(1).mean()
    assert all((found["soup"][0]*found[name][0]).sum() > (found["stage1"][0]*found["anchor"][0]).sum() - 1e-4
               for name in ("stage1", "anchor"))
    low, high = sorted(found[name][1] for name in ("stage1", "anchor"))
    assert low - 3 <= found["soup"][1] <= high + 3 # mean rank of the answer among 80 documents


def test_a_merged_model_keeps_an_instruction_that_all_parents_had(tmp_path):
    from anchor_nb.data.prompts import save_layout, stored_facts
    from anchor_nb.release.merging import write_use
    layout = AnchorEmbedder.from_pretrained("tiny").formatter.layout
    for name, text in dict(a="Find it", b="Find it", c="Find all").items():
        (tmp_path/name).mkdir()
        save_layout(tmp_path/name, layout, pooling="eos", instructions=dict(nq=[text]))
    for parents, kept in (("ab", dict(nq=["Find it"])), ("ac", None)):
        (tmp_path/f"of-{parents}").mkdir()
        write_use([tmp_path/name for name in parents], tmp_path/f"of-{parents}")
        assert stored_facts(tmp_path/f"of-{parents}").get("instructions") == kept
