"""One run at a time on one output: a lock on a file that goes with the process that holds it.

A POSIX record lock, and not flock: flock's belongs to the open file, which forked engine workers inherit, so that a
run that was killed could still seem to hold it. Its price: the lock goes when this process closes *any* descriptor of
the file. So the file is opened once here, and whoever reads it does so through that descriptor.
"""

import contextlib
import os
import struct
import sys
import threading
from pathlib import Path

from .disk import Disk

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


# Files that this process (named too: a fork inherits the set) holds: to itself a record lock is never in the way, and
# closing a second descriptor ends it.
_held: set[tuple[int, int, int]] = set()
_one_at_a_time = threading.Lock()
# The C structure flock, and where in it the holder's process stands.
_FLOCK = {"linux": ("hhqqi", 4), "darwin": ("qqihh", 2)}


class Locked(Exception):
    """The lock is held; `text` is what the locked file says, `pid` who holds it (None where the system cannot say)."""

    def __init__(self, text: str, pid: int | None) -> None:
        super().__init__(text)
        self.text = text
        self.pid = pid


def lock_file(path: Path, disk: Disk) -> int:
    """Open a file, made where it is missing, and lock it; its descriptor comes back. Raises Locked, OSError."""
    with _one_at_a_time:
        return _lock_file(path, disk)


def _lock_file(path: Path, disk: Disk) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            if _identity(path.stat()) in _held:
                raise Locked("", os.getpid())
        descriptor = disk.open(path, create=True)
        try:
            if not _try_lock(descriptor):
                raise Locked(disk.read(descriptor, 1 << 20, 0).decode(errors="replace"), _find_holder(descriptor))
            # The path may name another file by now: one that the last holder removed, and someone made anew.
            with contextlib.suppress(FileNotFoundError):
                identity = _identity(os.fstat(descriptor))
                if identity == _identity(path.stat()):
                    _held.add(identity)
                    return descriptor
        except BaseException:
            disk.close(descriptor)
            raise
        disk.close(descriptor)


def unlock_file(descriptor: int, disk: Disk) -> None:
    """Close a locked file, and so unlock it."""
    with _one_at_a_time:
        _held.discard(_identity(os.fstat(descriptor)))
        disk.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, 1 << 40, os.SEEK_SET)  # far behind what is read: locks there are mandatory
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _find_holder(descriptor: int) -> int | None:
    """The process that holds the lock on a file; None where the system does not say, or says 0 (another machine's)."""
    if sys.platform == "win32" or sys.platform not in _FLOCK:
        return None
    form, at = _FLOCK[sys.platform]
    asked = [0] * len(struct.unpack(form, bytes(struct.calcsize(form))))
    asked[0 if at == 4 else 3] = fcntl.F_WRLCK  # noqa: PLR2004 - l_type is first, or last but one
    with contextlib.suppress(OSError):
        return struct.unpack(form, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(form, *asked)))[at] or None
    return None
