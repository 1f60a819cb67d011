"Filtering by margin: what is kept, and whose scores decide."
import numpy as np
from hypothesis import given, settings, strategies as st

from anchor_nb.data.rows import parsed
from anchor_nb.data.tables import find_sources
from anchor_nb.inference.filtering import filter_pairs, filtered, margins
from anchor_nb.models.embedder import AnchorEmbedder
from common import toy_pairs


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
