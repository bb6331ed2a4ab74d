"""The first pass: every line judged before anything starts, in blocks, without keeping a line.

Whole blocks are decoded at once where nothing in them is suspicious; else line by line. Either way it is
`parse.judge` that decides, and the run's own reading of each line asks the same function.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from .duplicates import Duplicates
from .parse import Envelope, Head, judge, parse_request
from .records import INVALID_JSON_LINE, Problem
from .source import Block, Source

MAX_KEPT_PROBLEMS = 10_000
# Beyond this many different names a counter says "(others)": a file may name each line's url or model anew.
MAX_KEPT_NAMES = 1_000
MAX_NAME = 200
OTHERS = "(others)"

_first, _last = itemgetter(0), itemgetter(-1)
_decode_lines = msgspec.json.Decoder(Envelope).decode_lines


@dataclass(slots=True)
class Verdict:
    """What the first pass found. Counts are of lines; blank lines count in `lines` alone."""

    lines: int = 0
    requests: int = 0  # lines that get a row: good ones and problems
    bytes: int = 0
    good: int = 0
    streamed: int = 0
    duplicates: int = 0  # good lines whose custom_id stood before
    endpoints: Counter[str] = field(default_factory=Counter)  # by endpoint, else by url as written; good lines only
    models: Counter[str | None] = field(default_factory=Counter)  # None: the body names no model
    problem_codes: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[int, Problem]] = field(default_factory=list)  # the first 10,000, with their line numbers
    unknown_keys: set[str] = field(default_factory=set)
    on_problem: Callable[[int, Problem], None] | None = None

    @property
    def problem_count(self) -> int:
        """How many lines are no requests."""
        return self.problem_codes.total()


def judge_source(
    source: Source,
    *,
    duplicates: Duplicates | None = None,
    on_block: Callable[[int], None] | None = None,
    on_problem: Callable[[int, Problem], None] | None = None,
) -> Verdict:
    """Judge every line of an input. Raises InputError.

    `on_block` is told the bytes read so far; `on_problem` each problem, with its line's number, as it is found.
    """
    verdict = Verdict(on_problem=on_problem)
    for block in source.first_pass():
        if block.data is None:
            verdict.lines += 1
            verdict.bytes += block.oversized
            _note_problem(verdict, block.number, oversized_problem(block, source.max_line_bytes))
        else:
            _judge_block(block, block.data, verdict, duplicates)
        if on_block:
            on_block(verdict.bytes)
    if duplicates:
        verdict.duplicates = duplicates.count()
    return verdict


def number_lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """The lines of a block that get a row, with their numbers: all but blank ones."""
    for number, line in enumerate(block.lines(), block.number):
        if line and not line.isspace():
            yield number, line


def oversized_problem(block: Block, limit: int) -> Problem:
    """What is wrong with a line beyond the limit."""
    what = f"The line has {block.oversized:,} bytes; --max-line-bytes allows {limit:,}"
    return Problem(INVALID_JSON_LINE, what)


def _judge_block(block: Block, data: bytes, verdict: Verdict, duplicates: Duplicates | None) -> None:
    lines = block.lines()
    verdict.lines += len(lines)
    verdict.bytes += len(data)
    envelopes = _decode_block(data, lines)
    if envelopes is not None:
        _judge_decoded(lines, envelopes, block.number, verdict, duplicates)
        return
    for number, line in number_lines(block):
        request = parse_request(line, 0, number)
        if isinstance(request, Problem):
            _note_problem(verdict, number, request)
        else:
            envelope = Envelope(request.custom_id, "POST", request.url, msgspec.Raw(request.body))
            _judge_decoded([line], [envelope], number, verdict, duplicates)


def _decode_block(data: bytes, lines: list[bytes]) -> list[Envelope] | None:
    """Every line's envelope, or None where the block must be read line by line.

    decode_lines would take two objects on one line, or one object on two. Where each line begins with `{` and
    ends with `}`, a line's end inside an object is not JSON (`}` and `{` never meet there), so as many objects
    as lines means one on each.
    """
    if not all(lines) or set(map(_first, lines)) != {ord("{")} or set(map(_last, lines)) != {ord("}")}:
        return None
    try:
        if not data.isascii():
            data.decode()
        envelopes = _decode_lines(data)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
    return envelopes if len(envelopes) == len(lines) else None


def _judge_decoded(
    lines: list[bytes], envelopes: list[Envelope], number: int, verdict: Verdict, duplicates: Duplicates | None
) -> None:
    good: list[str] = []
    last: Head | None = None  # the head of the lines before: nearly all share one, and are counted together
    url, run = "", 0
    for line, envelope in zip(lines, envelopes, strict=True):
        head = judge(line, envelope)
        if isinstance(head, Problem):
            _note_problem(verdict, number, head)
        else:
            good.append(envelope.custom_id)
            if head is last:
                run += 1
            else:
                _count(verdict, last, url, run)
                last, url, run = head, envelope.url, 1
        number += 1
    _count(verdict, last, url, run)
    verdict.good += len(good)
    verdict.requests += len(good)
    if duplicates:
        duplicates.add_all(good)


def _count(verdict: Verdict, head: Head | None, url: str, lines: int) -> None:
    """Count good lines that have one head."""
    if head is None:
        return
    _add(verdict.endpoints, head.endpoint or url, lines)
    _add(verdict.models, head.model, lines)
    verdict.streamed += head.is_streamed * lines
    if head.unknown_keys and len(verdict.unknown_keys) < MAX_KEPT_NAMES:
        verdict.unknown_keys.update(map(shorten, head.unknown_keys[:MAX_KEPT_NAMES]))


def _add(total: Counter[Any], name: str | None, count: int) -> None:
    short = name if name is None else shorten(name)
    total[short if short in total or len(total) < MAX_KEPT_NAMES else OTHERS] += count


def shorten(name: str) -> str:
    """A name as the counts keep it."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"


def _note_problem(verdict: Verdict, number: int, problem: Problem) -> None:
    verdict.requests += 1
    verdict.problem_codes[problem.code] += 1
    if verdict.on_problem:
        verdict.on_problem(number, problem)
    if len(verdict.problems) < MAX_KEPT_PROBLEMS:
        verdict.problems.append((number, problem))


def describe_problem(number: int, problem: Problem) -> str:
    """One line for people: where, which code, why."""
    column = f", column {problem.column}" if problem.column else ""
    return f"line {number:,}{column}: {problem.code}: {problem.message}"


def report_problems(verdict: Verdict, path: str, *, at_most: int = 20) -> str:
    """The first problems in full, then a count of the rest by code."""
    shown = [f"  {describe_problem(number, problem)}" for number, problem in verdict.problems[:at_most]]
    rest = verdict.problem_count - len(shown)
    if rest > 0:
        codes = ", ".join(f"{code}: {count:,}" for code, count in verdict.problem_codes.most_common())
        shown.append(f"  … and {rest:,} more (in all {codes}). List them: overnight validate -i {path}")
    return "\n".join(shown)
