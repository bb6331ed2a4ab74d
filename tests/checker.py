"""Holds a run's files against what docs/continuing.md says of them. Shares no code with the package: json and os alone.

As a script: checker.py OUTPUT
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROW_ID = re.compile(r"batch_req_[0-9a-f]{36}([0-9a-f]+)")


class Found(NamedTuple):
    """What lies on the disk: rows of the output, rows of the journal by their index, bytes of either kind."""

    rows: list[dict[str, Any]]
    waiting: dict[int, dict[str, Any]]
    has_journal: bool
    torn: int
    damaged: int
    segment_bytes: int

    @property
    def finished(self) -> set[int]:
        """The indexes of the requests that have a row in a file."""
        return set(range(len(self.rows))) | set(self.waiting)


def look(output: Path, *, may_be_damaged: bool = False) -> Found:
    """Read an output and its journal. AssertionError says what is wrong with them.

    A torn last line is no fault of a process that was killed; any other line must be whole, unless the files
    `may_be_damaged`, as a lost machine leaves them.
    """
    rows, torn = _lines(output, may_be_damaged=may_be_damaged)
    for index, row in enumerate(rows):
        assert index_of(row) == index, f"{output} has the row of request {index_of(row)} at place {index}"
    head, torn_head = _lines(Path(f"{output}.ahead"), may_be_damaged=may_be_damaged)
    assert all("overnight" in line or "run" in line for line in head), f"no line of a journal's head: {head}"
    waiting: dict[int, dict[str, Any]] = {}
    size = 0
    for segment in segments(output):
        lines, more = _lines(segment, may_be_damaged=may_be_damaged)
        torn_head += more
        size += segment.stat().st_size
        for line in lines:
            assert next(iter(line)) == "line", f"{segment} has a line that does not say whose it is: {str(line)[:80]}"
            assert line["line"] > 0
            row = {key: value for key, value in line.items() if key != "line"}
            waiting[index_of(row)] = row
    return Found(rows, waiting, Path(f"{output}.ahead").exists(), torn, torn_head, size)


def segments(output: Path) -> list[Path]:
    """The journal's files with rows, oldest first."""
    name = re.compile(re.escape(output.name) + r"\.ahead\.([0-9]+)")
    found = [(int(match[1]), path) for path in output.parent.iterdir() if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def look_at_size(output: Path) -> int:
    """How many bytes the journal's rows take."""
    return sum(path.stat().st_size for path in segments(output))


def index_of(row: dict[str, Any]) -> int:
    """The index of the request that a row answers, as its id says."""
    match = ROW_ID.fullmatch(row["id"])
    assert match, f"no id of a row: {row['id']!r}"
    return int(match[1], 16)


def essence(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs from run to run."""
    assert row.keys() == {"id", "custom_id", "response", "error"}, row.keys()
    row = {**row, "id": row["id"][:38] + row["id"][46:]}
    if row["response"]:
        row["response"] = {**row["response"], "request_id": None}
    return row


def _lines(path: Path, *, may_be_damaged: bool) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file, and how many bytes of it are none."""
    if not path.exists():
        return [], 0
    *lines, last = path.read_bytes().split(b"\n")
    found = []
    damaged = len(last)
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            assert isinstance(value, dict)
            found.append(value)
        except (ValueError, AssertionError):
            assert may_be_damaged, f"{path}, line {number} is not whole: {line[:80]!r}"
            damaged += len(line) + 1
    return found, damaged


if __name__ == "__main__":
    found = look(Path(sys.argv[1]))
    sys.stdout.write(
        f"{len(found.rows):,} rows in order (then {found.torn:,} bytes of a torn one); {len(found.waiting):,} rows in "
        f"the journal, {found.segment_bytes:,} bytes\n"
    )
