"""`overnight engines`: which are installed, what each serves, and how to install the others."""

import sys
from collections.abc import Sequence

from overnight.endpoints import ENDPOINTS
from overnight.engines import list_engines, load_engine
from overnight.errors import EngineMissing

from . import flags

ABOUT = "Says which engines are installed, what each serves, and the pip command for those that are not.\n"


def main(words: Sequence[str]) -> int:
    """Print every registered engine."""
    parser = flags.make_parser("engines", ABOUT, ())
    parser.add_argument("-h", "--help", action="store_true", help="these lines")
    values, rest = flags.parse(parser, words)
    if values.pop("help", False):
        sys.stdout.write(parser.format_help())
        return 0
    flags.refuse_rest(rest, (), " of overnight engines")
    for name in list_engines():
        sys.stdout.write(_describe(name))
    return 0


def _describe(name: str) -> str:
    try:
        engine = load_engine(name)
    except EngineMissing as error:
        return f"{name}\n  broken: {error}\n"
    missing = engine.missing()
    state = f"not usable: {missing}. {engine.pip}" if missing else "installed"
    order = list(ENDPOINTS)
    serves = ", ".join(sorted(engine.endpoints, key=order.index))
    return f"{name}: {engine.summary}\n  {state}\n  serves {serves}\n"
