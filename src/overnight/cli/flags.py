"""Flags and TOML keys from the tables of options: nothing about an option is written a second time."""

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from overnight.errors import UnknownOption, UsageError
from overnight.options import TOPICS, Option

EXTRA_FLAGS = ("--config", "--help", "--help-all")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help")


def make_parser(
    command: str, about: str, options: Iterable[Option], *, show_all: bool = False, epilog: str = ""
) -> argparse.ArgumentParser:
    """A parser whose values are texts, present only where given; help shows common options, or all."""
    parser = _Parser(
        prog=f"overnight {command}", description=about, epilog=epilog, allow_abbrev=False, add_help=False,
        usage=f"overnight {command} [OPTIONS]", formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in sorted(options, key=lambda each: TOPICS.index(each.topic)):
        group = groups.setdefault(option.topic, parser.add_argument_group(option.topic))
        _add(group, option, is_shown=show_all or option.common)
    return parser


def _add(group: Any, option: Option, *, is_shown: bool) -> None:
    facts: dict[str, Any] = {"dest": option.name, "help": _help(option) if is_shown else argparse.SUPPRESS}
    if option.type is bool:
        facts["action"] = "store_true"
    else:
        facts["action"] = "append" if option.repeatable else "store"
        facts["metavar"] = f"{{{','.join(option.choices)}}}" if option.choices else option.metavar or "VALUE"
    names = [option.short, option.flag] if option.short else [option.flag]
    group.add_argument(*names, **facts)


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    has_default = option.default not in (None, "", (), False, -1)
    return f"{text} (default: {_show(option)})" if has_default and "default:" not in text else text


def _show(option: Option) -> str:
    if option.metavar == "SIZE":
        return f"{option.default >> 20}MiB"
    if option.metavar == "TIME":
        return f"{option.default:g}s"
    return str(option.default)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values given, by name, and the words that no option took."""
    values, rest = parser.parse_known_args(list(words))
    return vars(values), rest


def refuse_rest(rest: Sequence[str], known: Iterable[Option], where: str) -> None:
    """Refuse words that nothing took, naming the nearest flag. Raises UnknownOption, UsageError."""
    if not rest:
        return
    flag = next((word for word in rest if word.startswith("-") and word != "-"), None)
    if flag is None:
        raise UsageError(f"{rest[0]!r} stands alone: every value needs its flag, such as -i {rest[0]}")
    names = [*EXTRA_FLAGS, *(option.flag for option in known)]
    raise UnknownOption(flag.partition("=")[0], names, where)


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


def refuse_missing(flag: str, example: str) -> NoReturn:
    """Refuse to go on without a flag. Raises UsageError."""
    raise UsageError(f"{flag} is needed: {example}")
