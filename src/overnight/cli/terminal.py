"""Standard error, which may go away while a run goes on: what is said then is dropped, and nothing fails.

For editors: bytes that a dead terminal did not take stay in Python's buffer, and Python turns the failed flush at its
end into exit code 120. Hence descriptor 2 is led to the null device at the first failure.
"""

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator

COMMAND = "  overnight "


class Terminal:
    """A file for texts that never raises for what stands behind standard error."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Take a text; where nobody can read it any more it is dropped."""
        with _surviving():
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        with _surviving():
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        return sys.stderr.isatty()

    def fileno(self) -> int:
        """The descriptor, where there is one."""
        return sys.stderr.fileno()


@contextlib.contextmanager
def _surviving() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):
        lead_nowhere(2)


def lead_nowhere(descriptor: int) -> None:
    """Let everything that is still written to a descriptor vanish."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_closed_descriptors() -> None:
    """Fill the places of closed standard streams, so that no file of the run gets their numbers.

    Standard output is filled with what cannot be written: `-o -` must fail then, and not vanish.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def say(text: str) -> None:
    """A text on standard error; on a terminal, lines are folded between words (but for commands, which are copied)."""
    terminal = Terminal()
    if terminal.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(line if line.startswith(COMMAND) else _fold(line, width) for line in text.split("\n"))
    terminal.write(f"{text}\n")
    terminal.flush()


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line, max(width, 20), subsequent_indent=f"{indent}  ", break_on_hyphens=False, break_long_words=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
