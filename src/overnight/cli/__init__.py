"""The command line: the only code that prints, exits or reads the environment. One module a subcommand.

Nothing is imported here that `overnight --help` does not need: no engine, no event loop, no JSON.
"""

import errno
import io
import sys
from collections.abc import Sequence

from .terminal import lead_nowhere, open_closed_descriptors, say

COMMANDS = {
    "run": "answer a file of requests, in order, once",
    "validate": "judge a file of requests without an engine",
    "engines": "which engines are installed, and what each serves",
}

USAGE = """\
usage: overnight COMMAND [OPTIONS]

Runs a file of OpenAI requests through any inference engine, and writes every
answer once, in the order of the requests.

commands:
{commands}

start here:
  overnight validate -i requests.jsonl              is every line a request?
  overnight run -i requests.jsonl -o answers.jsonl  without a server or a GPU
  overnight COMMAND --help                          the options of a command
  overnight --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code comes back."""
    open_closed_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be UTF-8
    try:
        code = _choose(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # a file that no error of ours speaks for
            say(f"overnight: Cannot use {error.filename}: {error.strerror}")
            return 3
        lead_nowhere(1)  # standard output: its reader has gone, or its disk is full
        if error.errno == errno.EPIPE:
            return 141
        say(f"overnight: Cannot write to standard output: {error.strerror or error}")
        return 2
    return code


def _choose(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in {"-h", "--help", "help"}:
        listed = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
        sys.stdout.write(USAGE.format(commands=listed))
        return 0 if words else 2
    if command in {"-V", "--version"}:
        from overnight import __version__

        sys.stdout.write(f"overnight {__version__}\n")
        return 0
    return _run_command(command, words[1:])


def _run_command(command: str, words: list[str]) -> int:
    """Run a subcommand; what a user can cause ends in one message, never in a traceback."""
    from importlib import import_module

    from overnight.errors import OvernightError, UnknownOption

    try:
        if command not in COMMANDS:
            raise UnknownOption(command, COMMANDS, what="command", see="overnight --help")
        code: int = import_module(f"overnight.cli.{command}").main(words)
    except OvernightError as error:
        say("\n".join([f"overnight: {error}", *getattr(error, "__notes__", ())]))
        return error.exit_code
    except KeyboardInterrupt:
        say("overnight: interrupted")
        return 130
    return code
