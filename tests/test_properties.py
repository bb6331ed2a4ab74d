"""Any sequence of starts, finishes, syncs, crashes and continuations comes to the undisturbed output."""

import asyncio
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checker
from overnight.disk import Disk
from overnight.journal import Journal
from overnight.output import Output, RowFile, drain_all
from overnight.window import IN_HAND, NOWHERE, Window
from test_journal import SETTINGS, make_row

SIZES = (0, 30, 400)


@given(
    max_inflight=st.integers(1, 5),
    spare=st.none() | st.integers(0, 5),
    choices=st.lists(st.integers(0, 10**6), max_size=200),
)
def test_a_window_gives_every_place_back_once_and_in_order(
    max_inflight: int, spare: int | None, choices: list[int]
) -> None:
    window = Window(max_inflight, None if spare is None else max_inflight + spare, first=3)
    inflight: list[int] = []
    released: list[int] = []
    for choice in choices:
        if choice % 3 and not window.is_full:
            inflight.append(window.start())
        elif inflight:
            index = inflight.pop(choice % len(inflight))
            window.finish(index, index + 10)
        assert window.inflight == len(inflight) <= max_inflight
        assert spare is None or window.started - window.written <= max_inflight + spare
        if choice % 2:
            while (place := window.release()) != NOWHERE:
                released.append(place - 10)
        assert window.waiting == window.started - 3 - len(released) - len(inflight)
    assert released == list(range(3, 3 + len(released)))


class Model:
    """A batch of `total` requests whose n-th row is always the same; each run is cut off where the choices say."""

    def __init__(self, folder: Path, total: int, choices: list[int], interval_s: float) -> None:
        self.path = folder / "out.jsonl"
        self.total = total
        self.choices = choices
        self.interval_s = interval_s
        self.ran: list[int] = []

    def choose(self, bound: int) -> int:
        return self.choices.pop() % bound if self.choices else 0

    def run_once(self) -> bool:
        """One run; whether it came to its end. Nothing that a file holds may run again."""
        disk = Disk()
        finished = checker.look(self.path, may_be_damaged=True).finished
        head = disk.open(Path(f"{self.path}.ahead"), create=True)
        journal = Journal(Path(f"{self.path}.ahead"), head, disk, 700)
        kept = len(checker.look(self.path, may_be_damaged=True).rows)
        data = self.path.read_bytes() if self.path.exists() else b""
        size = sum(map(len, data.splitlines(keepends=True)[:kept]))
        places = journal.load(kept, SETTINGS)
        window = Window(1 + self.choose(6), first=kept)
        file = RowFile(self.path, disk)
        output = Output(
            file, journal, window, begin=lambda: file.open(size), on_written=lambda _: None, disk=disk,
            sync_interval_s=self.interval_s,
        )  # fmt: skip
        try:
            is_over = asyncio.run(self._work(output, window, dict(enumerate(places, kept)), finished))
            if is_over or self.choose(2):
                output.close()
                if is_over:
                    journal.remove_rows()
        finally:
            output._thread.shutdown()
            journal.close()
            file.close()
            os.close(head)
        return is_over

    async def _work(self, output: Output, window: Window, places: dict[int, int], finished: set[int]) -> bool:
        inflight: list[int] = []
        while window.written < self.total:
            while window.started < self.total and not window.is_full:
                place = places.get(window.started, NOWHERE)
                if place != NOWHERE:
                    window.skip(place)
                else:
                    inflight.append(window.start())
                    assert inflight[-1] not in finished, "it was finished, and runs again"
            match self.choose(12) if self.choices else 1:
                case 0:
                    return False
                case 11:
                    await output.sync()
                case _ if inflight:
                    for _ in range(1 + self.choose(3)):
                        index = inflight.pop(self.choose(len(inflight)))
                        self.ran.append(index)
                        output.finish(make_row(index, SIZES[index % 3]))
                        if not inflight:
                            break
            await drain_all(output)
        return True

    def damage(self) -> None:
        """What a crash may leave of the last rows: less, or zeros."""
        files = [self.path, *checker.segments(self.path)[-1:]]
        path = files[self.choose(len(files))]
        if path.exists():
            size = path.stat().st_size
            kept = max(size - self.choose(600), 0)
            os.truncate(path, kept)
            if self.choose(2):
                os.truncate(path, size)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    total=st.integers(0, 40),
    choices=st.lists(st.integers(0, 10**6), max_size=150),
    interval_s=st.sampled_from([0.0, 1.0]),
    is_damaged=st.booleans(),
)
def test_any_sequence_of_crashes_comes_to_the_undisturbed_output(
    total: int, choices: list[int], interval_s: float, *, is_damaged: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder), total, choices, interval_s)
        while not model.run_once():
            if is_damaged:
                model.damage()
        wanted = b"".join(make_row(index, SIZES[index % 3]).data for index in range(total))
        assert model.path.read_bytes() == wanted if total else True
        assert not checker.segments(model.path)
        if not is_damaged:
            assert sorted(model.ran) == list(range(total))


@given(indexes=st.permutations(range(30)))
def test_rows_in_hand_are_released_in_order_whatever_the_order_they_finish_in(indexes: list[int]) -> None:
    window = Window(30)
    for _ in indexes:
        window.start()
    released = 0
    for index in indexes:
        window.finish(index)
        while window.release() == IN_HAND:
            released += 1
        assert released == window.written
    assert released == 30
