"""A folder of this user alone for a Unix socket, which does not outlive its process for long.

For editors: a process that is killed leaves its folder behind. Each holds a lock on its own as long as it lives, and
the next one to come removes those that nobody holds. The lock is `flock`, which works on folders and, unlike a process
id in the name, also between containers that share /tmp.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "overnight-"
LONGEST = 103  # bytes in a socket's path on macOS; Linux takes 107
YOUNG_S = 60  # so old must a folder be that is removed: a younger one may not have its lock yet


class SocketFolder:
    """A new folder, mode 0700, as short as a socket's path must be; removed when closed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        parent = _choose_parent(environ)
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._held = _lock(self.path)

    @property
    def socket(self) -> str:
        """The path for a socket."""
        return str(self.path / "llama.sock")

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __repr__(self) -> str:
        return f"<SocketFolder {self.path}>"


def _choose_parent(environ: Mapping[str, str]) -> str:
    """$XDG_RUNTIME_DIR, which the system empties, else the folder for temporary files; /tmp where both are too long."""
    room = LONGEST - len(f"/{PREFIX}12345678/llama.sock")
    for parent in (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if len(os.fsencode(parent)) <= room and Path(parent).is_absolute() and os.access(parent, os.W_OK | os.X_OK):
            return parent
    return "/tmp"  # noqa: S108 - mkdtemp makes a folder of its own there


def _lock(folder: Path) -> int | None:
    """Hold the folder's lock; None where another does, or where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    held = None
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if held is not None:
            os.close(held)
        return None
    return held


def _sweep(parent: str) -> None:
    """Remove the folders of processes that are gone."""
    if sys.platform == "win32":
        return
    for folder in Path(parent).glob(f"{PREFIX}????????"):
        with contextlib.suppress(OSError):
            seen = folder.lstat()
            if seen.st_uid != os.getuid() or time.time() - seen.st_mtime < YOUNG_S:
                continue
            held = _lock(folder)
            if held is not None:
                if {one.name for one in folder.iterdir()} <= {"llama.sock"}:  # others may use such a name too
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(held)
