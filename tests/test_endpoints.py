"""endpoints: which urls are taken for which endpoint, and what a body must have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.endpoints import ENDPOINTS, REQUIRED_FIELDS, find_endpoint, missing_field, normalise_url


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_path_of_the_table_is_found_as_it_is(path):
    assert find_endpoint(path) is ENDPOINTS[path]


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path.startswith("/v1/")])
@pytest.mark.parametrize(
    "form",
    ["{bare}", "{bare}/", "/v1{bare}", "v1{bare}", "/v1{bare}///", "/v1{bare}?x=1", "/v1{bare}#a?b", "/v1{bare}/?x=/y",
     "https://api.openai.com/v1{bare}", "HTTP://h:1{bare}/", "https://user@h/v1{bare}?next=http://x/y"],
)  # fmt: skip
def test_v1_origin_trailing_slash_query_and_fragment_make_no_difference(path, form):
    assert find_endpoint(form.format(bare=path.removeprefix("/v1"))) is ENDPOINTS[path]


@pytest.mark.parametrize(
    "url",
    ["/v1/Chat/completions", "/V1/chat/completions", "/v1/v1/chat/completions", "/v2/chat/completions", "/foo/score",
     "/v1/v1/score", "/vx/score", "/v/score", "/v1/score/x", "//v1/chat/completions", "", "/", "?", "#", "/v1",
     "/v1/moderations", "/v1/chat/completions ", " /v1/chat/completions", "https://", "https://api.openai.com",
     "/v1/chat%2Fcompletions", "/v1/chat/completions\n", "/foo/http://h/v1/chat/completions", "/v\u0661/score"],
)  # fmt: skip
def test_what_is_not_exactly_an_endpoint_is_none(url):
    assert find_endpoint(url) is None


@pytest.mark.parametrize("name", ["/score", "/rerank"])
@pytest.mark.parametrize("prefix", ["", "/v1", "/v2", "/v10", "https://h:80/v2"])
def test_score_and_rerank_are_taken_under_one_version(prefix, name):
    assert find_endpoint(prefix + name) is ENDPOINTS[name]


def test_an_origin_is_dropped_only_where_a_url_begins():
    assert normalise_url("/a/http://host/b") == "/a/http://host/b"
    assert normalise_url("http://host/b") == "/b"


def test_a_url_of_any_length_is_judged():
    long = "/" + "x" * 1_000_000
    assert find_endpoint(long) is None
    assert find_endpoint("/v1/chat/completions?" + long) is ENDPOINTS["/v1/chat/completions"]


@given(st.text())
@settings(deadline=None)
def test_any_text_normalises_to_one_path_and_stays_there(url):
    path = normalise_url(url)
    assert path.startswith("/")
    assert "?" not in path
    assert "#" not in path
    if "://" not in path:
        assert normalise_url(path) == path
    found = find_endpoint(url)
    assert found is None or found is ENDPOINTS[found.path]


@pytest.mark.parametrize(
    ("path", "present", "missing"),
    [("/v1/chat/completions", set(), "messages"),
     ("/v1/chat/completions", {"prompt"}, "messages"),
     ("/v1/chat/completions", {"messages"}, None),
     ("/v1/completions", {"messages"}, "prompt"),
     ("/v1/responses", {"messages"}, "input"),
     ("/v1/embeddings", {"messages"}, None),
     ("/v1/embeddings", {"input"}, None),
     ("/v1/embeddings", set(), "input"),
     ("/score", {"text_1"}, "text_2"),
     ("/score", {"queries"}, "documents"),
     ("/score", {"queries", "items"}, None),
     ("/score", {"documents"}, "queries"),
     ("/score", {"data_2"}, "data_1"),
     ("/score", {"text_1", "queries", "items"}, None),
     ("/rerank", {"query"}, "documents"),
     ("/v1/audio/transcriptions", {"file"}, "file_url"),
     ("/v1/audio/translations", {"file_url"}, None)],
)  # fmt: skip
def test_the_missing_field_is_that_of_the_nearest_alternative(path, present, missing):
    assert missing_field(ENDPOINTS[path], present) == missing


def test_required_fields_lists_each_field_of_the_table_once():
    assert len(set(REQUIRED_FIELDS)) == len(REQUIRED_FIELDS)
    for endpoint in ENDPOINTS.values():
        assert missing_field(endpoint, set(REQUIRED_FIELDS)) is None
