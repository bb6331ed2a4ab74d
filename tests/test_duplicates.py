"""duplicates: counts against a Counter, in memory and on disk."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.duplicates import Duplicates


def repeats(ids):
    return sum(count - 1 for count in Counter(ids).values())


@given(st.lists(st.text(max_size=2), max_size=300), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_the_count_is_that_of_a_counter_wherever_the_hashes_lie(ids, max_in_memory):
    for limit in (max_in_memory, 10_000):
        duplicates = Duplicates(max_in_memory=limit)
        for each in ids:
            duplicates.add_all([each])
        assert duplicates.count() == repeats(ids)
        assert duplicates.hashes() == {hash(each) for each, count in Counter(ids).items() if count > 1}
        assert duplicates.count() == repeats(ids)
        duplicates.close()


def test_many_ids_spilled_many_times_are_counted_right(tmp_path):
    duplicates = Duplicates(tmp_path, max_in_memory=700)
    ids = [f"id-{number * 7919 % 9001}" for number in range(20_000)]
    for each in ids:
        duplicates.add_all([each])
    assert duplicates.count() == repeats(ids) == 20_000 - 9001
    duplicates.close()
    assert not list(tmp_path.iterdir())


def test_counting_and_going_on_adding_may_alternate(tmp_path):
    duplicates = Duplicates(tmp_path, max_in_memory=3)
    for number in range(1, 20):
        duplicates.add_all(["same"])
        assert duplicates.count() == number - 1
    duplicates.close()


def test_a_folder_that_is_not_there_yet_is_made_when_it_is_needed(tmp_path):
    folder = tmp_path / "not" / "yet"
    duplicates = Duplicates(folder, max_in_memory=2)
    duplicates.add_all(["a"])
    assert not folder.exists()
    duplicates.add_all(["a"])
    duplicates.add_all(["b"])
    assert duplicates.count() == 1
    duplicates.close()


@pytest.mark.parametrize("limit", [2, 1000])
def test_hashes_may_be_bounded(limit):
    duplicates = Duplicates(max_in_memory=limit)
    for number in range(500):
        duplicates.add_all([str(number % 250)])
    assert 10 <= len(duplicates.hashes(at_most=10)) <= 250
    assert len(duplicates.hashes()) == 250
    duplicates.close()


def test_nothing_added_is_nothing_repeated():
    duplicates = Duplicates()
    assert duplicates.count() == 0
    assert duplicates.hashes() == set()
    duplicates.close()
