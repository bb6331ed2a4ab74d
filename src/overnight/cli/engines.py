"""`overnight engines`: which are installed, what each serves, and how to install the others."""

import sys
import textwrap
from collections.abc import Sequence

from overnight.endpoints import ENDPOINTS
from overnight.engines import list_engines, load_engine
from overnight.errors import EngineMissing

from . import flags

ABOUT = "Says which engines are installed, what each serves, and the pip command for those that are not."


def main(words: Sequence[str]) -> int:
    """Print every registered engine."""
    parser = flags.make_parser("engines", ABOUT, ())
    values, rest = flags.parse(parser, words)
    if values.pop("help", False):
        sys.stdout.write(parser.format_help())
        return 0
    flags.refuse_rest(rest, (), " of overnight engines", "overnight engines --help")
    sys.stdout.write("\n".join(_describe(name) for name in list_engines()))
    return 0


def _describe(name: str) -> str:
    try:
        engine = load_engine(name)
    except EngineMissing as error:
        return f"{name}\n    broken: {error}\n"
    missing = engine.missing()
    state = f"not usable: {missing}. Install it: {engine.pip}" if missing else "installed"
    order = list(ENDPOINTS)
    serves = f"serves {', '.join(sorted(engine.endpoints, key=order.index))}"
    indent = " " * 4
    folded = textwrap.fill(
        serves, flags.MAX_WIDTH, initial_indent=indent, subsequent_indent=indent + " " * len("serves "),
        break_on_hyphens=False,
    )  # fmt: skip
    return f"{name}: {engine.summary}\n{indent}{state}\n{folded}\n"
