"""Signals end a run in steps: the first stops new starts, a second what is in flight, and nothing finished is lost."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from overnight.errors import RunStopped

if TYPE_CHECKING:
    from overnight.batch import Batch
    from overnight.progress import Summary

# How long after a second signal the process may still take to close its files: they are true at any moment.
LAST_S = 5.0


def _watched() -> list[signal.Signals]:
    """The signals that end a run; one that was ignored from the start (nohup) stays so."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [each for each in known if signal.getsignal(each) is not signal.SIG_IGN]


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """While plain code runs: a signal raises RunStopped, so that what was opened is closed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise RunStopped(f"Stopped by {signal.Signals(number).name} before anything was run", 128 + number)

    before = {each: signal.signal(each, stop) for each in _watched()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


async def run_stoppable(batch: "Batch") -> "Summary":
    """Run a batch, and stop it as signals say. Raises RunError."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: signal.Signals) -> None:
        seen.append(number)
        stopped = RunStopped(f"Stopped by {number.name}", 128 + number)
        if len(seen) == 1:
            grace = batch.options.grace
            batch.watcher.on_note(
                f"{number.name}: nothing more starts; what is in flight may take {grace:g} s (again: stop at once)"
            )
            batch.stop(stopped, grace)
        else:
            batch.stop(stopped, 0.0)
            loop.call_later(LAST_S, os._exit, 128 + number)

    watched = _watched()
    with contextlib.suppress(NotImplementedError):  # Windows' loops take no handlers; Ctrl-C raises there
        for each in watched:
            loop.add_signal_handler(each, on_signal, each)
    try:
        return await batch.run()
    finally:
        with contextlib.suppress(NotImplementedError):
            for each in watched:
                loop.remove_signal_handler(each)
