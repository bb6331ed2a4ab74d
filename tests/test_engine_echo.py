"""The echo engine's scripts."""

import asyncio
import json

import pytest

from engine_contract import make_request
from overnight.engines.base import EngineContext
from overnight.engines.echo import EchoEngine, EchoOptions, script
from overnight.errors import EngineLost
from overnight.records import Answer, Failure, Request


def answer(body, engine=None):
    return asyncio.run((engine or EchoEngine(EngineContext())).answer(make_request(body)))


def test_it_gives_the_body_back_byte_for_byte():
    body = b'{ "n":1.0E+2,"a" : [1e400, "\\u0041"] }'
    assert answer(body).body.endswith(b',"echo":' + body + b"}")


def test_a_script_sets_status_size_and_tokens():
    assert answer(script(status=418)).status == 418
    body = json.loads(answer(script(size=1000, tokens=7)).body)
    assert len(body["filler"]) == 1000
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}


@pytest.mark.parametrize("odd", [b'{"echo":5}', b'{"echo":{"delay":"x"}}', b'{"echo":null}', b'"echo"', b'{"echo":'])
def test_what_is_no_script_is_echoed(odd):
    assert answer(odd).status == 200


def test_faults_are_what_they_say():
    with pytest.raises(RuntimeError, match="scripted error"):
        answer(script(fault="error"))
    with pytest.raises(EngineLost, match="scripted by r0"):
        answer(script(fault="lost"))
    assert answer(script(fault="refuse", retry_after=2)) == Failure(
        "connection_error", "scripted refusal", retryable=True, retry_after_s=2
    )
    for fault in ("invalid", "nan"):
        with pytest.raises(ValueError, match=r"Expecting value|NaN"):
            json.loads(answer(script(fault=fault)).body, parse_constant=_refuse)


def _refuse(constant):
    raise ValueError(constant)


def test_a_request_that_hangs_can_be_cancelled():
    async def work():
        engine = EchoEngine(EngineContext())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.answer(make_request(script(fault="hang"))), 0.05)
        assert repr(engine) == "<EchoEngine: 0 inflight (peak 1), 1 answered>"

    asyncio.run(work())


def test_times_counts_the_attempts_at_each_request_by_itself():
    engine = EchoEngine(EngineContext())
    body = script(status=503, times=1, retry_after=1.5)

    async def work():
        requests = [make_request(body, index=index) for index in (0, 1, 0, 1)]
        return [await engine.answer(request) for request in requests]

    answers = asyncio.run(work())
    assert [one.status for one in answers] == [503, 503, 200, 200]
    assert answers[0].retry_after_s == 1.5


def test_its_log_names_each_request_as_it_starts(tmp_path):
    path = tmp_path / "log"

    async def work():
        async with EchoEngine(EngineContext(), EchoOptions(echo_log=str(path), echo_jitter=0.001)) as engine:
            for index in range(3):
                assert isinstance(await engine.answer(make_request(b"{}", index=index)), Answer)

    asyncio.run(work())
    assert path.read_text() == "r0\nr1\nr2\n"


def test_it_takes_any_model_name_unless_some_were_given():
    assert EchoEngine(EngineContext()).models is None
    assert EchoEngine(EngineContext(served=("a",))).models == ("a",)
    assert EchoEngine(EngineContext()).max_inflight == 64
    assert isinstance(make_request(b"{}"), Request)
