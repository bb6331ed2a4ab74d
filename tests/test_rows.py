"""Rows read back: ids, counts, and where an output's whole rows end."""

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.disk import Disk
from overnight.errors import OutputRefused
from overnight.parse import parse_request
from overnight.records import (
    Answer,
    Failure,
    Problem,
    Request,
    Row,
    RowKey,
    answer_row,
    digest_line,
    digest_settings,
    failure_row,
    problem_row,
)
from overnight.rows import RowReader, index_of, is_row_id, line_in, read_row, run_in, settings_in

KEY = RowKey("0123456789ab", "00c0ffee")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


def request_at(index: int, custom_id: str = "a", digest: str = "f" * 16) -> Request:
    return Request(index, index + 1, custom_id, "/v1/chat/completions", None, b"{}", None, False, digest)


def written(row: Row) -> Row:
    """A row as it is read back, which knows no line number."""
    return Row(*[getattr(row, name) for name in Row.__struct_fields__[:-1]])


@given(
    st.binary(max_size=50),
    st.dictionaries(st.text(), st.text()),
    st.integers(0, 2**60 - 1),
    st.binary(min_size=4, max_size=4),
)
def test_an_id_says_which_line_settings_run_and_place_a_row_has(line, settings, index, run):
    key = RowKey(digest_settings(settings), run.hex())
    row_id = key.row_id(digest_line(line), index)
    assert is_row_id(row_id)
    assert line_in(row_id) == digest_line(line)
    assert settings_in(row_id) == digest_settings(settings)
    assert run_in(row_id) == run.hex()
    assert index_of(row_id) == index


@given(ANY_TEXT)
def test_no_other_text_is_an_id(text):
    assert not is_row_id(text)
    assert not is_row_id(f"batch_req_{text}")


@given(st.integers(0, 2**40), st.text(), JSON, st.sampled_from([200, 201, 400, 404, 429, 500]))
def test_an_answers_row_reads_back_as_it_was_written(index, custom_id, body, status):
    row = answer_row(request_at(index, custom_id), Answer(status, msgspec.json.encode(body)), KEY)
    row_id, read = read_row(row.data)
    assert read == written(row)
    assert index_of(row_id) == index


@given(st.integers(0, 2**40), st.text(), st.text(max_size=10), ANY_TEXT)
def test_a_failures_row_reads_back_as_it_was_written(index, custom_id, code, message):
    row = failure_row(request_at(index, custom_id), Failure(code, message), KEY)
    read = read_row(row.data)[1]
    if code:
        assert (read.index, read.custom_id, read.code, read.data) == (index, custom_id, code, row.data)


@given(st.binary(max_size=60))
def test_the_row_of_a_line_that_is_no_request_reads_back(line):
    line = line.replace(b"\n", b"")
    problem = parse_request(line, 0, 1)
    assert isinstance(problem, Problem)
    row = problem_row(problem, 5, 6, digest_line(line), KEY)
    row_id, read = read_row(row.data)
    assert (line_in(row_id), read.index, read.code) == (digest_line(line), 5, row.code)


@pytest.mark.parametrize(
    "body",
    [rb'{"a":"\ud800"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xe2\x80\xa8"}', b'{"a":1e999}', b'"text"', b"[1]", b"null",
     b'{"a":' + b"1" * 5000 + b"}", b'{"usage":{"prompt_tokens":3},"x":"\\udfff"}'],
)  # fmt: skip
def test_answers_that_are_odd_read_back(body):
    row = answer_row(request_at(0), Answer(200, body), KEY)
    assert not row.code
    assert read_row(row.data)[1] == written(row)


def test_an_answer_nested_as_deep_as_can_be_written_reads_back():
    def deeper(frames: int, data: bytes) -> Row:
        return deeper(frames - 1, data) if frames else read_row(data)[1]

    seen = 0
    for depth in range(1, sys.getrecursionlimit(), 7):
        row = answer_row(request_at(0), Answer(200, b"[" * depth + b"]" * depth), KEY)
        if not row.code:
            assert deeper(30, row.data) == written(row)
            seen = depth
    assert seen > 100


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a":1}\n', "id"),
        (b'{"id":"batch_req_1","custom_id":"a","response":null,"error":{"code":"x"}}\n', "none that overnight gives"),
        (b'{"id":"%s","custom_id":"a","response":null,"error":null}\n' % KEY.row_id("f" * 16, 0).encode(), "neither"),
        (b"hello\n", "malformed"), (b"\xff\n", "utf-8"), (b"\n", "truncated"), (b"\0\0\n", "malformed"),
        (b"[" * 5000 + b"\n", "xpected"),
    ],
)  # fmt: skip
def test_what_is_no_row_of_ours_says_why(data, why):
    with pytest.raises(ValueError, match=why):
        read_row(data)


# -- an output's whole rows ----------------------------------------------------------------------------------------


def rows_of(count: int, size: int = 10) -> list[bytes]:
    return [answer_row(request_at(n), Answer(200, b'"%s"' % (b"x" * size)), KEY).data for n in range(count)]


def read_all(path: Path) -> tuple[int, RowReader]:
    reader = RowReader(path, Disk())
    return sum(1 for _ in reader), reader


def test_an_output_cut_at_any_byte_holds_the_rows_before_the_cut(tmp_path: Path) -> None:
    rows = rows_of(3)
    data = b"".join(rows)
    for cut in range(len(data) + 1):
        (tmp_path / "out").write_bytes(data[:cut])
        count, reader = read_all(tmp_path / "out")
        assert count == data[:cut].count(b"\n")
        assert reader.end == sum(map(len, rows[:count]))
        assert reader.end + reader.torn == cut
        assert reader.tail == data[reader.end : cut]


@pytest.mark.parametrize("size", [10, 1 << 20, 3 << 20])
def test_rows_of_any_size_are_read_whole(tmp_path: Path, size: int) -> None:
    data = b"".join(rows_of(4, size))
    (tmp_path / "out").write_bytes(data + b'{"id":"torn')
    assert b"".join(row.data for _, row in RowReader(tmp_path / "out", Disk())) == data
    assert read_all(tmp_path / "out")[1].torn == 11


def test_zeros_end_the_rows_however_many_there_are(tmp_path: Path) -> None:
    rows = rows_of(3)
    (tmp_path / "out").write_bytes(rows[0] + bytes(5 << 20) + rows[1] + rows[2])
    count, reader = read_all(tmp_path / "out")
    assert (count, reader.end) == (1, len(rows[0]))


def test_a_whole_line_of_json_that_is_no_row_is_refused_with_its_place(tmp_path: Path) -> None:
    rows = rows_of(1)
    (tmp_path / "out").write_bytes(rows[0] + b'{"mine":1}\n')
    with pytest.raises(OutputRefused, match=f"its line at byte {len(rows[0])}"):
        read_all(tmp_path / "out")
