"""A folder in which batches are run, continued and broken: in this process, or in a child that can be killed."""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from conftest import COMMAND, child_environ, ids_of, read_rows, request_line
from overnight.batch import Batch, prepare_batch
from overnight.disk import Disk
from overnight.errors import RunStopped
from overnight.progress import Summary, Watcher
from overnight.settings import split_options

QUICK = ("--no-progress", "--engine", "echo")


class DyingDisk(Disk):
    """A disk that fails at its nth change, and at each from then on: what a crash at that moment leaves."""

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at
        self.changes = 0
        self.last = ""

    def _change(self, what: str) -> None:
        self.changes += 1
        if self.changes >= self.dies_at:
            raise OSError(5, "the disk died")
        self.last = what

    def open(self, path: Path, *, create: bool = False) -> int:
        if create and not path.exists():
            self._change(f"create {path.name}")
        return super().open(path, create=create)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        self._change("write")
        super().write(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        self._change("truncate")
        super().truncate(descriptor, size)

    def remove(self, path: Path) -> None:
        self._change(f"remove {path.name}")
        super().remove(path)

    def replace(self, source: Path, target: Path) -> None:
        self._change(f"replace {target.name}")
        super().replace(source, target)


class Notes(Watcher):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


class Ground:
    """in.jsonl and out.jsonl in a folder, and the engine's log of what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.head = folder / "out.jsonl.ahead"
        self.log = folder / "engine.log"
        self.watcher = Notes()
        self.described = ""
        self.batch: Batch | None = None
        self.children: list[subprocess.Popen[bytes]] = []

    def write(self, lines: Iterable[str | bytes], end: bytes = b"\n") -> None:
        """The input: these lines."""
        data = [line.encode() if isinstance(line, str) else line for line in lines]
        self.input.write_bytes(b"\n".join(data) + end)

    def lines(self) -> list[bytes]:
        return self.input.read_bytes().splitlines()

    def prepare(self, disk: Disk | None = None, **options: Any) -> Batch:
        values = {
            "input_file": str(self.input), "output_file": str(self.output), "engine": "echo",
            "echo_log": str(self.log), "sync_interval": 10, **options,
        }  # fmt: skip
        mine, theirs = split_options(values)
        self.watcher = Notes()
        environ = {"OVERNIGHT_CACHE": str(self.folder / "cache")}
        return prepare_batch(mine, theirs, environ=environ, watcher=self.watcher, disk=disk)

    def run(self, **options: Any) -> Summary:
        """Run to the end; raises what ends it early."""
        self.log.write_text("")
        with self.prepare(**options) as batch:
            self.described, self.batch = batch.describe(), batch
            return asyncio.run(batch.run())

    def run_until(self, finished: int, *, inflight: int = 0, **options: Any) -> None:
        """Run, and stop hard when the engine has answered so many, and has so many in flight."""

        async def work(batch: Batch) -> None:
            task = asyncio.create_task(batch.run())
            engine = batch.engine
            while not task.done() and (engine.answered < finished or engine.inflight < inflight):  # noqa: ASYNC110 - it says nothing
                await asyncio.sleep(0.001)
            batch.stop(RunStopped(), 0.0)
            try:
                await task
            except RunStopped:
                return

        self.log.write_text("")
        with self.prepare(**options) as batch:
            self.described, self.batch = batch.describe(), batch
            asyncio.run(work(batch))

    def asked(self) -> list[str]:
        """The custom_ids that the engine was asked in the last run, sorted."""
        return sorted(self.log.read_text().split()) if self.log.exists() else []

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.output)

    def ids(self) -> list[str]:
        return ids_of(self.rows())

    def codes(self) -> Counter[str]:
        """Why rows failed."""
        return Counter(code_of(row) for row in self.rows() if code_of(row))

    def ahead(self) -> list[dict[str, Any]]:
        """The rows in the journal."""
        files = sorted(self.folder.glob("out.jsonl.ahead.*"))
        return [msgspec.json.decode(line) for path in files for line in path.read_bytes().splitlines()]

    def files(self) -> list[str]:
        """What lies beside the input and the output."""
        own = {self.input.name, self.output.name, self.log.name}
        return sorted(path.name for path in self.folder.iterdir() if path.is_file() and path.name not in own)

    def look(self) -> dict[str, tuple[bytes, int]]:
        """Every file: what it holds, and when it was written."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path != self.log]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    def start(self, *words: object, **more: str) -> "subprocess.Popen[bytes]":
        """The command in a child."""
        files = ("-i", self.input, "-o", self.output, *QUICK, "--echo-log", self.log)
        child = subprocess.Popen(
            [*map(str, (*COMMAND, "run", *files, *words))], cwd=self.folder, env=child_environ(self.folder, **more),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.children.append(child)
        return child

    def close(self) -> None:
        """End what a test that failed left."""
        for child in self.children:
            if child.poll() is None:
                kill(child)


def code_of(row: dict[str, Any]) -> str:
    """Why a row failed; empty where it did not."""
    if row["error"]:
        return str(row["error"]["code"])
    status = row["response"]["status_code"]
    return f"http_{status}" if status >= 400 else ""


def lines_of(count: int, first: int = 0, **facts: Any) -> list[str]:
    """Requests r0, r1, …, scripted alike."""
    return [request_line(f"r{index}", **({"echo": facts} if facts else {})) for index in range(first, first + count)]


def slow_first(count: int) -> list[str]:
    """Requests whose first never answers, so that all others wait for it in the journal."""
    return [request_line("r0", echo={"fault": "hang"}), *lines_of(count - 1, 1)]


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


def without_root() -> None:
    """In a child before it begins: root, too, needs permission for files from here on."""
    if os.getuid() == 0:
        drop, override, read_search = 24, 1, 2  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        for power in (override, read_search):
            ctypes.CDLL(None).prctl(drop, power, 0, 0, 0)


def kill(child: "subprocess.Popen[bytes]") -> str:
    """SIGKILL, and what was said until then."""
    child.send_signal(signal.SIGKILL)
    return child.communicate(timeout=20)[1].decode()


def end_of(child: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """The exit code of a child, and what it said."""
    err = child.communicate(timeout=30)[1].decode()
    assert "Traceback" not in err, err
    return child.returncode, err
