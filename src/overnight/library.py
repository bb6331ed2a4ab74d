"""The Python functions: a batch from file to file, or lines through an engine that is open."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from .batch import prepare_batch
from .engines.base import Engine
from .errors import UsageError
from .items import request_or_row
from .options import RunOptions, make
from .output import Sink
from .progress import Summary, Watcher
from .records import Request, Row, RowKey, digest_settings
from .runner import Runner
from .settings import check_engine, make_engine, make_pace, make_router, settings_of, split_options
from .window import NOWHERE, Window

# Rows that wait for an earlier one are in memory here, so starts keep this close to the first that was not taken.
AHEAD_FACTOR = 16


class Stream(Sink):
    """Rows in order, for one reader; `rows` ends with None."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self.rows: asyncio.Queue[list[Row] | None] = asyncio.Queue(maxsize=1)
        self._finished: dict[int, Row] = {}

    def finish(self, row: Row) -> None:
        """Keep a row until its turn."""
        self.window.finish(row.index)
        self._finished[row.index] = row

    async def drain(self) -> bool:
        """Hand on the rows whose turn has come; waits for the reader."""
        ready: list[Row] = []
        while self._finished and self.window.release() != NOWHERE:
            ready.append(self._finished.pop(self.window.written - 1))
        if ready:
            await self.rows.put(ready)
        self.room.set()
        return False


async def run_batch(
    input_file: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    **options: Any,
) -> Summary:
    """Run a file of requests and write every row, in order; what an earlier run of it finished is kept.

        summary = await overnight.run_batch("in.jsonl", "out.jsonl", engine="llama", max_inflight=8)

    The options are those of `overnight run`. Raises OvernightError before anything starts (input, output, options),
    and RunError when the run ends early: the output then holds whole rows for the first requests, and the same call
    goes on.
    """
    values = {**options, "input_file": os.fspath(input_file), "output_file": os.fspath(output_file)}
    mine, theirs = split_options(values)
    batch = await asyncio.to_thread(prepare_batch, mine, theirs, environ=os.environ, watcher=watcher)
    with batch:
        return await batch.run()


def run(input_file: str | os.PathLike[str], output_file: str | os.PathLike[str], **options: Any) -> Summary:
    """`run_batch` for code without an event loop."""
    return asyncio.run(run_batch(input_file, output_file, **options))


def open_engine(engine: str = "llama", **options: Any) -> Engine:
    """An engine for `async with`, to run lines one at a time without loading its model each time."""
    mine, theirs = split_options({**options, "engine": engine})
    made = make_engine(mine, theirs, os.environ, Watcher())
    check_engine(mine, made)
    return made


async def run_lines(
    lines: Iterable[str | bytes],
    engine: Engine,
    *,
    max_inflight: int | None = None,
    **options: Any,
) -> AsyncIterator[Row]:
    """Answer lines, and yield one row for each in their order, as soon as its turn comes.

    `engine` is open (`async with overnight.open_engine("llama") as engine`). A malformed line becomes an error row
    and the rest goes on; blank lines are skipped. At most 16 x max_inflight rows wait for a slow reader. Raises
    EngineLost.
    """
    made = make(RunOptions, options)
    key = RowKey(digest_settings(settings_of(engine, made)), secrets.token_hex(4))
    inflight = max_inflight or engine.max_inflight
    stream = Stream(Window(inflight, AHEAD_FACTOR * inflight))
    runner = Runner(
        _read_lines(lines, key),
        engine,
        stream,
        router=make_router(engine, made),
        key=key,
        pace=make_pace(made),
    )

    async def work() -> None:
        try:
            await runner.run()
        finally:
            # A reader that has gone takes nothing more.
            if not is_abandoned:
                await stream.rows.put(None)

    is_abandoned = False
    task = asyncio.create_task(work(), name="run_lines")
    try:
        while rows := await stream.rows.get():
            for row in rows:
                yield row
        await task
    finally:
        is_abandoned = True
        task.cancel()
        while not task.done():
            if not stream.rows.empty():
                stream.rows.get_nowait()
            await asyncio.wait([task], timeout=0.1)


async def run_line(line: str | bytes, engine: Engine, **options: Any) -> Row:
    """Answer one line; its row comes back, an error row where the line is malformed. Raises EngineLost, UsageError."""
    rows = [row async for row in run_lines([line], engine, **options)]
    if not rows:
        raise UsageError("The line is blank: there is no request in it")
    return rows[0]


def _read_lines(lines: Iterable[str | bytes], key: RowKey) -> Iterator[Request | Row]:
    index = 0
    for number, line in enumerate(lines, 1):
        data = (line.encode(errors="surrogatepass") if isinstance(line, str) else bytes(line)).removesuffix(b"\n")
        if data and not data.isspace():
            yield request_or_row(data, index, number, key)
            index += 1
