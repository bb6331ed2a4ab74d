"""`overnight run`."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overnight.engines import list_engines, load_engine
from overnight.errors import EngineMissing, RunError, UsageError
from overnight.options import Option, RunOptions, list_options, make

from . import flags

if TYPE_CHECKING:
    from overnight.batch import Batch

ABOUT = """\
Answers every request of a JSON Lines file (as for OpenAI's Batch API): one row each, in the same order.

  overnight run -i in.jsonl -o out.jsonl                  the embedded engine
  overnight run -i in.jsonl -o out.jsonl --model my.gguf  a model of yours
  overnight run -i in.jsonl -o out.jsonl --engine echo    a dry run, no model
  make-requests | overnight run -i - -o - | jq .response  in a pipe\
"""
EPILOG = """\
--help-all shows every option, with those of the engine. Any option may also stand in a TOML file (--config);
flags win. A run that ended early goes on when the same command is given again.

Exit codes: 0 all rows are written; 1 every row failed (--fail-on-error: any row); 2 bad flags or input, nothing was
touched; 3 the run ended early; 129, 130, 143 a signal ended it.\
"""
SEE = "overnight run --help-all"


def main(words: Sequence[str]) -> int:
    """Run a batch; the exit code says how it ended."""
    mine = list_options(RunOptions)
    values, rest = flags.parse(_parser(mine.values(), show_all=False), words)
    show_all = values.pop("help_all", False)
    is_asked = values.pop("help", False) or show_all
    config = values.pop("config", None)
    if config:
        values = {**flags.read_config(config), **values}
    engine = str(values.get("engine", mine["engine"].default))
    if is_asked:
        return _print_help(mine, engine, show_all=show_all)
    theirs: dict[str, Option] = {}
    if rest or not values.keys() <= mine.keys():
        theirs = _engine_options(engine)
        given, rest = flags.parse(flags.make_parser("run", ABOUT, theirs.values()), rest)
        _refuse_unknown(mine, theirs, values, rest, engine, config)
        values.update(given)
    options = make(RunOptions, {name: value for name, value in values.items() if name in mine})
    return _run(options, {name: value for name, value in values.items() if name in theirs}, words)


def _parser(options: Iterable[Option], *, show_all: bool) -> argparse.ArgumentParser:
    parser = flags.make_parser("run", ABOUT, options, show_all=show_all, epilog=EPILOG)
    more = next(group for group in parser._action_groups if group.title == flags.MORE)  # noqa: SLF001 - its only list
    more.add_argument("--help-all", action="store_true", help="Every option, with those of --engine")
    more.add_argument("--config", metavar="FILE", help="A TOML file whose keys are options")
    return parser


def _print_help(mine: dict[str, Option], engine: str, *, show_all: bool) -> int:
    options = list(mine.values())
    if show_all:
        options += _engine_options(engine).values()
    sys.stdout.write(_parser(options, show_all=show_all).format_help())
    return 0


def _engine_options(engine: str) -> dict[str, Option]:
    """An engine's own options; its library need not be installed."""
    return list_options(load_engine(engine).options_type)


def _refuse_unknown(
    mine: dict[str, Option], theirs: dict[str, Option], values: Iterable[str], rest: list[str], engine: str,
    config: str | None,
) -> None:  # fmt: skip
    """Refuse flags and keys that neither the run nor its engine knows. Raises UnknownOption, UsageError."""
    known = {**mine, **theirs}
    unknown = [name for name in values if name not in known]
    flag = flags.first_flag(rest)
    for name in [*unknown, *([flag.lstrip("-").replace("-", "_")] if flag else [])]:
        owner = _find_owner(name)
        if owner:
            raise UsageError(f"{name if name in unknown else flag} is an option of the engine {owner}, not of {engine}")
    flags.refuse_rest(rest, known.values(), f" of overnight run or of the engine {engine}", SEE)
    flags.refuse_unknown_keys(str(config), unknown, known)


def _find_owner(name: str) -> str | None:
    """Which registered engine has an option."""
    for engine in list_engines():
        with contextlib.suppress(EngineMissing):
            if name in _engine_options(engine):
                return engine
    return None


def _run(options: RunOptions, engine_options: dict[str, Any], words: Sequence[str]) -> int:
    import asyncio

    from overnight.batch import prepare_batch

    from .signals import raising, run_stoppable
    from .watch import make_watcher

    if options.summary_json:
        _check_summary(options)
    watcher = make_watcher(is_quiet=options.no_progress, has_log=options.verbose)
    with contextlib.ExitStack() as stack:
        stack.callback(watcher.on_end)
        with raising():
            batch = prepare_batch(options, engine_options, environ=os.environ, watcher=watcher)
            stack.enter_context(batch)
        watcher.on_note(batch.describe())
        try:
            summary = asyncio.run(run_stoppable(batch))
        except RunError as error:
            error.add_note(_how_to_go_on(batch, words))
            raise
    watcher.on_note(summary.as_text())
    if options.summary_json:
        _write_summary(options.summary_json, summary.as_dict())
    if summary.all_failed or (options.fail_on_error and summary.counts.failed):
        return 1
    return 0


def _how_to_go_on(batch: "Batch", words: Sequence[str]) -> str:
    """What is there, and the command that does the rest."""
    written = batch.describe_end()
    if batch.target.is_stream:
        return f"{written}. What went into a pipe cannot be continued"
    kept = [word for word in words if word != "--overwrite"]  # what is there is gone on with, not replaced
    staged = ["-i", str(batch.source.staged)] if batch.source.staged and batch.keeps_input else []
    if batch.source.staged and not staged:
        return f"{written}. The same command, with the same input, goes on from there"
    return f"{written}. This goes on from there:\n  overnight run {shlex.join([*kept, *staged])}"


def _check_summary(options: RunOptions) -> None:
    """Refuse a summary that could not be written, or that would take a batch file's place. Raises UsageError."""
    path = Path(str(options.summary_json))
    if not path.parent.is_dir() or path.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"Cannot write --summary-json {path}: {reason}")
    for name in ("input_file", "output_file", "error_file"):
        other = getattr(options, name)
        if other and os.path.realpath(path) == os.path.realpath(other):
            raise UsageError(f"--summary-json and --{name.replace('_', '-')} are the same file: {path}")


def _write_summary(path: str, summary: dict[str, Any]) -> None:
    import json

    try:
        Path(path).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The rows are written, but not --summary-json {path}: {error.strerror or error}") from error
