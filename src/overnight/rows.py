"""Rows read back from a file: what a row's id says, and what the counts need of a row that is already there.

An id is `batch_req_`, 16 hexadecimal digits for the input line, 12 for the settings that shape answers, 8 for the run
that wrote the row, then the request's index (see `records.RowKey`).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Raw

from .disk import Disk
from .errors import OutputRefused
from .records import Row, error_message, read_head, read_tokens, without_lone_surrogates

READ_BYTES = 1 << 20
TAIL_BYTES = 4096

_PREFIX = len("batch_req_")
_SETTINGS = _PREFIX + 16
_RUN = _SETTINGS + 12
_INDEX = _RUN + 8
_is_id = re.compile(r"batch_req_[0-9a-f]{36}[0-9a-f]{1,15}").fullmatch


class _Response(msgspec.Struct, gc=False):
    status_code: int
    body: Raw


class _Error(msgspec.Struct, gc=False):
    code: str
    message: str = ""


class _Fields(msgspec.Struct, gc=False):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_decode = msgspec.json.Decoder(_Fields).decode
_check_json = msgspec.json.Decoder(Raw).decode
# How a row's line goes on around its answer; inside a string neither could stand, its quotes being escaped.
_BODY, _AFTER_BODY = b',"body":', b'},"error":null}'


def is_row_id(text: str) -> bool:
    """Whether a text is an id that this program gave to a row."""
    return _is_id(text) is not None


def line_in(row_id: str) -> str:
    """The digest of the input line that a row answers."""
    return row_id[_PREFIX:_SETTINGS]


def settings_in(row_id: str) -> str:
    """The digest of the settings that a row was answered under."""
    return row_id[_SETTINGS:_RUN]


def run_in(row_id: str) -> str:
    """What a row's id shares with all others that the same run wrote."""
    return row_id[_RUN:_INDEX]


def index_of(row_id: str) -> int:
    """The index of the request that a row answers."""
    return int(row_id[_INDEX:], 16)


def read_row(data: bytes) -> tuple[str, Row]:
    """The id of a row and the row itself, from its line. Raises ValueError where it is none of ours."""
    fields, body = _read_fields(data)
    if not is_row_id(fields.id):
        raise ValueError(f"the id {fields.id[:80]!r} is none that overnight gives")
    index = index_of(fields.id)
    if fields.error:
        return fields.id, Row(index, fields.custom_id, data, fields.error.code, fields.error.message)
    if not fields.response:
        raise ValueError("it holds neither a response nor an error")
    head = read_head(body)
    status = fields.response.status_code
    if status >= 400:  # noqa: PLR2004 - HTTP's line between answers and errors
        message = error_message(head, body) if head else ""
        return fields.id, Row(index, fields.custom_id, data, f"http_{status}", message)
    tokens = read_tokens(head.usage) if head else (0, 0, 0)
    return fields.id, Row(index, fields.custom_id, data, "", "", *tokens)


def _read_fields(data: bytes) -> tuple[_Fields, bytes]:
    """A row's fields, and its answer's body as it stands. Raises ValueError.

    An answer may hold halves of surrogate pairs, which a strict decoder takes for no JSON, and may be nested as deep
    as the decoder goes while it is by itself, which is deeper than it goes inside a row.
    """
    try:
        if not data.isascii():
            data.decode()
        fields = _decode(data)
    except RecursionError as error:
        start, end = data.find(_BODY) + len(_BODY), data.rfind(_AFTER_BODY)
        if not len(_BODY) <= start <= end:
            raise ValueError(str(error)) from error
        return _read_fields(data[:start] + b"null" + data[end:])[0], data[start:end]
    except msgspec.MsgspecError as error:
        mended = without_lone_surrogates(data)
        if mended == data:
            raise ValueError(str(error)) from error
        return _read_fields(mended)
    return fields, bytes(fields.response.body) if fields.response else b""


class RowReader:
    """The whole rows of an output, in order, until the first that is none; what follows is counted as torn."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.end = 0  # behind the last row that was given out
        self.torn = 0
        self.tail = b""  # how what is torn begins
        self._disk = disk

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        descriptor = self._disk.open(self.path)
        try:
            yield from self._read(descriptor)
            self.torn = os.fstat(descriptor).st_size - self.end
            self.tail = self._disk.read(descriptor, TAIL_BYTES, self.end)
        finally:
            self._disk.close(descriptor)

    def _read(self, descriptor: int) -> Iterator[tuple[str, Row]]:
        for data in _read_lines(descriptor, self._disk):
            try:
                row_id, row = read_row(data)
            except ValueError as error:
                if not _is_json(data):
                    return
                raise OutputRefused(
                    f"{self.path} is no output of overnight: its line at byte {self.end:,} says that {error}. "
                    "Nothing was touched. Choose another output, or replace it with --overwrite"
                ) from error
            self.end += len(data)
            yield row_id, row


def _read_lines(descriptor: int, disk: Disk) -> Iterator[bytes]:
    """The lines of a file that may be rows, with their ends."""
    at = 0
    parts: list[bytes] = []  # of a line that goes on
    while data := disk.read(descriptor, READ_BYTES, at):
        at += len(data)
        start = data.find(b"\n") + 1
        if not start:
            parts.append(data)
        else:
            yield b"".join([*parts, data[:start]])
            end = data.rfind(b"\n") + 1
            for line in data[start:end].split(b"\n")[:-1]:
                yield line + b"\n"
            parts = [data[end:]] if end < len(data) else []
        if parts and not parts[0].startswith(b"{"):
            return


def _is_json(line: bytes) -> bool:
    try:
        line.decode()
        _check_json(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return line.startswith(b"{")
