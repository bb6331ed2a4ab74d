"""`overnight validate`: judges a file without an engine."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overnight.duplicates import Duplicates
from overnight.endpoints import ENDPOINTS
from overnight.errors import UsageError
from overnight.folders import cache_folder
from overnight.judge import OTHERS, Verdict, describe_problem, judge_source, number_lines
from overnight.options import list_options, make, option, parse_size
from overnight.parse import parse_request
from overnight.records import DUPLICATE_CUSTOM_ID, Problem, Request
from overnight.source import Source, open_source

from . import flags

ABOUT = """\
Judges a file of requests without an engine: every problem by line, column and code, then counts for each endpoint and
model. Exits with 0 when every line is a request, else with 2.

  overnight validate -i requests.jsonl\
"""


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """What `overnight validate` can be told."""

    input_file: str = option(
        "", "The requests: a path, or - for standard input. Plain, gzip or zstd", "files", common=True,
        metavar="PATH", short="-i",
    )  # fmt: skip
    max_line_bytes: int = option(
        512 << 20, "The longest line that is read (at least 256KiB)", "files", common=True, metavar="SIZE",
        parse=parse_size,
    )  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Judge a file; what is found goes to standard output."""
    known = list_options(ValidateOptions)
    parser = flags.make_parser("validate", ABOUT, known.values())
    values, rest = flags.parse(parser, words)
    if values.pop("help", False):
        sys.stdout.write(parser.format_help())
        return 0
    flags.refuse_rest(rest, known.values(), " of overnight validate", "overnight validate --help")
    options = make(ValidateOptions, values)
    if not options.input_file:
        raise UsageError("--input-file is needed: overnight validate -i requests.jsonl")
    stage = cache_folder(os.environ) / f"{os.getpid()}.validate.input"
    with open_source(options.input_file, stage=stage, max_line_bytes=options.max_line_bytes) as source:
        return _judge(source, stage.parent if stage.parent.is_dir() else None)


def _judge(source: Source, spill_folder: Path | None) -> int:
    duplicates = Duplicates(spill_folder)
    try:
        verdict = judge_source(source, duplicates=duplicates, on_problem=_print_problem)
        if verdict.duplicates:
            _list_duplicates(source, duplicates.hashes())
    finally:
        duplicates.close()
    if verdict.problem_count or verdict.duplicates:
        sys.stdout.write("\n")
    sys.stdout.write(_report(source, verdict))
    return 2 if verdict.problem_count else 0


def _print_problem(number: int, problem: Problem) -> None:
    sys.stdout.write(f"{describe_problem(number, problem)}\n")


def _list_duplicates(source: Source, repeated: set[int]) -> None:
    """Name the lines whose custom_id stood before, in a second reading."""
    first: dict[str, int] = {}
    for block in source.blocks():
        for number, line in number_lines(block):
            request = parse_request(line, 0, number)
            if isinstance(request, Request) and hash(request.custom_id) in repeated:
                before = first.setdefault(request.custom_id, number)
                if before != number:
                    what = f"custom_id {request.custom_id!r} stood on line {before:,} (both run; a warning)"
                    _print_problem(number, Problem(DUPLICATE_CUSTOM_ID, what))


def _report(source: Source, verdict: Verdict) -> str:
    """Counts, a section for each kind."""
    size = f"{_count(verdict.lines, 'line')}, {_count(verdict.bytes, 'byte')}"
    lines = [f"{source.name}: {size}, {_count(verdict.requests, 'request')}, {verdict.problem_count:,} with problems"]
    lines += _section("endpoints", ((_word_endpoint(url), count) for url, count in verdict.endpoints.most_common()))
    lines += _section("models", ((name or "(none named)", count) for name, count in verdict.models.most_common()))
    lines += _section("problems", verdict.problem_codes.most_common())
    streamed = "streamed: each gets a 400 row"
    warnings = {streamed: verdict.streamed, f"{DUPLICATE_CUSTOM_ID}: they run all the same": verdict.duplicates}
    lines += _section("warnings", ((text, count) for text, count in warnings.items() if count))
    if verdict.unknown_keys:
        lines.append(f"  unknown top-level keys, which are ignored: {', '.join(sorted(verdict.unknown_keys)[:10])}")
    return "\n".join(lines) + "\n"


def _section(title: str, counts: Iterable[tuple[str, int]]) -> list[str]:
    lines = [f"{count:>11,}  {what}" for what, count in counts]
    return [f"  {title}", *lines] if lines else []


def _word_endpoint(url: str) -> str:
    return url if url in ENDPOINTS or url == OTHERS else f"{url} (no endpoint: each gets a 404 row)"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
