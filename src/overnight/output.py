"""The output: rows in the order of their requests, at any moment a true prefix of the answers.

A row whose turn has come goes to the file, an early one to the journal, both in the turn of the loop in which it
finished; a task syncs them. Files are made, cut or emptied by `begin`, when the first new row is there and not before.

For editors, the order on disk: the journal's head is synced before the output is emptied or made; a journal's segment
goes only after a sync of the output that followed the copy of its rows; at the end the output is synced, then the
journal goes, then their folder is synced. A failed sync ends the run: one that succeeds later proves nothing. After any
failure nothing more is written (it would follow a hole) and no segment goes (its rows may have no copy).
"""

import abc
import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import ParamSpec, TypeVar

from .disk import Disk
from .errors import OutputLost
from .journal import Journal
from .records import Row
from .window import IN_HAND, NOWHERE, Window

P = ParamSpec("P")
T = TypeVar("T")

# One step of a drain, so that a long one never stalls the loop.
SLICE_BYTES = 1 << 20
SLICE_S = 0.01
# How long a drain waits for a sync before it looks at what has finished meanwhile.
HELD_S = 0.01


class Sink(abc.ABC):
    """Where the runner's rows go. `room` is set when the window may have room again."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.room = asyncio.Event()

    @abc.abstractmethod
    def finish(self, row: Row) -> None:
        """Take a finished row, at once."""

    @abc.abstractmethod
    async def drain(self) -> bool:
        """Put away what has finished; whether there is more to do comes back. Raises OutputLost."""

    @property
    def is_untouched(self) -> bool:
        """Whether no file was touched yet, and there is no row for which one had to be."""
        return False

    async def sync(self) -> None:  # noqa: B027 - most sinks have nothing to sync
        """Return when all that was put away is on the disk. Raises OutputLost."""

    async def keep(self) -> None:
        """Work beside the drain, until cancelled."""
        await asyncio.Event().wait()


async def drain_all(sink: Sink) -> None:
    """Put everything away that can be."""
    while not sink.is_untouched and await sink.drain():  # noqa: ASYNC110 - the loop turns once between two slices
        await asyncio.sleep(0)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what must not be left half done: a cancellation waits for its end."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class RowFile:
    """Rows in a file; what a failed write leaves of a row is cut."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.size = 0
        self.descriptor: int | None = None
        self._disk = disk

    def open(self, size: int) -> None:
        """Open for appending behind the first `size` bytes; the rest is cut."""
        self.descriptor = self._disk.open(self.path, create=True)
        self._disk.truncate(self.descriptor, size)
        self.size = size

    def append(self, data: bytes) -> None:
        """Write whole rows."""
        assert self.descriptor is not None
        try:
            self._disk.write(self.descriptor, data, self.size)
        except OSError:
            self._disk.truncate(self.descriptor, self.size)
            raise
        self.size += len(data)

    def sync(self) -> None:
        """Return when its rows are on the disk, under its name."""
        if self.descriptor is not None:
            self._disk.sync(self.descriptor)
            if not self._disk.is_at(self.descriptor, self.path):
                raise FileNotFoundError(errno.ENOENT, f"{self.path} was removed or replaced while the run went on")

    def close(self) -> None:
        """Close it."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)


class RowStream(RowFile):
    """Rows in what is no file: a pipe, a terminal. Nothing there can be cut, continued or synced."""

    def sync(self) -> None:
        """Nothing to do."""

    def open(self, size: int) -> None:  # noqa: ARG002 - a pipe has none
        """Open for writing."""
        name = str(self.path)
        number = "1" if name in {"-", "/dev/stdout"} else name.removeprefix("/dev/fd/")
        self.descriptor = os.dup(int(number)) if number.isdecimal() else os.open(self.path, os.O_WRONLY)

    def append(self, data: bytes) -> None:
        """Write whole rows."""
        assert self.descriptor is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]


class Output(Sink):
    """The output file and its journal, behind a window."""

    def __init__(
        self,
        file: RowFile,
        journal: Journal,
        window: Window,
        *,
        begin: Callable[[], None],
        on_written: Callable[[list[Row]], None],
        disk: Disk,
        sync_interval_s: float = 1.0,
        errors: RowFile | None = None,
    ) -> None:
        """`begin` makes the files ready and is called once, when there is a first row; `on_written` gets rows in order.

        `errors` gets a copy of the failed rows.
        """
        super().__init__(window)
        self.file = file
        self.journal = journal
        self._begin: Callable[[], None] | None = begin
        self._on_written = on_written
        self._disk = disk
        self._interval_s = sync_interval_s
        self._errors = errors
        self._fresh: dict[int, Row] = {}
        self._uncounted: list[Row] = []  # written, and with an interval of 0 not yet synced
        self._urgent = asyncio.Event()
        self._is_dirty = False
        self._is_kept = False
        self._failure: OSError | None = None
        self._thread = futures.ThreadPoolExecutor(1, "sync")
        self._syncing: futures.Future[OSError | None] | None = None
        self._begun = self._ended = 0  # syncs

    @property
    def is_untouched(self) -> bool:
        """Whether a run goes on that touched no file yet, and has no row for which one had to be."""
        return self._begin is not None and self._is_kept and not self.window.waiting

    def finish(self, row: Row) -> None:
        """Take a finished row; it is in a file after the next drain."""
        self.window.finish(row.index)
        self._fresh[row.index] = row

    def put(self, row: Row) -> None:
        """Take the row of a request that never started, or that was stopped."""
        if row.index < self.window.started:
            self.finish(row)
        else:
            self.window.skip(IN_HAND)
            self._fresh[row.index] = row

    async def drain(self) -> bool:
        """Write what has finished: rows whose turn has come (a slice of them), and the others to the journal."""
        self._refuse_if_lost()
        try:
            if self._begin:
                self._begin()
                self._begin = None
            rows = [] if self.journal.is_heavy else self._release()
            self._write(rows)
            self._put_aside()
            is_moving = self._move_rows()
        except OSError as error:
            raise self._lose(error) from error
        self._is_dirty = True
        self._uncounted += rows
        self._look_at_room()
        if self._interval_s == 0:
            await self.sync()
        self._count()
        if self.window.is_held:
            await self._step_sync(HELD_S)
        # Also what has finished during a wait: the runner may have looked for its last row before that.
        return is_moving or self.window.is_held or bool(self._fresh) or self.window.is_next_there

    def _look_at_room(self) -> None:
        self.window.is_held = self.journal.is_heavy
        if self.journal.wants_sync:
            self._urgent.set()
        self.room.set()

    def _count(self) -> None:
        rows, self._uncounted = self._uncounted, []
        self._on_written(rows)

    def _lose(self, error: OSError) -> OutputLost:
        self._failure = self._failure or error
        return OutputLost(self.file.path, self._failure)

    def _refuse_if_lost(self) -> None:
        if self._failure:
            raise self._lose(self._failure)

    def _release(self) -> list[Row]:
        """The rows whose turn has come, as many as make a slice."""
        rows: list[Row] = []
        size, until = 0, time.monotonic() + SLICE_S
        while size < SLICE_BYTES and (len(rows) & 63 != 63 or time.monotonic() < until):  # noqa: PLR2004
            index = self.window.written
            place = self.window.release()
            if place == NOWHERE:
                break
            row = self._fresh.pop(index) if place == IN_HAND else self._read_back(place)
            rows.append(row)
            size += len(row.data)
        return rows

    def _read_back(self, place: int) -> Row:
        try:
            return self.journal.take(place)
        except ValueError as error:
            raise _damaged(error) from error

    def _move_rows(self) -> bool:
        try:
            return self.journal.move_rows(self.window)
        except ValueError as error:
            raise _damaged(error) from error

    def _write(self, rows: list[Row]) -> None:
        if rows:
            self.file.append(b"".join([row.data for row in rows]))
        if self._errors:
            failed = [row.data for row in rows if row.code]
            if failed:
                self._errors.append(b"".join(failed))

    def _put_aside(self) -> None:
        """What has finished before its turn goes to the journal."""
        for index, row in self._fresh.items():
            self.window.move(index, self.journal.append(row))
        self._fresh.clear()
        self.journal.flush()

    async def keep(self) -> None:
        """Sync every so often; sooner where that would give much room back."""
        self._is_kept = True
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s or None):
                    await self._urgent.wait()
            self._urgent.clear()
            if self._is_dirty:
                await self.sync()

    async def sync(self) -> None:
        """Return when all that was written is on the disk. Raises OutputLost."""
        wanted = self._begun + 1  # one that runs already began before the last rows
        while self._ended < wanted:
            await self._step_sync()

    async def _step_sync(self, seconds: float | None = None) -> None:
        """Begin a sync where none runs, and wait for its end, no longer than so many seconds. Raises OutputLost."""
        self._refuse_if_lost()
        if self._syncing is None:
            self._is_dirty = False
            try:
                self._syncing = self._thread.submit(self._sync_all, self.journal.begin_sync())
            except OSError as error:
                raise self._lose(error) from error
            self._begun += 1
        syncing = self._syncing
        await asyncio.wait({asyncio.wrap_future(syncing)}, timeout=seconds)
        if syncing.done():
            self._end_sync(syncing)
        self._refuse_if_lost()

    def _end_sync(self, syncing: "futures.Future[OSError | None]") -> None:
        """Take what a sync brought, once."""
        if self._syncing is not syncing:
            return
        self._syncing = None
        self._ended += 1
        self._failure = self._failure or syncing.result()
        try:
            if not self._failure:
                self.journal.end_sync()
        except OSError as error:
            self._failure = error
        self._look_at_room()

    def _sync_all(self, descriptors: Sequence[int]) -> OSError | None:
        """In a thread; the files stay open until it is through."""
        try:
            self.file.sync()
            if self._errors:
                self._errors.sync()
            for descriptor in descriptors:
                self._disk.sync(descriptor)
            self.journal.sync_names()
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Sync what there is, and close the files; the journal stays. Raises OutputLost unless it was raised before."""
        was_lost = self._failure is not None
        self._thread.shutdown()
        if self._syncing:
            self._end_sync(self._syncing)
        with contextlib.ExitStack() as closing:
            for file in (self._errors, self.file, self.journal):
                if file:
                    closing.push(self._note_failure)
                    closing.callback(file.close)
            closing.push(self._note_failure)
            if not self._begin:
                failure = self._sync_all(self.journal.begin_sync())
                self._failure = self._failure or failure
                if not self._failure:
                    self.journal.end_sync()
                    self._count()
        if self._failure and not was_lost:
            raise self._lose(self._failure) from self._failure

    def _note_failure(self, _: object, error: BaseException | None, __: object) -> bool:
        """As the exit of a context: an OSError is noted, and goes no further."""
        if isinstance(error, OSError):
            self._failure = self._failure or error
            return True
        return False

    def __repr__(self) -> str:
        return f"<Output {self.file.path.name}: {self.window!r}, {self.journal!r}>"


def _damaged(error: ValueError) -> OSError:
    return OSError(f"its journal was damaged while the run went on ({error})")
