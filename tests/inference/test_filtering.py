"Filtering by margin: what is kept, and whose scores decide."
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from anchor_nb.core.recipe import Stage2
from anchor_nb.data.rows import load_pairs, parsed
from anchor_nb.data.tables import find_sources
from anchor_nb.data.writers import write_pairs
from anchor_nb.inference import filtering
from anchor_nb.inference.filtering import filter_pairs, filtered, margins
from anchor_nb.models.embedder import AnchorEmbedder
from anchor_nb.models.resolve import find_model
from anchor_nb.training.trainer import train
from common import files, recipe, toy_pairs


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=3), st.lists(st.floats(-1, 1), max_size=4), st.floats(-2, 2),
       st.floats(0, 2))
def test_what_the_margin_filter_keeps(positives, negatives, minimum, width):
    texts = dict(query="q", positives=list(map(str, positives)), negatives=[f"n{k}" for k in range(len(negatives))])
    scores, maximum = (positives, negatives), minimum + width
    whole, some = (filtered(texts, scores, minimum, maximum, each) for each in ("row", "negative"))
    assert (whole is not None) == (not negatives or minimum <= min(positives) - max(negatives) <= maximum)
    assert some["negatives"] == [f"n{k}" for k, score in enumerate(negatives)
                                 if minimum <= min(positives) - score <= maximum]
    assert all(minimum <= margin <= maximum for margin in margins((positives, some["negative_scores"])))


def test_scores_are_those_of_single_texts(tmp_path):
    data = tmp_path/"toy.jsonl"
    data.write_text("\n".join(open(find_sources(toy_pairs())["toy"]).read().splitlines()[:20]))
    report = filter_pairs(str(data), str(tmp_path/"out"), -9, 9, model="tiny", max_length=64)["toy"]
    assert report["written"] == report["rows"] == 20 and sum(report["histogram"]["margin"]) == 20
    embedder = AnchorEmbedder.from_pretrained("tiny", max_length=64)
    for each in list(parsed(str(tmp_path/"out/pairs/toy.jsonl")))[::7]:
        scores = embedder.encode_document(each["positives"] + each["negatives"]) @ embedder.encode_query(each["query"])
        np.testing.assert_allclose(each["positive_scores"] + each["negative_scores"], scores, atol=1e-5)


def test_documents_are_scored_with_the_instruction_of_training(tmp_path):
    "A row may have one or not, of the same texts."
    data, embedder = tmp_path/"a.jsonl", AnchorEmbedder.from_pretrained("tiny", max_length=64)
    data.write_text("".join(json.dumps(dict(query=["Find", "a cat"], pos=[form("cats sleep")], neg=[form("dogs bark")]))
                            + "\n" for form in (lambda text: ["Keep", text], lambda text: text)))
    for instructions in ("paper", "none"):
        filter_pairs(str(data), str(tmp_path/instructions), model="tiny", max_length=64, instructions=instructions)
        for each in parsed(str(tmp_path/instructions/"pairs/a.jsonl")):
            asked, keep = [each[name]*(instructions != "none") for name in ("instruction", "document_instruction")]
            texts = each["positives"] + each["negatives"]
            np.testing.assert_allclose(each["positive_scores"] + each["negative_scores"],
                                       embedder.encode(texts, keep) @ embedder.encode(each["query"], asked), atol=1e-5)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> str:
    "A random cross-encoder with the words of MiniLM."
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
    place, source = tmp_path_factory.mktemp("reranker"), find_model("minilm")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, num_labels=1, initializer_range=0.5)
    BertForSequenceClassification(config).eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


@pytest.fixture
def judged(tmp_path) -> str:
    "150 rows with negatives: three batches of a cross-encoder."
    table = load_pairs(toy_pairs())["toy"].select(range(150))
    write_pairs(tmp_path/"my", "toy", table)
    return str(tmp_path/"my")


def test_a_cross_encoder_judges(judged, reranker, tmp_path):
    "Its scores are those of one pair at a time, whatever the batch; stage II learns from them."
    from sentence_transformers import CrossEncoder
    report = filter_pairs(judged, str(tmp_path/"out"), model=reranker)["toy"]
    assert report["written"] == report["rows"] == 150
    judge, rows = CrossEncoder(reranker), list(parsed(str(tmp_path/"out/pairs/toy.jsonl")))
    for row in rows[::37]:
        texts = row["positives"] + row["negatives"]
        alone = [float(judge.predict([(row["query"], text)], activation_fn=torch.nn.Identity())[0]) for text in texts]
        np.testing.assert_allclose(row["positive_scores"] + row["negative_scores"], alone, atol=1e-5)
    spread = [score for row in rows for score in row["positive_scores"]]
    assert max(spread) - min(spread) > 0.01, "a model that says the same of everything shows nothing"
    train(recipe(Stage2, tmp_path/"run", steps=2, warmup_steps=0, negatives=1, data=str(tmp_path/"out/pairs"),
                 distillation="margin_mse", teacher_temperature=1.0))


def test_scores_survive_a_stop(judged, reranker, tmp_path, monkeypatch):
    "The same command resumes; other rows begin anew; nothing is left lying about."
    from sentence_transformers import CrossEncoder
    monkeypatch.setattr(filtering, "BLOCK", 64)
    predict, asked = CrossEncoder.predict, []
    def breaks(self, pairs, **how):
        asked.append(len(pairs))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return predict(self, pairs, **how)
    monkeypatch.setattr(CrossEncoder, "predict", breaks)
    with pytest.raises(KeyboardInterrupt): filter_pairs(judged, str(tmp_path/"out"), model=reranker)
    assert not (tmp_path/"out/pairs").exists()
    filter_pairs(judged, str(tmp_path/"out"), model=reranker)
    assert len(asked) == 4, "the first batch was judged twice"
    assert sorted(path.name for path in (tmp_path/"out").iterdir()) == ["pairs", "report.json"]
    filter_pairs(judged, str(tmp_path/"whole"), model=reranker)
    assert files(tmp_path/"out") == files(tmp_path/"whole")

    del asked[:]
    with pytest.raises(KeyboardInterrupt): filter_pairs(judged, str(tmp_path/"other"), model=reranker)
    path = tmp_path/"my/toy.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[1:]))
    filter_pairs(judged, str(tmp_path/"other"), model=reranker)
    assert len(asked) == 5 and len(list(parsed(str(tmp_path/"other/pairs/toy.jsonl")))) == 149


def test_any_number_of_processes_gives_the_same_scores(judged, tmp_path, monkeypatch):
    monkeypatch.setattr(filtering, "BLOCK", 32)
    one, three = [tmp_path/name for name in ("one", "three")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1) # as in each of several processes: it decides the last digit
    filter_pairs(judged, str(one), model="tiny", max_length=64)
    torch.set_num_threads(threads)
    filter_pairs(judged, str(three), model="tiny", max_length=64, processes=3)
    assert files(one) == files(three)


def test_nothing_that_is_not_ours_is_removed(judged, tmp_path):
    filter_pairs(judged, str(tmp_path/"scored"), model="tiny", max_length=64)
    kept = [tmp_path/"out"/name/"notes.txt" for name in (".scores", ".launch", "launch")]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    filter_pairs(str(tmp_path/"scored/pairs"), str(tmp_path/"out"))
    (tmp_path/"scored"/"launch").mkdir()
    filter_pairs(judged, str(tmp_path/"scored"), model="tiny", max_length=64)
    assert all(file.is_file() for file in kept) and (tmp_path/"scored"/"launch").is_dir()


def test_launchers_of_others_and_broken_models_are_refused(judged, tmp_path, monkeypatch):
    tiny = AnchorEmbedder.from_pretrained("tiny")
    monkeypatch.setattr(tiny, "encode_query", lambda texts, *_, **__: np.full((len(texts), tiny.dimension), np.nan))
    monkeypatch.setattr(AnchorEmbedder, "from_pretrained", lambda *_, **__: tiny)
    with pytest.raises(ValueError, match="toy, row 0 has a score that is not finite"):
        filter_pairs(judged, str(tmp_path/"out"), model="tiny")
    with pytest.raises(ValueError, match="processes=-1"): filter_pairs(judged, str(tmp_path/"out"), processes=-1)
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="here").items(): monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="runs on one machine"): filter_pairs(judged, str(tmp_path/"out"))


def test_a_faulty_row_of_a_shard_is_named(tmp_path):
    import pyarrow as pa, pyarrow.parquet as pq
    rows = [dict(query=f"q{n}", positive=f"text {n}" if n != 150 else "") for n in range(200)]
    (tmp_path/"data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/"data/rows.parquet")
    with pytest.raises(ValueError, match=r"rows.parquet, row 15\d"):
        filter_pairs(f"file://{tmp_path}/data/*.parquet", str(tmp_path/"out"), model="tiny")


def test_a_classifier_is_no_judge(judged, reranker, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    AutoModelForSequenceClassification.from_pretrained(reranker, num_labels=3, ignore_mismatched_sizes=True
                                                       ).save_pretrained(tmp_path/"classes")
    AutoTokenizer.from_pretrained(reranker).save_pretrained(tmp_path/"classes")
    with pytest.raises(ValueError, match="has 3 classes"):
        filter_pairs(judged, str(tmp_path/"out"), model=str(tmp_path/"classes"))


def test_a_faulty_row_of_an_address_costs_no_scores(tmp_path, monkeypatch):
    import pandas
    rows = [dict(query=f"q{n}", positive=f"text {n}"*(n != 150)) for n in range(200)] # 100 are looked at before
    (tmp_path/"rows").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path/"rows/rows.parquet")
    monkeypatch.setattr(filtering, "score_share", None)
    with pytest.raises(ValueError, match="row 150"):
        filter_pairs(f"file://{tmp_path}/rows/*.parquet", str(tmp_path/"out"), model="tiny")
