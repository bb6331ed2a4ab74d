"""`--retry-errors`: failed rows run again, each new answer in its old place."""

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batches import DyingDisk, Ground, end_of, kill, lines_of, wait_for
from conftest import ids_of, read_rows, request_line
from overnight.disk import Disk
from overnight.errors import EngineLost, OutputLost, OutputRefused, RunStopped, UsageError


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    ground.close()


def failing(count: int, first: int = 0, **better: object) -> list[str]:
    """Of each five requests: one that is answered, and four that fail, each in its own way."""
    ways = [{}, {"status": 400}, {"status": 429}, {"status": 500}, {"fault": "refuse"}]
    return [request_line(f"r{n}", echo={**ways[n % 5], **better}) for n in range(first, first + count)]


def leave_failures(ground: Ground, count: int = 20, **options: object) -> None:
    """A complete output with failures, whose next run answers what failed."""
    ground.write([*failing(count), b"no json", request_line("empty").replace('"messages"', '"massages"')])
    ground.run(on_invalid="row", max_attempts=1, **options)
    assert ground.codes() == {
        "http_400": count // 5 + 1, "http_429": count // 5, "http_500": count // 5, "connection_error": count // 5,
        "invalid_json_line": 1,
    }  # fmt: skip


class Before:
    """The rows as they are now, to hold against those after."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.lines = ground.output.read_bytes().splitlines()

    def changed(self) -> list[int]:
        now = self.ground.output.read_bytes().splitlines()
        assert len(now) == len(self.lines)
        return [n for n, (old, new) in enumerate(zip(self.lines, now, strict=True)) if old != new]


def row_ids(rows: list[dict[str, Any]]) -> set[str]:
    return {row["id"] for row in rows}


def run_again(ground: Ground, which: str = "failed", **options: object) -> object:
    return ground.run(retry_errors=which, on_invalid="row", max_attempts=1, **options)


@pytest.mark.parametrize(("which", "kinds"), [("failed", {2, 3, 4}), ("all", {1, 2, 3, 4})])
def test_failed_rows_run_again_and_no_others_and_the_newer_failure_stands(ground, which, kinds):
    leave_failures(ground)
    before, counts = Before(ground), ground.codes()
    run_again(ground, which)
    wanted = [n for n in range(20) if n % 5 in kinds]
    assert ground.asked() == sorted(f"r{n}" for n in wanted)
    assert before.changed() == wanted  # all others are the same to the byte, those of bad lines too
    assert ground.ids()[:20] == [f"r{n}" for n in range(20)]
    assert ground.codes() == counts
    assert ground.files() == []


def test_each_new_answer_takes_its_old_place_and_the_summary_is_the_whole_batchs(ground: Ground) -> None:
    ground.write(failing(20, times=1))
    ground.run(max_attempts=1)
    assert ground.codes().total() == 16
    before = Before(ground)
    child = ground.start("--retry-errors", "all", "--max-attempts", "2", "--summary-json", ground.folder / "s.json")
    code, err = end_of(child)
    assert code == 0, err
    assert len(before.changed()) == 16
    assert ground.codes() == {"http_400": 4}
    assert ground.ids() == [f"r{n}" for n in range(20)]
    assert "20 of 20 rows: 16 completed, 4 failed" in err
    assert "tokens: 16 in, 16 out" in err
    assert "out.jsonl has 20 rows" in err
    assert "16 failed rows run again" in err


def test_rows_that_this_run_wrote_do_not_run_twice(ground: Ground) -> None:
    ground.write(failing(10))
    run_again(ground, "all")
    assert Counter(ground.asked()) == Counter(f"r{n}" for n in range(10))
    assert "There is no failed row to run again" in ground.watcher.notes[-1]


def test_nothing_to_run_again_says_so_and_opens_no_engine(ground: Ground) -> None:
    ground.write([*lines_of(3), request_line("bad", echo={"status": 404})])
    ground.run()
    before = ground.look()
    run_again(ground, echo_log="/nowhere/engine.log")
    assert "There is no failed row to run again (those that failed, failed for good: --retry-errors all)" in (
        ground.watcher.notes
    )
    assert ground.look() == before
    assert end_of(ground.start("--retry-errors"))[0] == 0
    assert ground.look() == before


def test_on_an_unfinished_run_what_is_missing_runs_first(ground: Ground) -> None:
    lines = failing(10)
    lines[5] = request_line("r5", echo={"fault": "hang"})
    ground.write(lines)
    ground.run_until(9, max_attempts=1)
    assert len(ground.ahead()) == 4
    ground.write([*lines[:5], request_line("r5"), *lines[6:], *lines_of(2, 10)])
    run_again(ground, max_inflight=1)
    order = ground.log.read_text().split()
    assert order[:3] == ["r5", "r10", "r11"]
    assert sorted(order[3:]) == ["r2", "r3", "r4", "r7", "r8", "r9"]
    assert ground.ids() == [f"r{n}" for n in range(12)]


def test_the_engine_is_opened_once_for_what_is_missing_and_what_failed(ground: Ground) -> None:
    ground.write([*failing(5), request_line("r5", echo={"fault": "hang"})])
    ground.run_until(5, max_attempts=1)
    ground.write([*failing(5), request_line("r5")])
    opened = []
    with ground.prepare(retry_errors="all", max_attempts=1) as batch:
        kind = type(batch.engine)

        class Counting(kind):
            async def __aenter__(self):
                opened.append(1)
                return await super().__aenter__()

        batch.engine = Counting(batch.engine.context, batch.engine.options)
        asyncio.run(batch.run())
    assert opened == [1]
    assert len(ground.ids()) == 6


# -- ends in the middle --------------------------------------------------------------------------------------------


def stop_in_the_middle(ground: Ground) -> Before:
    """r2, r3 and r4 were answered again and wait for the merge; r7, r8 and r9 were not."""
    ways = failing(7, times=1) + [request_line(f"r{n}", echo={"status": 500, "delay": 0.3}) for n in (7, 8, 9)]
    ground.write(ways)
    ground.run(max_attempts=1)
    before = Before(ground)
    ground.run_until(6, retry_errors="failed", max_inflight=1, max_attempts=2)
    assert ground.batch.describe_end() == "3 of 6 failed rows were run again; the new answers wait in the journal"
    assert before.changed() == []
    assert ids_of(ground.ahead()) == ["r2", "r3", "r4"]
    return before


def test_the_plain_command_finishes_the_merge_first(ground: Ground) -> None:
    before = stop_in_the_middle(ground)
    summary = ground.run(echo_log="/nowhere/engine.log")
    assert "3 new answers wait in its journal to take failed rows' places" in ground.described
    assert before.changed() == [2, 3, 4]
    assert ground.files() == []
    assert (summary.counts.completed, summary.counts.failed) == (5, 5)


def test_asked_again_it_merges_and_runs_the_rest(ground: Ground) -> None:
    before = stop_in_the_middle(ground)
    ground.run(retry_errors="failed", max_attempts=1)
    assert ground.asked() == ["r7", "r8", "r9"]
    assert before.changed() == [2, 3, 4, 7, 8, 9]


def test_an_input_that_grew_meanwhile_is_merged_and_then_continued(ground: Ground) -> None:
    before = stop_in_the_middle(ground)
    ground.write([*ground.lines(), *lines_of(3, 10)])
    ground.run()
    assert ground.asked() == ["r10", "r11", "r12"]
    assert ground.ids() == [f"r{n}" for n in range(13)]
    before.lines += ground.output.read_bytes().splitlines()[10:]
    assert before.changed() == [2, 3, 4]


def test_an_engine_that_is_lost_loses_no_answer(ground: Ground) -> None:
    ground.write(failing(10, times=1))
    ground.run(max_attempts=1)
    before = Before(ground)
    lost = ground.input.read_bytes()

    with ground.prepare(retry_errors="failed", max_attempts=2, max_inflight=1) as batch:
        kind = type(batch.engine)

        class Dying(kind):
            async def answer(self, request):
                if request.custom_id == "r7":
                    raise EngineLost("echo", "it had enough")
                return await super().answer(request)

        batch.engine = Dying(batch.engine.context, batch.engine.options)
        with pytest.raises(EngineLost):
            asyncio.run(batch.run())
    assert ground.input.read_bytes() == lost
    assert ids_of(ground.ahead()) == ["r2", "r3", "r4"]
    ground.run()
    assert before.changed() == [2, 3, 4]


def test_an_engine_that_does_not_open_leaves_everything_as_it_was(ground: Ground) -> None:
    leave_failures(ground)
    before = ground.look()
    with pytest.raises(EngineLost):
        run_again(ground, echo_log="/nowhere/engine.log")
    assert ground.look() == before


def test_a_crash_between_any_two_steps_leaves_the_old_file_or_the_new(ground: Ground) -> None:
    ground.write(failing(10))
    ground.run(max_attempts=1)
    old, old_ids = ground.output.read_bytes(), row_ids(ground.rows())
    ends = set()
    for dies_at in range(1, 60):
        ground.output.write_bytes(old)
        disk = DyingDisk(dies_at)
        try:
            run_again(ground, disk=disk, max_inflight=2)
        except (OutputLost, OutputRefused):
            ends.add(disk.last)
        else:
            break
        waiting = row_ids(ground.ahead())
        assert len(row_ids(ground.rows()) - old_ids) in {0, 6}
        ground.run()
        assert waiting <= row_ids(ground.rows())
        assert ground.ids() == [f"r{n}" for n in range(10)]
        assert ground.files() == []
    assert {"replace out.jsonl", "create out.jsonl.merge"} <= ends


def test_kills_at_any_moment_leave_the_old_file_or_the_new_and_lose_no_answer(ground: Ground) -> None:
    rng = random.Random(7)
    size = 60_000  # so that the merge takes a while
    ground.write([request_line(f"r{n}", echo={"status": 500} if n % 2 else {"size": size}) for n in range(200)])
    ground.run(max_attempts=1)
    old, old_ids = ground.output.read_bytes(), row_ids(ground.rows())
    for _ in range(20):
        ground.output.write_bytes(old)
        child = ground.start("--retry-errors", "--max-attempts", "1", "--max-inflight", "8", "--echo-jitter", "10ms")
        wait_for(lambda child=child: ground.head.exists() or child.poll() is not None)
        try:
            child.wait(rng.random() * 0.4)
        except subprocess.TimeoutExpired:
            kill(child)
        else:
            assert end_of(child)[0] == 0
        waiting = row_ids(ground.ahead())
        assert len(row_ids(ground.rows()) - old_ids) in {0, 100}
        ground.run()  # the plain command
        assert waiting <= row_ids(ground.rows())
        assert ground.ids() == [f"r{n}" for n in range(200)]
        assert ground.output.read_bytes().splitlines()[::2] == old.splitlines()[::2]
        assert ground.files() == []


def test_a_stop_while_rows_are_merged_lets_the_merge_end(ground: Ground) -> None:
    before = stop_in_the_middle(ground)

    class Slow(Disk):
        is_merging = False

        def open(self, path: Path, *, create: bool = False) -> int:
            if path.name.endswith(".merge"):
                self.is_merging = True
                time.sleep(0.3)
            return super().open(path, create=create)

    disk = Slow()

    async def work() -> None:
        with ground.prepare(disk=disk) as batch:
            task = asyncio.create_task(batch.run())
            while not disk.is_merging:  # noqa: ASYNC110 - a disk says nothing
                await asyncio.sleep(0.01)
            batch.stop(RunStopped("Stopped", 143), 0.0)
            with pytest.raises(RunStopped):
                await task
            assert before.changed() == [2, 3, 4]  # while the lock is still held

    asyncio.run(work())
    ground.run()
    assert before.changed() == [2, 3, 4]
    assert ground.files() == []


def test_a_signal_while_failed_rows_run_again_keeps_the_answers(ground: Ground) -> None:
    ground.write(failing(10))
    ground.run(max_attempts=1)
    before = Before(ground)
    child = ground.start("--retry-errors", "--max-attempts", "1", "--max-inflight", "1", "--echo-delay", "0.2s")
    wait_for(lambda: len(ground.ahead()) == 2)
    child.terminate()
    assert end_of(child)[0] == 143
    assert before.changed() == []
    ground.run()
    assert before.changed() == [2, 3, 4]  # what was in flight could finish
    assert ground.files() == []


# -- edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"overwrite": True}, {"output_file": "-"}, {"expire": True}], ids=str)
def test_it_cannot_work_with_options_that_leave_no_old_place(ground: Ground, more: dict[str, object]) -> None:
    leave_failures(ground)
    before = ground.look()
    ground.input.unlink()  # so that the refusal comes before the input is read
    before.pop(str(ground.input))
    with pytest.raises(UsageError, match="retry-errors"):
        ground.run(retry_errors="failed", **more)
    assert ground.look() == before


def test_the_files_mode_and_a_link_to_it_are_kept(ground: Ground) -> None:
    there = ground.folder / "there"
    there.mkdir()
    ground.output.symlink_to("there/real.jsonl")
    leave_failures(ground)
    (there / "real.jsonl").chmod(0o640)
    before = Before(ground)
    run_again(ground)
    assert len(before.changed()) == 12
    assert ground.output.is_symlink()
    assert (there / "real.jsonl").stat().st_mode & 0o7777 == 0o640
    assert [path.name for path in there.iterdir()] == ["real.jsonl"]


def test_too_little_room_for_the_merge_is_said_before_anything_runs(ground: Ground) -> None:
    small = ground.folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        ground.output = small / "out.jsonl"
        ground.write([request_line("big", echo={"size": 700_000}), request_line("bad", echo={"status": 500})])
        ground.run(max_attempts=1)
        before = ground.output.read_bytes()
        with pytest.raises(OutputLost, match=r"needs .* bytes beside it") as caught:
            run_again(ground)
        assert caught.value.exit_code == 3
        assert ground.asked() == []
        assert [path.name for path in small.iterdir()] == ["out.jsonl"]
        assert ground.output.read_bytes() == before
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_copy_of_failed_rows_is_made_anew_after_the_merge(ground: Ground) -> None:
    errors = ground.folder / "errors.jsonl"
    ground.write(failing(10, times=1))
    ground.run(max_attempts=1, error_file=str(errors))
    assert len(read_rows(errors)) == 8
    ground.run(retry_errors="failed", max_attempts=2, error_file=str(errors))
    assert ids_of(read_rows(errors)) == ["r1", "r6"]


def test_rows_of_two_settings_are_known_after_a_retry_was_cut_short(ground: Ground) -> None:
    ground.write(failing(10))
    ground.run(max_attempts=1)
    ground.write([*failing(10), request_line("r10", echo={"status": 500})])
    ground.run(max_attempts=1, model="other", continue_anyway=True)
    ground.run_until(
        3, retry_errors="failed", max_attempts=1, model="other", continue_anyway=True, max_inflight=1, echo_delay=0.01
    )
    assert ground.head.exists()
    ground.run(model="other")
    assert len(ground.ids()) == 11
    assert ground.files() == []


def test_a_larger_file_is_merged_in_pieces(ground: Ground) -> None:
    lines = [request_line(f"r{n}", echo={"size": 100_000, **({"status": 500, "times": 1} if n % 7 == 0 else {})})
             for n in range(60)]  # fmt: skip
    ground.write(lines)
    ground.run(max_attempts=1)
    before = Before(ground)
    ground.run(retry_errors="failed", max_attempts=2)
    assert before.changed() == list(range(0, 60, 7))
    assert ground.codes() == {}
