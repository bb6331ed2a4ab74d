"""`--deadline`, `--on-deadline expire` and `--expire`: a run that ends by the clock."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batches import Ground, end_of, lines_of, slow_first, wait_for
from conftest import request_line
from overnight.errors import RunStopped, UsageError
from overnight.expire import MARGIN_S, plan_stop

SLACK_S = 1.5  # what a busy machine may add


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    ground.close()


def gaps(count: int) -> list[str]:
    """Of each four requests, the second never answers."""
    return [request_line(f"r{n}", echo={"fault": "hang"} if n % 4 == 1 else {}) for n in range(count)]


# -- when to stop, in numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "grace", "rows", "expected"),
    [
        (100, 20, 0, (100 - 20 - MARGIN_S, 20)),
        (10.5, 20, 0, (5, 5)),  # of a short time the grace takes half
        (0.2, 20, 0, (0, 0)), (-5, 20, 0, (0, 0)), (100, 0, 0, (100 - MARGIN_S, 0)),
        (100, 0, 1_000_000, (100 - MARGIN_S - 30, 0)),
    ],
)  # fmt: skip
def test_starts_stop_a_grace_and_a_sync_before_the_deadline(left, grace, rows, expected):
    assert plan_stop(left, grace, rows) == pytest.approx(expected)


# -- --deadline ----------------------------------------------------------------------------------------------------


def test_at_the_deadline_all_that_finished_is_on_the_disk_and_the_command_goes_on_later(ground: Ground) -> None:
    ground.write([*lines_of(3), *slow_first(1), *lines_of(4, 4)])
    began = time.monotonic()
    with pytest.raises(RunStopped, match="--deadline came before the last row") as caught:
        ground.run(deadline="1.5s", grace="0.2s")
    assert 0.7 < time.monotonic() - began < 1.5 + SLACK_S
    assert caught.value.exit_code == 3
    assert ground.ids() == ["r0", "r1", "r2"]
    assert len(ground.ahead()) == 4
    ground.run(expire=True)
    assert len(ground.rows()) == 8


def test_what_is_in_flight_may_finish_within_the_grace(ground: Ground) -> None:
    ground.write(lines_of(6, delay=0.5))
    with pytest.raises(RunStopped):
        ground.run(deadline="2s", grace="0.9s", max_inflight=1)
    done = len(ground.ids())
    assert 1 <= done <= 3
    assert len(ground.asked()) == done  # none was asked in vain


def test_a_deadline_that_is_far_changes_nothing(ground: Ground) -> None:
    ground.write(lines_of(5))
    assert ground.run(deadline="1h").counts.completed == 5


def test_a_deadline_that_is_past_opens_no_engine(ground: Ground) -> None:
    ground.write(lines_of(5))
    with pytest.raises(RunStopped):
        ground.run(deadline="0s", echo_log="/nowhere/engine.log")
    assert not ground.output.exists()
    assert ground.files() == []
    ground.run(deadline="0s", on_deadline="expire", echo_log="/nowhere/engine.log")
    assert ground.codes() == {"batch_expired": 5}


def test_a_deadline_ends_the_opening_of_an_engine_too(ground: Ground) -> None:
    ground.write(lines_of(3))
    for how in ("stop", "expire"):
        with ground.prepare(deadline="1s", grace="0s", on_deadline=how) as batch:

            class Slow(type(batch.engine)):
                async def __aenter__(self):
                    await asyncio.sleep(60)

            batch.engine = Slow(batch.engine.context, batch.engine.options)
            began = time.monotonic()
            if how == "stop":
                with pytest.raises(RunStopped):
                    asyncio.run(batch.run())
            else:
                asyncio.run(batch.run())
            assert time.monotonic() - began < 1 + SLACK_S
    assert ground.codes() == {"batch_expired": 3}


def test_at_the_deadline_what_did_not_run_gets_a_row_that_says_so(ground: Ground) -> None:
    ground.write(gaps(40))
    began = time.monotonic()
    code, err = end_of(ground.start("--deadline", "2s", "--grace", "0", "--on-deadline", "expire"))
    assert time.monotonic() - began < 2 + SLACK_S + 1
    assert code == 0, err
    assert ground.ids() == [f"r{n}" for n in range(40)]
    assert ground.codes() == {"batch_expired": 10}
    expired = [row for row in ground.rows() if row["error"]]
    assert [int(row["custom_id"][1:]) % 4 for row in expired] == [1] * 10
    assert all(row["response"] is None and row["error"]["code"] == "batch_expired" for row in expired)
    assert "30 completed, 10 failed" in err
    assert ground.files() == []


def test_a_run_of_which_everything_expired_exits_with_1(ground: Ground) -> None:
    ground.write(slow_first(1))
    assert end_of(ground.start("--deadline", "1s", "--grace", "0", "--on-deadline", "expire"))[0] == 1
    assert ground.codes() == {"batch_expired": 1}


def test_the_deadline_ends_the_command_with_3(ground: Ground) -> None:
    ground.write(slow_first(3))
    code, err = end_of(ground.start("--deadline", "1s", "--grace", "0"))
    assert code == 3
    assert "--deadline came before the last row" in err


def test_a_signal_while_the_deadline_comes_ends_the_run_as_a_signal(ground: Ground) -> None:
    ground.write(slow_first(3))
    child = ground.start("--deadline", "5s", "--grace", "0", "--on-deadline", "expire")
    wait_for(lambda: len(ground.ahead()) == 2)
    child.terminate()
    assert end_of(child)[0] == 143
    assert ground.ids() == []


# -- --expire ------------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_completed_at_once_and_keeps_what_waits(ground: Ground) -> None:
    ground.write(gaps(40))
    ground.run_until(30)
    waiting = {row["id"] for row in ground.ahead()}
    assert len(waiting) == 29
    summary = ground.run(expire=True, echo_log="/nowhere/engine.log")
    assert "has 1 rows, 29 more wait in its journal: 10 requests get a batch_expired row" in ground.described
    assert ground.ids() == [f"r{n}" for n in range(40)]
    assert waiting <= {row["id"] for row in ground.rows()}
    assert ground.codes() == {"batch_expired": 10}
    assert (summary.counts.completed, summary.counts.failed) == (30, 10)
    assert ground.files() == []


def test_without_anything_that_ran_every_row_expires(ground: Ground) -> None:
    ground.write(lines_of(2500))
    code, err = end_of(ground.start("--expire"))
    assert code == 1, err
    assert ground.ids() == [f"r{n}" for n in range(2500)]
    assert ground.codes() == {"batch_expired": 2500}


def test_lines_that_are_no_requests_keep_saying_why(ground: Ground) -> None:
    ground.write([*lines_of(1), b"no json", *lines_of(1, 2)])
    ground.run(expire=True, on_invalid="row")
    assert ground.codes() == {"batch_expired": 2, "invalid_json_line": 1}


def test_what_expired_runs_later(ground: Ground) -> None:
    ground.write(gaps(20))
    ground.run_until(15)
    ground.run(expire=True)
    before = ground.rows()
    ground.run()  # the plain command finds every row there
    assert ground.asked() == []
    ground.run_until(0, inflight=5, retry_errors="failed")  # they hang again
    assert ground.asked() == ["r1", "r13", "r17", "r5", "r9"]
    assert ground.rows() == before


def test_a_complete_output_has_nothing_to_expire(ground: Ground) -> None:
    ground.write(lines_of(3))
    ground.run()
    before = ground.look()
    ground.run(expire=True)
    assert ground.look() == before


@pytest.mark.parametrize("more", [{"retry_errors": "failed"}, {"output_file": "-"}])
def test_it_cannot_work_with_options_that_run_or_keep_nothing(ground: Ground, more: dict[str, str]) -> None:
    ground.write(lines_of(3))
    before = ground.look()
    with pytest.raises(UsageError):
        ground.run(expire=True, **more)
    assert ground.look() == before
