"""routing: what the runner answers in the engine's place."""

import json

import pytest

from overnight.endpoints import ENDPOINTS
from overnight.parse import parse_request
from overnight.records import Request
from overnight.routing import Router

ALL = Router(ENDPOINTS, None)


def request(url="/v1/chat/completions", **body):
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"messages": [], "input": "", **body}}
    parsed = parse_request(json.dumps(line).encode(), 0, 1)
    assert isinstance(parsed, Request)
    return parsed


def error(answer):
    return json.loads(answer.body)["error"]


def test_what_is_served_is_the_engines_to_answer():
    assert ALL.refuse(request()) is None
    assert Router(["/v1/chat/completions"], ["m"]).refuse(request(model="m")) is None


@pytest.mark.parametrize("stream", [True, "true", "True", "1", 1, 1.0, "on", "yes", "T", "y"])
def test_a_streamed_request_is_refused_with_400(stream):
    answer = ALL.refuse(request(stream=stream))
    assert answer.status == 400
    assert error(answer)["code"] == "streaming_unsupported"
    assert error(answer)["param"] == "stream"


@pytest.mark.parametrize("stream", [False, None, "false", "", 0, 2, "off", [], {}, [True], -1])
def test_a_request_that_is_not_streamed_is_not_refused(stream):
    assert ALL.refuse(request(stream=stream)) is None


def test_an_unknown_url_is_404_and_lists_what_is_supported():
    answer = ALL.refuse(request("/v1/moderations"))
    assert answer.status == 404
    assert error(answer)["code"] == "invalid_url"
    supported = ", ".join(ENDPOINTS)
    assert error(answer)["message"] == (
        f"URL /v1/moderations is not a supported endpoint. Supported endpoints: {supported}"
    )


def test_an_endpoint_that_the_model_does_not_serve_is_400():
    answer = Router(["/v1/embeddings"], None).refuse(request())
    assert answer.status == 400
    assert error(answer)["message"] == "Model does not support endpoint: /v1/chat/completions"


def test_an_engine_that_knows_any_path_is_asked_for_all():
    router = Router([], None, any_path=True)
    assert router.refuse(request("/v1/moderations")) is None
    assert router.refuse(request()) is None
    assert router.refuse(request(stream=True)).status == 400


def test_an_unknown_model_is_404_and_names_what_is_served():
    answer = Router(ENDPOINTS, ["b", "a"]).refuse(request(model="m"))
    assert answer.status == 404
    assert error(answer)["code"] == "model_not_found"
    assert error(answer)["message"] == "The model 'm' does not exist. Served here: a, b"
    assert Router(ENDPOINTS, ["a"]).refuse(request(model="")).status == 404


def test_no_model_or_one_that_is_no_text_is_left_to_the_engine():
    router = Router(ENDPOINTS, ["a"])
    assert router.refuse(request()) is None
    assert router.refuse(request(model=None)) is None
    assert router.refuse(request(model=7)) is None


def test_a_model_name_that_stands_after_an_odd_one_still_counts():
    line = b'{"custom_id":"a","method":"POST","url":"/score","body":{"text_1":"","text_2":"","model":1,"model":"m"}}'
    assert Router(ENDPOINTS, ["a"]).refuse(parse_request(line, 0, 1)).status == 404
