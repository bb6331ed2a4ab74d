"""`--retry-errors`: failed rows run again, and each new answer takes its old row's place.

New rows go to the journal, whose head says `retry`. At the end old rows and new ones are merged into a file beside
the output, which then takes its name in one step: a crash leaves the old file or the new one, and in either case the
journal, from which the next run finishes the merge.
"""

import asyncio
import contextlib
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from .disk import Disk
from .errors import OutputLost
from .items import Line
from .journal import Journal
from .output import RowFile, Sink, in_thread
from .parse import parse_request
from .progress import Counts
from .records import (
    BATCH_EXPIRED,
    CONNECTION_ERROR,
    ENGINE_DIED,
    ENGINE_ERROR,
    INVALID_ANSWER,
    REQUEST_TIMEOUT,
    Request,
    Row,
)
from .retry import RETRYABLE_STATUSES
from .rows import RowReader, run_in
from .window import NOWHERE, Window

MERGE_BYTES = 1 << 20
_PASSING = frozenset({
    BATCH_EXPIRED, CONNECTION_ERROR, ENGINE_DIED, ENGINE_ERROR, INVALID_ANSWER, REQUEST_TIMEOUT,
    *(f"http_{status}" for status in RETRYABLE_STATUSES),
})  # fmt: skip


def may_run_again(code: str, which: str) -> bool:
    """Whether a row with that code is to run again: `failed` leaves out what a server refused, `all` does not."""
    if code in _PASSING or code.startswith("http_5"):
        return True
    return which == "all" and code.startswith("http_")


def find_failed(path: Path, lines: Iterator[Line], disk: Disk, which: str, run: str) -> "array[int]":
    """The indexes of an output's rows that are to run again: none that this run (`run`) wrote.

    `lines` are the input's, from the first: a line that is no request has nothing to run.
    """
    found = array("Q")
    for index, ((row_id, row), line) in enumerate(zip(RowReader(path, disk), lines, strict=False)):
        if not row.code or run_in(row_id) == run or not may_run_again(row.code, which):
            continue
        if line.text is not None and isinstance(parse_request(line.text, index, line.number), Request):
            found.append(index)
    return found


def count_rows(path: Path, disk: Disk, total: int) -> Counts:
    """The counts of a whole output."""
    counts = Counts(total=total)
    for _, row in RowReader(path, disk):
        counts.add([row])
    return counts


def copy_failed(path: Path | None, errors: RowFile, disk: Disk) -> None:
    """Make a file the copy of an output's failed rows (None: there is none yet); it stays open for more."""
    errors.open(0)
    if path:
        pending: list[bytes] = []
        for _, row in RowReader(path, disk):
            if row.code:
                pending.append(row.data)
            if len(pending) >= 1000:  # noqa: PLR2004 - rows in one write
                errors.append(b"".join(pending))
                pending = []
        errors.append(b"".join(pending))


class RetryOutput(Sink):
    """Every row goes to the journal: its place in the output is taken only in the merge."""

    def __init__(
        self, path: Path, journal: Journal, window: Window, *, begin: Callable[[], None],
        on_written: Callable[[list[Row]], None], disk: Disk, sync_interval_s: float,
    ) -> None:  # fmt: skip
        """`begin` makes the journal ready and is called once, when there is a first row."""
        super().__init__(window)
        self.has_begun = False
        self._path = path
        self._journal = journal
        self._begin = begin
        self._on_written = on_written
        self._disk = disk
        self._interval_s = sync_interval_s
        self._done = 0
        self._rows: list[Row] = []
        self._one_sync = asyncio.Lock()

    def finish(self, row: Row) -> None:
        """Take a finished row. Order means nothing here, so the window is told of the first that is in flight."""
        self.window.finish(self._done)
        self.window.release()
        self._done += 1
        self._rows.append(row)

    async def drain(self) -> bool:
        """Put what has finished into the journal."""
        rows, self._rows = self._rows, []
        try:
            if rows and not self.has_begun:
                self._begin()
                self.has_begun = True
            for row in rows:
                self._journal.append(row)
            self._journal.flush()
        except OSError as error:
            raise OutputLost(self._path, error) from error
        if self._interval_s == 0:
            await self.sync()
        self._on_written(rows)
        self.room.set()
        return False

    async def keep(self) -> None:
        """Sync every so often."""
        while True:
            await asyncio.sleep(self._interval_s or 1.0)
            await self.sync()

    async def sync(self) -> None:
        """Return when all that was written is on the disk. Raises OutputLost."""
        async with self._one_sync:
            try:
                await in_thread(self._sync_all, self._journal.begin_sync())
                self._journal.end_sync()
            except OSError as error:
                raise OutputLost(self._path, error) from error

    def _sync_all(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            self._disk.sync(descriptor)
        self._journal.sync_names()

    def close(self) -> None:
        """Sync what there is, and close the journal's files. Raises OutputLost."""
        try:
            self._sync_all(self._journal.begin_sync())
            self._journal.end_sync()
        except OSError as error:
            raise OutputLost(self._path, error) from error
        finally:
            self._journal.close()

    def __repr__(self) -> str:
        return f"<RetryOutput {self._path.name}: {self.window!r}, {self._journal!r}>"


def check_room(path: Path) -> None:
    """Refuse to begin what the merge would have no room for. Raises OutputLost."""
    size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
    if free < size:
        reason = OSError(0, f"--retry-errors needs {size:,} bytes beside it for the new file; {free:,} are free")
        raise OutputLost(path, reason)


def merge(path: Path, journal: Journal, places: "array[int]", disk: Disk) -> None:
    """Put the journal's rows in their places in the output, in one step. Raises OutputLost.

    `places` are those of the rows in the journal, from the first request on.
    """
    beside = merged_path(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(beside)
        descriptor = disk.open(beside, create=True)
        try:
            _copy_mode(descriptor, path)
            _write_merged(descriptor, path, journal, places, disk)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.replace(beside, path)
        disk.sync_folder(path.parent)
    except ValueError as error:
        raise OutputLost(path, OSError(0, f"what is to be merged is damaged ({error})")) from error
    except OSError as error:
        raise OutputLost(path, error) from error


def merged_path(path: Path) -> Path:
    """Where the new file is written before it takes the output's name."""
    return Path(f"{path}.merge")


def _copy_mode(descriptor: int, path: Path) -> None:
    status = path.stat()
    if hasattr(os, "fchown"):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, status.st_uid, status.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, status.st_mode & 0o7777)


def _write_merged(descriptor: int, path: Path, journal: Journal, places: "array[int]", disk: Disk) -> None:
    offset, pending, size = 0, [], 0
    reader, index = RowReader(path, disk), -1
    for index, (_, row) in enumerate(reader):
        place = places[index] if index < len(places) else NOWHERE
        data = row.data if place == NOWHERE else journal.peek(place)[1].data
        pending.append(data)
        size += len(data)
        if size >= MERGE_BYTES:
            disk.write(descriptor, b"".join(pending), offset)
            offset, pending, size = offset + size, [], 0
    if reader.torn:
        raise ValueError(f"the output has {reader.torn:,} bytes behind row {index + 1:,} that are no whole row")
    disk.write(descriptor, b"".join(pending), offset)
