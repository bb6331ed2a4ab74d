"""The window, held against a model that is simple enough to be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.window import NOWHERE, Window


def test_it_shows_its_numbers():
    window = Window(64, first=500)
    for _ in range(4):
        window.start()
    window.finish(500)
    window.finish(502)
    window.release()
    assert repr(window) == "<Window 64: 2 inflight, 1 waiting, 501 written>"


@pytest.mark.parametrize(("sizes", "message"), [((0,), "at least 1, not 0"), ((8, 7), r"max_inflight \(8\), not 7")])
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Window(*sizes)


def test_nothing_starts_where_it_is_full_or_held():
    window = Window(1)
    window.is_held = True
    assert window.is_full
    window.is_held = False
    assert window.start() == 0
    with pytest.raises(RuntimeError, match=r"nothing may start: <Window 1: 1 inflight"):
        window.start()


@pytest.mark.parametrize("index", [-1, 1, 4])
def test_only_what_is_in_flight_can_finish(index):
    window = Window(4)
    for _ in range(2):
        window.start()
    window.finish(1)
    with pytest.raises(RuntimeError, match=f"request {index} cannot finish"):
        window.finish(index)


def test_what_was_written_cannot_finish_again():
    window = Window(1)
    window.finish(window.start())
    assert window.release() != NOWHERE
    with pytest.raises(RuntimeError, match="request 0 cannot finish"):
        window.finish(0)


def test_only_a_row_that_waits_can_move():
    window = Window(1)
    window.start()
    with pytest.raises(RuntimeError, match="row 0 does not wait"):
        window.move(0, 7)


def test_rows_of_an_earlier_run_do_not_count_as_in_flight_but_are_released_in_their_turn():
    window = Window(1)
    for place in (10, 11):
        window.skip(place)
    window.start()
    window.skip(12)
    assert window.is_full
    assert [window.release() for _ in range(3)] == [10, 11, NOWHERE]
    window.finish(2, 13)
    assert [window.release() for _ in range(3)] == [13, 12, NOWHERE]


@given(
    max_inflight=st.integers(1, 6),
    further=st.none() | st.integers(0, 12),
    first=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from(["start", "skip", "finish", "release", "move"]), st.integers(0, 99))),
)
def test_it_behaves_as_a_list_of_started_rows(max_inflight, further, first, steps):
    max_ahead = None if further is None else max_inflight + further
    window = Window(max_inflight, max_ahead, first)
    places: list[int] = []  # of every row from `first` on: NOWHERE until it is finished
    written = 0
    for place, (step, number) in enumerate(steps, 100):
        waiting = [index for index, where in enumerate(places) if where != NOWHERE and index >= written]
        inflight = [index for index, where in enumerate(places) if where == NOWHERE]
        assert (window.inflight, window.waiting, window.written) == (len(inflight), len(waiting), first + written)
        is_full = len(inflight) >= max_inflight or (max_ahead is not None and len(places) - written >= max_ahead)
        assert window.is_full == is_full
        match step:
            case "start" if not is_full:
                assert window.start() == first + len(places)
                places.append(NOWHERE)
            case "skip":
                assert window.skip(place) == first + len(places)
                places.append(place)
            case "finish" if inflight:
                index = inflight[number % len(inflight)]
                window.finish(first + index, place)
                places[index] = place
            case "move" if waiting:
                index = waiting[number % len(waiting)]
                window.move(first + index, place)
                places[index] = place
            case "release":
                expected = places[written] if written < len(places) else NOWHERE
                assert window.release() == expected
                written += expected != NOWHERE
    for index in range(len(places)):
        assert window.place(first + index) == (places[index] if index >= written else NOWHERE)


def test_what_is_written_takes_no_memory():
    window = Window(1)
    for _ in range(50_000):
        window.finish(window.start(), 5)
        window.release()
    window.start()
    for index in range(50_000):
        window.skip(index + 1)
    window.finish(50_000, 1)
    while window.release():
        pass
    assert window.written == 100_001
    assert len(window._places) <= 8192
