"""Flags and TOML keys from the tables of options: nothing about an option is written a second time."""

import argparse
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from overnight.errors import UnknownOption, UsageError
from overnight.options import TOPICS, Option

MORE = "more"
EXTRA_FLAGS = ("--config", "--help", "--help-all")
MAX_WIDTH = 110
HELP_COLUMN = 30
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help")


class _Formatter(argparse.HelpFormatter):
    """Flags in one column: `-i, --input-file PATH`, long ones below one another; indented paragraphs as written."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH) - 1
        super().__init__(prog, max_help_position=HELP_COLUMN, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        value = f" {action.metavar}" if action.metavar else ""
        return f"{names}{value}" if len(action.option_strings) > 1 else f"    {names}{value}"


def make_parser(
    command: str, about: str, options: Iterable[Option], *, show_all: bool = False, epilog: str = ""
) -> argparse.ArgumentParser:
    """A parser whose values are texts, present only where given; help shows common options, or all."""
    parser = _Parser(
        prog=f"overnight {command}", description=about, epilog=epilog, allow_abbrev=False, add_help=False,
        usage=f"overnight {command} [OPTIONS]", formatter_class=_Formatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in sorted(options, key=lambda each: TOPICS.index(each.topic)):
        group = groups.get(option.topic) or parser.add_argument_group(option.topic)
        groups[option.topic] = group
        _add(group, option, is_shown=show_all or option.common)
    more = parser.add_argument_group(MORE)
    more.add_argument("-h", "--help", action="store_true", help="These lines")
    return parser


def _add(group: Any, option: Option, *, is_shown: bool) -> None:
    facts: dict[str, Any] = {"dest": option.name, "help": _help(option) if is_shown else argparse.SUPPRESS}
    if option.type is bool:  # `--overwrite=false` stands above a TOML file's true
        facts |= {"nargs": "?", "const": True, "type": _read_bool, "metavar": ""}
    else:
        facts["action"] = "append" if option.repeatable else "store"
        facts["metavar"] = "|".join(option.choices) if option.choices else option.metavar or "VALUE"
    if option.bare:
        facts |= {"nargs": "?", "const": option.bare, "metavar": f"[{facts['metavar']}]"}
    names = [option.short, option.flag] if option.short else [option.flag]
    group.add_argument(*names, **facts)


def _read_bool(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise argparse.ArgumentTypeError(f"it stands alone, or with =true or =false, not with {text!r}")
    return text.lower() == "true"


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.default in (None, "", (), False, -1) or "default:" in text:
        return text
    default = f"default: {_show(option)}"
    return f"{text[:-1]}; {default})" if text.endswith(")") else f"{text} ({default})"


def _show(option: Option) -> str:
    if option.metavar == "SIZE":
        return f"{option.default >> 20}MiB"
    if option.metavar == "TIME":
        size, unit = next((each for each in _UNITS if not option.default % each[0]), (1, "s"))
        return f"{option.default / size:g}{unit}"
    return str(option.default)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values given, by name, and the words that no option took."""
    values, rest = parser.parse_known_args(list(words))
    return vars(values), rest


def first_flag(rest: Sequence[str]) -> str | None:
    """The first flag among words that nothing took."""
    flag = next((word for word in rest if word.startswith("-") and word != "-"), None)
    return flag and flag.partition("=")[0]


def refuse_rest(rest: Sequence[str], known: Iterable[Option], where: str, see: str) -> None:
    """Refuse words that nothing took, naming the nearest flag. Raises UnknownOption, UsageError."""
    if not rest:
        return
    flag = first_flag(rest)
    if flag is None:
        raise UsageError(f"{rest[0]!r} stands alone: every value needs its flag, such as -i {rest[0]}")
    raise UnknownOption(flag, [*EXTRA_FLAGS, *(option.flag for option in known)], where, see=see)


def read_config(path: str) -> dict[str, Any]:
    """The keys and values of a TOML file; dashes and underscores are one. Raises UsageError."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read --config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is no TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in table.items()}


def refuse_unknown_keys(path: str, names: Iterable[str], known: Mapping[str, Option]) -> None:
    """Refuse a key that is no option, naming the nearest. Raises UnknownOption."""
    for name in names:
        if name not in known:
            raise UnknownOption(name, known, f" (a key in {path})")
