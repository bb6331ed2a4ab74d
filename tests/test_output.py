"""The output behind its window: order, holding back, syncs in a thread, and what a failure leaves."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import checker
from overnight.disk import Disk
from overnight.errors import OutputLost
from overnight.journal import Journal
from overnight.output import Output, RowFile, drain_all
from overnight.records import Row
from overnight.window import Window
from test_journal import SETTINGS, make_row


class Bench:
    """An output in a folder, with a journal of small segments."""

    def __init__(self, folder: Path, disk: Disk, segment_bytes: int, interval_s: float, inflight: int) -> None:
        self.path = folder / "out.jsonl"
        self.head = disk.open(folder / "out.jsonl.ahead", create=True)
        self.journal = Journal(folder / "out.jsonl.ahead", self.head, disk, segment_bytes)
        self.window = Window(inflight)
        self.counted: list[int] = []
        self.file = RowFile(self.path, disk)
        self.output = Output(
            self.file, self.journal, self.window, begin=lambda: self.file.open(0), on_written=self._count, disk=disk,
            sync_interval_s=interval_s,
        )  # fmt: skip

    def _count(self, rows: list[Row]) -> None:
        self.counted += [row.index for row in rows]

    async def finish(self, *indexes: int, size: int = 0) -> None:
        for index in indexes:
            while self.window.started <= index:
                self.window.start()
            self.output.finish(make_row(index, size))
        await drain_all(self.output)

    @property
    def written(self) -> list[int]:
        return [checker.index_of(row) for row in checker.look(self.path).rows]


@contextmanager
def open_bench(
    folder: Path, *, disk: Disk | None = None, segment_bytes: int = 1000, interval_s: float = 1.0, inflight: int = 10**6
) -> Iterator[Bench]:
    bench = Bench(folder, disk or Disk(), segment_bytes, interval_s, inflight)
    try:
        yield bench
    finally:
        os.close(bench.head)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


def test_rows_are_written_in_order_and_early_ones_wait_in_the_journal(tmp_path: Path) -> None:
    with open_bench(tmp_path) as bench:

        async def work() -> None:
            await bench.finish(2, 1)
            assert bench.written == []
            assert set(checker.look(bench.path).waiting) == {1, 2}
            await bench.finish(0)
            assert bench.written == bench.counted == [0, 1, 2]

        run(work)
        bench.output.close()


def test_in_a_run_nothing_is_touched_before_there_is_a_row(tmp_path: Path) -> None:
    with open_bench(tmp_path) as bench:
        bench.path.write_text("old\n")

        async def work() -> None:
            keeper = asyncio.ensure_future(bench.output.keep())
            await asyncio.sleep(0)
            bench.window.start()
            await drain_all(bench.output)
            keeper.cancel()

        run(work)
        bench.output.close()
        assert bench.path.read_text() == "old\n"


def test_with_an_interval_of_0_a_row_counts_once_it_is_synced(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(Disk):
        def sync(self, descriptor: int) -> None:
            release.wait(5)
            super().sync(descriptor)

    with open_bench(tmp_path, disk=Slow(), interval_s=0) as bench:

        async def work() -> None:
            task = asyncio.ensure_future(bench.finish(0, 1))
            await asyncio.sleep(0.05)
            assert bench.written == [0, 1]
            assert bench.counted == []
            release.set()
            await task
            assert bench.counted == [0, 1]

        run(work)
        bench.output.close()


def test_a_row_that_finishes_during_a_drain_is_put_away_by_it(tmp_path: Path) -> None:
    """A runner whose last row came meanwhile does not drain again."""

    class Slow(Disk):
        def sync(self, _: int) -> None:
            time.sleep(0.03)

    with open_bench(tmp_path, disk=Slow(), interval_s=0) as bench:

        async def work() -> None:
            drain = asyncio.ensure_future(bench.finish(1))
            await asyncio.sleep(0.01)
            bench.output.finish(make_row(0))
            await drain
            assert bench.written == [0, 1]

        run(work)
        bench.output.close()


def test_a_sync_whose_waiter_is_cancelled_is_over_before_its_files_are_closed(tmp_path: Path) -> None:
    seen: list[str] = []

    class Slow(Disk):
        def sync(self, descriptor: int) -> None:
            time.sleep(0.05)
            os.fstat(descriptor)
            super().sync(descriptor)
            seen.append("synced")

        def close(self, descriptor: int) -> None:
            seen.append("closed")
            super().close(descriptor)

    with open_bench(tmp_path, disk=Slow()) as bench:

        async def work() -> None:
            await bench.finish(0, 2)
            task = asyncio.ensure_future(bench.output.sync())
            await asyncio.sleep(0.01)
            task.cancel()

        run(work)
        bench.output.close()
    assert seen.index("closed") > 1
    assert "synced" not in seen[seen.index("closed") :]


def test_what_was_given_back_but_not_written_stays_in_the_journal(tmp_path: Path) -> None:
    """The disk is full just as rows are copied from the journal: no segment may go."""

    class Full(Disk):
        is_full = False

        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "full")
            super().write(descriptor, data, offset)

    disk = Full()
    with open_bench(tmp_path, disk=disk) as bench:

        async def work() -> None:
            await bench.finish(*range(1, 40))
            disk.is_full = True
            with pytest.raises(OutputLost, match="full"):
                await bench.finish(0)
            disk.is_full = False
            with pytest.raises(OutputLost, match="full"):
                await bench.finish(40)

        run(work)
        bench.output.close()
        assert bench.written == []
        assert set(checker.look(bench.path).waiting) == set(range(1, 40))
        assert sum(place != 0 for place in bench.journal.load(0, SETTINGS)) == 39


def test_rows_that_were_moved_but_not_written_stay_where_they_were(tmp_path: Path) -> None:
    class Full(Disk):
        left = 10**9

        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "full")
            super().write(descriptor, data, offset)

    for left in range(8):
        folder = tmp_path / str(left)
        folder.mkdir()
        disk = Full()
        with open_bench(folder, disk=disk) as bench:

            async def work(bench: Bench = bench, disk: Full = disk, left: int = left) -> None:
                # Every tenth row holds its segment; the others are written.
                await bench.finish(*(n for n in range(200) if n % 10))
                disk.left = left
                for index in range(0, 200, 10):
                    await bench.finish(index)

            with pytest.raises(OutputLost):
                run(work)
            bench.output.close()
            found = checker.look(bench.path)
            assert found.finished >= {n for n in range(200) if n % 10}


def test_the_failure_of_a_sync_is_said_and_ends_what_follows(tmp_path: Path) -> None:
    class Bad(Disk):
        def sync(self, _: int) -> None:
            raise OSError(errno.EIO, "no sync")

    with open_bench(tmp_path, disk=Bad()) as bench:

        async def work() -> None:
            await bench.finish(0)
            with pytest.raises(OutputLost, match="no sync"):
                await bench.output.sync()
            with pytest.raises(OutputLost, match="no sync"):
                await bench.finish(1)

        run(work)
        bench.output.close()


def test_a_failure_that_only_the_end_shows_is_raised_there(tmp_path: Path) -> None:
    with open_bench(tmp_path) as bench:
        run(lambda: bench.finish(0))
        bench.path.unlink()
        with pytest.raises(OutputLost, match="removed or replaced"):
            bench.output.close()


def test_while_a_straggler_holds_old_segments_the_others_go_on(tmp_path: Path) -> None:
    """Nothing finishes while nothing may start: so what holds starts back must end by itself."""
    with open_bench(tmp_path) as bench:

        async def work() -> None:
            await bench.finish(*(n for n in range(1000) if n % 50))
            await bench.finish(*range(0, 950, 50), size=10)  # all but the last straggler: a tenth still waits
            assert not bench.window.is_held
            assert not bench.journal.is_heavy
            assert bench.journal.size <= 2 * bench.journal.live + 3 * bench.journal.segment_bytes

        run(work)
        bench.output.close()


@pytest.mark.parametrize("interval_s", [0, 0.01, 100])
def test_the_journal_keeps_its_bound_while_much_is_drained(tmp_path: Path, interval_s: float) -> None:
    """One request holds 60 MB of rows, then all go at once; syncs are slow."""
    most = 0

    class Measured(Disk):
        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            nonlocal most
            super().write(descriptor, data, offset)
            most = max(most, checker.look_at_size(bench.path) - 2 * bench.journal.live)

        def sync(self, _: int) -> None:
            time.sleep(0.05)

    with open_bench(tmp_path, disk=Measured(), segment_bytes=8 << 20, interval_s=interval_s) as bench:

        async def work() -> None:
            for start in range(1, 1201, 100):
                await bench.finish(*range(start, start + 100), size=50_000)
            assert bench.journal.live > 60_000_000
            await bench.finish(0)
            assert bench.window.written == 1201

        run(work)
        bench.output.close()
    assert most <= 32 << 20


def test_a_long_drain_never_stalls_the_loop(tmp_path: Path) -> None:
    """100,000 rows behind one; the benchmark has a million."""
    count = 100_000
    with open_bench(tmp_path, segment_bytes=8 << 20) as bench:

        async def work() -> float:
            for start in range(1, count, 1000):
                await bench.finish(*range(start, start + 1000))
            longest = 0.0
            is_over = False

            async def watch() -> None:
                nonlocal longest
                while not is_over:
                    before = time.monotonic()
                    await asyncio.sleep(0)
                    longest = max(longest, time.monotonic() - before)

            watcher = asyncio.ensure_future(watch())
            await bench.finish(0)
            is_over = True
            await watcher
            return longest

        longest = run(work)
        bench.output.close()
    assert len(bench.counted) > 99_000
    assert longest < 0.25  # 0.02 where nothing else runs; the bar is 0.05


def test_rows_that_finish_while_much_waits_for_a_sync_are_on_disk_at_once(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(Disk):
        def sync(self, _: int) -> None:
            release.wait(5)

    with open_bench(tmp_path, disk=Slow(), interval_s=100) as bench:

        async def work() -> None:
            await bench.finish(*range(1, 100))
            drain = asyncio.ensure_future(bench.finish(0))
            await asyncio.sleep(0.05)
            assert not drain.done()
            assert bench.window.is_full
            bench.window.is_held = False
            for _ in range(3):
                bench.window.start()
            bench.window.is_held = True
            bench.output.finish(make_row(102))
            await asyncio.sleep(0.05)
            assert 102 in checker.look(bench.path).waiting
            release.set()
            await drain
            assert bench.window.written == 100

        run(work)
        bench.output.close()
