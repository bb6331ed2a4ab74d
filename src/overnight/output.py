"""The output file: the only writer of batch files.

Rows arrive in the order of the requests and are written whole: a write that the disk takes only in part is taken
back before the error is raised, so that the file stays a true prefix of the answers.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from .errors import InputError, OutputLost, OutputRefused
from .records import Row
from .source import is_descriptor

# Rows of one turn are written together, but never more than this at once.
MAX_WRITE_BYTES = 1 << 20


class Output:
    """Appends rows to a file; nothing that was there is touched before the first row."""

    def __init__(self, path: str, *, overwrite: bool = False, error_file: str | None = None) -> None:
        self.name = path
        self.is_stream = path == "-" or is_descriptor(path) or _is_special(path)
        self.path = Path(path if self.is_stream else os.path.realpath(path))
        self.rows = 0
        self.bytes = 0
        self._overwrite = overwrite
        self._errors = Output(error_file, overwrite=True) if error_file else None
        self._descriptor: int | None = None

    def check(self) -> None:
        """Refuse what could not be written, before anything costs. Raises OutputRefused."""
        if self._errors:
            self._errors.check()
        if self.is_stream:
            return
        folder = self.path.parent
        if not folder.is_dir():
            raise OutputRefused(f"Cannot write {self.name}: there is no folder {folder}")
        if self.path.is_dir():
            raise OutputRefused(f"Cannot write {self.name}: it is a folder")
        if not os.access(self.path if self.path.exists() else folder, os.W_OK):
            raise OutputRefused(f"Cannot write {self.name}: no permission")
        if self.path.exists() and self.path.stat().st_size and not self._overwrite:
            raise OutputRefused(f"{self.name} is there already. Replace it with --overwrite, or choose another output")

    def refuse_same(self, opened: os.stat_result, name: str) -> None:
        """Refuse to write over a file that is read, by whatever name. Raises OutputRefused."""
        if self._errors:
            self._errors.refuse_same(opened, name)
        if not self.is_stream and self.path.exists() and os.path.samestat(self.path.stat(), opened):
            raise OutputRefused(f"{self.name} and the input {name} are the same file. Nothing was written")

    def open(self) -> Self:
        """Open for appending; what is there stays until the first row. Raises OutputLost."""
        try:
            if self.name == "-":
                self._descriptor = os.dup(1)
            else:
                flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
                self._descriptor = os.open(self.path, flags if self.is_stream else flags | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputLost(self.name, error) from error
        if self._errors:
            self._errors.open()
        return self

    def write(self, rows: Iterable[Row]) -> None:
        """Append whole rows, and the failed ones to the error file too. Raises OutputLost."""
        pending: list[bytes] = []
        size = 0
        for row in rows:
            pending.append(row.data)
            size += len(row.data)
            if size >= MAX_WRITE_BYTES:
                self._append(pending)
                pending, size = [], 0
            if row.code and self._errors:
                self._errors._append([row.data])  # noqa: SLF001 - one of its own kind
        if pending:
            self._append(pending)

    def _append(self, rows: list[bytes]) -> None:
        assert self._descriptor is not None
        data = memoryview(b"".join(rows))
        try:
            if not self.rows and not self.is_stream:
                os.ftruncate(self._descriptor, 0)
            done = 0
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self._take_back()
            raise OutputLost(self.name, error) from error
        self.rows += len(rows)
        self.bytes += len(data)

    def _take_back(self) -> None:
        """Cut what a failed write left of a row."""
        if self._descriptor is not None and not self.is_stream:
            os.ftruncate(self._descriptor, self.bytes)

    def close(self, *, completed: bool) -> None:
        """Sync and close. A completed batch without a row leaves an empty file. Raises OutputLost."""
        if self._errors:
            self._errors.close(completed=completed)
        if self._descriptor is None:
            return
        try:
            if not self.is_stream:
                if completed and not self.rows:
                    os.ftruncate(self._descriptor, 0)
                os.fsync(self._descriptor)
        except OSError as error:
            raise OutputLost(self.name, error) from error
        finally:
            os.close(self._descriptor)
            self._descriptor = None
        if not completed and not self.rows and not self.is_stream and not self.path.stat().st_size:
            self.path.unlink()  # made by this run, and nothing came of it

    def __repr__(self) -> str:
        return f"<Output {self.name}: {self.rows} rows, {self.bytes} bytes>"


def _is_special(path: str) -> bool:
    """Whether something is there that is neither a regular file nor a folder: a FIFO, a terminal."""
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InputError(path, error.strerror or str(error)) from error
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
