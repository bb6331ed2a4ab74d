"""What every engine must do, as tests that an engine's own test file inherits.

    class TestMine(EngineContract):
        long_body = {...}                      # a chat body whose answer takes at least ten seconds
        @classmethod
        def make(cls): return MyEngine(...)    # a new engine, not yet open

The engine is opened once a class and lives on a loop of its own (`live`). An engine that judges bodies keeps
`refuses_bad_bodies`; one that gives back what it gets clears it.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest

from overnight.engines.base import Engine
from overnight.records import Answer, Failure, Request

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}

# A small body for each endpoint that an engine may serve.
SAMPLES: dict[str, dict[str, Any]] = {
    CHAT: HI,
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/score": {"queries": "q", "documents": ["d1", "d2"]},
    "/rerank": {"query": "q", "documents": ["d1", "d2"]},
}


def chat(**fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {**HI, **fields}


def messages(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A chat body with these roles and contents."""
    return chat(messages=[{"role": role, "content": content} for role, content in pairs])


def schema_body(schema: Any) -> dict[str, Any]:
    """A chat body whose answer must fit a schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": schema}})


def nested_schema(depth: int) -> bytes:
    """A chat body with a schema of objects in objects, deeper than Python's encoder goes."""
    body = json.dumps(schema_body({"x": 0})).encode()
    schema = b'{"type":"object","properties":{"p":' * depth + b'{"type":"string"}' + b"}}" * depth
    return body.replace(b'{"x": 0}', schema)


# Bodies that cannot be answered as they ask; the names are those of reference/edge-cases.md, 3d.
BAD_BODIES: dict[str, dict[str, Any] | bytes] = {
    "no messages": {"max_tokens": 4},
    "B5 empty messages": chat(messages=[]),
    "B5 content null": messages(("user", None)),
    "B5 unknown role": messages(("wizard", "hi")),
    "no role": chat(messages=[{"content": "hi"}]),
    "no content": chat(messages=[{"role": "user"}]),
    "messages is a text": chat(messages="hi"),
    "messages of numbers": chat(messages=[1]),
    "body is a list": b"[]",
    "body is a text": b'"x"',
    "body is cut": b'{"messages":[{"role":"user"',
    "B8 n 0": chat(n=0),
    "B8 n -1": chat(n=-1),
    "B8 n 10000": chat(n=10000),
    "n is a text": chat(n="two"),
    "B9 max_tokens -1": chat(max_tokens=-1),
    "B9 max_tokens 0": chat(max_tokens=0),
    "max_tokens is a text": chat(max_tokens="x"),
    "B12 unknown type": schema_body({"type": "objekt"}),
    "B12 schema is a text": schema_body("{}"),
    "B12 schema refers to nothing": schema_body({"$ref": "#/x"}),
    "B12 schema refers to a host": schema_body({"$ref": "http://127.0.0.1:1/x"}),
    "B12 schema of 1 MB": schema_body({"enum": ["x" * 40 + str(n) for n in range(20_000)]}),
    "B12 no schema": chat(response_format={"type": "json_schema"}),
    "response_format is a text": chat(response_format="json"),
    "response_format unknown": chat(response_format={"type": "xml"}),
    "B13 unknown tool": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nope"}}),
    "B13 unknown choice": chat(tools=[TOOL], tool_choice="sometimes"),
    "B13 a tool required of none": chat(tool_choice="required"),
    "tools is a text": chat(tools="x"),
    "temperature is a text": chat(temperature="hot"),
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":2}',
    "image for a text model": messages(("user", [{"type": "image_url", "image_url": {"url": "data:,"}}])),
}

# Bodies that an engine may answer or refuse; it stays up, and answers in a reasonable time.
ODD_BODIES: dict[str, dict[str, Any] | bytes] = {
    "B5 roles unordered": messages(("assistant", "a"), ("system", "b"), ("assistant", "c")),
    "B12 json_object": chat(response_format={"type": "json_object"}),
    "B12 recursion": schema_body({"type": "object", "properties": {"c": {"$ref": "#"}}}),
    "B12 unsupported keyword": schema_body({"type": "string", "pattern": "(?=x)a"}),
    "B12 500 nested": nested_schema(500),
    "B13 tool without parameters": chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="auto"),
    "B13 200 tools": chat(tools=[{**TOOL, "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(200)]),
    "tool history": chat(
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"q":"x"}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "y"},
        ]
    ),
    "B15 five stops": chat(stop=["a", "b", "c", "d", "e"]),
    "B15 bad logit_bias": chat(logit_bias={"99999999": 5}),
    "B15 seed 2^63": chat(seed=2**63),
    "B15 temperature 3": chat(temperature=3),
    "B15 top_p 0": chat(top_p=0),
    "B16 service fields": chat(
        priority=-1, cache_salt="s", user="u", metadata={"a": "b"}, store=True, service_tier="auto"
    ),
    "B17 unknown field": chat(frobnicate=[1, {"x": None}]),
    "B7 stream_options": chat(stream_options={"include_usage": True}),
    "NUL": messages(("user", "a\0b")),
    "10,000 lists in lists": b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"x":'
    + b"[" * 10_000
    + b"]" * 10_000
    + b"}",
}


def make_request(body: dict[str, Any] | bytes, endpoint: str = CHAT, index: int = 0) -> Request:
    """A request as the core hands it to an engine."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(index, index + 1, f"r{index}", endpoint, endpoint, data, None, False, "0" * 16)


def body_of(answer: Answer | Failure, status: int = 200) -> dict[str, Any]:
    """The body of an answer that must have this status."""
    assert isinstance(answer, Answer), answer
    assert answer.status == status, answer
    body: dict[str, Any] = json.loads(answer.body)
    return body


class Live:
    """An open engine, and the loop that it lives on."""

    def __init__(self, engine: Engine) -> None:
        self._runner = asyncio.Runner()
        self.engine: Any = self.run(engine.__aenter__())

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        return self._runner.run(asyncio.wait_for(work, timeout_s))

    def ask(self, body: dict[str, Any] | bytes, endpoint: str = CHAT) -> Any:
        """One answer."""
        return self.run(self.engine.answer(make_request(body, endpoint)))

    def ask_all(self, bodies: list[dict[str, Any]], endpoint: str = CHAT) -> list[Any]:
        """Answers to requests that are made at once."""

        async def ask() -> list[Any]:
            requests = [make_request(body, endpoint, index) for index, body in enumerate(bodies)]
            return await asyncio.gather(*map(self.engine.answer, requests))

        answers: list[Any] = self.run(ask())
        return answers

    def cancel_all(self, bodies: list[dict[str, Any]], after_s: float) -> float:
        """Make requests, cancel them, and say how long that took."""

        async def cancel() -> float:
            requests = [make_request(body, index=index) for index, body in enumerate(bodies)]
            tasks = [asyncio.create_task(self.engine.answer(request)) for request in requests]
            await asyncio.sleep(after_s)
            began = time.monotonic()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
            return time.monotonic() - began

        seconds: float = self.run(cancel())
        return seconds

    def close(self) -> None:
        self.run(self.engine.__aexit__(None, None, None))
        self._runner.close()


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens (Linux)."""
    links = [_target(link) for link in Path("/proc/self/fd").iterdir()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in _lines(Path(f"/proc/self/net/{table}"))]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the listing's own
        return ""


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []


class EngineContract:
    """The tests; see the module."""

    long_body: ClassVar[dict[str, Any]]
    refuses_bad_bodies: ClassVar[bool] = True
    after_cancel_s: ClassVar[float] = 5.0  # far below the time of `long_body`, far above a busy machine's hiccups

    @classmethod
    def make(cls) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        live = Live(cls.make())
        yield live
        live.close()

    def test_it_opens_and_closes_twice_in_one_process(self):
        for _ in range(2):
            live = Live(self.make())
            assert live.ask(HI).status == 200
            live.close()

    def test_closing_an_engine_that_never_opened_does_nothing(self):
        asyncio.run(self.make().__aexit__(None, None, None))

    def test_it_serves_every_endpoint_that_it_names(self, live):
        for endpoint in sorted(live.engine.endpoints & SAMPLES.keys()):
            body = body_of(live.ask(SAMPLES[endpoint], endpoint))
            assert body["usage"], endpoint

    def test_it_says_how_many_requests_keep_it_busy_and_answers_as_many_at_once(self, live):
        count = live.engine.max_inflight
        assert count >= 1
        for answer in live.ask_all([chat(user=f"u{n}") for n in range(count)]):
            assert body_of(answer)["usage"]["total_tokens"] > 0

    def test_more_requests_than_keep_it_busy_are_answered_too(self, live):
        answers = live.ask_all([chat(max_tokens=1)] * (4 * min(live.engine.max_inflight, 8)))
        assert {answer.status for answer in answers} == {200}

    @pytest.mark.parametrize("name", BAD_BODIES)
    def test_a_bad_body_is_answered_with_its_status_and_the_next_request_works(self, live, name):
        answer = live.ask(BAD_BODIES[name])
        assert isinstance(answer, Answer)
        if self.refuses_bad_bodies:
            assert answer.status == 400, answer
            assert json.loads(answer.body)["error"]["message"]
        assert live.ask(HI).status == 200

    @pytest.mark.parametrize("name", ODD_BODIES)
    def test_an_odd_body_is_answered_and_the_next_request_works(self, live, name):
        answer = live.ask(ODD_BODIES[name])
        assert isinstance(answer, Answer)
        assert answer.status in {200, 400}, answer
        if self.refuses_bad_bodies:
            json.loads(answer.body)
        assert live.ask(HI).status == 200

    def test_cancelling_ends_the_work_soon_and_the_engine_goes_on(self, live):
        count = live.engine.max_inflight
        expected = live.ask(HI)
        assert live.cancel_all([self.long_body] * count, after_s=0.5) < 1
        began = time.monotonic()
        answers = live.ask_all([chat(max_tokens=1)] * count)
        assert time.monotonic() - began < self.after_cancel_s
        assert {answer.status for answer in answers} == {200}
        after = live.ask(HI)
        assert body_of(after).get("choices") == body_of(expected).get("choices")

    def test_cancelling_before_anything_was_sent_does_no_harm(self, live):
        live.cancel_all([HI] * 8, after_s=0)
        assert live.ask(HI).status == 200
