"""One batch, from its files to its summary: what the command line and the Python functions call.

`prepare_batch` judges options, output and input, and finds what an earlier run left, in plain code, before an
engine's library is imported or a model is loaded; `Batch.run` then opens the engine and runs what is missing.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any, Self

from .again import RetryOutput, check_room, count_rows, find_failed
from .checks import list_notes, refuse_batch, refuse_options
from .disk import Disk
from .duplicates import Duplicates
from .engines import find_engine
from .engines.base import Engine
from .errors import EngineLost, OutputLost, OutputRefused, RunStopped, UsageError
from .expire import expire, plan_stop
from .files import BatchFiles
from .head import Head, InputFacts, from_facts, parse_head
from .items import Items, chosen_items, missing_items, read_lines
from .judge import Verdict, judge_source
from .options import RunOptions
from .output import Output, Sink, in_thread
from .progress import Clock, Counts, Summary, Watcher, plural
from .records import RowKey
from .runner import Runner
from .settings import check_engine, make_engine, make_pace, make_router, settings_of
from .source import Source, open_source
from .target import Target
from .window import Window


class Batch:
    """A batch that was judged and may run, once; closing it gives its files and its lock back."""

    def __init__(
        self, options: RunOptions, engine: Engine, verdict: Verdict, files: BatchFiles, watcher: Watcher, disk: Disk
    ) -> None:
        """What `prepare_batch` found."""
        self.options = options
        self.engine = engine
        self.verdict = verdict
        self.files = files
        self.source = files.source
        self.target = files.target
        self.watcher = watcher
        self.disk = disk
        self.key = RowKey(files.digest, secrets.token_hex(4))
        self.counts = files.earlier.counts  # of the whole batch
        self.again: Counts | None = None  # of the failed rows that run again
        self.runner: Runner | None = None
        self.summary = Summary(self.counts, self.target.name, options.engine, options.model)
        self._engines = contextlib.AsyncExitStack()
        self._is_open = False
        self._is_expiring = False  # the deadline came, and what did not run gets a row that says so
        self._stopped: RunStopped | None = None
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    @property
    def missing(self) -> int:
        """How many requests have no row, neither in the output nor in the journal."""
        earlier = self.files.earlier
        return self.verdict.requests - earlier.kept - (0 if earlier.is_retry else earlier.waiting)

    @property
    def keeps_input(self) -> bool:
        """Whether a staged input (`source.staged`) stays for the command that goes on."""
        return self.files.keeps_input

    # -- in words

    def describe(self) -> str:
        """What was found and what will run, in a line or two."""
        endpoints = ", ".join(f"{count:,} x {url}" for url, count in self.verdict.endpoints.most_common(4))
        found = f"{self.source.name}: {plural(self.verdict.requests, 'request')} ({endpoints or 'none'}); "
        found += f"engine {self.options.engine}"
        there = self._describe_earlier()
        return f"{found}\n{there}" if there else found

    def _describe_earlier(self) -> str:
        earlier, name, options = self.files.earlier, self.target.name, self.options
        if self.target.is_stream:
            return f"{name} is no file: nothing there can be locked, or continued"
        if earlier.is_anew:
            return f"{name} is replaced when the first new row is ready; until then it stays as it is"
        if not (earlier.kept or earlier.waiting or earlier.torn or earlier.torn_ahead):
            return ""
        there = f"{name} has {earlier.kept:,} rows"
        if earlier.torn:
            there += f" (behind them {earlier.torn:,} bytes that are no whole row are cut)"
        if earlier.is_retry:
            there += f", and {earlier.waiting:,} new answers wait in its journal to take failed rows' places"
        elif earlier.waiting:
            there += f", {earlier.waiting:,} more wait in its journal"
        if earlier.torn_ahead:
            there += f" ({earlier.torn_ahead:,} bytes of the journal are no whole row, and dropped)"
        if options.overwrite:
            there += "; the unfinished run was itself begun with --overwrite"
        if self.missing:
            left = "get a batch_expired row" if options.expire else "are left to run"
            return f"{there}: {self.missing:,} requests {left}"
        return f"{there}: every request has its row, and nothing is missing"

    def describe_end(self) -> str:
        """What a run that ended early leaves, in half a sentence."""
        if self.again:
            done = f"{self.again.written:,} of {self.again.total:,} failed rows were run again"
            return f"{done}; the new answers wait in the journal"
        return f"{self.counts.written:,} of {self.verdict.requests:,} rows are written, whole and in order"

    # -- a run and its phases

    async def run(self) -> Summary:
        """Open the engine, answer what is missing and write every row.

        Raises RunError; the same command then goes on.
        """
        self._task = asyncio.current_task()
        began = time.monotonic()
        timer = self._set_deadline()
        try:
            async with self._engines:
                if self.files.earlier.is_retry:
                    await self._merge()
                await self._run_missing()
                if self.options.retry_errors:
                    await self._run_failed()
            self.files.finish()
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        except OSError as error:  # an engine's own is EngineLost by now
            raise OutputLost(self.target.name, error) from error
        finally:
            if timer:
                timer.cancel()
            self.watcher.on_end()
            self.summary.counts = self.counts
            self.summary.wall_s = time.monotonic() - began
        return self.summary

    async def _run_missing(self) -> None:
        """Run the requests that have no row."""
        earlier = self.files.earlier
        if self._is_complete():
            return
        output: Output | None = None
        is_left = self.options.expire or not self.missing  # whether only the journal's rows, or expired ones, are left
        try:
            try:
                if not is_left:
                    await self._open_engine()
                    output = self._make_output()
                    await self._run(missing_items(self.source, earlier.kept, earlier.places, self.key), output)
            except (RunStopped, asyncio.CancelledError):
                if not self._is_told_to_expire():
                    raise
                is_left = True
            if is_left:
                output = output or self._make_output()
                await expire(output, self.source, earlier.places, earlier.kept, self.key)
        finally:
            if output:
                output.close()
        if output and output.window.written != self.verdict.requests:
            # The journal may not go: it holds what is missing.
            raise OutputLost(
                self.target.name, OSError(0, f"{output.window!r}, where {self.verdict.requests} rows should be")
            )

    def _is_complete(self) -> bool:
        """Whether there is nothing to write: no row, no tail to cut, no copy of failed rows, no file to make."""
        earlier = self.files.earlier
        is_whole = earlier.kept == self.verdict.requests and not earlier.torn
        return is_whole and bool(self.verdict.requests) and not self.target.errors

    async def _run_failed(self) -> None:
        """Run the failed rows again, and put the new ones in their places."""
        path, which = self.target.path, self.options.retry_errors
        failed = find_failed(path, read_lines(self.source), self.disk, which, self.key.run)
        if not failed:
            others = " (those that failed, failed for good: --retry-errors all)" if self.counts.failed else ""
            self.watcher.on_note(f"There is no failed row to run again{others if which == 'failed' else ''}")
            return
        check_room(path)
        self.watcher.on_note(f"{len(failed):,} failed rows run again")
        engine = await self._open_engine()
        self.again = Counts(total=len(failed))
        sink = RetryOutput(
            path,
            self.files.journal,
            Window(self.options.max_inflight or engine.max_inflight),
            begin=self.files.begin_again,
            on_written=self.again.add,
            disk=self.disk,
            sync_interval_s=self.options.sync_interval,
        )
        try:
            await self._run(chosen_items(self.source, failed, self.key), sink)
        finally:
            sink.close()
        self.files.earlier.places = self.files.journal.load(0, {self.key.settings})
        await self._merge()
        self.again = None

    async def _merge(self) -> None:
        """Let the journal's answers take their rows' places."""
        await in_thread(self.files.merge, self.files.earlier.places)
        self.counts = await in_thread(count_rows, self.target.path, self.disk, self.verdict.requests)
        await in_thread(self.files.copy_errors)

    async def _open_engine(self) -> Engine:
        """The engine, opened by the first phase that needs it."""
        if self._stopped:
            raise self._stopped
        if not self._is_open:
            began = time.monotonic()
            self.watcher.on_load(self.options.model or self.options.engine)
            try:
                await self._engines.enter_async_context(self.engine)
            except OSError as error:
                raise EngineLost(self.options.engine, f"it cannot be opened: {error}") from error
            self._is_open = True
            self.summary.load_s = time.monotonic() - began
            self.summary.model = next(iter(self.engine.models or ()), None)
        return self.engine

    async def _run(self, items: Items, sink: Sink) -> None:
        if self._stopped:
            raise self._stopped
        self.summary.max_inflight = sink.window.max_inflight
        clock = Clock(self.again or self.counts)
        self.watcher.on_start(clock)
        began = time.monotonic()
        self.runner = Runner(
            items,
            self.engine,
            sink,
            router=make_router(self.engine, self.options),
            key=self.key,
            pace=make_pace(self.options),
            tick=lambda: self.watcher.on_tick(clock, sink.window.inflight),
            tick_s=self.watcher.interval_s,
        )
        try:
            await self.runner.run()
            await sink.sync()
        except RunStopped:
            raise self._stopped or RunStopped() from None
        finally:
            self.runner = None
            self.summary.add_run(clock, time.monotonic() - began)
            self.watcher.on_tick(clock, sink.window.inflight)

    def _make_output(self) -> Output:
        options = self.options
        inflight = options.max_inflight or (self.engine.max_inflight if self._is_open else 1)
        ahead = options.max_ahead and max(options.max_ahead, inflight)
        file, errors = self.target.make_file(), self.target.make_errors()
        return Output(
            file,
            self.files.journal,
            Window(inflight, ahead, first=self.files.earlier.kept),
            begin=lambda: self.files.begin(file, errors),
            on_written=self.counts.add,
            disk=self.disk,
            sync_interval_s=options.sync_interval,
            errors=errors,
        )

    # -- an early end

    def stop(self, stopped: RunStopped, grace_s: float) -> None:
        """End the run with that error: nothing more starts, and what is in flight may finish within the grace."""
        if self._stopped is None or self._is_expiring:
            self._stopped = stopped
        self._is_expiring = False
        if self.runner:
            self.runner.stop(grace_s)
        elif self._task:
            self._task.cancel()

    def _set_deadline(self) -> asyncio.TimerHandle | None:
        """Stop in time for all to be on the disk at the deadline."""
        options = self.options
        if options.deadline is None:
            return None
        will_expire = options.on_deadline == "expire"
        wait_s, grace_s = plan_stop(options.deadline - time.time(), options.grace, self.missing if will_expire else 0)
        stopped = RunStopped("--deadline came before the last row")
        if wait_s <= 0:  # nothing is to start, nor the engine to be opened
            self._stopped, self._is_expiring = stopped, will_expire
            return None

        def come() -> None:
            if self._stopped is None:
                self.stop(stopped, grace_s)
                self._is_expiring = will_expire

        return asyncio.get_running_loop().call_later(wait_s, come)

    def _is_told_to_expire(self) -> bool:
        """Whether the deadline came and asks for rows in the place of those that did not run."""
        if self._is_expiring and self._task:
            while self._task.cancelling():  # the engine was still being opened
                self._task.uncancel()
        return self._is_expiring


def prepare_batch(
    options: RunOptions,
    engine_options: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str],
    watcher: Watcher | None = None,
    disk: Disk | None = None,
) -> Batch:
    """Judge everything that can be judged before an engine is opened. Raises OvernightError; nothing is touched."""
    watcher, disk = watcher or Watcher(), disk or Disk()
    target = Target(options, environ, disk)
    refuse_options(options, is_stream=target.is_stream)
    target.check()
    engine = make_engine(options, engine_options or {}, environ, watcher)
    if not target.has_rows:
        find_engine(options.engine)  # an output that is complete needs none
    target.clean_cache()
    try:
        return _find_batch(options, engine, target, watcher, disk)
    except OSError as error:
        raise OutputRefused(f"Cannot use the files of {target.name}: {error}. Nothing was touched") from error


def _find_batch(options: RunOptions, engine: Engine, target: Target, watcher: Watcher, disk: Disk) -> Batch:
    """Lock, open, judge and compare; whatever fails, all is given back. Raises OvernightError, OSError."""
    with contextlib.ExitStack() as undo:
        journal = target.lock()
        undo.callback(target.give_up)
        source = open_source(options.input_file, stage=target.staging, max_line_bytes=options.max_line_bytes)
        undo.callback(source.close)
        target.refuse_same(source.stat(), source.name)
        head, _, _ = parse_head(journal.read_head())
        verdict = _judge(source, target, head, watcher)
        refuse_batch(verdict, options, engine)
        settings = settings_of(engine, options)
        files = BatchFiles(options, settings, source, verdict, target=target, journal=journal, disk=disk)
        undo.callback(files.hold_input)
        files.find()
        if files.earlier.is_anew and options.expire:
            raise UsageError("--expire completes a run that stopped; with --overwrite its rows would go: leave one out")
        batch = Batch(options, engine, verdict, files, watcher, disk)
        if (batch.missing and not options.expire) or options.retry_errors:
            check_engine(options, engine)
        for note in list_notes(verdict, options, engine):
            watcher.on_note(note)
        undo.pop_all()
    return batch


def _judge(source: Source, target: Target, head: Head | None, watcher: Watcher) -> Verdict:
    """The first pass; its verdict comes from the journal where the input is the one that it names."""
    size = source.stat().st_size
    if head:
        done = 0
        for block in source.first_pass():
            done += len(block.data) if block.data is not None else block.oversized
            watcher.on_pass(done, size)
        if head.input == InputFacts(done, source.digest):
            return from_facts(head.verdict, done)
    duplicates = Duplicates(target.stage.parent)
    try:
        return judge_source(source, duplicates=duplicates, on_block=lambda done: watcher.on_pass(done, size))
    finally:
        duplicates.close()
