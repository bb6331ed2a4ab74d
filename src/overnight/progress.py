"""Counts of what was written, and their views: the progress line, and the summary as text and as JSON."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .records import Row

MAX_REASONS = 1_000
SHOWN_REASONS = 5
MAX_MESSAGE = 300
SHOWN_MESSAGE = 160


@dataclass(slots=True)
class Reason:
    """Why rows failed: how many, and one of them."""

    count: int
    custom_id: str | None
    message: str


@dataclass(slots=True)
class Counts:
    """OpenAI's request_counts of the rows written so far, and their tokens."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Rows in the output."""
        return self.completed + self.failed

    def add(self, rows: Iterable[Row]) -> None:
        """Count rows as they are written."""
        for row in rows:
            if row.code:
                self._add_failure(row)
            else:
                self.completed += 1
                self.prompt_tokens += row.prompt_tokens
                self.completion_tokens += row.completion_tokens
                self.cached_tokens += row.cached_tokens

    def _add_failure(self, row: Row) -> None:
        self.failed += 1
        code = row.code if row.code in self.reasons or len(self.reasons) < MAX_REASONS else "(others)"
        reason = self.reasons.setdefault(code, Reason(0, row.custom_id, row.message[:MAX_MESSAGE]))
        reason.count += 1

    def codes(self) -> Counter[str]:
        """How many rows failed, by code."""
        return Counter({code: reason.count for code, reason in self.reasons.items()})


class Clock:
    """Rates over the whole run and over its last half minute."""

    def __init__(self, counts: Counts, now: float | None = None) -> None:
        self.counts = counts
        self.started_at = time.monotonic() if now is None else now
        self.rows, self.tokens = counts.written, counts.completion_tokens  # what earlier runs had written
        self._marks: list[tuple[float, int, int]] = [(self.started_at, self.rows, self.tokens)]

    def tick(self, now: float | None = None) -> tuple[float, float, float | None]:
        """Rows per second, generated tokens per second, and seconds left (None while that cannot be said)."""
        now = time.monotonic() if now is None else now
        counts = self.counts
        self._marks.append((now, counts.written, counts.completion_tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > 30:  # noqa: PLR2004
            self._marks.pop(0)
        since, rows, tokens = self._marks[0]
        span = max(now - since, 1e-9)
        rate = (counts.written - rows) / span
        left = (counts.total - counts.written) / rate if rate > 0 else None
        return rate, (counts.completion_tokens - tokens) / span, left


@dataclass(slots=True)
class Summary:
    """How a run ended: `counts` of the whole batch, `rows` and `tokens` of this run, times in seconds.

    Rates are those of this run.
    """

    counts: Counts
    output: str
    engine: str
    model: str | None
    max_inflight: int = 0
    rows: int = 0
    tokens: int = 0
    load_s: float = 0.0
    run_s: float = 0.0
    wall_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add_run(self, clock: Clock, run_s: float) -> None:
        """Count what was written since a clock began."""
        self.rows += clock.counts.written - clock.rows
        self.tokens += clock.counts.completion_tokens - clock.tokens
        self.run_s += run_s

    def _rate(self, count: int) -> float:
        """A count by this run's seconds; 0 where it ran nothing."""
        return count / self.run_s if self.run_s else 0.0

    @property
    def all_failed(self) -> bool:
        """Whether there were rows, and not one completed."""
        return bool(self.counts.total) and self.counts.completed == 0

    def as_dict(self) -> dict[str, Any]:
        """The summary for --summary-json."""
        counts = self.counts
        codes = counts.codes().most_common()
        return {
            "output": self.output,
            "engine": self.engine,
            "model": self.model,
            "max_inflight": self.max_inflight,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "failures": [
                {"code": code, "count": count, "custom_id": counts.reasons[code].custom_id,
                 "message": counts.reasons[code].message}
                for code, count in codes
            ],
            "usage": {
                "prompt_tokens": counts.prompt_tokens, "completion_tokens": counts.completion_tokens,
                "cached_tokens": counts.cached_tokens,
            },
            "this_run": {"rows": self.rows, "completion_tokens": self.tokens},
            "tokens_per_second": round(self._rate(self.tokens), 1),
            "requests_per_second": round(self._rate(self.rows), 1),
            "load_s": round(self.load_s, 3),
            "run_s": round(self.run_s, 3),
            "wall_s": round(self.wall_s, 3),
            "notes": self.notes,
        }  # fmt: skip

    def as_text(self) -> str:
        """The summary for people, a fact a line."""
        counts = self.counts
        failed = f", {counts.failed:,} failed" if counts.failed else ""
        now = "" if self.rows == counts.written else f" ({self.rows:,} by this run)"
        lines = [f"{counts.written:,} of {plural(counts.total, 'row')}: {counts.completed:,} completed{failed}{now}"]
        for code, count in counts.codes().most_common(SHOWN_REASONS):
            reason = counts.reasons[code]
            example = f", such as {reason.custom_id!r}" if reason.custom_id is not None else ""
            lines.append(f"  {count:,} x {code}{example}: {reason.message[:SHOWN_MESSAGE]}")
        if len(counts.reasons) > SHOWN_REASONS:
            lines.append(f"  … and {len(counts.reasons) - SHOWN_REASONS} other reasons")
        if counts.prompt_tokens or counts.completion_tokens:
            cached = f" ({counts.cached_tokens:,} cached)" if counts.cached_tokens else ""
            rate = f", {self._rate(self.tokens):,.1f} out per second" if self.tokens else ""
            lines.append(f"tokens: {counts.prompt_tokens:,} in{cached}, {counts.completion_tokens:,} out{rate}")
        load = f" ({format_seconds(self.load_s)} to load {self.model or self.engine})" if self.load_s else ""
        rate = f", {self._rate(self.rows):,.1f} rows per second" if self.rows else ""
        lines.append(f"time: {format_seconds(self.wall_s)}{load}{rate}")
        lines.append(f"output: {self.output}")
        return "\n".join(lines)


def plural(count: int, word: str) -> str:
    """A count and its noun: 1 row, 2 rows."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def progress_line(clock: Clock, inflight: int) -> str:
    """One plain line: rows, rate, tokens per second, failures, time left."""
    counts = clock.counts
    rate, tokens, left = clock.tick()
    percent = 100 * counts.written / counts.total if counts.total else 100.0
    parts = [f"{counts.written:,}/{counts.total:,} rows ({percent:.1f} %)", f"{rate:,.1f} rows/s"]
    if counts.completion_tokens:
        parts.append(f"{tokens:,.1f} tokens/s")
    parts += [f"{inflight} inflight", f"{counts.failed:,} failed"]
    parts.append(f"{format_seconds(left)} left" if left is not None else "time left unknown")
    return ", ".join(parts)


class Watcher:
    """Is told what a run does; this one says nothing. The command line's prints."""

    interval_s = 1.0

    def on_note(self, text: str) -> None:
        """Something worth a line."""

    def on_pass(self, done: int, total: int | None) -> None:
        """The first pass has read `done` bytes of `total` (None: unknown, as it is compressed)."""

    def on_download(self, what: str, done: int, total: int) -> None:
        """A model's download, in bytes; `total` is 0 where it is unknown."""

    def on_load(self, what: str) -> None:
        """The engine is being opened, which may take long."""

    def on_start(self, clock: Clock) -> None:
        """The engine is open; the first request starts."""

    def on_tick(self, clock: Clock, inflight: int) -> None:
        """Called about every `interval_s` seconds while requests run, and once at the end."""

    def on_end(self) -> None:
        """The run has ended, one way or another."""
