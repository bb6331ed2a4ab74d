"""The command line: the only code that prints, exits or reads the environment. One module a subcommand.

Nothing is imported here that `overnight --help` does not need: no engine, no event loop, no JSON.
"""

import sys
from collections.abc import Sequence

COMMANDS = {
    "run": "answer a file of requests, in order, once",
    "validate": "judge a file of requests without an engine",
    "engines": "which engines are installed, and what each serves",
}

USAGE = """\
usage: overnight COMMAND [OPTIONS]

Runs a file of OpenAI requests through any inference engine, and writes every answer, in the order of the
requests, once.

commands:
{commands}

  overnight run -i requests.jsonl -o answers.jsonl      the embedded engine: no server, no GPU
  overnight COMMAND --help                              the options of a command
  overnight --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code comes back."""
    words = list(sys.argv[1:] if arguments is None else arguments)
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
        _say(f"overnight: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("overnight: interrupted; the rows written so far are whole and in order")
        return 130
    except BrokenPipeError:  # whoever read our standard output has gone
        sys.stderr.close()
        return 141
    return code


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # a terminal that is gone does not change how the run ended
