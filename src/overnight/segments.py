"""A journal's rows as lines and places, and the files that they lie in. Pure, but for a segment's open descriptor."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from .records import Row, without_lone_surrogates
from .rows import is_row_id, read_row

# A place is the row's address over all segments, and its length where that fits.
LENGTH_BITS = 20
MAX_LENGTH = (1 << LENGTH_BITS) - 1


class _Line(msgspec.Struct, gc=False):
    """A row's line, as far as reading it back needs it."""

    line: int = 0
    id: str = ""


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_lines = msgspec.json.Decoder(_Line).decode_lines


class Segment:
    """One file of rows; `base` is its first byte's address."""

    def __init__(self, path: Path, number: int, base: int, size: int = 0) -> None:
        self.path = path
        self.number = number
        self.base = base
        self.size = size
        self.live = 0  # bytes of rows that wait
        self.died_in: int | None = None  # the round of syncs in which its last row went
        self.is_dirty = False  # written since the last sync
        self.is_earlier = False  # an earlier run's, which may have ended before a sync
        self.moved_to = 0  # how far it was looked through for rows to move
        self.descriptor: int | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.path.name}: {self.live} of {self.size} bytes wait>"


def make_place(address: int, length: int) -> int:
    """A row's address and length as one number; a length that does not fit is 0, and read from the row."""
    return address << LENGTH_BITS | (length if length <= MAX_LENGTH else 0)


def is_json(text: bytes) -> bool:
    """Whether a text is one JSON value."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def row_in(line: bytes) -> tuple[str, Row]:
    """The id of a row, and the row as the output has it, from its line in the journal. Raises ValueError."""
    return read_row(b"{" + line[line.index(b",") + 1 :])


def rows_in(block: bytes) -> Iterator[tuple[int, str]]:
    """The length and the id of each line of a block; an empty id where the line is damaged."""
    lines = block.split(b"\n")
    lines.pop()
    for line, row_id in zip(lines, _read_ids(block, lines), strict=True):
        yield len(line) + 1, row_id


def _read_ids(block: bytes, lines: list[bytes]) -> list[str]:
    """All at once where every line is beyond suspicion (see `judge`), else one by one."""
    if all(line.startswith(b'{"line":') and line.endswith(b"}") for line in lines):
        try:
            if not block.isascii():
                block.decode()
            ids = [row.id for row in _decode_lines(block)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            ids = []
        if len(ids) == len(lines) and all(map(is_row_id, ids)):
            return ids
    return [_read_id(line) for line in lines]


def _read_id(line: bytes) -> str:
    try:
        line.decode()
        row_id = _decode_line(without_lone_surrogates(line)).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return row_id if is_row_id(row_id) else ""
