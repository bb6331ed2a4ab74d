"""Where a batch's rows go: paths, judged before anything costs, and the lock on them."""

import contextlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from .disk import Disk
from .errors import OutputRefused
from .folders import cache_folder
from .head import describe_holder
from .journal import Journal
from .lock import Locked, lock_file, unlock_file
from .options import RunOptions
from .output import RowFile, RowStream
from .source import is_descriptor

# What a run whose output is no file keeps in the cache folder: its process first.
_OWN = re.compile(r"([1-9][0-9]*)-[0-9a-f]{8}\.overnight\.(ahead(\.[1-9][0-9]*)?|input)")


class Target:
    """The output's path and those that go with it."""

    def __init__(self, options: RunOptions, environ: Mapping[str, str], disk: Disk) -> None:
        """What the options name; nothing is opened."""
        name = options.output_file
        self.name = name
        self.is_stream = name == "-" or is_descriptor(name) or _is_special(name)
        if name in {"/dev/stdout", "/dev/fd/1"}:
            name = "-"  # opened by that name, a file that standard output appends to would be written from its start
        self.path = Path(name if self.is_stream else os.path.realpath(name))
        self.errors = Path(os.path.realpath(options.error_file)) if options.error_file else None
        self._disk = disk
        self._cache = cache_folder(environ)
        own = self._cache / f"{os.getpid()}-{secrets.token_hex(4)}.overnight"
        self.journal_path = own.with_suffix(".overnight.ahead") if self.is_stream else Path(f"{self.path}.ahead")
        if options.output_tmp_dir:
            self.stage = Path(options.output_tmp_dir) / f"{own.name if self.is_stream else self.path.name}.input"
        else:
            self.stage = own.with_suffix(".overnight.input") if self.is_stream else Path(f"{self.path}.input")
        self._descriptor: int | None = None

    @property
    def staging(self) -> Path:
        """Where an input is staged until the first new row is ready: what an earlier run staged stays until then."""
        return self.stage if self.is_stream else Path(f"{self.stage}.new")

    def check(self) -> None:
        """Refuse what could not be written. Raises OutputRefused."""
        if not self.is_stream:
            _check_file(self.path, self.name)
        if self.errors:
            _check_file(self.errors, str(self.errors))
            if self.errors == self.path or _is_same(self.errors, self.path):
                raise OutputRefused(f"--error-file and the output are both {self.errors}. Nothing was touched")
        if self.is_stream:
            try:
                self.journal_path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputRefused(
                    f"Rows that wait for an earlier one need a place in {self.journal_path.parent}: "
                    f"{error.strerror or error}. Name another folder: OVERNIGHT_CACHE"
                ) from error

    def refuse_same(self, opened: os.stat_result, source: str) -> None:
        """Refuse to write over the input, by whatever name. Raises OutputRefused."""
        for path in (None if self.is_stream else self.path, self.errors, self.journal_path):
            if path and path.exists() and os.path.samestat(path.stat(), opened):
                raise OutputRefused(f"{path} and the input {source} are the same file. Nothing was touched")

    def lock(self) -> Journal:
        """The journal, locked. Raises OutputRefused where another run holds it."""
        try:
            self._descriptor = lock_file(self.journal_path, self._disk)
        except Locked as held:
            raise OutputRefused(
                f"{self.name} is being written by {describe_holder(held.text, held.pid)}. Nothing was touched. Wait "
                "for it, or choose another output"
            ) from held
        except OSError as error:
            raise OutputRefused(f"Cannot write {self.journal_path}: {error.strerror or error}") from error
        return Journal(self.journal_path, self._descriptor, self._disk)

    def unlock(self, *, is_finished: bool) -> None:
        """Give the lock back. The journal's first file goes where the batch is finished, or where nothing is in it."""
        if self._descriptor is None:
            return
        try:
            if is_finished or not os.fstat(self._descriptor).st_size:
                self._disk.remove(self.journal_path)
                self._disk.sync_folder(self.journal_path.parent)
        finally:
            unlock_file(self._descriptor, self._disk)
            self._descriptor = None

    def give_up(self) -> None:
        """Give the lock back after a refusal, which no failure here may hide."""
        with contextlib.suppress(OSError):
            self.unlock(is_finished=False)

    def clean_cache(self) -> None:
        """Remove what runs without an output file left in the cache folder when they were killed."""
        try:
            paths = list(self._cache.iterdir())
        except OSError:
            return  # there is none, or it is another's
        for path in paths:
            match = _OWN.fullmatch(path.name)
            if match and not _is_alive(int(match[1])):
                with contextlib.suppress(OSError, Locked):  # held: by a process that this one cannot see
                    first = path.with_name(path.name.partition(".overnight.")[0] + ".overnight.ahead")
                    descriptor = lock_file(first, self._disk)
                    try:
                        self._disk.remove(path)
                        self._disk.remove(first)
                    finally:
                        unlock_file(descriptor, self._disk)

    def make_file(self) -> RowFile:
        """The output, not yet open."""
        return RowStream(self.path, self._disk) if self.is_stream else RowFile(self.path, self._disk)

    def make_errors(self) -> RowFile | None:
        """The copy of failed rows, not yet open; None where none is wanted."""
        return RowFile(self.errors, self._disk) if self.errors else None

    @property
    def has_rows(self) -> bool:
        """Whether there is an output with anything in it."""
        return not self.is_stream and self.path.exists() and self.path.stat().st_size > 0


def _check_file(path: Path, name: str) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise OutputRefused(f"Cannot write {name}: there is no folder {folder}")
    if path.is_dir():
        raise OutputRefused(f"Cannot write {name}: it is a folder")
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        raise OutputRefused(f"Cannot write {name}: no permission")


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _is_special(name: str) -> bool:
    """Whether something is there that is neither a regular file nor a folder: a FIFO, a terminal."""
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return False  # what is wrong with it, the check says
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_alive(pid: int) -> bool:
    """Whether a process of that number runs here."""
    if sys.platform == "win32":
        return False  # os.kill would end it; the lock alone says
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
