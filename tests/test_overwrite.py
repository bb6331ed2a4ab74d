"""`--overwrite` begins anew, once the first new row is ready; until then what is there is whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batches import DyingDisk, Ground, end_of, kill, lines_of, slow_first, wait_for
from conftest import request_line
from overnight.errors import EngineLost, OutputLost, OutputRefused, UsageError


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    ground.close()


def leave_unfinished(ground: Ground, **options: Any) -> None:
    """r0 to r4 are in the output, r5 is missing, r6 to r9 wait."""
    ground.write([*lines_of(5), request_line("r5", echo={"fault": "hang"}), *lines_of(4, 6)])
    ground.run_until(9, **options)
    assert len(ground.ids()) == 5
    assert len(ground.ahead()) == 4


def settings_in_use(ground: Ground) -> set[str]:
    return {row["id"][26:38] for row in ground.rows()}


@pytest.mark.parametrize("words", [["--max-inflight", "0"], ["--nonsense"], ["--error-file", "out.jsonl"]], ids=str)
def test_flags_that_are_refused_leave_what_is_there(ground: Ground, words: list[str]) -> None:
    leave_unfinished(ground)
    before = ground.look()
    assert end_of(ground.start("--overwrite", *words))[0] == 2
    assert ground.look() == before


def test_an_input_that_is_refused_leaves_what_is_there(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.write([*ground.lines(), b"no json"])
    before = ground.look()
    assert end_of(ground.start("--overwrite"))[0] == 2
    assert ground.look() == before


def test_an_engine_that_does_not_open_leaves_what_is_there(ground: Ground) -> None:
    leave_unfinished(ground)
    before = ground.look()
    with pytest.raises(EngineLost):
        ground.run(overwrite=True, echo_log="/nowhere/engine.log")
    assert ground.look() == before


def test_an_engine_lost_before_its_first_answer_leaves_what_is_there(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.write([request_line(f"q{n}", echo={"fault": "lost"}) for n in range(4)])
    before = ground.look()
    with pytest.raises(EngineLost):
        ground.run(overwrite=True)
    assert ground.look() == before


def test_a_kill_before_the_first_new_row_leaves_what_is_there(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.write([request_line(f"q{n}", echo={"fault": "hang"}) for n in range(4)])
    before = ground.look()
    child = ground.start("--overwrite")
    wait_for(lambda: {"q0", "q1", "q2", "q3"} <= set(ground.asked()))
    said = kill(child)
    assert "out.jsonl is replaced when the first new row is ready" in said
    assert ground.look() == before


def test_with_the_first_new_row_the_old_are_gone(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.write([*lines_of(1, 100), request_line("q1", echo={"fault": "hang"})])
    ground.run_until(1, overwrite=True, max_inflight=1)
    assert ground.ids() == ["r100"]
    assert ground.ahead() == []
    ground.write([request_line("q0", echo={"fault": "hang"}), *lines_of(2, 101)])
    ground.run_until(2, overwrite=True)
    assert ground.ids() == []
    assert len(ground.ahead()) == 2


def test_an_overwritten_run_that_completes_leaves_its_rows_alone(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.write(lines_of(3, 50))
    summary = ground.run(overwrite=True)
    assert ground.ids() == ["r50", "r51", "r52"]
    assert summary.counts.total == 3
    assert ground.files() == []


def test_a_complete_output_is_run_anew_when_asked(ground: Ground) -> None:
    ground.write(lines_of(4))
    ground.run()
    first = ground.output.read_bytes()
    ground.run(overwrite=True)
    assert len(ground.asked()) == 4
    assert ground.output.read_bytes() != first


@pytest.mark.parametrize("data", [b"Dear diary\n", b'{"a":1}\n', bytes(10), b""])
def test_a_file_that_is_no_output_can_be_replaced(ground: Ground, data: bytes) -> None:
    ground.write(lines_of(3))
    ground.output.write_bytes(data)
    if data:
        with pytest.raises(OutputRefused, match="replace it with --overwrite"):
            ground.run()
    assert ground.output.read_bytes() == data
    ground.run(overwrite=True)
    assert ground.ids() == ["r0", "r1", "r2"]


def test_a_crash_between_any_two_steps_never_brings_old_rows_back(ground: Ground) -> None:
    leave_unfinished(ground)
    old = {path: path.read_bytes() for path in (ground.output, *ground.folder.glob("*.ahead*"))}
    lines = [*lines_of(5), request_line("r5"), *lines_of(4, 6)]
    seen = []
    for dies_at in range(1, 40):
        for path in (ground.output, *ground.folder.glob("*.ahead*")):
            path.unlink(missing_ok=True)
        for path, data in old.items():
            path.write_bytes(data)
        ground.write(lines)
        disk = DyingDisk(dies_at)
        try:
            ground.run(disk=disk, overwrite=True, model="other", max_inflight=3)
        except (OutputLost, OutputRefused):
            seen.append(disk.last)
        else:
            break
        if ground.output.read_bytes() == old[ground.output]:
            assert all(path.read_bytes() == old[path] for path in ground.folder.glob("*.ahead.*"))
        else:
            assert ground.ahead() == [] or {row["id"][26:38] for row in ground.ahead()} == settings_in_use(ground)
            assert ground.output.read_bytes()[:10] in {b"", b'{"id":"bat'}
        ground.run(overwrite=True, model="other")
        assert ground.ids() == [f"r{n}" for n in range(10)]
        assert len(settings_in_use(ground)) == 1
        assert ground.files() == []
    assert {"remove out.jsonl.ahead.1", "truncate", "write"} <= set(seen)


# -- a command that is repeated ------------------------------------------------------------------------------------


def test_an_unfinished_run_that_was_begun_so_is_continued_and_that_is_said(ground: Ground) -> None:
    leave_unfinished(ground, overwrite=True)
    for _ in range(2):
        ground.run_until(0, overwrite=True)
    ground.write([*lines_of(5), request_line("r5"), *lines_of(4, 6)])
    with ground.prepare(overwrite=True) as batch:  # the line in the gap is another: another input begins anew
        assert "is replaced when the first new row is ready" in batch.describe()
    ground.write([*lines_of(5), request_line("r5", echo={"fault": "hang"}), *lines_of(4, 6)])
    ground.run_until(0, overwrite=True)
    assert (
        "has 5 rows, 4 more wait in its journal; the unfinished run was itself begun with --overwrite: 1 requests"
        in (ground.described)
    )
    assert ground.asked() in ([], ["r5"])
    assert len(ground.ids()) == 5


def test_it_is_continued_also_where_a_plain_command_came_between(ground: Ground) -> None:
    leave_unfinished(ground, overwrite=True)
    ground.run_until(0)
    ground.run_until(0, overwrite=True)
    assert "was itself begun with --overwrite" in ground.described
    assert len(ground.ids()) == 5


def test_with_other_settings_it_begins_anew(ground: Ground) -> None:
    leave_unfinished(ground, overwrite=True)
    ground.run_until(9, overwrite=True, model="other")
    assert len(ground.asked()) == 10


def test_an_unfinished_run_that_was_begun_plainly_is_begun_anew(ground: Ground) -> None:
    leave_unfinished(ground)
    ground.run_until(9, overwrite=True)
    assert len(ground.asked()) == 10


def test_it_begins_anew_where_the_output_was_replaced_meanwhile(ground: Ground) -> None:
    leave_unfinished(ground, overwrite=True)
    ground.output.write_bytes(b'{"mine":1}\n')
    ground.run_until(9, overwrite=True)
    assert len(ground.asked()) == 10
    assert len(ground.ids()) == 5


def test_once_it_completed_the_command_begins_anew(ground: Ground) -> None:
    ground.write(lines_of(3))
    ground.run(overwrite=True)
    ground.run(overwrite=True)
    assert len(ground.asked()) == 3


def test_it_does_not_go_with_expire_where_rows_would_go(ground: Ground) -> None:
    leave_unfinished(ground)
    before = ground.look()
    with pytest.raises(UsageError, match="leave one out"):
        ground.run(overwrite=True, expire=True)
    assert ground.look() == before


def test_old_journals_of_a_run_that_hung_are_no_hindrance(ground: Ground) -> None:
    ground.write(slow_first(6))
    ground.run_until(5)
    ground.output.unlink()
    ground.write(lines_of(2))
    ground.run(overwrite=True)
    assert ground.ids() == ["r0", "r1"]
    assert ground.files() == []
