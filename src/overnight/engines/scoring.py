"""/score and /rerank from the embeddings of a model that is no reranker, as vLLM does: cosine similarity. Pure.

The shapes are those of vLLM's score and rerank responses (Jina's rerank API for the latter).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from overnight.records import Answer, error_answer


class BadScoreRequest(ValueError):
    """A body that cannot be scored; says which field is wrong."""


class _ScoreBody(msgspec.Struct):
    model: str | None = None
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    query: Any = None
    top_n: int | None = None


# Under which names vLLM takes the two sides of a score.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class Pairs(msgspec.Struct):
    """What is to be compared: `left` and `right` are indexes into `texts`, a pair for each score."""

    texts: list[str]
    left: list[int]
    right: list[int]
    documents: list[str]
    top_n: int | None


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    model: str = ""
    usage: _Usage = msgspec.field(default_factory=_Usage)


def read_pairs(body: bytes, *, is_rerank: bool) -> Pairs:
    """What a body asks to compare. Raises BadScoreRequest."""
    try:
        fields = msgspec.json.decode(body, type=_ScoreBody)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadScoreRequest(str(error)) from error
    if is_rerank:
        lefts, rights = _texts(fields.query, "query"), _texts(fields.documents, "documents")
        if len(lefts) != 1:
            raise BadScoreRequest("query must be one text")
    else:
        has_both = [all(getattr(fields, name) is not None for name in names) for names in _SIDES]
        left_name, right_name = _SIDES[has_both.index(True) if True in has_both else 0]
        lefts, rights = _texts(getattr(fields, left_name), left_name), _texts(getattr(fields, right_name), right_name)
    if fields.top_n is not None and fields.top_n < 0:
        raise BadScoreRequest("top_n must be 0 (all) or more")
    if len(lefts) not in {1, len(rights)}:
        raise BadScoreRequest(f"{len(lefts)} texts cannot be paired with {len(rights)}: give one, or as many")
    texts = [*lefts, *rights]
    right = [len(lefts) + n for n in range(len(rights))]
    left = list(range(len(lefts))) if len(lefts) == len(rights) else [0] * len(rights)
    return Pairs(texts, left, right, rights, fields.top_n)


def _texts(value: object, field: str) -> list[str]:
    """One text or a list of them; a text may stand in an object with `text`."""
    values = value if isinstance(value, list) else [value]
    texts = [each.get("text") if isinstance(each, dict) else each for each in values]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadScoreRequest(f"{field} must be a text that is not empty, or a list of such texts")
    return texts  # type: ignore[return-value]


def embeddings_body(pairs: Pairs) -> bytes:
    """The /v1/embeddings request for all texts of a comparison."""
    return msgspec.json.encode({"input": pairs.texts, "encoding_format": "float"})


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0.0 where one is zero."""
    left_norm, right_norm = math.hypot(*left), math.hypot(*right)
    if not left_norm or not right_norm:
        return 0.0
    return sum((x / left_norm) * (y / right_norm) for x, y in zip(left, right, strict=True))


def score_answer(pairs: Pairs, embeddings: bytes, *, is_rerank: bool, answer_id: str) -> Answer:
    """The answer to a /score or /rerank request from the answer to its /v1/embeddings request."""
    answered = msgspec.json.decode(embeddings, type=_Embeddings)
    vectors = [each.embedding for each in sorted(answered.data, key=lambda each: each.index)]
    scores = [cosine(vectors[a], vectors[b]) for a, b in zip(pairs.left, pairs.right, strict=True)]
    return shape_scores(pairs, scores, answered.usage, answered.model, is_rerank=is_rerank, answer_id=answer_id)


def shape_scores(
    pairs: Pairs, scores: list[float], usage: object, model: str, *, is_rerank: bool, answer_id: str
) -> Answer:
    """Scores in the shape that their endpoint answers with."""
    shape: dict[str, Any] = {"id": answer_id, "model": model, "usage": usage}
    if is_rerank:
        results = [
            {"index": n, "document": {"text": pairs.documents[n]}, "relevance_score": score}
            for n, score in sorted(enumerate(scores), key=lambda pair: -pair[1])
        ]
        shape["results"] = results[: pairs.top_n or None]
    else:
        shape["object"] = "list"
        shape["data"] = [{"index": n, "object": "score", "score": score} for n, score in enumerate(scores)]
    return Answer(200, msgspec.json.encode(shape))


def refuse(error: BadScoreRequest) -> Answer:
    """A 400 that says what is wrong with the body."""
    return error_answer(400, str(error), code=None)
