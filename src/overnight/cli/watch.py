"""What a person sees while a batch runs, on standard error: a bar on a terminal, a plain line now and then elsewhere.

A terminal that is gone ends the bar, never the run.
"""

import sys
import time
from typing import TYPE_CHECKING

from overnight.progress import Clock, Watcher, format_seconds, progress_line

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.25


def make_watcher(*, is_quiet: bool) -> Watcher:
    """The watcher that suits where standard error goes."""
    if is_quiet:
        return PlainWatcher(interval_s=float("inf"))
    return BarWatcher() if sys.stderr.isatty() else PlainWatcher()


class PlainWatcher(Watcher):
    """Whole lines, one every ten seconds."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.interval_s = min(interval_s, 3600.0)
        self._is_quiet = interval_s > self.interval_s
        self._said_at = time.monotonic()

    def say(self, text: str) -> None:
        """One line; none where nobody can read it any more."""
        try:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self._is_quiet = True

    def on_note(self, text: str) -> None:
        """Notes are said also where progress is not."""
        self.say(text)

    def on_pass(self, done: int, total: int | None) -> None:
        """Say how far the first pass is, where it takes long."""
        if self._is_due():
            self.say(f"judging the input: {done:,} bytes read" + (f" of {total:,}" if total else ""))

    def on_download(self, what: str, done: int, total: int) -> None:
        """Say how far a download is."""
        if self._is_due() or (done and done == total):
            self.say(f"{what}: {done / 1e6:,.0f} MB" + (f" of {total / 1e6:,.0f} MB" if total else ""))

    def on_tick(self, clock: Clock, inflight: int) -> None:
        """Say how far the batch is."""
        if self._is_due():
            self.say(progress_line(clock, inflight))

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
        self._is_gone = False
        self._drawn_at = 0.0

    def on_note(self, text: str) -> None:
        """A line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self._is_gone = True

    def on_pass(self, done: int, total: int | None) -> None:
        """How far the first pass is."""
        self._draw("judging the input", done, total, f"{done / 1e6:,.0f} MB")

    def on_download(self, what: str, done: int, total: int) -> None:
        """How far a download is."""
        self._draw(what, done, total or None, f"{done / 1e6:,.1f} MB", is_last=done == total)

    def on_start(self, clock: Clock) -> None:
        """The bar of rows takes the place of what stood there."""
        self._draw("rows", 0, clock.counts.total, "", is_last=True)

    def on_tick(self, clock: Clock, inflight: int) -> None:
        """Rows, rate, tokens per second, failures, time left."""
        counts = clock.counts
        rate, tokens, left = clock.tick()
        facts = [f"{counts.written:,}/{counts.total:,}", f"{rate:,.1f}/s"]
        if counts.completion_tokens:
            facts.append(f"{tokens:,.0f} tok/s")
        if counts.failed:
            facts.append(f"[red]{counts.failed:,} failed[/red]")
        facts.append(f"{format_seconds(left)} left" if left is not None else f"{inflight} inflight")
        self._draw("rows", counts.written, counts.total, " · ".join(facts), is_last=True)

    def on_end(self) -> None:
        """Leave the bar as it is, and the cursor below it."""
        if self._bar:
            try:
                self._bar.stop()
            except OSError:
                self._is_gone = True
            self._bar = None

    def _draw(self, what: str, done: int, total: int | None, facts: str, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if self._is_gone or (now - self._drawn_at < BAR_INTERVAL_S and not is_last):
            return
        self._drawn_at = now
        try:
            if self._bar is None or what != self._what:
                self._open(what, total)
            assert self._bar is not None
            self._bar.update(self._task, completed=done, total=total, facts=facts)  # type: ignore[arg-type]
            self._bar.refresh()
        except OSError:
            self._is_gone = True
            self._bar = None

    def _open(self, what: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        if self._bar:
            self._bar.stop()
        self._what = what
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=what != "rows")
        self._task = self._bar.add_task(what, total=total, facts="")
        self._bar.start()
