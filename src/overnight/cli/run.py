"""`overnight run`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overnight.errors import UsageError
from overnight.options import Option, RunOptions, list_options, make

from . import flags

ABOUT = """\
Answers a file of OpenAI requests (JSON Lines, as for OpenAI's Batch API) and writes one row for each, in their order.

  overnight run -i requests.jsonl -o answers.jsonl
"""
EPILOG = (
    "More options, and those of the engine: overnight run --help-all. Any option may stand in a TOML file: --config"
)


def main(words: Sequence[str]) -> int:
    """Run a batch; the exit code says how it ended."""
    mine = list_options(RunOptions)
    values, rest = flags.parse(_parser(mine.values(), show_all=False), words)
    config = values.pop("config", None)
    if config:
        values = {**flags.read_config(config), **values}
    show_all = values.pop("help_all", False)
    if values.pop("help", False) or show_all:
        return _print_help(mine, str(values.get("engine", mine["engine"].default)), show_all=show_all)
    options, engine_options = _split(mine, values, rest, config)
    return _run(options, engine_options)


def _parser(options: Any, *, show_all: bool) -> argparse.ArgumentParser:
    parser = flags.make_parser("run", ABOUT, options, show_all=show_all, epilog="" if show_all else EPILOG)
    more = parser.add_argument_group("more")
    more.add_argument("--config", metavar="FILE", help="a TOML file whose keys are options")
    more.add_argument("-h", "--help", action="store_true", help="these lines")
    more.add_argument("--help-all", action="store_true", help="every option, with those of --engine")
    return parser


def _print_help(mine: dict[str, Option], engine: str, *, show_all: bool) -> int:
    options = list(mine.values())
    if show_all:
        options += _engine_options(engine).values()
    sys.stdout.write(_parser(options, show_all=show_all).format_help())
    return 0


def _engine_options(engine: str) -> dict[str, Option]:
    """An engine's own options; its library need not be installed."""
    from overnight.engines import load_engine

    return list_options(load_engine(engine).options_type)


def _split(
    mine: dict[str, Option], values: dict[str, Any], rest: list[str], config: str | None
) -> tuple[RunOptions, dict[str, Any]]:
    """The run's options, and the engine's; flags stand above the TOML file."""
    theirs: dict[str, Option] = {}
    given: dict[str, Any] = {}
    if rest or not values.keys() <= mine.keys():
        engine = str(values.get("engine", mine["engine"].default))
        theirs = _engine_options(engine)
        given, rest = flags.parse(flags.make_parser("run", ABOUT, theirs.values()), rest)
        flags.refuse_rest(rest, [*mine.values(), *theirs.values()], f" of overnight run or of the engine {engine}")
    if config:
        flags.refuse_unknown_keys(config, values, {**mine, **theirs})
    options = make(RunOptions, {name: value for name, value in values.items() if name in mine})
    return options, {**{name: value for name, value in values.items() if name in theirs}, **given}


def _run(options: RunOptions, engine_options: dict[str, Any]) -> int:
    from overnight.batch import prepare_batch

    from .watch import make_watcher

    watcher = make_watcher(is_quiet=options.no_progress)
    try:
        with prepare_batch(options, engine_options, environ=os.environ, watcher=watcher) as batch:
            watcher.on_note(batch.describe())
            import asyncio

            summary = asyncio.run(batch.run())
    finally:
        watcher.on_end()
    watcher.on_note(summary.as_text())
    if options.summary_json:
        _write_summary(options.summary_json, summary.as_dict())
    if summary.all_failed or (options.fail_on_error and summary.counts.failed):
        return 1
    return 0


def _write_summary(path: str, summary: dict[str, Any]) -> None:
    import json

    try:
        Path(path).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The rows are written, but not --summary-json {path}: {error.strerror or error}") from error
