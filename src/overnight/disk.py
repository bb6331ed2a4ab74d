"""The system calls that batch files are written with: the seam where tests let a disk fail.

Nothing here decides; each method is one call, or the loop that makes one whole. Errors are OSError.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

if sys.platform == "darwin":
    import fcntl

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Disk:
    """Files by descriptor; folders by path."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor to read and write."""
        return os.open(path, os.O_RDWR | _FLAGS | (os.O_CREAT if create else 0), 0o666)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write all of the data at an offset; what a failed call leaves behind it is for the caller to cut."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += _pwrite(descriptor, view[done:], offset + done)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes from an offset; fewer only at the file's end."""
        parts: list[bytes] = []
        while size > 0 and (part := _pread(descriptor, size, offset)):
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sync(self, descriptor: int) -> None:
        """Return when the file is on the disk (on macOS on its platters, which fsync alone does not promise)."""
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder are on the disk; Windows has no such call."""
        if os.name != "posix":
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def is_at(self, descriptor: int, path: Path) -> bool:
        """Whether a path still names the file of a descriptor."""
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            return False

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file to a size."""
        os.ftruncate(descriptor, size)

    def remove(self, path: Path) -> None:
        """Remove a name; it may be gone already."""
        path.unlink(missing_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file another's name, in one step."""
        source.replace(target)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)


def _lseek_pwrite(descriptor: int, data: "Buffer", offset: int) -> int:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


def _lseek_pread(descriptor: int, size: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


# Windows has no calls that write or read at an offset.
_pwrite: "Callable[[int, Buffer, int], int]" = getattr(os, "pwrite", _lseek_pwrite)
_pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _lseek_pread)
