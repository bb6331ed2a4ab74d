"""The same command again: what is missing runs, and what does not fit is refused with nothing touched."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batches import Ground, end_of, kill, lines_of, slow_first, wait_for, without_root
from conftest import COMMAND, child_environ, ids_of, overnight, read_rows, request_line
from overnight.batch import prepare_batch
from overnight.errors import BatchInvalid, OutputRefused
from overnight.options import RunOptions


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    ground.close()


def stop_in_the_middle(ground: Ground, count: int = 30) -> None:
    """r0 to r9 are in the output, r10 is missing, and r11 to r19 wait in the journal; the others never started."""
    lines = lines_of(count)
    lines[10] = request_line("r10", echo={"delay": 0.3})
    ground.write(lines)
    ground.run_until(19, max_inflight=2, max_ahead=10)
    assert ground.ids() == [f"r{n}" for n in range(10)]
    assert len(ground.ahead()) == 9


def finish(ground: Ground, count: int = 30) -> None:
    ground.write(lines_of(count))
    ground.run()


# -- only what is missing ------------------------------------------------------------------------------------------


def test_the_same_command_does_only_what_is_missing_and_keeps_what_is_there_byte_for_byte(ground: Ground) -> None:
    stop_in_the_middle(ground)
    kept, waiting = ground.output.read_bytes(), {row["id"] for row in ground.ahead()}
    summary = ground.run()
    assert ground.asked() == sorted(["r10", *(f"r{n}" for n in range(20, 30))])
    assert ground.output.read_bytes().startswith(kept)
    assert waiting <= {row["id"] for row in ground.rows()}
    assert ground.ids() == [f"r{n}" for n in range(30)]
    assert ground.files() == []
    assert (summary.counts.total, summary.counts.completed) == (30, 30)
    assert "out.jsonl has 10 rows, 9 more wait in its journal: 11 requests are left to run" in ground.described


def test_without_its_journal_an_output_is_continued_from_its_end(ground: Ground) -> None:
    stop_in_the_middle(ground)
    for path in ground.folder.glob("*.ahead*"):
        path.unlink()
    ground.run()
    assert len(ground.asked()) == 20
    assert ground.ids() == [f"r{n}" for n in range(30)]


def test_without_its_output_the_rows_that_wait_are_used_and_the_rest_runs(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.output.unlink()
    ground.run()
    assert len(ground.asked()) == 21
    assert ground.ids() == [f"r{n}" for n in range(30)]


def test_rows_that_all_wait_are_written_without_the_engine(ground: Ground) -> None:
    ground.write(slow_first(10))
    ground.run_until(9)
    assert ground.ids() == []
    ground.write([request_line("r0"), *lines_of(9, 1)])  # the line that never finished may be another
    ground.run(max_inflight=1)
    assert ground.asked() == ["r0"]
    assert ground.ids() == [f"r{n}" for n in range(10)]


def test_counts_and_tokens_are_those_of_the_whole_batch(ground: Ground) -> None:
    lines = [*lines_of(10, tokens=3), request_line("bad", echo={"status": 400}), *lines_of(10, 11, tokens=5)]
    ground.write(lines)
    whole = ground.run()
    undisturbed = whole.as_dict()
    ground.output.unlink()
    ground.run_until(13, max_inflight=1, echo_delay=0.001)
    assert 0 < len(ground.ids()) < 21
    again = ground.run().as_dict()
    for key in ("request_counts", "usage", "failures"):
        assert again[key] == undisturbed[key]
    assert whole.counts.completion_tokens == 80


def test_lines_that_are_the_same_in_everything_keep_their_own_rows(ground: Ground) -> None:
    ground.write([request_line("same")] * 20)
    ground.run_until(7, max_inflight=1, echo_delay=0.001)
    done = len(ground.ids())
    ground.run()
    assert len(ground.asked()) == 20 - done
    assert [int(row["id"][46:], 16) for row in ground.rows()] == list(range(20))


def test_a_complete_output_says_so_and_opens_no_engine(ground: Ground) -> None:
    finish(ground)
    before = ground.look()
    summary = ground.run(echo_log="/nowhere/engine.log")  # could not be opened
    assert "out.jsonl has 30 rows: every request has its row, and nothing is missing" in ground.described
    assert (summary.counts.completed, summary.load_s, summary.run_s) == (30, 0, 0)
    assert ground.look() == before


def test_a_complete_output_needs_no_engine_that_is_installed(ground: Ground) -> None:
    finish(ground)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from overnight.engines.echo import EchoEngine\n"
        "EchoEngine.missing = classmethod(lambda _: 'its library is not installed')\n"
        "from overnight.cli import main; sys.exit(main())"
    )
    words = ["run", "-i", ground.input, "-o", ground.output, "--engine", "echo"]
    run = [sys.executable, "-c", code, "src", *map(str, words)]
    ended = subprocess.run(run, capture_output=True, cwd=ground.folder, env=child_environ(ground.folder), check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"nothing is missing" in ended.stderr
    ground.output.unlink()
    ended = subprocess.run(run, capture_output=True, cwd=ground.folder, env=child_environ(ground.folder), check=False)
    assert ended.returncode == 2
    assert b"not installed" in ended.stderr
    assert ground.files() == []


def test_a_journal_left_beside_a_complete_output_is_removed(ground: Ground) -> None:
    stop_in_the_middle(ground)
    journal = {path: path.read_bytes() for path in ground.folder.glob("*.ahead*")}
    ground.run()
    for path, data in journal.items():
        path.write_bytes(data)
    ground.run()
    assert ground.asked() == []
    assert ground.files() == []


def test_an_empty_input_beside_an_output_with_rows_is_refused(ground: Ground) -> None:
    finish(ground)
    ground.write([])
    refused(ground, "more rows than the input has requests")


# -- what never matters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_inflight": 3}, {"timeout": 5}, {"max_attempts": 9}, {"max_ahead": 50}, {"sync_interval": 0},
        {"no_progress": True}, {"served_model_name": "m"}, {"grace": 1}, {"on_invalid": "row"}, {"fail_on_error": True},
        {"echo_delay": 0.001}, {"echo_inflight": 4}, {"deadline": "1h"}, {"max_line_bytes": "1MiB"},
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_shape_no_answer_never_matter(ground: Ground, options: dict[str, Any]) -> None:
    stop_in_the_middle(ground)
    ground.run(**options)
    assert len(ground.asked()) == 11


def test_files_may_be_named_otherwise(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_in_the_middle(ground)
    (ground.folder / "link.jsonl").symlink_to("out.jsonl")
    (ground.folder / "in-link").symlink_to("in.jsonl")
    monkeypatch.chdir(ground.folder)
    ground.run(input_file="in-link", output_file="./link.jsonl")
    assert len(ground.asked()) == 11
    assert (ground.folder / "link.jsonl").is_symlink()
    assert ground.ids() == [f"r{n}" for n in range(30)]


def test_the_journal_of_an_output_that_is_a_link_lies_beside_the_file_itself(ground: Ground) -> None:
    there = ground.folder / "disk"
    there.mkdir()
    ground.output.symlink_to("disk/real.jsonl")
    ground.write(slow_first(5))
    ground.run_until(4)
    assert sorted(path.name for path in there.iterdir()) == ["real.jsonl", "real.jsonl.ahead", "real.jsonl.ahead.1"]
    assert ground.files() == []


def test_a_copied_output_continues_under_its_new_name(ground: Ground) -> None:
    stop_in_the_middle(ground)
    copy = ground.folder / "copy.jsonl"
    copy.write_bytes(ground.output.read_bytes())
    ground.run(output_file=str(copy))
    assert len(ground.asked()) == 20
    assert ids_of(read_rows(copy)) == [f"r{n}" for n in range(30)]


def test_the_input_may_be_compressed_meanwhile(ground: Ground) -> None:
    stop_in_the_middle(ground)
    (ground.folder / "in.gz").write_bytes(gzip.compress(ground.input.read_bytes()))
    ground.run(input_file=str(ground.folder / "in.gz"))
    assert len(ground.asked()) == 11


def test_a_byte_order_mark_that_an_editor_added_changes_no_line(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.input.write_bytes(b"\xef\xbb\xbf" + ground.input.read_bytes())
    ground.run()
    assert len(ground.asked()) == 11


# -- refused, and nothing touched ----------------------------------------------------------------------------------

PREPARED = pytest.mark.parametrize("state", ["with a journal", "without a journal", "complete"])


def prepare_state(ground: Ground, state: str) -> None:
    if state == "complete":
        stop_in_the_middle(ground)
        ground.run()
        return
    stop_in_the_middle(ground)
    if state == "without a journal":
        for path in ground.folder.glob("*.ahead*"):
            path.unlink()


def refused(ground: Ground, why: str, **options: Any) -> str:
    """A run is refused, and every file is as it was, to its time of writing."""
    before = ground.look()
    with pytest.raises(OutputRefused) as caught:
        ground.run(**options)
    assert why in str(caught.value)
    assert "Nothing was touched" in str(caught.value)
    assert ground.look() == before
    return str(caught.value)


def _edit(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4].replace(b'"hi"', b'"ho"'), *lines[5:]]


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "another input": lambda lines: [line.replace(b'"r', b'"q') for line in lines],
    "an edited line": _edit,
    "reordered lines": lambda lines: [lines[1], lines[0], *lines[2:]],
    "a deleted line": lambda lines: lines[:3] + lines[4:],
    "an inserted line": lambda lines: [*lines[:3], request_line("new").encode(), *lines[3:]],
    "a shorter input": lambda lines: lines[:8],
    "other prompts under the same ids": lambda lines: [line.replace(b'"hi"', b'"ho"') for line in lines],
    "line ends converted": lambda lines: [line + b"\r" for line in lines],
}


@PREPARED
@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_is_another_is_refused(ground: Ground, state: str, change: str) -> None:
    prepare_state(ground, state)
    ground.write(CHANGES[change](ground.lines()))
    why = refused(ground, "of the input" if change != "a shorter input" else "more rows than the input")
    if change == "line ends converted":
        assert "LF to CRLF" in why
    refused(ground, "", continue_anyway=True)


@PREPARED
@pytest.mark.parametrize("rows", ["from somewhere else", "with a hole", "that is text", "that is JSON"])
def test_an_output_that_is_another_is_refused(ground: Ground, state: str, rows: str) -> None:
    prepare_state(ground, state)
    data = ground.output.read_bytes().splitlines(keepends=True)
    theirs = b'{"id":"batch_req_abc","custom_id":"r0","response":{"status_code":200,"body":{}},"error":null}\n'
    ground.output.write_bytes({
        "from somewhere else": theirs * 10,
        "with a hole": b"".join(data[:3] + data[4:]),
        "that is text": b"Dear diary,\nI was no output.\n",
        "that is JSON": b'{"a": 1}\n',
    }[rows])  # fmt: skip
    why = {"with a hole": "rows before it are gone", "that is text": "is no output of overnight"}
    refused(ground, why.get(rows, "is no output of overnight"))
    refused(ground, "", continue_anyway=True)


@PREPARED
def test_a_hole_among_lines_that_are_the_same_is_refused(ground: Ground, state: str) -> None:
    ground.write([request_line("same")] * 12)
    ground.run() if state == "complete" else ground.run_until(8, max_inflight=1, echo_delay=0.001)
    if state == "without a journal":
        ground.head.unlink()
    rows = ground.output.read_bytes().splitlines(keepends=True)
    ground.output.write_bytes(b"".join(rows[:3] + rows[4:]))
    refused(ground, "rows before it are gone")


def test_an_edited_custom_id_in_the_output_is_refused(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.output.write_bytes(ground.output.read_bytes().replace(b'"custom_id":"r3"', b'"custom_id":"r4"'))
    refused(ground, "does not answer line 4")


OTHER = [{"model": "other"}, {"ignore_request_model": True}, {"engine": "llama", "echo_log": None}]


@PREPARED
@pytest.mark.parametrize("options", OTHER, ids=["model", "flag", "engine"])
def test_other_settings_are_refused_and_accepted_anyway(ground: Ground, state: str, options: dict[str, Any]) -> None:
    prepare_state(ground, state)
    given = {"engine": "echo", "echo_log": str(ground.log), **options}
    given = {name: value for name, value in given.items() if value is not None}

    def prepare(**more: Any) -> int:
        values = {"input_file": str(ground.input), "output_file": str(ground.output), **given, **more}
        values.pop("echo_log", None)
        with prepare_batch(RunOptions(**values), environ=os.environ) as batch:
            return batch.missing

    before = ground.look()
    with pytest.raises(OutputRefused, match="other settings") as caught:
        prepare()
    assert "--continue-anyway" in str(caught.value)
    assert ground.look() == before
    if state == "with a journal":
        name = next(iter(options))
        assert f"{name}: " in str(caught.value)
    assert prepare(continue_anyway=True) == {"with a journal": 11, "without a journal": 20, "complete": 0}[state]
    assert ground.look() == before


@pytest.mark.parametrize("state", ["with a journal", "without a journal"])
def test_what_goes_on_anyway_is_continued_by_the_plain_command_and_holds_rows_of_both(
    ground: Ground, state: str
) -> None:
    prepare_state(ground, state)
    ground.write([*ground.lines()[:25], request_line("r25", echo={"fault": "hang"}).encode(), *ground.lines()[26:]])
    left = 10 if state == "with a journal" else 19
    ground.run_until(left, model="other", continue_anyway=True, max_inflight=2)
    assert len(ground.ids()) == 25
    ground.write([*ground.lines()[:25], *lines_of(5, 25)])
    ground.run(model="other")
    assert ground.ids() == [f"r{n}" for n in range(30)]
    assert len({row["id"][26:38] for row in ground.rows()}) == 2


# -- inputs that changed where it does not matter ------------------------------------------------------------------


@PREPARED
@pytest.mark.parametrize("end", [b"\n", b""], ids=["newline", "no newline"])
def test_an_input_that_grew_at_its_end_is_accepted(ground: Ground, state: str, end: bytes) -> None:
    lines = lines_of(12)
    lines[10] = request_line("r10", echo={"delay": 0.2})
    ground.write(lines, end)
    ground.run() if state == "complete" else ground.run_until(11, max_inflight=2)
    if state == "without a journal":
        ground.head.unlink(missing_ok=True)
        for path in ground.folder.glob("*.ahead.*"):
            path.unlink()
    kept = ground.output.read_bytes()
    ground.write([*ground.lines(), *lines_of(5, 12)])
    summary = ground.run()
    assert ground.output.read_bytes().startswith(kept)
    assert ground.ids() == [f"r{n}" for n in range(17)]
    assert {"complete": 5, "with a journal": 6, "without a journal": 7}[state] == len(ground.asked())
    assert summary.counts.total == 17


def test_a_last_line_that_was_completed_is_refused_once_it_has_a_row(ground: Ground) -> None:
    ground.write([*lines_of(3), b'{"custom_id": "r3"'], end=b"")
    ground.run(on_invalid="row")
    assert ground.codes() == {"invalid_json_line": 1}
    ground.write([*lines_of(4)])
    refused(ground, "does not answer line 4")


def test_a_last_line_that_was_completed_runs_where_it_has_no_row(ground: Ground) -> None:
    ground.write([*lines_of(3), request_line("r3", echo={"fault": "hang"})], end=b"")
    ground.run_until(3)
    ground.write(lines_of(5))
    ground.run()
    assert ground.asked() == ["r3", "r4"]


def test_an_input_that_changed_behind_what_is_finished_is_accepted(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.write([*ground.lines()[:20], *lines_of(4, 100)])
    ground.run()
    assert ground.ids() == [f"r{n}" for n in [*range(20), *range(100, 104)]]


def test_an_input_that_was_edited_before_a_row_that_waits_is_refused(ground: Ground) -> None:
    stop_in_the_middle(ground)
    lines = ground.lines()
    ground.write([*lines[:15], lines[15].replace(b'"hi"', b'"ho"'), *lines[16:]])
    refused(ground, "The input changed before what is finished")
    ground.write([*lines[:12], *lines[13:]])
    refused(ground, "The input changed before what is finished")
    ground.write(lines[:15])
    refused(ground, "a line that is gone")
    ground.write([*lines[:10], lines[10].replace(b'"hi"', b'"ho"'), *lines[11:]])  # the gap has no row
    ground.run()
    assert len(ground.asked()) == 11


# -- torn tails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b'{"id":"batch_req_', b"\0" * 100, b"garbage", b'{"id":"x"'])
def test_a_torn_last_row_is_cut_and_that_is_said_at_once(ground: Ground, tail: bytes) -> None:
    stop_in_the_middle(ground)
    whole = ground.output.read_bytes()
    ground.output.write_bytes(whole + tail)
    ground.run()
    assert f"behind them {len(tail)} bytes that are no whole row are cut" in ground.described
    assert ground.output.read_bytes().startswith(whole + b'{"id":"batch_req_')
    assert len(ground.asked()) == 11


def test_a_torn_tail_behind_a_complete_output_is_cut(ground: Ground) -> None:
    finish(ground)
    whole = ground.output.read_bytes()
    ground.output.write_bytes(whole + b'{"id":')
    ground.run()
    assert "6 bytes that are no whole row" in ground.described
    assert ground.asked() == []
    assert ground.output.read_bytes() == whole
    assert ground.files() == []


def test_a_hole_of_zeros_costs_what_follows_it_and_no_more(ground: Ground) -> None:
    stop_in_the_middle(ground)
    rows = ground.output.read_bytes().splitlines(keepends=True)
    ground.output.write_bytes(b"".join([*rows[:6], bytes(len(rows[6])), *rows[7:]]))
    ground.run()
    assert ground.asked() == sorted(["r6", "r7", "r8", "r9", "r10", *(f"r{n}" for n in range(20, 30))])


@pytest.mark.parametrize("first", [b'{"id":"bat', b"\0" * 50, b'{"id":"batch_req_12' + bytes(30)])
def test_a_torn_first_row_is_cut_where_the_journal_says_whose_it_is(ground: Ground, first: bytes) -> None:
    stop_in_the_middle(ground)
    ground.output.write_bytes(first)
    ground.run()
    assert len(ground.asked()) == 21
    assert ground.ids() == [f"r{n}" for n in range(30)]


@pytest.mark.parametrize("damage", ["torn", "zeros"])
def test_damaged_rows_of_the_journal_are_dropped_and_that_is_said(ground: Ground, damage: str) -> None:
    stop_in_the_middle(ground)
    segment = ground.folder / "out.jsonl.ahead.1"
    data = segment.read_bytes()
    length = len(data.splitlines(keepends=True)[-1])
    segment.write_bytes(data[:-5] if damage == "torn" else data[:-length] + bytes(length))
    ground.run()
    assert "bytes of the journal are no whole row, and dropped" in ground.described
    assert len(ground.asked()) == 12
    assert ground.ids() == [f"r{n}" for n in range(30)]


def test_a_torn_head_counts_as_none_and_the_output_speaks_for_itself(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.head.write_bytes(ground.head.read_bytes()[:100])
    ground.run()
    assert len(ground.asked()) == 20
    assert ground.files() == []
    assert ground.ids() == [f"r{n}" for n in range(30)]


@pytest.mark.parametrize("head", ["another version", "a newer format", "mine"])
def test_a_journal_that_this_version_does_not_know_is_refused(ground: Ground, head: str) -> None:
    stop_in_the_middle(ground)
    data = ground.head.read_bytes()
    ground.head.write_bytes({
        "another version": b'{"overnight":"journal","format":9,"where":"elsewhere"}\n',
        "a newer format": data.replace(b'"format":1', b'"format":2'),
        "mine": b"Dear diary,\nI was no journal.\n",
    }[head])  # fmt: skip
    refused(ground, "is no journal that this version of overnight knows")
    refused(ground, "is no journal that this version of overnight knows", overwrite=True)


@pytest.mark.parametrize("head", [b"", b"\0" * 80, b'{"overnight":"jou', b'{"run":{"pid":1,"host":"h","at":0}}\n'])
def test_what_a_crash_may_leave_of_a_head_is_no_hindrance(ground: Ground, head: bytes) -> None:
    ground.write(lines_of(3))
    ground.head.write_bytes(head)
    ground.run()
    assert ground.ids() == ["r0", "r1", "r2"]
    assert ground.files() == []


def test_segments_without_a_head_are_not_trusted_and_go(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.head.unlink()
    ground.output.unlink()
    ground.run()
    assert len(ground.asked()) == 30
    assert ground.files() == []


def test_rows_with_halves_of_surrogate_pairs_are_whole(ground: Ground) -> None:
    stop_in_the_middle(ground)
    for path in (ground.output, ground.folder / "out.jsonl.ahead.1"):
        path.write_bytes(path.read_bytes().replace(b'"hi"', rb'"\ud800"'))  # as an engine may have answered
    ground.run()
    assert len(ground.asked()) == 11
    assert ground.output.read_bytes().count(rb'"\ud800"') == 19


def test_rows_that_are_odd_are_whole(ground: Ground) -> None:
    deep = b"[" * 300 + b"]" * 300
    odd = [
        b'{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[],"x":%s}}' % (n, x)
        for n, x in enumerate([deep, deep, b'"\xe2\x80\xa8"', b"1e999", b'"\\ud83d\\ude00"'])
    ]
    ground.write([*odd, request_line("r5", echo={"fault": "hang"}), *[line.replace(b'"r', b'"s') for line in odd]])
    ground.run_until(10)
    assert len(ground.ids()) == 5
    ground.write([*odd, request_line("r5"), *[line.replace(b'"r', b'"s') for line in odd]])
    ground.run()
    assert ground.asked() == ["r5"]
    assert "no whole row" not in ground.described


# -- journals that belong elsewhere --------------------------------------------------------------------------------


def test_the_journal_of_another_input_is_refused_where_rows_wait_in_it(ground: Ground) -> None:
    stop_in_the_middle(ground)
    ground.output.unlink()
    ground.write(lines_of(30, 100))
    refused(ground, "The input changed before what is finished")


def test_the_journal_of_another_input_is_no_hindrance_where_nothing_waits_in_it(ground: Ground) -> None:
    stop_in_the_middle(ground)
    for path in (*ground.folder.glob("*.ahead.*"), ground.output):
        path.unlink()
    ground.write(lines_of(5, 100))
    ground.run()
    assert ground.ids() == [f"r{n}" for n in range(100, 105)]


def test_files_that_may_not_be_read_are_refused_clearly(ground: Ground) -> None:
    stop_in_the_middle(ground)
    for name in ("out.jsonl", "out.jsonl.ahead", "out.jsonl.ahead.1", "in.jsonl"):
        path = ground.folder / name
        path.chmod(0)
        ended = subprocess.run(
            [*COMMAND, "run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo"], cwd=ground.folder,
            capture_output=True, check=False, env=child_environ(ground.folder), text=True,
            preexec_fn=without_root,
        )  # fmt: skip
        path.chmod(0o644)
        assert ended.returncode == 2, ended.stderr
        assert name in ended.stderr
        assert "ermission" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert len(ground.ids()) == 10


# -- the first pass ------------------------------------------------------------------------------------------------


def test_the_verdict_is_the_journals_where_the_input_is_the_same(ground: Ground) -> None:
    odd = [*lines_of(8), request_line("r1"), b"no json", request_line("r9", url="/v1/nothing"), request_line("ten")]
    odd.append(json.dumps({**json.loads(request_line("eleven", model="m")), "extra": 1}))
    ground.write([*odd, request_line("last", echo={"fault": "hang"})])
    ground.run_until(11, on_invalid="row")
    first, notes = ground.batch.verdict, ground.watcher.notes
    assert len(notes) == 4
    with ground.prepare(on_invalid="row") as batch:
        assert ground.watcher.notes == notes
        assert batch.verdict == first
    with pytest.raises(BatchInvalid):
        ground.run()  # the verdict still refuses what these options do
    head = ground.head.read_bytes()
    ground.head.write_bytes(head.replace(b'"duplicates":1', b'"duplicates":7'))  # lines that are judged say otherwise
    with ground.prepare(on_invalid="row"):
        assert ground.watcher.notes[0].startswith("7 lines repeat")
    ground.input.write_bytes(ground.input.read_bytes() + b"\n")
    with ground.prepare(on_invalid="row"):
        assert ground.watcher.notes == notes


# -- the copy of failed rows ---------------------------------------------------------------------------------------


def test_the_copy_of_failed_rows_is_that_of_the_whole_batch(ground: Ground) -> None:
    errors = ground.folder / "errors.jsonl"
    lines = [request_line(f"r{n}", echo={"status": 400} if n % 3 == 0 else {}) for n in range(20)]
    lines[10] = request_line("r10", echo={"fault": "hang"})
    ground.write(lines)
    ground.run_until(19, error_file=str(errors))
    early = errors.read_bytes()
    assert ids_of(read_rows(errors)) == ["r0", "r3", "r6", "r9"]
    ground.write([*lines[:10], request_line("r10", echo={"status": 404}), *lines[11:]])
    ground.run(error_file=str(errors))
    assert ids_of(read_rows(errors)) == ["r0", "r3", "r6", "r9", "r10", "r12", "r15", "r18"]
    assert errors.read_bytes().startswith(early)
    errors.unlink()
    ground.run(error_file=str(errors))  # also where the output is complete
    assert ground.asked() == []
    assert len(read_rows(errors)) == 8


def test_a_refused_run_leaves_the_copy_of_failed_rows_alone(ground: Ground) -> None:
    errors = ground.folder / "errors.jsonl"
    errors.write_text("mine")
    finish(ground)
    refused(ground, "", model="other", error_file=str(errors))
    assert errors.read_text() == "mine"
    os.link(ground.output, ground.folder / "hard.jsonl")
    refused(ground, "--error-file", error_file=str(ground.folder / "hard.jsonl"))


def test_the_input_may_be_neither_output_nor_journal(ground: Ground) -> None:
    stop_in_the_middle(ground)
    refused(ground, "same file", input_file=str(ground.head))
    refused(ground, "same file", input_file=str(ground.output))


# -- staged inputs -------------------------------------------------------------------------------------------------


def pipe_in(ground: Ground, data: bytes, *words: object, code: int | None = None) -> str:
    ended = overnight(
        "run", "-i", "-", "-o", "out.jsonl", "--engine", "echo", "--echo-log", "engine.log", *words,
        cwd=ground.folder, stdin=data,
    )  # fmt: skip
    assert code is None or ended.returncode == code, ended.stderr
    return ended.stderr


def test_a_piped_input_is_kept_where_the_run_ended_early_and_goes_when_it_completes(ground: Ground) -> None:
    lost = request_line("r5", echo={"fault": "lost", "delay": 0.2})
    data = "\n".join([*lines_of(5), lost, *lines_of(3, 6)]).encode()
    said = pipe_in(ground, data, code=3)
    staged = ground.folder / "out.jsonl.input"
    assert staged.read_bytes() == data
    assert str(staged) in said
    assert ground.files() == ["out.jsonl.ahead", "out.jsonl.ahead.1", "out.jsonl.input"]
    with ground.prepare(input_file=str(staged)) as batch:  # refused or stopped before anything: it stays
        assert batch.source.staged == staged
    assert staged.exists()
    staged.write_bytes(data.replace(b"lost", b"none"))
    ended = overnight("run", "-i", staged, "-o", "out.jsonl", "--engine", "echo", cwd=ground.folder)
    assert ended.returncode == 0, ended.stderr
    assert ground.files() == []
    assert ground.ids() == [f"r{n}" for n in range(9)]


def test_a_piped_input_of_which_no_row_is_written_yet_is_kept_for_those_that_wait(ground: Ground) -> None:
    lost = request_line("r0", echo={"fault": "lost", "delay": 0.3})
    pipe_in(ground, "\n".join([lost, *lines_of(3, 1)]).encode(), code=3)
    assert ground.ids() == []
    assert "out.jsonl.input" in ground.files()


def test_a_piped_input_that_is_refused_leaves_what_an_earlier_run_staged(ground: Ground) -> None:
    lost = request_line("r5", echo={"fault": "lost", "delay": 0.2})
    data = "\n".join([*lines_of(5), lost]).encode()
    pipe_in(ground, data, code=3)
    before = ground.look()
    pipe_in(ground, "\n".join(lines_of(5, 50)).encode(), code=2)
    pipe_in(ground, b"no json", code=2)
    pipe_in(ground, b"no json", "--overwrite", code=2)
    assert ground.look() == before
    pipe_in(ground, data.replace(b"lost", b"none"), code=0)
    assert ground.files() == []


def test_a_piped_input_takes_an_earlier_ones_place_only_with_the_first_new_row(ground: Ground) -> None:
    lost = request_line("r5", echo={"fault": "lost", "delay": 0.2})
    pipe_in(ground, "\n".join([*lines_of(5), lost]).encode(), code=3)
    first = (ground.folder / "out.jsonl.input").read_bytes()
    pipe_in(ground, request_line("new", echo={"fault": "lost"}).encode(), "--overwrite", code=3)
    assert (ground.folder / "out.jsonl.input").read_bytes() == first
    assert len(ground.ids()) == 5
    pipe_in(ground, request_line("new").encode(), "--overwrite", code=0)
    assert ground.files() == []
    assert ground.ids() == ["new"]


# -- outputs that are no file --------------------------------------------------------------------------------------


def stream_words(ground: Ground, output: str) -> list[str]:
    words = ["run", "-i", str(ground.input), "-o", output, "--engine", "echo", "--echo-inflight", "8"]
    return [*COMMAND, *words]


@pytest.mark.parametrize("output", ["-", "/dev/stdout", "/dev/fd/1"])
def test_a_stream_gets_rows_in_order_and_the_early_ones_wait_in_the_cache_folder(ground: Ground, output: str) -> None:
    ground.write([request_line("r0", echo={"delay": 0.1}), *lines_of(40, 1)])
    ended = subprocess.run(
        stream_words(ground, output), capture_output=True, check=True, env=child_environ(ground.folder)
    )
    assert [json.loads(line)["custom_id"] for line in ended.stdout.splitlines()] == [f"r{n}" for n in range(41)]
    assert b"is no file: nothing there can be locked, or continued" in ended.stderr
    assert list((ground.folder / "cache").iterdir()) == []


def test_a_file_that_standard_output_appends_to_keeps_what_is_there(ground: Ground) -> None:
    ground.write(lines_of(3))
    log = ground.folder / "all.jsonl"
    log.write_text('{"before":1}\n')
    with log.open("a") as out:
        subprocess.run(
            stream_words(ground, "/dev/stdout"), stdout=out, stderr=subprocess.PIPE, check=True,
            env=child_environ(ground.folder),
        )  # fmt: skip
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0] == {"before": 1}
    assert [line["custom_id"] for line in lines[1:]] == ["r0", "r1", "r2"]


def test_a_stream_without_a_place_for_rows_that_wait_is_refused(ground: Ground) -> None:
    ground.write(lines_of(1))
    (ground.folder / "cache").write_text("a file")
    ended = overnight("run", "-i", "in.jsonl", "-o", "-", "--engine", "echo", cwd=ground.folder)
    assert ended.returncode == 2
    assert "OVERNIGHT_CACHE" in ended.stderr
    overnight("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo", cwd=ground.folder)
    assert ground.ids() == ["r0"]


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL", "lost"])
def test_what_a_stream_keeps_in_the_cache_folder_goes_however_it_ends(ground: Ground, end: str) -> None:
    fault = {"fault": "lost", "delay": 0.3} if end == "lost" else {"fault": "hang"}
    ground.write([request_line("r0", echo=fault), *lines_of(20, 1)])
    os.mkfifo(ground.folder / "out.fifo")
    child = subprocess.Popen(
        [*stream_words(ground, str(ground.folder / "out.fifo")), "--grace", "0"], stderr=subprocess.PIPE,
        env=child_environ(ground.folder),
    )  # fmt: skip
    cache = ground.folder / "cache"
    with (ground.folder / "out.fifo").open("rb") as pipe:
        wait_for(lambda: any(path.suffix == ".1" and path.stat().st_size for path in cache.glob("*")))
        if end == "SIGKILL":
            kill(child)
            assert list(cache.iterdir()) != []
            mine = cache / "models"
            mine.mkdir()
            ground.write(lines_of(1))
            ground.run()  # any other run cleans up
            assert list(cache.iterdir()) == [mine]
            return
        if end == "SIGTERM":
            child.send_signal(signal.SIGTERM)
        code, err = end_of(child)
        assert code == {"SIGTERM": 143, "lost": 3}[end], err
        assert pipe.read() == b""
    assert list(cache.iterdir()) == []


def test_a_stream_that_still_runs_keeps_what_it_has_in_the_cache_folder(ground: Ground) -> None:
    ground.write(slow_first(20))
    child = subprocess.Popen(
        stream_words(ground, "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environ(ground.folder)
    )
    cache = ground.folder / "cache"
    wait_for(lambda: list(cache.glob("*.1")))
    ground.write(lines_of(3))
    ground.run()
    assert list(cache.glob("*.1")) != []
    child.terminate()
    child.send_signal(signal.SIGINT)  # at once
    assert end_of(child)[0] == 143


# -- a stop --------------------------------------------------------------------------------------------------------


def test_a_batch_that_is_stopped_says_what_it_leaves(ground: Ground) -> None:
    stop_in_the_middle(ground)
    assert ground.batch.describe_end() == "10 of 30 rows are written, whole and in order"


def test_a_cancelled_batch_leaves_its_rows_and_no_lock(ground: Ground) -> None:
    ground.write(slow_first(5))

    async def work() -> None:
        with ground.prepare() as batch:
            task = asyncio.create_task(batch.run())
            while batch.engine.answered < 4:  # noqa: ASYNC110 - an engine says nothing
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    assert len(ground.ahead()) == 4
    ground.write(lines_of(1) + lines_of(4, 1))
    ground.run()
    assert ground.asked() == ["r0"]
