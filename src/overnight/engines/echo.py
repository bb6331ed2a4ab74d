"""Answers without a model: for tests, benchmarks and dry runs.

A request may script what happens to it, in `body.echo`: `{"delay": s, "after": n, "status": n, "size": bytes,
"tokens": n, "retry_after": s, "fault": name, "times": n}`. `after` waits until so many other requests are answered.
Faults: `error` raises inside the engine, `invalid` answers what is no JSON, `nan` answers NaN, `lost` ends the engine,
`hang` never answers, `refuse` gives a retryable failure. `times` lets the first n attempts at a request fail and the
next succeed.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from overnight.endpoints import ENDPOINTS
from overnight.errors import EngineLost
from overnight.options import option, parse_count, parse_duration
from overnight.records import CONNECTION_ERROR, Answer, Failure, Request, error_answer

from .base import Engine, EngineContext


@dataclass(frozen=True, kw_only=True)
class EchoOptions:
    """What the engine does where a request does not script it."""

    echo_delay: float = option(0.0, "Time for an answer, at least", "engine", metavar="TIME", parse=parse_duration)
    echo_jitter: float = option(
        0.0, "Further time for an answer, at random, at most", "engine", metavar="TIME", parse=parse_duration
    )
    echo_inflight: int = option(64, "How many requests keep it busy", "engine", metavar="N", parse=parse_count)
    echo_log: str | None = option(
        None, "A file that gets the custom_id of each request as it starts, one a line", "engine", metavar="PATH"
    )


class Script(msgspec.Struct, frozen=True):
    """What a request asks the engine to do with it."""

    delay: float | None = None
    after: int = 0
    status: int = 200
    size: int = 0
    tokens: int = 1
    retry_after: float | None = None
    fault: str | None = None
    times: int = 1_000_000_000


class _Body(msgspec.Struct, frozen=True):
    echo: Script | None = None


_decode_script = msgspec.json.Decoder(_Body).decode
_NOTHING = Script()


class EchoEngine(Engine):
    """Gives each request's body back; serves every endpoint and every model name."""

    name = "echo"
    summary = "answers without a model: tests, dry runs"
    options_type = EchoOptions
    endpoints = frozenset(ENDPOINTS)

    def __init__(self, context: EngineContext, options: EchoOptions | None = None) -> None:
        super().__init__(context, options)
        self._options = options or EchoOptions()
        self.max_inflight = self._options.echo_inflight
        self.inflight = 0
        self.peak = 0
        self.answered = 0
        self._attempts: Counter[int] = Counter()
        self._log: IO[str] | None = None

    @property
    def models(self) -> tuple[str, ...] | None:
        """Whatever was named with --served-model-name; else any."""
        return self.context.served or None

    async def __aenter__(self) -> Self:
        if self._options.echo_log:
            self._log = Path(self._options.echo_log).open("a", buffering=1, encoding="utf-8")  # noqa: ASYNC230, SIM115 - closed in __aexit__
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log:
            self._log.close()

    async def answer(self, request: Request) -> Answer | Failure:
        """Do what the request's script says; the loop is given up at least once."""
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)
        if self._log:
            self._log.write(f"{request.custom_id}\n")
        try:
            return await self._follow(request, self._read_script(request))
        finally:
            self.inflight -= 1
            self.answered += 1

    def _read_script(self, request: Request) -> Script:
        if b'"echo"' not in request.body:
            return _NOTHING
        try:
            return _decode_script(request.body).echo or _NOTHING
        except msgspec.MsgspecError:
            return _NOTHING

    async def _follow(self, request: Request, script: Script) -> Answer | Failure:
        delay = self._options.echo_delay if script.delay is None else script.delay
        if script.delay is None and self._options.echo_jitter:
            delay += random.random() * self._options.echo_jitter  # noqa: S311 - no secret
        await asyncio.sleep(delay)
        while self.answered < script.after:  # noqa: ASYNC110 - a count has no event, and few requests wait so
            await asyncio.sleep(0.01)
        if script.fault or script.status != 200:  # noqa: PLR2004
            self._attempts[request.index] += 1
            if self._attempts[request.index] <= script.times:
                return await self._fail(request, script)
            script = Script()
        usage = {"prompt_tokens": 1, "completion_tokens": script.tokens, "total_tokens": 1 + script.tokens}
        head = msgspec.json.encode({"object": "echo", "usage": usage})[:-1]
        filler = b',"filler":"%s"' % (b"x" * script.size) if script.size else b""
        return Answer(200, head + filler + b',"echo":' + request.body + b"}")

    async def _fail(self, request: Request, script: Script) -> Answer | Failure:
        match script.fault:
            case "error":
                raise RuntimeError("scripted error")
            case "invalid":
                return Answer(200, b"<html>no JSON</html>")
            case "nan":
                return Answer(200, b'{"logprob":NaN}')
            case "lost":
                raise EngineLost(self.name, f"scripted by {request.custom_id}")
            case "hang":
                await asyncio.Event().wait()
            case "refuse":
                return Failure(CONNECTION_ERROR, "scripted refusal", retryable=True, retry_after_s=script.retry_after)
        answer = error_answer(script.status, f"scripted status {script.status}", code=None)
        return Answer(answer.status, answer.body, retry_after_s=script.retry_after)

    def __repr__(self) -> str:
        return f"<EchoEngine: {self.inflight} inflight (peak {self.peak}), {self.answered} answered>"


def script(**facts: Any) -> dict[str, Any]:
    """A chat body that scripts the engine, for tests and benchmarks."""
    return {"messages": [{"role": "user", "content": "hi"}], "echo": facts}
