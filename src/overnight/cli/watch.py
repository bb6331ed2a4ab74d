"""What a person sees while a batch runs, on standard error: a bar on a terminal, a plain line now and then elsewhere.

A terminal that is gone ends the bar, never the run.
"""

import os
import time
from typing import IO, TYPE_CHECKING, cast

from overnight.progress import Clock, Watcher, format_seconds, progress_line

from .terminal import Terminal, say

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.25


def make_watcher(*, is_quiet: bool, has_log: bool = False) -> Watcher:
    """The watcher that suits where standard error goes; an engine's log there would write across a bar."""
    if is_quiet:
        return PlainWatcher(interval_s=float("inf"))
    has_cursor = Terminal().isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}
    return BarWatcher() if has_cursor and not has_log else PlainWatcher()


class PlainWatcher(Watcher):
    """Whole lines, one every ten seconds."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.interval_s = min(interval_s, 3600.0)
        self._is_quiet = interval_s > self.interval_s
        self._said_at = time.monotonic()

    def on_note(self, text: str) -> None:
        """Notes are said also where progress is not."""
        say(text)

    def on_pass(self, done: int, total: int | None) -> None:
        """Say how far the first pass is, where it takes long."""
        if self._is_due():
            say(f"judging the input: {done:,} bytes read" + (f" of {total:,}" if total else ""))

    def on_download(self, what: str, done: int, total: int) -> None:
        """Say how far a download is."""
        if self._is_due() or (done and done == total):
            say(f"{what}: {done / 1e6:,.0f} MB" + (f" of {total / 1e6:,.0f} MB" if total else ""))

    def on_tick(self, clock: Clock, inflight: int) -> None:
        """Say how far the batch is."""
        if self._is_due():
            say(progress_line(clock, inflight))

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._is_quiet or now - self._said_at < self.interval_s * 0.99:
            return False
        self._said_at = now
        return True


class BarWatcher(Watcher):
    """A bar that is drawn where it stands."""

    interval_s = BAR_INTERVAL_S

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = -1
        self._what = ""
        self._terminal = Terminal()
        self._is_loading = False
        self._drawn_at = time.monotonic()  # what is over at once shows no bar

    def on_note(self, text: str) -> None:
        """A line above the bar."""
        if self._is_loading:
            self.on_end()
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def on_pass(self, done: int, total: int | None) -> None:
        """How far the first pass is."""
        self._draw("judging the input", done, total, f"{done / 1e6:,.0f} MB")

    def on_download(self, what: str, done: int, total: int) -> None:
        """How far a download is."""
        self._draw(what, done, total or None, f"{done / 1e6:,.1f} MB", is_now=done == total)

    def on_load(self, what: str) -> None:
        """Say what takes its time now, in a line that the next thing said takes the place of."""
        self.on_end()
        self._terminal.write(f"loading {what} …\r")
        self._terminal.flush()
        self._is_loading = True

    def on_start(self, clock: Clock) -> None:
        """The bar of rows takes the place of what stood there."""
        self._draw("rows", 0, clock.counts.total, "", is_now=True)

    def on_tick(self, clock: Clock, inflight: int) -> None:
        """Rows, rate, tokens per second, failures, time left."""
        counts = clock.counts
        rate, tokens, left = clock.tick()
        facts = [f"{counts.written:,}/{counts.total:,}"]
        if rate:
            facts.append(f"{rate:,.1f}/s")
        if counts.completion_tokens:
            facts.append(f"{tokens:,.0f} tok/s")
        if counts.failed:
            facts.append(f"[red]{counts.failed:,} failed[/red]")
        if counts.written < counts.total:
            facts.append(f"{format_seconds(left)} left" if left is not None else f"{inflight} inflight")
        self._draw("rows", counts.written, counts.total, " · ".join(facts), is_now=True)

    def on_end(self) -> None:
        """Leave the bar as it is, and the cursor below it."""
        if self._is_loading:
            self._terminal.write("\x1b[2K")
            self._is_loading = False
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _draw(self, what: str, done: int, total: int | None, facts: str, *, is_now: bool = False) -> None:
        now = time.monotonic()
        if now - self._drawn_at < BAR_INTERVAL_S and not is_now:
            return
        self._drawn_at = now
        if self._bar is None or what != self._what:
            self._bar = self._open(what, total)
        self._bar.update(self._task, completed=done, total=total, facts=facts)  # type: ignore[arg-type]
        self._bar.refresh()

    def _open(self, what: str, total: int | None) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.table import Column

        self.on_end()
        self._what = what
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True)),
        )
        console = Console(file=cast("IO[str]", self._terminal), force_terminal=True)
        bar = Progress(
            *columns, console=console, auto_refresh=False, transient=what != "rows",
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = bar.add_task(what, total=total, facts="")
        bar.start()
        return bar
