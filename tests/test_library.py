"""Runs from Python: a file to a file, lines, one line; the echo engine answers."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import overnight
from conftest import ids_of, read_rows, request_line, write_requests
from overnight.errors import EngineLost, EngineMissing, OutputRefused, UnknownOption, UsageError


def answer_lines(lines: Iterable[str | bytes], **options: Any) -> list[overnight.Row]:
    """The rows of lines, through an engine of their own."""

    async def collect() -> list[overnight.Row]:
        async with overnight.open_engine("echo") as engine:
            return [row async for row in overnight.run_lines(lines, engine, **options)]

    return asyncio.run(collect())


def answer_line(line: str | bytes) -> overnight.Row:
    async def answer() -> overnight.Row:
        async with overnight.open_engine("echo") as engine:
            return await overnight.run_line(line, engine)

    return asyncio.run(answer())


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_run_to_a_file_and_the_summary_comes_back(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 20)
    summary = overnight.run(source, tmp_path / "out.jsonl", engine="echo", echo_jitter="5ms", max_inflight=4)
    assert isinstance(summary, overnight.Summary)
    assert (summary.counts.total, summary.counts.completed, summary.counts.failed) == (20, 20, 0)
    assert ids_of(read_rows(tmp_path / "out.jsonl")) == [f"r{n}" for n in range(20)]


def test_a_file_can_be_run_in_a_loop_that_goes_on(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 3)

    async def run_both() -> list[int]:
        runs = (overnight.run_batch(source, str(tmp_path / name), engine="echo", echo_delay=0.05) for name in "ab")
        return [summary.counts.completed for summary in await asyncio.gather(*runs)]

    assert asyncio.run(run_both()) == [3, 3]


def test_an_empty_file_gives_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    summary = overnight.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine="echo")
    assert summary.counts.total == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("options", "nearest"), [({"max_inflite": 3}, "max_inflight"), ({"ekko_delay": 3}, "echo_delay")]
)
def test_an_unknown_option_names_the_nearest(tmp_path: Path, options: dict[str, int], nearest: str) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    with pytest.raises(UnknownOption, match=f"Did you mean {nearest}"):
        overnight.run(source, tmp_path / "out.jsonl", engine="echo", **options)
    assert not (tmp_path / "out.jsonl").exists()


def test_one_file_for_both_is_refused(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    with pytest.raises(OutputRefused):
        overnight.run(source, source, engine="echo", overwrite=True)
    assert source.read_text().count("\n") == 1


def test_what_is_refused_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(overnight.OvernightError):
        overnight.run(tmp_path / "no.jsonl", tmp_path / "out.jsonl", engine="echo")


# -- lines ---------------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_lines() -> None:
    lines = [request_line(f"r{n}", echo={"delay": 0.05 if n % 7 == 0 else 0}) for n in range(50)]
    rows = answer_lines(lines, max_inflight=8)
    assert [row.custom_id for row in rows] == [f"r{n}" for n in range(50)]
    assert rows[3].json()["custom_id"] == "r3"
    assert rows[3].json()["response"]["status_code"] == 200


def test_lines_may_be_texts_or_bytes_with_or_without_their_ends() -> None:
    lines: list[str | bytes] = [
        request_line("a"),
        request_line("b").encode(),
        request_line("c") + "\n",
        request_line("ü") + "\r\n",
    ]
    assert [row.custom_id for row in answer_lines(lines)] == ["a", "b", "c", "ü"]


def test_a_malformed_line_is_an_error_row_and_the_rest_goes_on() -> None:
    rows = answer_lines([request_line("a"), "{", b"\xff", request_line("d")])
    assert [row.code for row in rows] == ["", "invalid_json_line", "invalid_json_line", ""]
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert rows[1].json()["error"]["line"] == 2
    assert rows[1].json()["response"] is None


def test_no_lines_give_no_rows_and_blank_ones_neither() -> None:
    assert answer_lines([]) == []
    assert [row.custom_id for row in answer_lines(["", " \n", request_line("a"), "\n"])] == ["a"]


def test_rows_come_as_soon_as_their_turn_comes() -> None:
    async def first_two() -> list[str | None]:
        lines = [request_line("a"), request_line("b"), request_line("c", echo={"fault": "hang"})]
        seen = []
        async with overnight.open_engine("echo") as engine:
            async for row in overnight.run_lines(lines, engine):
                seen.append(row.custom_id)
                if len(seen) == 2:
                    break
        return seen

    assert asyncio.run(asyncio.wait_for(first_two(), 10)) == ["a", "b"]


def test_lines_are_not_read_far_ahead_of_a_slow_consumer() -> None:
    taken = 0

    def endless() -> Iterable[str]:
        nonlocal taken
        while True:
            taken += 1
            yield request_line(f"r{taken}")

    async def read_some() -> None:
        async with overnight.open_engine("echo") as engine:
            rows = overnight.run_lines(endless(), engine, max_inflight=2)
            for _ in range(3):
                await anext(rows)
            await asyncio.sleep(0.2)
            await rows.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(read_some(), 10))
    assert taken <= 3 * 16 * 2


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_loop_that_is_left_early_leaves_no_task_behind(*, is_closed: bool) -> None:
    async def leave() -> tuple[set[str], str]:
        async with overnight.open_engine("echo") as engine:
            rows = overnight.run_lines((request_line(f"r{n}") for n in range(10_000)), engine, max_inflight=4)
            async for _ in rows:
                break
            if is_closed:
                await rows.aclose()  # type: ignore[attr-defined]
            del rows
            for _ in range(100):
                left = asyncio.all_tasks() - {asyncio.current_task()}
                if not left:
                    break
                await asyncio.sleep(0.01)
            return {str(task) for task in left}, repr(engine)

    unhandled: list[dict[str, Any]] = []

    async def watch() -> tuple[set[str], str]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        return await leave()

    tasks, engine = asyncio.run(watch())
    assert tasks == set()
    assert unhandled == []
    assert "0 inflight" in engine


@pytest.mark.parametrize("pause_s", [0, 0.1])
def test_a_lost_engine_is_raised_from_the_loop_after_the_rows_before_it(pause_s: float) -> None:
    """Also where the consumer is busy elsewhere while the engine is lost."""
    fault = request_line("r3", echo={"fault": "lost", "delay": 0.05})
    lines = [fault if n == 3 else request_line(f"r{n}") for n in range(9)]
    seen = []
    caught = []

    async def read() -> int:
        async with overnight.open_engine("echo") as engine:
            try:
                async for row in overnight.run_lines(lines, engine):
                    seen.append(row.custom_id)
                    await asyncio.sleep(pause_s)
            except Exception as error:  # noqa: BLE001 - whatever comes out
                caught.append(error)
        task = asyncio.current_task()
        assert task
        return task.cancelling()

    assert asyncio.run(read()) == 0
    assert [type(error) for error in caught] == [EngineLost]
    assert seen == ["r0", "r1", "r2"]


def test_an_error_of_the_consumer_comes_out_as_it_is() -> None:
    async def read() -> None:
        async with overnight.open_engine("echo") as engine:
            async for _ in overnight.run_lines([request_line(f"r{n}") for n in range(100)], engine):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(read())


def test_an_error_of_the_iterable_comes_out_as_it_is() -> None:
    def failing() -> Iterable[str]:
        yield request_line("a")
        raise LookupError("no more lines")

    with pytest.raises(LookupError, match="no more lines"):
        answer_lines(failing())


def test_an_engine_can_be_used_again_and_again() -> None:
    async def twice() -> list[list[str | None]]:
        async with overnight.open_engine("echo") as engine:
            return [
                [row.custom_id async for row in overnight.run_lines([request_line(name)], engine)]
                for name in ("a", "b")
            ]

    assert asyncio.run(twice()) == [["a"], ["b"]]


@pytest.mark.parametrize("options", [{"max_inflite": 3}, {"echo_dely": 1}])
def test_lines_take_no_unknown_option(options: dict[str, int]) -> None:
    with pytest.raises(UnknownOption):
        answer_lines([request_line("a")], **options)


# -- one line ------------------------------------------------------------------------------------------------------


def test_one_line_gives_its_row() -> None:
    row = answer_line(request_line("only", max_tokens=7))
    assert row.custom_id == "only"
    assert json.loads(row.data) == row.json()
    assert row.json()["response"]["body"]["echo"]["max_tokens"] == 7


def test_one_malformed_line_gives_an_error_row() -> None:
    assert answer_line("{").code == "invalid_json_line"


def test_one_blank_line_is_refused() -> None:
    with pytest.raises(UsageError):
        answer_line(" \n")


def test_one_line_raises_the_loss_of_its_engine() -> None:
    with pytest.raises(EngineLost):
        answer_line(request_line("a", echo={"fault": "lost"}))


# -- engines -------------------------------------------------------------------------------------------------------


def test_an_engine_is_opened_by_name_with_its_options() -> None:
    assert overnight.open_engine("echo", echo_inflight=7).max_inflight == 7
    with pytest.raises(EngineMissing, match="echo, llama"):
        overnight.open_engine("nosuch")
    with pytest.raises(UnknownOption, match="echo_delay"):
        overnight.open_engine("echo", echo_dely=1)


def test_what_is_public_is_there() -> None:
    for name in overnight.__all__:
        assert getattr(overnight, name).__doc__
    with pytest.raises(AttributeError):
        overnight.nosuch  # noqa: B018 - the look-up is the test
