"""Scores from embeddings, without an engine."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.engines.scoring import (
    BadScoreRequest,
    Pairs,
    cosine,
    embeddings_body,
    read_pairs,
    refuse,
    score_answer,
    shape_scores,
)

VECTORS = {"x": [1.0, 0.0], "y": [0.0, 2.0], "xy": [3.0, 3.0], "-x": [-1.0, 0.0], "0": [0.0, 0.0]}


def embedded(pairs, *, shuffled=False):
    data = [{"index": index, "embedding": VECTORS[text]} for index, text in enumerate(pairs.texts)]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return json.dumps({"data": data[::-1] if shuffled else data, "model": "m", "usage": usage}).encode()


def score(*, is_rerank=False, **body):
    pairs = read_pairs(json.dumps(body).encode(), is_rerank=is_rerank)
    return json.loads(score_answer(pairs, embedded(pairs, shuffled=True), is_rerank=is_rerank, answer_id="a").body)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_text_is_compared_with_each_of_many_under_every_name(names):
    body = score(**{names[0]: "x", names[1]: ["x", "y", "xy", "-x"]})
    assert [one["score"] for one in body["data"]] == pytest.approx([1, 0, math.sqrt(0.5), -1])
    assert [one["index"] for one in body["data"]] == [0, 1, 2, 3]
    assert (body["object"], body["model"], body["usage"]["prompt_tokens"]) == ("list", "m", 7)


def test_as_many_texts_are_compared_pair_by_pair():
    body = score(text_1=["x", "y"], text_2=["y", "xy"])
    assert [one["score"] for one in body["data"]] == pytest.approx([0, math.sqrt(0.5)])


def test_a_rerank_is_ordered_by_score_and_equal_scores_by_index():
    body = score(is_rerank=True, query="x", documents=["y", {"text": "x"}, "xy", "x"])
    assert [one["index"] for one in body["results"]] == [1, 3, 2, 0]
    assert body["results"][0]["document"] == {"text": "x"}


@pytest.mark.parametrize(("top_n", "count"), [(None, 3), (0, 3), (1, 1), (3, 3), (9, 3)])
def test_top_n_bounds_a_rerank_and_0_means_all(top_n, count):
    body = score(is_rerank=True, query="x", documents=["y", "x", "xy"], top_n=top_n)
    assert len(body["results"]) == count


@pytest.mark.parametrize(
    ("is_rerank", "body", "message"),
    [
        (False, {"text_1": ["x", "y"], "text_2": ["x", "y", "xy"]}, "2 texts cannot be paired with 3"),
        (False, {"text_1": [], "text_2": ["x"]}, "text_1 must be"),
        (False, {"queries": "x", "documents": ["x", ""]}, "documents must be"),
        (False, {"queries": "x", "documents": [{"image": "x"}]}, "documents must be"),
        (False, {"text_1": "x"}, "text_2 must be"),
        (True, {"query": ["x", "y"], "documents": ["x", "y"]}, "query must be one"),
        (True, {"query": "x", "documents": ["x"], "top_n": -1}, "top_n must be 0"),
        (True, {"query": "x", "documents": ["x"], "top_n": "two"}, "top_n"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(is_rerank, body, message):
    with pytest.raises(BadScoreRequest, match=message) as refused:
        read_pairs(json.dumps(body).encode(), is_rerank=is_rerank)
    answer = refuse(refused.value)
    assert answer.status == 400
    assert message in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b'{"text_1":"\\ud800","text_2":"a"}', b"\xff"])
def test_what_is_no_object_is_refused_and_never_raises_otherwise(body):
    for is_rerank in (True, False):
        with pytest.raises(BadScoreRequest):
            read_pairs(body, is_rerank=is_rerank)


def test_all_texts_are_embedded_by_one_request():
    pairs = read_pairs(b'{"query":"x","documents":["y",{"text":"xy"}]}', is_rerank=True)
    assert json.loads(embeddings_body(pairs)) == {"input": ["x", "y", "xy"], "encoding_format": "float"}


numbers = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
def test_a_cosine_is_symmetric_and_within_one(pairs):
    left, right = [list(side) for side in zip(*pairs, strict=True)]
    assert cosine(left, right) == cosine(right, left)
    assert abs(cosine(left, right)) <= 1 + 1e-9


def test_a_zero_vector_is_like_nothing():
    assert cosine(VECTORS["0"], VECTORS["x"]) == 0


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(0, 25))
def test_a_rerank_keeps_each_documents_score(scores, top_n):
    documents = [f"d{n}" for n in range(len(scores))]
    pairs = Pairs([], [], [], documents, top_n)
    body = msgspec.json.decode(shape_scores(pairs, scores, {}, "m", is_rerank=True, answer_id="a").body)
    ranked = [one["relevance_score"] for one in body["results"]]
    assert ranked == sorted(scores, reverse=True)[: top_n or None]
    assert all(one["document"]["text"] == documents[one["index"]] for one in body["results"])
