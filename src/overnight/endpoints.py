"""The table of endpoints: their paths, and what a request's body must have. Routing reads it, and so do messages."""

import re
from functools import lru_cache
from typing import NamedTuple


class Endpoint(NamedTuple):
    """One path of the OpenAI API, or of vLLM's additions to it.

    `requires` lists alternatives: a body must have every field of at least one of them.
    """

    path: str
    requires: tuple[tuple[str, ...], ...]


# OpenAI's Batch API takes the first four; scoring, reranking and audio are vLLM's additions.
ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", (("messages",),)),
        Endpoint("/v1/completions", (("prompt",),)),
        Endpoint("/v1/responses", (("input",),)),
        Endpoint("/v1/embeddings", (("input",), ("messages",))),
        Endpoint(
            "/score", (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
        ),
        Endpoint("/rerank", (("query", "documents"),)),
        Endpoint("/v1/audio/transcriptions", (("file_url",),)),
        Endpoint("/v1/audio/translations", (("file_url",),)),
    )
}

REQUIRED_FIELDS = tuple(
    dict.fromkeys(field for endpoint in ENDPOINTS.values() for names in endpoint.requires for field in names)
)

_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_VERSIONED = re.compile(r"/v[0-9]+(/score|/rerank)")
_MAX_REMEMBERED = 1000  # a file may give each line a url of a megabyte


def normalise_url(url: str) -> str:
    """The path that a request's url names: origin, query, fragment and trailing slashes dropped, case kept."""
    origin = _ORIGIN.match(url) if "://" in url else None
    path = url[origin.end() :] if origin else url
    path = path.partition("#")[0].partition("?")[0].rstrip("/")
    return path if path.startswith("/") else f"/{path}"


def find_endpoint(url: str) -> Endpoint | None:
    """The endpoint that a url names, or None: with or without /v1; /score and /rerank under one /vN too."""
    return _find_endpoint(url) if len(url) <= _MAX_REMEMBERED else _find_endpoint.__wrapped__(url)


@lru_cache(maxsize=1024)
def _find_endpoint(url: str) -> Endpoint | None:
    path = normalise_url(url)
    versioned = _VERSIONED.fullmatch(path)
    if versioned:
        path = versioned[1]
    return ENDPOINTS.get(path) or ENDPOINTS.get(f"/v1{path}")


def missing_field(endpoint: Endpoint, present: frozenset[str] | set[str]) -> str | None:
    """The first field that a body lacks, by the alternative that it comes nearest to; None when it has one whole."""
    lacking = [[name for name in names if name not in present] for names in endpoint.requires]
    nearest = min(lacking, key=len)
    return nearest[0] if nearest else None
