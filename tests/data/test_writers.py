"What the tools write is read back, in every format."
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data.rows import parsed
from anchor_nb.data.writers import write_pairs


def row(query, *positives, negatives=(), **more):
    return dict(query=query, positives=list(positives), negatives=list(negatives), instruction="",
                document_instruction="", positive_scores=[], negative_scores=[]) | more


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@st.composite
def tables(build, instructed):
    "Rows in the common form, as reading gives them."
    said = st.one_of(st.just(""), TEXT.map(str.strip)) if instructed else st.just("")
    rows = []
    for _ in range(build(st.integers(1, 4))):
        positives, negatives = build(st.lists(TEXT, min_size=1, max_size=3)), build(st.lists(TEXT, max_size=3))
        scores = lambda texts: [float(np.float32(build(st.floats(-1, 1)))) for _ in texts]
        scored = dict(positive_scores=scores(positives),
                      negative_scores=scores(negatives)) if build(st.booleans()) else {}
        rows.append(row(build(TEXT), *positives, negatives=negatives, instruction=build(said),
                        document_instruction=build(said), **scored))
    return rows


@pytest.mark.parametrize("format", ["anchor_nb", "gritlm"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_written_is_read_back(format, data, tmp_path_factory):
    rows, folder = data.draw(tables(True)), tmp_path_factory.mktemp("rows")
    assert write_pairs(folder, "t", rows, format)["rows"] == len(rows)
    assert list(parsed(str(folder/"t.jsonl"))) == rows


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_columns_are_read_back(data, tmp_path_factory):
    rows, folder = data.draw(tables(False)), tmp_path_factory.mktemp("rows")
    flat = [each | dict(positives=[text], positive_scores=each["positive_scores"][k:k + 1]) for each in rows
            for k, text in enumerate(each["positives"])]
    if len({(len(each["negatives"]), bool(each["positive_scores"])) for each in rows}) > 1:
        with pytest.raises(ValueError, match="row [0-9]+ has"): write_pairs(folder, "t", rows, "columns")
        assert not list(folder.iterdir())
    else:
        write_pairs(folder, "t", rows, "columns")
        assert list(parsed(str(folder/"t.parquet"))) == flat
