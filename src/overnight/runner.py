"""The runner: takes requests, keeps the engine busy, and hands rows on.

This is the only code of the core that starts tasks. `max_inflight` workers each take the next request as soon as
their last one is finished: no waves, and no task for each request. Rows go to a sink (the output), which one task
drains once for each turn of the loop in which a row finished.

A request's failure is a row. `EngineLost`, a lost output or a changed input ends the run: the workers are cancelled
and awaited, what had finished by then is written, and the first failure is raised. A stop ends it more gently: nothing
more starts, and what is in flight may still finish for a while.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .engines.base import Engine
from .errors import EngineLost, OutputLost, RunStopped
from .output import Sink, drain_all
from .records import ENGINE_ERROR, REQUEST_TIMEOUT, Answer, Failure, Request, Row, RowKey, answer_row, failure_row
from .retry import RetryPolicy, next_wait_s
from .routing import Router

# How many rows of an earlier run are passed over between two turns of the loop.
SKIP_SLICE = 1000


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How requests are tried: `timeout_s` bounds one attempt (0: no bound)."""

    timeout_s: float = 0.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Runner:
    """One run of requests through an open engine."""

    def __init__(
        self,
        items: Iterator[Request | Row | int],
        engine: Engine,
        sink: Sink,
        *,
        router: Router,
        key: RowKey,
        pace: Pace,
        tick: Callable[[], None] | None = None,
        tick_s: float = 1.0,
    ) -> None:
        """`items` come in order: requests, rows where there is nothing to ask, places where an earlier run finished.

        `tick` is called every `tick_s` seconds while requests run.
        """
        self._items = items
        self._engine = engine
        self._sink = sink
        self._router = router
        self._key = key
        self._pace = pace
        self._tick = tick
        self._tick_s = tick_s
        self._window = sink.window
        self._ready = asyncio.Event()  # a row has finished
        self._is_ending = False
        self._stop = asyncio.Event()
        self._is_cut_short = False  # requests were left for another run
        self._workers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Answer every request. Raises the run's first failure, and RunStopped where a stop left some."""
        try:
            async with asyncio.TaskGroup() as group:
                drain = group.create_task(self._drain(), name="drain")
                beside = [
                    group.create_task(self._keep_ticking(), name="ticker"),
                    group.create_task(self._sink.keep(), name="keeper"),
                ]
                workers = range(self._window.max_inflight)
                self._workers = [group.create_task(self._work(), name=f"worker {n}") for n in workers]
                await asyncio.wait(self._workers)
                self._is_ending = True
                self._ready.set()
                await drain
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as failures:
            first = _first(failures)
            if not isinstance(first, OutputLost):
                await drain_all(self._sink)
            raise first from None
        except asyncio.CancelledError:
            await drain_all(self._sink)
            raise
        if self._is_cut_short:
            raise RunStopped

    def stop(self, grace_s: float) -> None:
        """Start nothing more; what is in flight may finish within the grace, in seconds. May be called again."""
        self._stop.set()
        self._sink.room.set()
        if grace_s > 0:
            asyncio.get_running_loop().call_later(grace_s, self.stop, 0.0)
            return
        for worker in self._workers:
            if not worker.done():
                self._is_cut_short = True
                worker.cancel()

    async def _work(self) -> None:
        while (item := await self._next()) is not None:
            if isinstance(item, Row):
                row = item
                await asyncio.sleep(0)  # a file of nothing but bad lines must let the drain work too
            else:
                answered = await self._answer(item)
                if answered is None:
                    self._is_cut_short = True
                    return
                row = answered
            self._sink.finish(row)
            self._ready.set()

    async def _next(self) -> Request | Row | None:
        """The next request, when the window lets it start; None at the end."""
        skipped = 0
        while True:
            while self._window.is_full and not self._stop.is_set():
                self._sink.room.clear()
                await self._sink.room.wait()
            item = next(self._items, None)
            if item is None:
                return None
            if self._stop.is_set():
                self._is_cut_short = True
                return None
            if not isinstance(item, int):
                self._window.start()
                return item
            self._window.skip(item)
            skipped += 1
            if skipped % SKIP_SLICE == 0:
                self._ready.set()
                await asyncio.sleep(0)

    async def _answer(self, request: Request) -> Row | None:
        """A request's row, after as many attempts as are worth it; None where a stop came between two of them."""
        refusal = self._router.refuse(request)
        if refusal:
            await asyncio.sleep(0)
            return answer_row(request, refusal, self._key)
        attempt = 1
        while True:
            outcome = await self._attempt(request)
            wait_s = next_wait_s(self._pace.retry, attempt, outcome, random.random())  # noqa: S311 - no secret
            if wait_s is None:
                break
            if await self._is_stopped_within(wait_s):
                return None
            attempt += 1
        if isinstance(outcome, Answer):
            return answer_row(request, outcome, self._key)
        return failure_row(request, outcome, self._key)

    async def _attempt(self, request: Request) -> Answer | Failure:
        """What one sending of a request brings; only what ends the run is raised."""
        timeout_s = self._pace.timeout_s
        try:
            if not timeout_s:
                outcome = await self._engine.answer(request)
            else:
                async with asyncio.timeout(timeout_s) as timer:
                    outcome = await self._engine.answer(request)
        except EngineLost:
            raise
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise EngineLost(self._engine.name, f"it cancelled the request {request.custom_id!r} by itself") from None
        except TimeoutError as error:
            if timeout_s and timer.expired():
                return Failure(REQUEST_TIMEOUT, f"No answer within {timeout_s:g} s", retryable=True)
            return _engine_error(error)
        except Exception as error:  # noqa: BLE001 - whatever one request does to an engine is that request's row
            return _engine_error(error)
        if _is_cancelled():  # an engine may answer a cancellation: that is no answer to the request
            raise asyncio.CancelledError
        return outcome

    async def _is_stopped_within(self, seconds: float) -> bool:
        """Wait between two attempts; whether a stop ended the wait."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    async def _drain(self) -> None:
        """Put rows away as they finish, those of one turn of the loop together."""
        while not self._is_ending:
            await self._ready.wait()
            self._ready.clear()
            await drain_all(self._sink)
        await drain_all(self._sink)  # what finished while the drain before waited for a sync, or for a reader

    async def _keep_ticking(self) -> None:
        while self._tick:
            await asyncio.sleep(self._tick_s)
            self._tick()

    def __repr__(self) -> str:
        return f"<Runner of {self._engine!r}: {self._window!r}>"


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _engine_error(error: Exception) -> Failure:
    return Failure(ENGINE_ERROR, f"{type(error).__name__}: {error}")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
