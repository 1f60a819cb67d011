"Near-duplicates and contamination, beside the slow search that compares everything with everything."
import random

import pytest
from hypothesis import given, settings, strategies as st

from anchor_nb.data.deduplication import EvaluationSet, Watch, dedup_pairs, duplicates, runs_of, seen_part
from common import WORDS, toy_pairs


def row(query, positive):
    return dict(query=query, positives=[positive], negatives=[], instruction="", document_instruction="",
                positive_scores=[], negative_scores=[])


SENTENCE = st.lists(st.sampled_from(WORDS[:5]), min_size=1, max_size=14).map(" ".join)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=20), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_duplicates_are_those_of_the_slow_search(texts, threshold):
    near = lambda a, b: len(a & b)/len(a | b) >= threshold
    sets = [tuple(set(runs_of(text, part).tolist()) for text, part in zip(pair, ("query", "positive")))
            for pair in texts]
    kept = []
    for n, (query, positive) in enumerate(sets):
        if not any(near(query, sets[k][0]) and near(positive, sets[k][1]) for k in kept): kept.append(n)
    found = duplicates([row(*pair) for pair in texts], threshold)
    assert [n for n in range(len(texts)) if n not in found] == kept
    assert all(earlier in kept for earlier, _ in found.values())


@settings(deadline=None, max_examples=80)
@given(st.lists(SENTENCE, min_size=1, max_size=12), st.lists(SENTENCE, min_size=1, max_size=12),
       st.sampled_from([0.3, 0.8, 1.0]))
def test_what_was_seen_is_what_the_slow_search_sees(tests, trains, threshold):
    watch = Watch([EvaluationSet("t", {str(n): text for n, text in enumerate(tests)}, {}, {})], threshold)
    for train in trains:
        assert sorted(watch(train)) == sorted(("t", "queries", str(n)) for n, text in enumerate(tests)
                                              if seen_part(runs_of(text), runs_of(train)) >= threshold)


def test_a_passage_inside_a_longer_one_was_seen():
    passage = " ".join(random.Random(0).choices(WORDS, k=40))
    watch = Watch([EvaluationSet("t", {}, {"d": passage}, {})])
    assert watch("Before it. " + passage.upper() + ", and after it. " + "More " * 200) == [("t", "documents", "d")]
    assert not watch(passage[: len(passage)//2])


@pytest.mark.parametrize("given, message", [(dict(against=["nowhere"]), "nowhere is missing"),
                                            (dict(remove="some"), "choose one of none"),
                                            (dict(threshold=-1), "threshold=-1"),
                                            (dict(format="csv"), "choose one of anchor_nb"),
                                            (dict(out=""), "out is empty"), (dict(data="nowhere"), "neither a folder "
                                                                                                   "nor a file")])
def test_bad_input_of_deduplication(tmp_path, given, message):
    with pytest.raises((ValueError, OSError), match=message):
        dedup_pairs(**dict(data=toy_pairs(), out=str(tmp_path/"out")) | given)
