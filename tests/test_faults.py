"""Disks that fail, and files as a lost machine leaves them: the next run ends as an undisturbed one."""

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import checker
from conftest import child_environ, request_line
from overnight.batch import Batch, prepare_batch
from overnight.disk import Disk
from overnight.errors import EngineLost, OutputLost, OutputRefused
from overnight.options import RunOptions, make

ENDS = (OutputLost, OutputRefused)
SEGMENT_BYTES = 1500  # so that a few rows fill several, are moved and held back


class FaultyDisk(Disk):
    """A disk whose nth call fails, or (`is_lasting`) every one from there on. A write then leaves half its data."""

    def __init__(self, fail_at: int, code: int = errno.ENOSPC, *, is_lasting: bool = False) -> None:
        self.fail_at = fail_at
        self.code = code
        self.is_lasting = is_lasting
        self.calls: list[str] = []
        self.failed: str | None = None
        self._lock = threading.Lock()  # syncs come from a thread

    def _is_due(self, name: str) -> bool:
        with self._lock:
            self.calls.append(name)
            is_due = len(self.calls) == self.fail_at or (self.is_lasting and len(self.calls) > self.fail_at)
            if is_due:
                self.failed = self.failed or f"{name} ({len(self.calls)})"
            return is_due

    def _call(self, name: str, *facts: Any, **more: Any) -> Any:
        if self._is_due(name):
            if name == "write":
                descriptor, data, offset = facts
                super().write(descriptor, data[: len(data) // 2], offset)
            raise OSError(self.code, os.strerror(self.code))
        return getattr(super(), name)(*facts, **more)

    def open(self, path: Path, *, create: bool = False) -> int:
        return int(self._call("open", path, create=create))

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        self._call("write", descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._call("sync", descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._call("sync_folder", folder)

    def truncate(self, descriptor: int, size: int) -> None:
        self._call("truncate", descriptor, size)

    def remove(self, path: Path) -> None:
        self._call("remove", path)

    def replace(self, source: Path, target: Path) -> None:
        self._call("replace", source, target)


class FastDisk(Disk):
    """A disk that syncs nothing."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Case:
    """An input, its output, and what an undisturbed run makes of it."""

    def __init__(self, folder: Path, scripts: list[dict[str, Any]], **options: Any) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.log = folder / "echo.log"
        self.options = options
        self.input.write_text("".join(f"{request_line(f'r{n}', echo=echo)}\n" for n, echo in enumerate(scripts)))

    def run(self, disk: Disk | None = None, **options: Any) -> Batch:
        """One run in this process. Raises what ends it."""
        self.log.write_text("")
        values = {"input_file": str(self.input), "output_file": str(self.output), "engine": "echo", **self.options}
        batch = prepare_batch(
            make(RunOptions, {**values, **options}), {"echo_log": str(self.log)},
            environ=child_environ(self.folder), disk=disk or FastDisk(),
        )  # fmt: skip
        batch.files.journal.segment_bytes = SEGMENT_BYTES
        with batch:
            asyncio.run(batch.run())
        return batch

    def ran(self) -> list[int]:
        """The requests that the last run gave to the engine."""
        return sorted(int(name[1:]) for name in set(self.log.read_text().split()))

    def rows(self) -> list[dict[str, Any]]:
        return [checker.essence(row) for row in checker.look(self.output).rows]

    def clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith("out.jsonl"):
                path.unlink()

    def is_clean(self) -> bool:
        return {path.name for path in self.folder.iterdir() if path.name.startswith("out")} == {"out.jsonl"}


def fail_each(
    run: Callable[[FaultyDisk], None], code: int, *, is_lasting: bool, ends: tuple[type[Exception], ...] = ENDS
) -> Iterator[FaultyDisk]:
    """A run for each of its calls, in which that call fails; it then ends in one of these ways, or well."""
    number = 0
    while True:
        number += 1
        disk = FaultyDisk(number, code, is_lasting=is_lasting)
        try:
            run(disk)
        except ends as error:
            said = str(error)
        except BaseException as error:
            error.add_note(f"failed was {disk.failed}")
            raise
        else:
            said = ""
        if not disk.failed:
            assert not said
            return
        assert not said or os.strerror(code) in said, f"{disk.failed}: {said}"
        yield disk


# -- each call fails once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "is_lasting", "interval"),
    [
        (errno.ENOSPC, False, "2ms"),
        (errno.ENOSPC, True, "2ms"),
        (errno.EIO, False, "1h"),
        (errno.EIO, False, "0"),
    ],
)
def test_whichever_call_fails_nothing_finished_is_lost(
    tmp_path: Path, code: int, *, is_lasting: bool, interval: str
) -> None:
    late = {0: 0.025, 7: 0.015, 13: 0.02}
    scripts = [{"delay": late.get(n, 0.0005 * (n % 5)), "size": 150} for n in range(24)]
    case = Case(tmp_path, scripts, max_inflight=8, sync_interval=interval)
    case.run()
    expected = case.rows()
    case.clear()
    kinds: set[str] = set()
    for disk in fail_each(lambda disk: case.run(disk) and None, code, is_lasting=is_lasting):
        kinds.update(disk.calls)
        found = checker.look(case.output)
        case.run()
        again = case.ran()
        assert not set(again) & found.finished, f"{disk.failed}: ran again {set(again) & found.finished}"
        assert case.rows() == expected, disk.failed
        assert case.is_clean(), disk.failed
        case.clear()
    assert kinds >= {"open", "write", "sync", "sync_folder", "truncate", "remove"}


class Failed(Case):
    """A complete output, some of whose rows timed out, and what it is when they have run again."""

    def __init__(self, folder: Path) -> None:
        scripts = [{"delay": 0.02 + n / 1000 if n % 3 else 0.0, "size": 150, "tokens": n} for n in range(12)]
        super().__init__(folder, scripts, max_inflight=16, sync_interval="2ms", max_attempts=1)
        self.run(timeout=0.01)
        self.old = self.output.read_bytes()
        assert sum(row["error"] is not None for row in self.rows()) >= 8
        self.run(retry_errors="failed")
        self.expected = self.rows()
        assert not any(row["error"] for row in self.expected)
        self.output.write_bytes(self.old)

    def run_again(self, disk: Disk | None = None) -> None:
        self.run(disk, retry_errors="failed")


@pytest.mark.parametrize(("code", "is_lasting"), [(errno.ENOSPC, False), (errno.EIO, True)])
def test_whichever_call_fails_a_merge_leaves_the_old_file_or_the_new(
    tmp_path: Path, code: int, *, is_lasting: bool
) -> None:
    case = Failed(tmp_path)
    kinds: set[str] = set()
    for disk in fail_each(case.run_again, code, is_lasting=is_lasting, ends=(*ENDS, OSError)):
        kinds.update(disk.calls)
        found = checker.look(case.output)
        assert case.output.read_bytes() == case.old or case.rows() == case.expected, disk.failed
        case.run()  # a plain run finishes what was begun
        assert case.ran() == []
        rows = case.rows()
        for index, row in found.waiting.items():
            assert rows[index] == checker.essence(row) == case.expected[index], f"{disk.failed}: {index} is lost"
        case.run_again()
        assert not set(case.ran()) & found.waiting.keys()
        assert case.rows() == case.expected, disk.failed
        assert case.is_clean(), disk.failed
        case.output.write_bytes(case.old)
    assert kinds >= {"open", "write", "sync", "sync_folder", "truncate", "remove", "replace"}


def test_whichever_call_of_a_merge_fails_the_end_is_one_of_ours(tmp_path: Path) -> None:
    case = Failed(tmp_path)
    for is_lasting in (False, True):
        for _ in fail_each(case.run_again, errno.EIO, is_lasting=is_lasting):
            case.clear()
            case.output.write_bytes(case.old)


def test_an_answer_that_finishes_during_a_sync_is_merged_too(tmp_path: Path) -> None:
    class Slow(FastDisk):
        def sync(self, _: int) -> None:
            time.sleep(0.02)

    case = Failed(tmp_path)
    case.run(Slow(), retry_errors="failed", sync_interval="0")
    assert case.rows() == case.expected


def test_after_a_failed_write_no_later_row_is_written(tmp_path: Path) -> None:
    """It would stand behind a hole: an engine that is lost in the same turn must not bring the drain back."""
    scripts: list[dict[str, Any]] = [{"delay": 0.01} for _ in range(6)]
    scripts.append({"delay": 0.01, "fault": "lost"})
    case = Case(tmp_path, scripts, max_inflight=16)
    writes = 0

    class Failing(FastDisk):
        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            nonlocal writes
            if b'"response"' in data:
                writes += 1
                if writes == 1:
                    raise OSError(errno.ENOSPC, "full")
            super().write(descriptor, data, offset)

    with pytest.raises((OutputLost, EngineLost)):
        case.run(Failing())
    checker.look(case.output)


def test_a_failed_sync_ends_the_run_and_gives_nothing_back(tmp_path: Path) -> None:
    scripts = [{"delay": 0.02 if n == 0 else 0.0, "size": 300} for n in range(20)]
    case = Case(tmp_path, scripts, max_inflight=32, sync_interval="1ms")

    class Failing(FastDisk):
        def sync(self, descriptor: int) -> None:
            if Path(f"/dev/fd/{descriptor}").readlink().name == "out.jsonl":
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OutputLost, match="Input/output error"):
        case.run(Failing())
    case.run()
    assert len(case.rows()) == 20


def test_with_overwrite_an_engine_that_is_lost_at_once_leaves_the_old_file(tmp_path: Path) -> None:
    case = Case(tmp_path, [{}] * 3)
    case.run()
    old = case.output.read_bytes()
    lost = Case(tmp_path, [{"fault": "lost", "delay": 0.01}] * 3)
    with pytest.raises(EngineLost):
        lost.run(overwrite=True)
    assert case.output.read_bytes() == old
    assert case.is_clean()


# -- a lost machine ------------------------------------------------------------------------------------------------


class Torn(Case):
    """Three rows in the output, one that is missing, four in the journal; all short."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [{"fault": "refuse"}] * 8, max_attempts=1, max_inflight=16, sync_interval="1h")
        heads: list[bytes] = []

        class Watched(FastDisk):
            def write(self, descriptor: int, data: bytes, offset: int) -> None:
                heads.append(data)
                super().write(descriptor, data, offset)

        self.run(Watched())
        self.expected = self.rows()
        self.lines = self.output.read_bytes().splitlines(keepends=True)
        assert max(map(len, self.lines)) <= 160
        self.head = heads[0]
        self.in_output = self.lines[:4]
        self.in_journal = [b'{"line":%d,' % (n + 1) + self.lines[n][1:] for n in range(5, 8)]

    def restore(self, output: bytes | None = None, journal: bytes | None = None) -> None:
        self.output.write_bytes(b"".join(self.in_output) if output is None else output)
        (self.folder / "out.jsonl.ahead").write_bytes(self.head)
        data = b"".join(self.in_journal) if journal is None else journal
        (self.folder / "out.jsonl.ahead.1").write_bytes(data)

    def check(self, wanted: set[int], what: object) -> None:
        assert set(self.ran()) == wanted, what
        assert self.rows() == self.expected, what
        assert self.is_clean(), what


def damages(lines: list[bytes]) -> Iterator[tuple[str, bytes, list[bool]]]:
    """A file with its last two rows cut at every byte, zeroed from there, or with a hole; which rows are whole."""
    data = b"".join(lines)
    ends = [len(b"".join(lines[: n + 1])) for n in range(len(lines))]
    for cut in range(ends[-3], ends[-1]):
        whole = [end <= cut for end in ends]
        yield f"cut at {cut}", data[:cut], whole
        yield f"zeros from {cut}", data[:cut] + bytes(len(data) - cut), whole
    for cut in range(ends[-3] - 9, ends[-1] - 9, 3):
        hole = range(cut, cut + 9)
        starts = [0, *ends]
        holes = [hole[0] < end and start - 1 <= hole[-1] for start, end in zip(starts, ends, strict=False)]
        yield f"hole at {cut}", data[:cut] + bytes(9) + data[cut + 9 :], [not each for each in holes]


def test_an_output_that_is_torn_at_any_byte_is_continued(tmp_path: Path) -> None:
    case = Torn(tmp_path)
    for what, data, whole in damages(case.in_output):
        kept = whole.index(False)  # what stands behind a hole is cut too
        case.restore(output=data)
        case.run()
        case.check({*range(kept, 5)}, what)


def test_a_journal_that_is_torn_at_any_byte_is_continued(tmp_path: Path) -> None:
    case = Torn(tmp_path)
    for what, data, whole in damages(case.in_journal):
        case.restore(journal=data)
        case.run()
        case.check({4, *(5 + n for n, is_whole in enumerate(whole) if not is_whole)}, what)


def test_a_head_that_is_torn_at_any_byte_is_continued_or_begun_anew(tmp_path: Path) -> None:
    """A machine lost before the head was synced: the output may be there or not, the rows that waited are lost."""
    case = Torn(tmp_path)
    for cut in range(0, len(case.head), 7):
        for tail in (b"", bytes(len(case.head) - cut)):
            case.restore()
            (tmp_path / "out.jsonl.ahead").write_bytes(case.head[:cut] + tail)
            case.run()
            case.check({*range(4, 8)}, cut)


def test_a_row_in_the_output_and_in_the_journal_counts_once(tmp_path: Path) -> None:
    """A run that was killed after its copy and before its sync."""
    case = Torn(tmp_path)
    twice = [b'{"line":%d,' % (n + 1) + case.lines[n][1:] for n in (2, 3)]
    case.restore(journal=b"".join([*twice, *case.in_journal]))
    case.run()
    case.check({4}, "twice")


def test_both_files_torn_and_a_kill_on_top(tmp_path: Path) -> None:
    """Damage, a run that ends early, damage again, and a run that ends."""
    case = Torn(tmp_path)
    for cut in range(1, 140, 10):
        case.restore(b"".join(case.in_output)[:-cut], b"".join(case.in_journal)[:-cut])
        disk = FaultyDisk(4 + cut // 28, is_lasting=True)
        with pytest.raises((OutputLost, OutputRefused)):
            case.run(disk)
        for path in (case.output, *checker.segments(case.output)[-1:]):
            os.truncate(path, max(path.stat().st_size - cut, 0))
        case.run()
        assert case.rows() == case.expected
        assert case.is_clean()


class LossyDisk(FaultyDisk):
    """A machine that is lost at the nth call: of the names and bytes that were not synced, some are there, some not."""

    def __init__(self, fail_at: int, output: Path, rng: random.Random) -> None:
        super().__init__(fail_at, errno.EIO, is_lasting=True)
        self.durable: set[int] = set()  # requests whose rows a sync that is over put on the disk
        self._output = output
        self._rng = rng
        self._synced: dict[Path, int] = {}
        self._new: set[Path] = set()
        self._removed: dict[Path, Path] = {}
        self._paths: dict[int, Path] = {}
        self._seen: list[set[int]] = [set(), set()]

    def open(self, path: Path, *, create: bool = False) -> int:
        is_new = not path.exists()
        descriptor = super().open(path, create=create)
        if is_new:
            self._new.add(path)
            self._synced[path] = 0
        self._synced.setdefault(path, path.stat().st_size)
        self._paths[descriptor] = path
        return descriptor

    def truncate(self, descriptor: int, size: int) -> None:
        super().truncate(descriptor, size)
        path = self._paths[descriptor]
        self._synced[path] = min(self._synced[path], size)

    def sync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        seen = checker.look(self._output).finished if path == self._output else set()
        size = os.fstat(descriptor).st_size
        super().sync(descriptor)
        self._synced[path] = size
        if path == self._output:  # first in each round: the one before is over
            self._seen.append(seen)
            self.durable = self._seen[-3]

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._new.clear()
        self._removed.clear()

    def remove(self, path: Path) -> None:
        if path.exists() and not self.failed:
            grave = path.parent / f"grave{len(self.calls)}"
            os.link(path, grave)
            self._removed[path] = grave
        super().remove(path)

    def lose(self) -> None:
        """What is found when the machine is back."""
        for path, synced in self._synced.items():
            if path.exists():
                if path in self._new and self._rng.random() < 0.5:
                    path.unlink()
                    continue
                size = path.stat().st_size
                if size > synced:
                    kept = self._rng.randint(synced, size)
                    os.truncate(path, kept)
                    if self._rng.random() < 0.5:
                        os.truncate(path, size)  # zeros
        for path, grave in self._removed.items():
            if not path.exists() and self._rng.random() < 0.5:
                os.link(grave, path)


@pytest.mark.parametrize(("interval", "seed"), [("1ms", 1), ("1ms", 2), ("0", 3), ("1h", 4)])
def test_a_machine_lost_at_any_call_keeps_what_was_synced(tmp_path: Path, interval: str, seed: int) -> None:
    late = {0: 0.02, 7: 0.012, 13: 0.016}
    scripts = [{"delay": late.get(n, 0.0005 * (n % 5)), "size": 150} for n in range(24)]
    case = Case(tmp_path, scripts, max_inflight=8, sync_interval=interval)
    case.run()
    expected = case.rows()
    case.clear()
    rng = random.Random(seed)
    number = 0
    most = 0
    while True:
        number += 1
        disk = LossyDisk(number, case.output, rng)
        with contextlib.suppress(OutputLost, OutputRefused, OSError):
            case.run(disk)
        if not disk.failed:
            break
        disk.lose()
        found = checker.look(case.output, may_be_damaged=True)
        most = max(most, len(disk.durable))
        assert disk.durable <= found.finished, f"{disk.failed}: {disk.durable - found.finished} are lost"
        case.run()
        assert not set(case.ran()) & disk.durable, disk.failed
        assert case.rows() == expected, disk.failed
        assert case.is_clean(), disk.failed
        case.clear()
        for path in tmp_path.glob("grave*"):
            path.unlink()
    assert most > (5 if interval != "1h" else -1)


# -- full disks and folders that are gone --------------------------------------------------------------------------

LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}));"
    "sys.argv[0] = 'overnight'; runpy.run_module('overnight', run_name='__main__', alter_sys=True)"
)


def start(case: Case, *words: object, prefix: tuple[str, ...] = ("-m", "overnight")) -> "subprocess.Popen[str]":
    command = [sys.executable, *prefix, "run", "-i", case.input, "-o", case.output, "--engine", "echo", *words]
    return subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env=child_environ(case.folder), cwd=case.folder
    )


def end(child: "subprocess.Popen[str]", code: int) -> str:
    _, err = child.communicate(timeout=60)
    assert "Traceback" not in err, err
    assert child.returncode == code, err
    return err


def run_out_of_room(case: Case, expected: list[dict[str, Any]], *words: object, prefix: Any) -> None:
    """A run that ends for want of room, and one that goes on when there is some."""
    err = end(start(case, *words, prefix=prefix), 3)
    assert "Cannot write the output" in err
    found = checker.look(case.output)
    assert 0 < len(found.finished) < len(expected)
    assert found.torn == 0


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_a_file_that_may_not_grow_ends_the_run_and_it_goes_on_later(tmp_path: Path, limit: int) -> None:
    scripts = [{"delay": 0.2 if n == 30 else 0.001 * (n % 7), "size": 2000} for n in range(100)]
    case = Case(tmp_path, scripts)
    case.run()
    expected = case.rows()
    case.clear()
    run_out_of_room(case, expected, prefix=("-c", LIMITED.format(limit)))
    found = checker.look(case.output)
    case.run()
    assert not set(case.ran()) & found.finished
    assert case.rows() == expected


def mounted(words: list[str], folder: Path) -> None:
    done = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("there is no mount command")
    mounted(["-t", "tmpfs", "-o", "size=256k", "none"], folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_it_goes_on_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    scripts = [{"delay": 0.2 if n == 30 else 0.001 * (n % 7), "size": 1000} for n in range(300)]
    case = Case(tmp_path, scripts)
    case.run()
    expected = case.rows()
    case.output = small_disk / "out.jsonl"
    run_out_of_room(case, expected, prefix=("-m", "overnight"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    found = checker.look(case.output)
    case.run()
    assert not set(case.ran()) & found.finished
    assert case.rows() == expected


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be written, also by root."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o555)
    undo = [["chmod", "755", str(folder)]]
    if os.geteuid() == 0:
        if subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode == 0:
            undo.insert(0, ["chattr", "-i", str(folder)])
        else:
            mounted(["--bind", str(folder)], folder)
            undo.insert(0, ["umount", "-l", str(folder)])
            subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=False)
    with pytest.raises(OSError, match=r"[Pp]ermi|[Rr]ead-only"):
        (folder / "probe").write_text("")
    yield folder
    for words in undo:
        subprocess.run(words, check=True)


def test_a_folder_that_may_not_be_written_is_refused_before_anything(tmp_path: Path, closed_folder: Path) -> None:
    case = Case(tmp_path, [{}] * 3)
    case.output = closed_folder / "out.jsonl"
    err = end(start(case), 2)
    assert "Cannot write" in err
    assert not list(closed_folder.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no open file")
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_folder_that_goes_while_the_run_goes_on_ends_it(tmp_path: Path, *, is_renamed: bool) -> None:
    case = Case(tmp_path, [{"delay": 0.02 * n} for n in range(60)])
    folder = tmp_path / "there"
    folder.mkdir()
    case.output = folder / "out.jsonl"
    child = start(case, "--sync-interval", "50ms", "--max-inflight", 100)
    until = time.monotonic() + 30
    while not (case.output.exists() and case.output.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)
    folder.rename(tmp_path / "elsewhere") if is_renamed else shutil.rmtree(folder)
    err = end(child, 3)
    assert "Cannot write the output" in err
    if is_renamed:
        (tmp_path / "elsewhere").rename(folder)
        case.run()
        assert len(case.rows()) == 60


def test_the_journals_lines_are_lines_for_ordinary_tools(tmp_path: Path) -> None:
    case = Torn(tmp_path)
    case.restore(output=b"".join(case.in_output))
    with pytest.raises(OutputLost):
        case.run(FaultyDisk(9, is_lasting=True))
    for path in (tmp_path / "out.jsonl.ahead", *checker.segments(case.output)):
        assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
