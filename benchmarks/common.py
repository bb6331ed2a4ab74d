"""What the benchmarks share: children that are measured, rounds that alternate, requests to run, and tables.

For editors: nothing heavy is imported here, nor kept in memory by the parent. Linux counts what a process had
before `exec` into its peak, so a child's peak is never below that of the parent that started it.
"""

import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
# Each child's ru_maxrss: kilobytes, but bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
MIB = 1 << 20


# -- children ------------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """How a process ended: its standard output, its times, and the most memory that it held."""

    stdout: str
    wall_s: float
    cpu_s: float
    peak_mib: float

    def json(self) -> Any:
        """The last line of its output."""
        return json.loads(self.stdout.splitlines()[-1])


def run_child(words: Sequence[str | Path], *, cwd: Path | None = None, timeout_s: float = 600) -> Child:
    """Run `python WORDS` to its end. Raises RuntimeError where it fails or takes too long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, *map(str, words)], stdout=out, stderr=err, cwd=cwd)
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)  # of this child alone; RUSAGE_CHILDREN is the largest of all
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        wall_s = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))} ended with {child.returncode}:\n{_read(err)}")
        return Child(_read(out), wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT / MIB)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def interleave(
    contenders: dict[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: bool = False,
    quiet: bool = False,
    wait_s: float = 0,
) -> dict[str, list[T]]:
    """Run each contender once a round, every other round in the opposite order; what each gave, by name.

    A warm-up is a round whose results are dropped. Each run waits up to `wait_s` seconds for an idle machine, and
    where there is such a wait, a run that others disturbed is made again, twice at most.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(-1 if warm_up else 0, rounds):
        names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in names:
            what = "" if quiet else f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {name}"
            outcome = _run_undisturbed(contenders[name], wait_s, what)
            if number >= 0:
                found[name].append(outcome)
    return found


def _run_undisturbed(work: Callable[[], T], wait_s: float, what: str) -> T:
    for attempt in (1, 2, 3):
        wait_until_idle(wait_s)
        before = busy_seconds()
        outcome = work()
        share = others_since(before)
        is_kept = share < DISTURBED or not wait_s or attempt == 3
        if what:
            say(f"  {what}; others took {share:.0%}" + ("" if is_kept else ", once more"))
        if is_kept:
            _others.append(share)
            return outcome
    raise AssertionError


# -- what else runs on this machine (Linux; elsewhere nothing is known, and nothing waited for) ----------------------

DISTURBED = 0.1
_others: list[float] = []


def busy_seconds() -> tuple[float, float, float]:
    """The time, the CPU seconds of the whole machine so far, and those of our own children that have ended."""
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        ticks = list(map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]))
    except OSError:
        return time.monotonic(), 0.0, mine.ru_utime + mine.ru_stime
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for a disk
    return time.monotonic(), busy, mine.ru_utime + mine.ru_stime


def others_since(before: tuple[float, float, float]) -> float:
    """The share of the machine that others took since then."""
    wall, busy, mine = (now - then for now, then in zip(busy_seconds(), before, strict=True))
    return max(0.0, busy - mine) / max(wall, 0.01) / (os.cpu_count() or 1)


def take_others() -> list[float]:
    """Their share of each run that was kept, since the last call."""
    noted = list(_others)
    _others.clear()
    return noted


def wait_until_idle(at_most_s: float) -> None:
    """Wait until others leave the machine alone for a second."""
    until = time.monotonic() + at_most_s
    while time.monotonic() < until:
        before = busy_seconds()
        time.sleep(1)
        if others_since(before) < DISTURBED:
            return


def say(text: str) -> None:
    """Progress, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


# -- requests ------------------------------------------------------------------------------------------------------

_TEXT = (
    "the of and to a in for is on that by this with you it not or be are from at as your all have new more an was we "
    "will home can us about if page my has search free but our one other do no information time they site he up may "
    "what which their news out use any there see only so his when contact here business who web also now help get "
    "view online first been would how were services some these click its like service than find price date back top "
    "people had list name just over state year day into email two health world next used go work last most products"
)
_PLAIN = _TEXT.split(" ")
_ODD = [*_PLAIN, "naïve", "café", "Straße", "東京", "résumé", r"\n", r"\"quoted\""]


def chat_lines(count: int, seed: int = 1) -> Iterator[str]:
    """Requests of about 500 bytes, no two alike; some with escapes, and one in eight beyond ASCII."""
    chance = random.Random(seed)
    for n in range(count):
        words = _ODD if n % 8 == 0 else _PLAIN
        text = " ".join(chance.choices(words, k=chance.randint(25, 75)))
        yield (
            f'{{"custom_id": "request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": '
            f'{{"model": "some-model", "messages": [{{"role": "system", "content": "You are a helpful assistant."}}, '
            f'{{"role": "user", "content": "{text}"}}], '
            f'"max_tokens": {chance.randint(16, 1024)}, "temperature": {chance.randint(0, 10) / 10}}}}}\n'
        )


def make_file(path: Path, lines: Callable[[], Iterator[str]]) -> Path:
    """A file of these lines; one that an earlier run made is used again."""
    if not path.exists():
        say(f"  writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines())
        part.replace(path)
    return path


def chat_file(folder: Path, count: int) -> Path:
    """`count` of `chat_lines`."""
    return make_file(folder / f"chat-{count}.jsonl", lambda: chat_lines(count))


# -- figures -------------------------------------------------------------------------------------------------------


@dataclass
class Figure:
    """One measured thing: a value a round, and the bar that their median should meet."""

    what: str
    values: list[float]
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the bar; None where there is none."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )

    def row(self) -> str:
        """Its line of the table."""
        unit = f" {self.unit}" if self.unit else ""
        spread = f"{_number(min(self.values))} to {_number(max(self.values))}"
        bars = [f"≥ {_number(self.at_least)}"] if self.at_least is not None else []
        bars += [f"≤ {_number(self.at_most)}"] if self.at_most is not None else []
        met = {True: "met", False: "**missed**", None: ""}[self.is_met]
        return f"| {self.what} | {_number(self.median)}{unit} | {spread} | {' and '.join(bars)} | {met} |"


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], **bar: float) -> Figure:
    """Ours by theirs, round by round: both runs of a round met about the same machine."""
    return Figure(what, [mine / other for mine, other in zip(ours, theirs, strict=True)], "x", **bar)


@dataclass
class Report:
    """What one benchmark found."""

    title: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """A table, and what was noted."""
        rounds = len(self.figures[0].values)
        head = [
            f"### {self.title}",
            "",
            f"| | median of {rounds} | range | bar | |",
            "| --- | --: | --: | --: | --- |",
        ]
        return "\n".join([*head, *(figure.row() for figure in self.figures), *("\n" + note for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """The same for --json, with every round's value."""
        figures = [
            {"what": each.what, "unit": each.unit, "median": each.median, "values": each.values,
             "at_least": each.at_least, "at_most": each.at_most, "is_met": each.is_met}
            for each in self.figures
        ]  # fmt: skip
        return {"title": self.title, "figures": figures, "notes": self.notes}


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 20 else f"{value:.3g}"


def describe_machine() -> str:
    """Where the numbers are from."""
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
