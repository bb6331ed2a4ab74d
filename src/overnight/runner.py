"""The runner: takes requests, keeps the engine busy, and gives rows to the output in order.

This is the only code of the core that starts tasks. `max_inflight` workers each take the next request as soon as
their last one is finished: no waves, and no task for each request. A row that is finished waits in the window until
its turn comes; one task drains what is ready, once for each turn of the loop.

A request's failure is a row. `EngineLost`, a lost output or a changed input ends the run: the workers are cancelled
and awaited, what had finished by then is written, and the first failure is raised.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from .engines.base import Engine
from .errors import EngineLost
from .records import ENGINE_ERROR, REQUEST_TIMEOUT, Answer, Failure, Request, Row, RowKey, answer_row, failure_row
from .retry import RetryPolicy, next_wait_s
from .routing import Router
from .window import Window

# How many rows one step of the drain takes: with rows of 2 KB about 1 MiB.
DRAIN_SLICE = 512


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How requests are tried: `timeout_s` bounds one attempt (0: no bound)."""

    timeout_s: float = 0.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Runner:
    """One run of requests through an open engine."""

    def __init__(
        self,
        items: Iterator[Request | Row],
        engine: Engine,
        *,
        window: Window[Row],
        router: Router,
        key: RowKey,
        pace: Pace,
        write: Callable[[list[Row]], Awaitable[None]],
        tick: Callable[[], None] | None = None,
        tick_s: float = 1.0,
    ) -> None:
        """`items` are the requests in order, or rows where there is nothing to ask; `write` takes rows in order.

        `tick` is called every `tick_s` seconds while requests run.
        """
        self._items = items
        self._engine = engine
        self._router = router
        self._key = key
        self._pace = pace
        self._write = write
        self._tick = tick
        self._tick_s = tick_s
        self.window = window
        self._ready = asyncio.Event()  # a row's turn has come
        self._room = asyncio.Event()  # the window may have room again
        self._is_ending = False

    async def run(self) -> None:
        """Answer every request. Raises the run's first failure."""
        try:
            async with asyncio.TaskGroup() as group:
                drain = group.create_task(self._drain(), name="drain")
                ticker = group.create_task(self._keep_ticking(), name="ticker")
                workers = [group.create_task(self._work(), name=f"worker {n}") for n in range(self.window.max_inflight)]
                await asyncio.wait(workers)
                self._is_ending = True
                self._ready.set()
                await drain
                ticker.cancel()
        except BaseExceptionGroup as failures:
            await self._write_finished()
            raise _first(failures) from None
        except asyncio.CancelledError:
            await self._write_finished()
            raise

    async def _work(self) -> None:
        while (item := await self._next()) is not None:
            if isinstance(item, Row):
                row = item
                await asyncio.sleep(0)  # a file of nothing but bad lines must let the drain work too
            else:
                row = await self._answer(item)
            if self.window.finish(row.index, row):
                self._ready.set()

    async def _next(self) -> Request | Row | None:
        """The next request, when the window lets it start; None at the end."""
        while self.window.is_full:
            self._room.clear()
            await self._room.wait()
        item = next(self._items, None)
        if item is not None:
            self.window.start()
        return item

    async def _answer(self, request: Request) -> Row:
        """A request's row, after as many attempts as are worth it."""
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
            await asyncio.sleep(wait_s)
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

    async def _drain(self) -> None:
        """Write rows as their turn comes, those of one turn of the loop together."""
        while not self._is_ending or self.window.waiting:
            await self._ready.wait()
            self._ready.clear()
            await self._write_finished()

    async def _write_finished(self) -> None:
        while rows := self.window.release(DRAIN_SLICE):
            await self._write(rows)
            self._room.set()

    async def _keep_ticking(self) -> None:
        while self._tick:
            await asyncio.sleep(self._tick_s)
            self._tick()

    def __repr__(self) -> str:
        return f"<Runner of {self._engine!r}: {self.window!r}>"


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _engine_error(error: Exception) -> Failure:
    return Failure(ENGINE_ERROR, f"{type(error).__name__}: {error}")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
