"""One batch, from its files to its summary: what the command line and the Python functions call.

`prepare_batch` judges input, output and options, in plain code, before an engine's library is imported or a model is
loaded; `Batch.run` then opens the engine and runs what was prepared.
"""

import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .duplicates import Duplicates
from .endpoints import ENDPOINTS
from .engines import find_engine
from .engines.base import Engine, EngineContext
from .errors import BatchInvalid, UnknownOption, UsageError
from .folders import cache_folder
from .judge import Verdict, judge_source, number_lines, oversized_problem, report_problems
from .options import RunOptions, list_options, make, shaping
from .output import Output
from .parse import parse_request
from .progress import Clock, Counts, Summary, Watcher
from .records import Problem, Request, Row, RowKey, digest_line, digest_settings, problem_row
from .retry import RetryPolicy
from .routing import Router
from .runner import Pace, Runner
from .source import Source, open_source
from .window import Window

# Rows that wait for an earlier one are held in memory, so starts keep this close to the first unwritten row.
AHEAD_FACTOR = 16


def make_engine(
    options: RunOptions, engine_options: Mapping[str, object], environ: Mapping[str, str], watcher: Watcher
) -> Engine:
    """The engine that the options name, not yet open. Raises EngineMissing, UnknownOption, UsageError."""
    kind = find_engine(options.engine)
    context = EngineContext(
        model=options.model, served=options.served_model_name, log_path="-" if options.verbose else None,
        environ=environ, on_progress=watcher.on_download,
    )  # fmt: skip
    return kind(context, make(kind.options_type, engine_options, f" of the engine {options.engine}"))


def split_options(values: Mapping[str, object]) -> tuple[RunOptions, dict[str, object]]:
    """The run's options, and what is left for its engine. Raises UnknownOption where neither knows a name."""
    known = list_options(RunOptions)
    mine = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    options = make(RunOptions, mine)
    if rest:
        theirs = list_options(find_engine(options.engine).options_type)
        for name in rest:
            if name not in theirs:
                raise UnknownOption(name, [*known, *theirs], f" of overnight run or of the engine {options.engine}")
    return options, rest


def settings_of(engine: Engine, options: RunOptions) -> dict[str, Any]:
    """The settings that shape answers, for the digest in each row's id."""
    mine = {name: value for name, value in shaping(options).items() if name != "model"}
    return {**mine, **engine.identity, "engine_options": shaping(engine.options)}


class Batch:
    """A batch that was judged and may run; closing it gives its files back."""

    def __init__(
        self, options: RunOptions, engine: Engine, source: Source, verdict: Verdict, output: Output, watcher: Watcher
    ) -> None:
        self.options = options
        self.engine = engine
        self.source = source
        self.verdict = verdict
        self.output = output
        self.watcher = watcher
        self.key = RowKey(digest_settings(settings_of(engine, options)), secrets.token_hex(4))
        self.counts = Counts(total=verdict.requests)
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.source.__exit__(kind, error, at)

    def describe(self) -> str:
        """What will run, in a line."""
        endpoints = ", ".join(f"{count:,} x {url}" for url, count in self.verdict.endpoints.most_common(4))
        requests = f"{self.verdict.requests:,} requests ({endpoints or 'none'})"
        return f"{self.source.name}: {requests}; engine {self.options.engine}"

    async def run(self) -> Summary:
        """Open the engine, answer every request and write every row. Raises RunError; the output is then a prefix."""
        summary = Summary(self.counts, self.output.name, self.options.engine, self.options.model)
        self.output.open()
        completed = False
        try:
            if self.verdict.requests:
                await self._run_engine(summary)
            completed = True
        finally:
            self.output.close(completed=completed)
            self.watcher.on_end()
        summary.wall_s = time.monotonic() - self._started_at
        return summary

    async def _run_engine(self, summary: Summary) -> None:
        began = time.monotonic()
        async with self.engine as engine:
            summary.load_s = time.monotonic() - began
            summary.model = ", ".join(engine.models or ()) or None
            max_inflight = self.options.max_inflight or engine.max_inflight
            summary.max_inflight = max_inflight
            workers = min(max_inflight, self.verdict.requests)
            window: Window[Row] = Window(workers, AHEAD_FACTOR * max_inflight)
            clock = Clock(self.counts)
            self.watcher.on_start(clock)
            began = time.monotonic()
            try:
                await Runner(
                    self._items(), engine, window=window, router=make_router(engine, self.options), key=self.key,
                    pace=make_pace(self.options), write=self._write,
                    tick=lambda: self.watcher.on_tick(clock, window.inflight), tick_s=self.watcher.interval_s,
                ).run()  # fmt: skip
            finally:
                summary.run_s = time.monotonic() - began
                self.watcher.on_tick(clock, window.inflight)

    async def _write(self, rows: list[Row]) -> None:
        self.output.write(rows)
        self.counts.add(rows)

    def _items(self) -> Iterator[Request | Row]:
        """The input's requests in order; a line that is none as its row."""
        index = 0
        for block in self.source.blocks():
            if block.data is None:
                problem = oversized_problem(block, self.source.max_line_bytes)
                yield problem_row(problem, index, block.number, digest_line(b"%d" % block.oversized), self.key)
                index += 1
                continue
            for number, line in number_lines(block):
                yield _request_or_row(line, index, number, self.key)
                index += 1


def make_router(engine: Engine, options: RunOptions) -> Router:
    """What of the requests the open engine is asked."""
    models = None if options.ignore_request_model else engine.models
    return Router(engine.endpoints, models, any_path=engine.any_path)


def make_pace(options: RunOptions) -> Pace:
    """How requests are tried."""
    return Pace(timeout_s=options.timeout, retry=RetryPolicy(max_attempts=options.max_attempts))


def _request_or_row(line: bytes, index: int, number: int, key: RowKey) -> Request | Row:
    request = parse_request(line, index, number)
    if isinstance(request, Problem):
        return problem_row(request, index, number, digest_line(line), key)
    return request


def prepare_batch(
    options: RunOptions,
    engine_options: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str],
    watcher: Watcher | None = None,
) -> Batch:
    """Judge everything that can be judged before an engine is opened. Raises OvernightError; nothing is touched."""
    watcher = watcher or Watcher()
    for name in ("input_file", "output_file"):
        if not getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is needed: overnight run -i requests.jsonl -o answers.jsonl")
    output = Output(options.output_file, overwrite=options.overwrite, error_file=options.error_file)
    output.check()
    engine = make_engine(options, engine_options or {}, environ, watcher)
    stage = stage_path(options, output, environ)
    source = open_source(options.input_file, stage=stage, max_line_bytes=options.max_line_bytes)
    try:
        output.refuse_same(source.stat(), source.name)
        verdict = _judge(source, stage.parent, watcher)
        _refuse(verdict, options, engine)
        if verdict.requests:
            engine.check()
        _note(verdict, options, engine, watcher)
    except BaseException:
        source.__exit__(None, None, None)
        raise
    return Batch(options, engine, source, verdict, output, watcher)


def stage_path(options: RunOptions, output: Output, environ: Mapping[str, str]) -> Path:
    """Where an input that can be read only once is copied to: beside the output, unless told otherwise."""
    name = f"{output.path.name if not output.is_stream else 'overnight'}.input"
    if options.output_tmp_dir:
        return Path(options.output_tmp_dir) / name
    if output.is_stream:
        return cache_folder(environ) / f"{os.getpid()}.{name}"
    return output.path.with_name(name)


def _judge(source: Source, spill_folder: Path, watcher: Watcher) -> Verdict:
    size = source.stat().st_size
    duplicates = Duplicates(spill_folder)
    try:
        return judge_source(source, duplicates=duplicates, on_block=lambda done: watcher.on_pass(done, size))
    finally:
        duplicates.close()


def _refuse(verdict: Verdict, options: RunOptions, engine: Engine) -> None:
    """Refuse what can be seen to be wrong before the model loads."""
    if verdict.problem_count and options.on_invalid == "fail":
        report = report_problems(verdict, options.input_file)
        raise BatchInvalid(options.input_file, report, verdict.problem_count)
    served = engine.models
    if served is None or options.ignore_request_model or not verdict.models:
        return
    if None not in verdict.models and not any(name in verdict.models for name in served):
        asked = ", ".join(repr(name) for name, _ in verdict.models.most_common(3))
        raise UsageError(
            f"No line of {options.input_file} asks for the model that is served: the lines ask for {asked}, served "
            f"is {', '.join(map(repr, served))}. Serve all lines with it: --ignore-request-model. "
            f"Or give it the name that they ask for: --served-model-name"
        )


def _note(verdict: Verdict, options: RunOptions, engine: Engine, watcher: Watcher) -> None:
    """Say what is odd but runs."""
    if verdict.duplicates:
        watcher.on_note(
            f"{verdict.duplicates:,} lines repeat an earlier custom_id; their rows follow the input's order"
        )
    if verdict.unknown_keys:
        keys = ", ".join(sorted(verdict.unknown_keys)[:5])
        watcher.on_note(f"Unknown top-level keys are ignored: {keys}")
    if verdict.problem_count:
        watcher.on_note(f"{verdict.problem_count:,} lines are no requests; each gets an error row in its place")
    if engine.any_path:
        return
    for url, count in verdict.endpoints.items():
        if url not in ENDPOINTS:
            watcher.on_note(f"{count:,} lines ask for {url}, which is no endpoint: each gets a 404 row")
        elif url not in engine.endpoints:
            watcher.on_note(
                f"{count:,} lines ask for {url}, which {options.engine} does not serve: each gets a 400 row"
            )
    unserved = sum(count for name, count in verdict.models.items() if name and name not in (engine.models or (name,)))
    if unserved and not options.ignore_request_model:
        watcher.on_note(f"{unserved:,} lines ask for a model that is not served: each gets a 404 row")


# -- from Python ---------------------------------------------------------------------------------------------------


async def run_batch(
    input_file: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    **options: Any,
) -> Summary:
    """Run a file of requests and write every row, in order. The options are those of `overnight run`.

        summary = await overnight.run_batch("in.jsonl", "out.jsonl", engine="llama", max_inflight=8)

    Raises OvernightError before anything starts (input, output, options), and RunError when the run ends early:
    the output then holds whole rows for the first requests.
    """
    import asyncio

    values = {**options, "input_file": os.fspath(input_file), "output_file": os.fspath(output_file)}
    mine, theirs = split_options(values)
    batch = await asyncio.to_thread(prepare_batch, mine, theirs, environ=os.environ, watcher=watcher)
    with batch:
        return await batch.run()


def run(input_file: str | os.PathLike[str], output_file: str | os.PathLike[str], **options: Any) -> Summary:
    """`run_batch` for code without an event loop."""
    import asyncio

    return asyncio.run(run_batch(input_file, output_file, **options))


def open_engine(engine: str = "llama", **options: Any) -> Engine:
    """An engine for `async with`, to run lines one at a time without loading its model each time."""
    mine, theirs = split_options({**options, "engine": engine})
    made = make_engine(mine, theirs, os.environ, Watcher())
    made.check()
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
    and the rest goes on; blank lines are skipped. At most 16 x max_inflight rows wait for a slow consumer.
    """
    import asyncio

    made = make(RunOptions, options)
    key = RowKey(digest_settings(settings_of(engine, made)), secrets.token_hex(4))
    inflight = max_inflight or engine.max_inflight
    queue: asyncio.Queue[list[Row] | None] = asyncio.Queue(maxsize=1)
    runner = Runner(
        _read_lines(lines, key), engine, window=Window(inflight, AHEAD_FACTOR * inflight),
        router=make_router(engine, made), key=key, pace=make_pace(made), write=queue.put,
    )  # fmt: skip

    async def work() -> None:
        await runner.run()
        await queue.put(None)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        while rows := await queue.get():
            for row in rows:
                yield row
        await task


async def run_line(line: str | bytes, engine: Engine, **options: Any) -> Row:
    """Answer one line; its row comes back, an error row where the line is malformed. Raises EngineLost."""
    rows = [row async for row in run_lines([line], engine, **options)]
    if not rows:
        raise UsageError("The line is blank: there is no request in it")
    return rows[0]


def _read_lines(lines: Iterable[str | bytes], key: RowKey) -> Iterator[Request | Row]:
    index = 0
    for number, line in enumerate(lines, 1):
        data = (line.encode(errors="surrogatepass") if isinstance(line, str) else bytes(line)).removesuffix(b"\n")
        if data and not data.isspace():
            yield _request_or_row(data, index, number, key)
            index += 1
