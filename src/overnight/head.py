"""The head of a journal: whose it is, under which settings, and which process runs.

Each line is whole or does not count, and a later one says more than an earlier: a run that goes on with an input that
grew, or with other settings, adds a line.
"""

import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import OutputRefused
from .judge import Verdict
from .records import Problem

FORMAT = 1
KEPT_PROBLEMS = 20


class InputFacts(msgspec.Struct, frozen=True):
    """Which input a journal belongs to: its length and digest, decompressed."""

    bytes: int
    digest: str


class VerdictFacts(msgspec.Struct, frozen=True):
    """The first pass's verdict, so that an input that did not change need not be judged again."""

    lines: int
    requests: int
    good: int
    streamed: int
    duplicates: int
    endpoints: dict[str, int]
    models: list[tuple[str | None, int]]
    problem_codes: dict[str, int]
    problems: list[tuple[int, Problem]]
    unknown_keys: list[str]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a journal, and each later one where a run went on with another input or other settings.

    `also` are digests of further settings that rows may have; `staged` says that the input was staged beside the
    output, and goes when the run completes.
    """

    overnight: Literal["journal"] = "journal"
    format: int = FORMAT
    input: InputFacts
    settings: dict[str, Any]
    settings_digest: str
    also: list[str] = []
    overwrite: bool = False
    staged: bool = False
    retry: str = ""
    verdict: VerdictFacts


class _RunLine(msgspec.Struct):
    run: dict[str, Any]


def parse_head(data: bytes) -> tuple[Head | None, set[str], dict[str, Any] | None]:
    """The latest head that a journal's first file holds, the digests of all its settings, and its last run.

    A line that is not whole (a crash came between) counts as not there; without a first head, nothing counts.
    """
    head: Head | None = None
    run: dict[str, Any] | None = None
    accepted: set[str] = set()
    for line in data.split(b"\n"):
        try:
            run = msgspec.json.decode(line, type=_RunLine).run
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            try:
                head = msgspec.json.decode(line, type=Head)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            accepted.update([head.settings_digest, *head.also])
    return head, accepted, run


def refuse_foreign(data: bytes, path: Path) -> None:
    """Refuse a file in the journal's place that is none, or one of another version. Raises OutputRefused.

    What a crash may leave of a head (a line that is torn, zeros) is no such file.
    """
    head, _, run = parse_head(data)
    is_damaged = head is None and (run is not None or b"\n" not in data or b"\0" in data)
    if is_damaged or (head and head.format == FORMAT):
        return
    raise OutputRefused(
        f"{path} is no journal that this version of overnight knows. Nothing was touched. Go on with the version that "
        "wrote it, move it away, or choose another output"
    )


def run_line() -> bytes:
    """The journal's line that says which process runs."""
    return msgspec.json.encode({"run": {"pid": os.getpid(), "host": socket.gethostname(), "at": int(time.time())}})


def describe_holder(text: str, pid: int | None) -> str:
    """Who holds a lock: the process as the system knows it (None: it does not), else as the locked file says."""
    _, _, run = parse_head(text.encode())
    if run and pid in {None, run.get("pid")}:
        return f"process {run.get('pid')} on {run.get('host')}"
    if pid is not None:
        return f"process {pid} on {socket.gethostname()}"
    return "another run, which has written nothing yet"


def to_facts(verdict: Verdict) -> VerdictFacts:
    """A verdict as the journal keeps it."""
    return VerdictFacts(
        verdict.lines,
        verdict.requests,
        verdict.good,
        verdict.streamed,
        verdict.duplicates,
        dict(verdict.endpoints),
        list(verdict.models.items()),
        dict(verdict.problem_codes),
        verdict.problems[:KEPT_PROBLEMS],
        sorted(verdict.unknown_keys),
    )


def from_facts(facts: VerdictFacts, size: int) -> Verdict:
    """A verdict from the journal."""
    return Verdict(
        lines=facts.lines,
        requests=facts.requests,
        bytes=size,
        good=facts.good,
        streamed=facts.streamed,
        duplicates=facts.duplicates,
        endpoints=Counter(facts.endpoints),
        models=Counter(dict(facts.models)),
        problem_codes=Counter(facts.problem_codes),
        problems=list(facts.problems),
        unknown_keys=set(facts.unknown_keys),
    )
