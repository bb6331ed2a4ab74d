"""The journal alone: places, segments, moves, damage, and a model of it that hypothesis drives."""

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import checker
from overnight.disk import Disk
from overnight.journal import Journal
from overnight.records import Row, RowKey
from overnight.segments import MAX_LENGTH, make_place
from overnight.window import NOWHERE, Window

KEY = RowKey("5e77" * 3, "ab" * 4)
SETTINGS = {KEY.settings}


def make_row(index: int, size: int = 0, text: bytes = b"x", key: RowKey = KEY) -> Row:
    row_id = key.row_id(f"{index:016x}", index).encode()
    body = b'{"n":%d,"text":"%s"}' % (index, text * size)
    data = b'{"id":"%s","custom_id":"r%d","response":{"status_code":200,"request_id":"q","body":%s},"error":null}\n'
    return Row(index, f"r{index}", data % (row_id, index, body), line=index + 1)


@contextmanager
def open_journal(folder: Path, segment_bytes: int = 8 << 20, disk: Disk | None = None) -> Iterator[Journal]:
    disk = disk or Disk()
    path = folder / "out.jsonl.ahead"
    descriptor = disk.open(path, create=True)
    journal = Journal(path, descriptor, disk, segment_bytes)
    try:
        yield journal
    finally:
        journal.close()
        os.close(descriptor)


def sync(journal: Journal) -> None:
    for descriptor in journal.begin_sync():
        os.fsync(descriptor)
    journal.end_sync()


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in checker.segments(folder / "out.jsonl"))


def finish(journal: Journal, window: Window, row: Row) -> None:
    window.finish(row.index, journal.append(row))


# -- rows in and out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000, (1 << 20) - 300, (1 << 20) + 5, 3 << 20])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_row_comes_back_as_it_went_in(tmp_path: Path, size: int, *, is_reopened: bool) -> None:
    rows = [make_row(0, size), make_row(1), make_row(2, size, "é".encode()), make_row(3, 10)]
    with open_journal(tmp_path) as journal:
        places = {row.index: journal.append(row) for row in rows}
        journal.flush()
        if is_reopened:
            places = dict(enumerate(journal.load(0, SETTINGS)))
        assert journal.live == journal.size == sizes(tmp_path)
        for row in reversed(rows):
            assert journal.take(places[row.index]).data == row.data
        assert journal.live == 0


def test_rows_of_many_segments_come_back_with_few_files_open(tmp_path: Path) -> None:
    """A place a row, a file for each 8 MiB: what waits may be far more than a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 1500
    with open_journal(tmp_path, segment_bytes=400) as journal:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 60, hard))
        try:
            places = []
            for index in range(count):
                places.append(journal.append(make_row(index)))
                journal.flush()
                if journal.wants_sync:
                    sync(journal)
            assert len(checker.segments(tmp_path / "out.jsonl")) >= 500
            places = list(journal.load(0, SETTINGS))
            for index in range(0, count, 2):
                assert journal.take(places[index]).index == index
            for _ in range(40):
                sync(journal)
            for index in range(1, count, 2):
                assert journal.take(places[index]).index == index
            for _ in range(40):
                sync(journal)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not checker.segments(tmp_path / "out.jsonl")


def test_a_segment_goes_only_after_a_sync_that_began_behind_its_last_row(tmp_path: Path) -> None:
    with open_journal(tmp_path, segment_bytes=100) as journal:
        first, second = journal.append(make_row(0)), journal.append(make_row(1))
        journal.flush()
        journal.begin_sync()
        journal.take(first)
        journal.end_sync()
        assert len(checker.segments(tmp_path / "out.jsonl")) == 2
        journal.begin_sync()
        journal.take(second)
        journal.end_sync()
        assert [path.name for path in checker.segments(tmp_path / "out.jsonl")] == ["out.jsonl.ahead.2"]


def test_one_giant_row_is_given_back_whole(tmp_path: Path) -> None:
    """Also where it stands in the last segment: else nothing might start again."""
    with open_journal(tmp_path) as journal:
        place = journal.append(make_row(0, 40 << 20))
        journal.flush()
        journal.take(place)
        assert journal.is_heavy
        sync(journal)
        assert not journal.is_heavy
        assert sizes(tmp_path) == journal.size == 0


def test_addresses_are_never_given_twice(tmp_path: Path) -> None:
    """Else a row that was kept in memory could come back for another."""
    with open_journal(tmp_path, segment_bytes=100) as journal:
        places = set()
        for index in range(5):
            place = journal.append(make_row(index))
            journal.flush()
            assert journal.take(place).index == index
            sync(journal)
            places.add(place)
        assert len(places) == 5


def test_a_new_segments_name_is_on_the_disk_after_a_sync(tmp_path: Path) -> None:
    folders: list[Path] = []

    class Watched(Disk):
        def sync_folder(self, folder: Path) -> None:
            folders.append(folder)

    with open_journal(tmp_path, disk=Watched()) as journal:
        journal.append(make_row(0))
        journal.flush()
        sync(journal)
        sync(journal)
        assert folders == [tmp_path]


def test_an_earlier_runs_rows_are_synced_too(tmp_path: Path) -> None:
    """That run may have been killed before its sync, and a lost machine may come after this one's."""
    with open_journal(tmp_path, segment_bytes=200) as journal:
        for index in range(5):
            journal.append(make_row(index))
        journal.flush()
    with open_journal(tmp_path) as journal:
        journal.load(0, SETTINGS)
        descriptors = journal.begin_sync()
        assert len({os.fstat(each).st_ino for each in descriptors}) == len(checker.segments(tmp_path / "out.jsonl"))
        journal.end_sync()
        assert not journal.begin_sync()
        journal.end_sync()


# -- moving --------------------------------------------------------------------------------------------------------


def test_moved_rows_come_back_and_their_old_segments_go(tmp_path: Path) -> None:
    with open_journal(tmp_path, segment_bytes=10_000) as journal:
        window = Window(10**6)
        for index in range(2000):
            window.start()
            if index % 100:
                finish(journal, window, make_row(index, 50))
        journal.flush()
        # All but every hundredth row and the one behind it are written.
        for index in range(2000):
            if index % 100 > 1:
                journal.take(window.place(index))
                window.move(index, 1)
        while journal.move_rows(window):
            sync(journal)
        sync(journal)
        assert sizes(tmp_path) == journal.size <= 2 * journal.live + 4 * journal.segment_bytes
        for index in range(1, 2000, 100):
            assert journal.take(window.place(index)).data == make_row(index, 50).data


@pytest.mark.parametrize("pattern", ["stragglers", "every fourth", "one holds all", "a tenth is quick"])
def test_segments_never_take_more_than_twice_what_waits_and_32_mib(tmp_path: Path, pattern: str) -> None:
    """With a journal that is never empty, as `Output` uses it; sizes as the disk says, after every write."""
    rng = random.Random(5)
    slack = 32 << 20
    most = 0

    class Measured(Disk):
        def write(self, descriptor: int, data: bytes, offset: int) -> None:
            nonlocal most
            super().write(descriptor, data, offset)
            most = max(most, sizes(tmp_path) - 2 * journal.live)

    rows = {size: b"y" * size for size in (20_000, 300_000, 1_500_000)}
    with open_journal(tmp_path, disk=Measured()) as journal:
        window = Window(6000 if pattern == "a tenth is quick" else 64)
        late: dict[int, int] = {}
        total = turn = 0
        while total < 300 << 20:
            turn += 1
            for _ in range(64):
                if window.is_full or journal.is_heavy:
                    break
                index = window.start()
                late[index] = (
                    turn
                    + {
                        "stragglers": rng.choice((0, 1, 2, 3, 400)) if rng.random() < 0.1 else 1,
                        "every fourth": 9 * (index % 4),
                        "one holds all": 600 if index == 3 else rng.randrange(3),
                        "a tenth is quick": 1 if index % 10 == 0 else rng.randint(90, 100),
                    }[pattern]
                )
            for index in [index for index, due in late.items() if due <= turn]:
                del late[index]
                row = make_row(
                    index,
                    1,
                    rows[20_000 if pattern == "a tenth is quick" else rng.choice((20_000, 20_000, 300_000, 1_500_000))],
                )
                total += len(row.data)
                finish(journal, window, row)
            journal.flush()
            while not journal.is_heavy and (place := window.release()) != NOWHERE:
                journal.take(place)
            journal.move_rows(window)
            if journal.is_heavy or journal.wants_sync or turn % 50 == 0:
                sync(journal)
            assert journal.size == sizes(tmp_path)
    assert most <= slack


# -- damage --------------------------------------------------------------------------------------------------------


def test_the_newer_of_two_rows_counts(tmp_path: Path) -> None:
    with open_journal(tmp_path, segment_bytes=300) as journal:
        for text in (b"old", b"older", b"new"):
            journal.append(make_row(4, 1, text))
            journal.append(make_row(5 + len(text), 1))
        journal.flush()
        places = journal.load(4, SETTINGS)
        assert journal.live == sum(place & MAX_LENGTH for place in places)
        assert b"new" in journal.take(places[0]).data
        assert list(places).count(NOWHERE) == len(places) - 3


def test_rows_under_other_settings_are_dropped(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append(make_row(0, key=RowKey("0" * 12, "1" * 8)))
        journal.append(make_row(1))
        journal.flush()
        places = journal.load(0, SETTINGS)
        assert [place == NOWHERE for place in places] == [True, False]


@pytest.mark.parametrize("zeros", [False, True])
def test_a_hole_anywhere_drops_the_rows_in_it_and_no_other(tmp_path: Path, *, zeros: bool) -> None:
    with open_journal(tmp_path) as journal:
        rows = [make_row(index) for index in range(6)]
        for row in rows:
            journal.append(row)
        journal.flush()
    segment = tmp_path / "out.jsonl.ahead.1"
    whole = segment.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    rng = random.Random(3)
    for _ in range(300):
        start, end = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
        filler = bytes(end - start) if zeros else rng.randbytes(end - start)
        segment.write_bytes(whole[:start] + filler + whole[end:])
        untouched = {n for n in range(6) if ends[n + 1] <= start or (ends[n] >= end and (zeros or n != 0))}
        with open_journal(tmp_path) as journal:
            places = journal.load(0, SETTINGS)
            found = {index for index, place in enumerate(places) if place != NOWHERE}
            for index in found:
                assert journal.take(places[index]).data == rows[index].data
            # Where a hole ends in the middle of the file the next row has lost the line's end before it.
            assert {n for n in untouched if ends[n + 1] <= start or ends[n] > end} <= found


def test_a_new_row_after_a_torn_one_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append(make_row(0))
        journal.append(make_row(1))
        journal.flush()
    segment = tmp_path / "out.jsonl.ahead.1"
    segment.write_bytes(segment.read_bytes()[:-20])
    with open_journal(tmp_path) as journal:
        assert len(journal.load(0, SETTINGS)) == 1
        place = journal.append(make_row(1))
        journal.append(make_row(2))
        journal.flush()
        assert journal.take(place).index == 1
        assert [place != NOWHERE for place in journal.load(0, SETTINGS)] == [True, True, True]


@pytest.mark.parametrize("tail", [b'{"run":{"pid":1,"ho', b'{"run":{"pid":1}}', b"\0\0\0\0", b'{"run"\0\0'])
def test_a_torn_head_takes_no_later_line_with_it(tmp_path: Path, tail: bytes) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin(b'{"overnight":"journal"}')
        with journal.path.open("ab") as file:
            file.write(tail)
        journal.note(b'{"settings":{}}')
        lines = journal.path.read_bytes().split(b"\n")
    whole = [tail] if tail.endswith(b"}}") else []
    assert lines == [b'{"overnight":"journal"}', *whole, b'{"settings":{}}', b""]


def test_a_head_that_lost_only_its_newline_is_kept(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin(b'{"overnight":"journal"}')
        journal.path.write_bytes(b'{"overnight":"journal"}')
        journal.note(b'{"run":{}}')
        assert journal.path.read_bytes() == b'{"overnight":"journal"}\n{"run":{}}\n'


# -- a model -------------------------------------------------------------------------------------------------------


class JournalModel(RuleBasedStateMachine):
    """A journal, its window and the output against a dict; a crash is to open the files again."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.waiting: dict[int, Row] = {}
        self.flushed: set[int] = set()
        self.written = 0
        self.open()
        self.window = Window(10**6)

    def open(self) -> None:
        self.opened = open_journal(self.path, segment_bytes=600)
        self.journal = self.opened.__enter__()

    @rule(late=st.integers(0, 6), size=st.sampled_from([0, 5, 100, 900]), text=st.sampled_from([b"x", "é".encode()]))
    def append(self, late: int, size: int, text: bytes) -> None:
        while self.window.inflight < 8:
            self.window.start()
        free = [n for n in range(self.window.written, self.window.started) if self.window.place(n) == NOWHERE]
        row = make_row(free[late % len(free)], size, text)
        finish(self.journal, self.window, row)
        self.waiting[row.index] = row
        self.journal.flush()
        self.flushed.add(row.index)

    @rule()
    def drain(self) -> None:
        while (place := self.window.release()) != NOWHERE:
            row = self.waiting.pop(self.window.written - 1)
            assert self.journal.take(place).data == row.data

    @rule()
    def move(self) -> None:
        self.journal.move_rows(self.window)

    @rule()
    def sync(self) -> None:
        sync(self.journal)

    @rule()
    def drain_while_syncing(self) -> None:
        descriptors = self.journal.begin_sync()
        self.drain()
        self.move()
        for descriptor in descriptors:
            os.fsync(descriptor)
        self.journal.end_sync()

    @rule(torn=st.sampled_from([b"", b'{"line":3,"id":"batch_req_', b"\0" * 40]))
    def crash(self, torn: bytes) -> None:
        self.opened.__exit__(None, None, None)
        found = checker.segments(self.path / "out.jsonl")
        if found and torn:
            with found[-1].open("ab") as file:
                file.write(torn)
        self.open()
        places = self.journal.load(self.window.written, SETTINGS)
        self.window = Window(10**6, first=self.window.written)
        for place in places:
            if place == NOWHERE:
                self.window.start()
            else:
                self.window.skip(place)

    @precondition(lambda self: self.journal.live)
    @rule()
    def move_all(self) -> None:
        for _ in range(200):
            if not self.journal.move_rows(self.window):
                return
            sync(self.journal)
        raise AssertionError("moving has no end")

    @invariant()
    def all_that_waits_is_on_the_disk(self) -> None:
        found = checker.look(self.path / "out.jsonl", may_be_damaged=True)
        assert set(self.waiting) <= set(found.waiting)
        assert self.journal.size == found.segment_bytes
        waits = {n for n in range(self.window.written, self.window.started) if self.window.place(n) != NOWHERE}
        assert waits == set(self.waiting)
        lengths = sum(len(row.data) - 1 + len(b'{"line":%d,' % row.line) for row in self.waiting.values())
        assert self.journal.live == lengths

    def teardown(self) -> None:
        self.opened.__exit__(None, None, None)
        self.folder.cleanup()


TestJournalModel = JournalModel.TestCase
TestJournalModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_long_row_has_no_length_in_its_place() -> None:
    assert make_place(5, 100) == 5 << 20 | 100
    assert make_place(5, 1 << 20) == 5 << 20
