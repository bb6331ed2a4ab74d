"""Every exception of overnight; each takes facts and words its own message.

    OvernightError              `exit_code` says how the command ends
    ├── UsageError         2    flags, keys or files that cannot work together
    │   └── UnknownOption  2    a flag or key that does not exist
    ├── InputError         2    the input cannot be read
    │   └── BatchInvalid   2    the input holds lines that are no requests
    ├── OutputRefused      2    the output may not be written; nothing was touched
    ├── ModelNotFound      2    --model names nothing that can be found or read
    ├── EngineMissing      2    no such engine, or the library that it needs is not installed
    └── RunError           3    the run ended early; what was written is a true prefix
        ├── EngineLost     3    the engine can answer no more, or could not start
        ├── InputChanged   3    the input is no longer what the first pass judged
        ├── OutputLost     3    the output can be written no more
        └── RunStopped     3    asked to stop: a signal (its own exit code), or --deadline

A request's own failure is data (`records.Failure`), never an exception.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


class OvernightError(Exception):
    """What ends a run or refuses it, in words for the person who started it."""

    exit_code = 2


class UsageError(OvernightError):
    """Flags, keys or files that cannot work together."""


class UnknownOption(UsageError):
    """A flag, key or command that does not exist; names the nearest that does."""

    def __init__(
        self, name: str, known: Iterable[str], where: str = "", *, what: str = "option", see: str = ""
    ) -> None:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        super().__init__(f"There is no {what} {name}{where}.{hint} See {see or 'overnight run --help-all'}")


class InputError(OvernightError):
    """The input cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"Cannot read the input {path}: {reason}")


class BatchInvalid(InputError):
    """The input holds lines that are no requests; `report` lists them."""

    def __init__(self, path: str, report: str, problems: int) -> None:
        OvernightError.__init__(
            self,
            f"{path} holds {problems:,} line{'s' * (problems != 1)} that cannot be run:\n{report}\n"
            "Nothing was started. Correct them, or let each become an error row in its place: --on-invalid row",
        )
        self.problems = problems


class OutputRefused(OvernightError):
    """The output may not be written there; nothing was touched."""


class ModelNotFound(OvernightError):
    """What --model names cannot be found, fetched or read."""


class EngineMissing(OvernightError):
    """No engine has that name, or the library that it needs is not installed."""

    def __init__(self, engine: str, reason: str, pip: str = "") -> None:
        hint = f" Install it: {pip}" if pip else " See: overnight engines"
        super().__init__(f"The engine {engine} cannot be used: {reason}.{hint}")


class RunError(OvernightError):
    """The run ended before its last row; what was written is a true prefix of the answers."""

    exit_code = 3


class EngineLost(RunError):
    """The engine can answer no more, or could not start; requests that it did not answer have no row."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"The engine {engine} was lost: {reason}")


class InputChanged(RunError):
    """The input is no longer what the first pass judged."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"The input {path} changed while the run was going on: {reason}")


class OutputLost(RunError):
    """The output can be written no more: a full disk, a folder that is gone."""

    def __init__(self, path: str | Path, cause: OSError) -> None:
        super().__init__(f"Cannot write the output {path}: {cause.strerror or cause}")


class RunStopped(RunError):
    """The run was asked to stop before its last row; what is left can be run by the same command."""

    def __init__(self, reason: str = "The run was stopped", exit_code: int = 3) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
