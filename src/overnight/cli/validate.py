"""`overnight validate`: judges a file without an engine."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from overnight.duplicates import Duplicates
from overnight.folders import cache_folder
from overnight.judge import Verdict, describe_problem, judge_source, number_lines
from overnight.options import list_options, make, option, parse_size
from overnight.parse import parse_request
from overnight.records import DUPLICATE_CUSTOM_ID, Problem, Request
from overnight.source import Source, open_source

from . import flags

ABOUT = """\
Judges a file of requests without an engine: counts for each endpoint and model, bytes, and every problem by line, code
and column. Exits with 0 when every line is a request, else with 2.
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
    parser.add_argument("-h", "--help", action="store_true", help="these lines")
    values, rest = flags.parse(parser, words)
    if values.pop("help", False):
        sys.stdout.write(parser.format_help())
        return 0
    flags.refuse_rest(rest, known.values(), " of overnight validate")
    options = make(ValidateOptions, values)
    if not options.input_file:
        flags.refuse_missing("--input-file", "overnight validate -i requests.jsonl")
    stage = cache_folder(os.environ) / f"{os.getpid()}.validate.input"
    with open_source(options.input_file, stage=stage, max_line_bytes=options.max_line_bytes) as source:
        return _judge(source, stage.parent if stage.parent.is_dir() else None)


def _judge(source: Source, spill: object) -> int:
    duplicates = Duplicates(spill)  # type: ignore[arg-type]
    try:
        verdict = judge_source(source, duplicates=duplicates, on_problem=_print_problem)
        if verdict.duplicates:
            _list_duplicates(source, duplicates.hashes())
    finally:
        duplicates.close()
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
    counted = f"{verdict.requests:,} requests, {verdict.problem_count:,} with problems"
    lines = [f"{source.name}: {verdict.lines:,} lines, {verdict.bytes:,} bytes, {counted}"]
    lines += [f"  endpoint {url}: {count:,}" for url, count in verdict.endpoints.most_common()]
    for model, count in verdict.models.most_common():
        lines.append(f"  model {model}: {count:,}" if model is not None else f"  no model named: {count:,}")
    lines += [f"  {code}: {count:,}" for code, count in verdict.problem_codes.most_common()]
    if verdict.streamed:
        lines.append(f"  streamed (each gets a 400 row): {verdict.streamed:,}")
    if verdict.duplicates:
        lines.append(f"  {DUPLICATE_CUSTOM_ID} (a warning): {verdict.duplicates:,}")
    if verdict.unknown_keys:
        lines.append(f"  unknown top-level keys (ignored): {', '.join(sorted(verdict.unknown_keys)[:10])}")
    return "\n".join(lines) + "\n"
