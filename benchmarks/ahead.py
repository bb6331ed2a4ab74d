"""One request holds up all the others: the memory that their rows take, and how soon a continued run starts.

The first request is answered when all others are. `--rows` sets how many others there are (default: 1,000,000).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import Figure, Report, interleave, make_file, run_child

BARS_MIB = {1_000_000: 100, 4_000_000: 150}
START_BAR_S = 5


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Peak memory of a whole run, and seconds from a continued run's start to its first request."""
    rows = options.rows
    path = make_file(folder / f"ahead-{rows}.jsonl", partial(_lines, rows, rows))
    held = make_file(folder / f"held-{rows}.jsonl", partial(_lines, rows, rows + 1))  # the first is never answered
    (peaks,) = interleave({f"{rows:,} rows wait": partial(_peak, path, folder)}, options.rounds).values()
    (starts,) = interleave({"continued": partial(_continue, held, folder, rows)}, options.rounds).values()
    at_most = BARS_MIB.get(rows)
    figures = [
        Figure(f"{rows:,} rows wait for the first: peak memory", peaks, "MiB", at_most=at_most),
        Figure("continued after a kill: until the first request starts", starts, "s", at_most=START_BAR_S),
    ]
    return Report("ahead", figures)


def _lines(rows: int, after: int) -> Iterator[str]:
    yield _line(0, {"after": after})
    for n in range(1, rows + 1):
        yield _line(n, None)


def _line(n: int, echo: dict[str, int] | None) -> str:
    body = {"messages": [{"role": "user", "content": "hello"}], **({"echo": echo} if echo else {})}
    return (
        json.dumps({"custom_id": f"request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
    )


def _words(path: Path, folder: Path, *more: str) -> list[str]:
    output = folder / "ahead-out.jsonl"
    return ["-m", "overnight", "run", "--engine", "echo", "--no-progress", "-i", str(path), "-o", str(output), *more]


def _peak(path: Path, folder: Path) -> float:
    return run_child(_words(path, folder, "--overwrite")).peak_mib


def _continue(path: Path, folder: Path, rows: int) -> float:
    """Kill a run when all but the first have started and been journalled; continue it, and time its first start."""
    for old in folder.glob("ahead-out.jsonl*"):
        old.unlink()
    log = folder / "ahead-log"
    log.unlink(missing_ok=True)
    child = subprocess.Popen([sys.executable, *_words(path, folder, "--echo-log", str(log))], stderr=subprocess.DEVNULL)
    least = rows * len("request-0\n")
    while not log.exists() or log.stat().st_size < least or not _is_quiet(log):
        if child.poll() is not None:
            break
        time.sleep(0.2)
    if child.poll() is not None:
        raise RuntimeError(f"the run ended early, with {child.returncode}")
    child.kill()
    child.wait()
    log.unlink()
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, *_words(path, folder, "--echo-log", str(log))], stderr=subprocess.DEVNULL)
    while not log.exists() or not log.stat().st_size:
        if time.perf_counter() - began > 600:
            raise RuntimeError("the continued run starts nothing")
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    child.kill()
    child.wait()
    return seconds


def _is_quiet(log: Path) -> bool:
    size = log.stat().st_size
    time.sleep(0.5)
    return log.stat().st_size == size
