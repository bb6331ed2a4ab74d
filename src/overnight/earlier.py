"""What an earlier run of the same batch left, and whether this one may go on from it.

A finished row proves what it answers: its id carries digests of its input line and of the settings, and its place. So
row k must answer line k, under these settings; the journal's head names the whole input and the settings. What fits
is kept, and only the rest runs; what does not is refused, saying what differs, and nothing is touched.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from .disk import Disk
from .errors import OutputRefused
from .head import Head
from .items import Line
from .journal import Journal
from .progress import Counts
from .records import Row, digest_line, encode
from .rows import RowReader, index_of, line_in, settings_in
from .window import NOWHERE


class _Named(msgspec.Struct, gc=False):
    custom_id: str


_decode_named = msgspec.json.Decoder(_Named).decode
_FIRST_BYTES = b'{"id":"batch_req_'


class Earlier:
    """What was found of an earlier run.

    `kept` rows of the output fit, in `size` bytes; `places` are those of the rows in the journal, for the requests
    from `kept` on (from the first on, where they are to take others' places).
    """

    def __init__(self, total: int, head: Head | None, accepted: set[str]) -> None:
        self.head = head
        self.accepted = accepted  # digests of the settings that rows may have
        self.is_retry = bool(head and head.retry)  # the journal holds rows that are to take others' places
        self.is_anew = False  # what is there goes when the first new row is ready
        self.kept = 0
        self.size = 0
        self.torn = 0  # bytes behind the last whole row of the output
        self.torn_ahead = 0  # bytes in the journal that are no whole row
        self.counts = Counts(total=total)
        self.places: array[int] = array("Q")

    @property
    def waiting(self) -> int:
        """How many rows wait in the journal."""
        return len(self.places) - self.places.count(NOWHERE)


def refuse_other_settings(output: str, head: Head, settings: dict[str, Any]) -> None:
    """Refuse to go on under settings that would give other answers, naming them. Raises OutputRefused."""
    then, now = _flatten(head.settings), _flatten(settings)
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    differ = "; ".join(f"{name}: {then.get(name)!r} then, {now.get(name)!r} now" for name in names)
    raise OutputRefused(
        f"{output} was begun with other settings ({differ or 'of another version'}). Nothing was touched. Go on with "
        "these all the same: --continue-anyway. Begin anew: --overwrite"
    )


def _flatten(settings: dict[str, Any]) -> dict[str, Any]:
    options = settings.get("engine_options")
    rest = {name: value for name, value in settings.items() if name != "engine_options"}
    return {**rest, **(options if isinstance(options, dict) else {})}


def compare_output(path: Path, lines: Iterator[Line], earlier: Earlier, *, accept_settings: bool, disk: Disk) -> None:
    """Hold each row of an output against the line that it should answer. Raises OutputRefused where one differs.

    `lines` are read as far as there are rows. `earlier.accepted` are the settings' digests that rows may have; with
    `accept_settings` any may.
    """
    reader = RowReader(path, disk)
    for row_id, row in reader:
        line = next(lines, None)
        if line is None:
            raise OutputRefused(
                f"{path} holds more rows than the input has requests ({earlier.kept:,}): it answers another input, or "
                "the input was cut. Nothing was touched. Choose another output, or begin anew: --overwrite"
            )
        _compare_row(path, row_id, row, line, earlier.kept)
        if settings_in(row_id) not in earlier.accepted:
            if not accept_settings:
                raise OutputRefused(
                    f"Row {earlier.kept + 1:,} of {path} was answered under other settings (engine, model, or a flag "
                    "that shapes answers). Nothing was touched. Go on all the same: --continue-anyway. Begin anew: "
                    "--overwrite"
                )
            earlier.accepted.add(settings_in(row_id))
        earlier.kept += 1
        earlier.counts.add([row])
    if not earlier.kept and reader.torn and not (earlier.head and _may_be_torn_row(reader.tail)):
        raise OutputRefused(
            f"{path} is there already, and is no output of overnight. Nothing was touched. Choose another output, or "
            "replace it with --overwrite"
        )
    earlier.size, earlier.torn = reader.end, reader.torn


def _compare_row(path: Path, row_id: str, row: Row, line: Line, index: int) -> None:
    is_same = line_in(row_id) == line.digest and index_of(row_id) == index
    if is_same and (row.custom_id == _read_custom_id(line.text) or encode(row.custom_id) == encode(line.custom_id)):
        return
    why = "it is another input, or one that was edited or reordered"
    if index_of(row_id) > index:
        why = f"it is row {index_of(row_id) + 1:,} of a run, so rows before it are gone, or it is another input's"
    elif line.text and _is_line_end_changed(row_id, line.text):
        why = "the line's end was converted (LF to CRLF, or back)"
    raise OutputRefused(
        f"Row {index + 1:,} of {path} (custom_id {row.custom_id!r}) does not answer line {line.number:,} of the input: "
        f"{why}. Nothing was touched. Choose another output, or begin anew: --overwrite"
    )


def _read_custom_id(text: bytes | None) -> object:
    """A line's custom_id at a fraction of what it takes to judge the line; UNSET where that is not enough."""
    try:
        return _decode_named(text or b"").custom_id
    except (msgspec.MsgspecError, RecursionError):
        return UNSET


def _is_line_end_changed(row_id: str, text: bytes) -> bool:
    other = text[:-1] if text.endswith(b"\r") else text + b"\r"
    return line_in(row_id) == digest_line(other)


def _may_be_torn_row(tail: bytes) -> bool:
    """Whether a file may be what a lost machine left of a first row: its beginning, or zeros in its place."""
    start = tail[: len(_FIRST_BYTES)].rstrip(b"\0")
    return _FIRST_BYTES.startswith(start)


def compare_journal(journal: Journal, lines: Iterator[Line], earlier: Earlier, path: Path) -> None:
    """Hold each row that waits against its line, where the input is not the one that the journal names.

    `lines` go on behind those of the output's rows. Raises OutputRefused.
    """
    for place in earlier.places:
        line = next(lines, None)
        if place == NOWHERE:
            continue
        row_id, row = journal.peek(place)
        if line is None or line_in(row_id) != line.digest:
            where = f"line {line.number:,}" if line else "a line that is gone"
            raise OutputRefused(
                f"The input changed before what is finished: the journal of {path} holds an answer to {where} as it "
                f"was (custom_id {row.custom_id!r}). Nothing was touched. Restore the input, or begin anew: --overwrite"
            )
