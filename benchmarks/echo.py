"""What the runner itself costs: whole runs with an engine that answers at once, at two sizes.

`--profile` adds where the time goes. As a script it is the child: `python echo.py stages FILE`.
"""

import argparse
import asyncio
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from common import Child, Figure, Report, chat_file, interleave, ratio, run_child, say

SIZES = (20_000, 200_000)
INFLIGHT = 64  # the echo engine's own
BAR = 30_000


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """The command, at both sizes."""
    contenders = {f"{size:,} requests": partial(_run, chat_file(folder, size), folder) for size in SIZES}
    runs = interleave(contenders, options.rounds, warm_up=True, wait_s=options.wait)
    figures = []
    for size, (what, found) in zip(SIZES, runs.items(), strict=True):
        bar = BAR if size == max(SIZES) else None
        rows = [size / run_s for _, run_s in found]
        per_cpu = [size / child.cpu_s for child, _ in found]
        figures += [
            Figure(f"{what}: rows a second of the run", rows, "rows/s", at_least=bar),
            Figure(f"{what}: rows a CPU second, whole process", per_cpu, "rows/s", at_least=bar),
            Figure(f"{what}: peak memory", [child.peak_mib for child, _ in found], "MiB"),
        ]
    small, large = ([child.peak_mib for child, _ in found] for found in runs.values())
    figures.append(ratio("peak memory, large ÷ small", large, small, at_least=0.9, at_most=1.1))
    notes = _profile(folder) if options.profile else []
    return Report("echo", figures, notes)


def _run(path: Path, folder: Path, *before: str) -> tuple[Child, float]:
    """One run; the process, and the seconds of the run itself: without imports, first pass and sync."""
    summary = folder / "echo-summary.json"
    child = run_child([
        *before, "-m", "overnight", "run", "--engine", "echo", "--no-progress", "-i", path,
        "-o", folder / "echo-out.jsonl", "--overwrite", "--summary-json", summary,
    ], cwd=folder)  # fmt: skip
    facts = json.loads(summary.read_text(encoding="utf-8"))
    assert facts["request_counts"]["failed"] == 0, facts
    return child, facts["run_s"]


# -- where the time goes -------------------------------------------------------------------------------------------


def _profile(folder: Path) -> list[str]:
    path = chat_file(folder, SIZES[0])
    stats = folder / "echo.prof"
    say("  profiling")
    _run(path, folder, "-m", "cProfile", "-o", str(stats))
    stages = [run_child([__file__, "stages", path]).json() for _ in range(5)]
    lines = ["| stage | µs a row, median of 5 |", "| --- | --: |"]
    for name in stages[0]:
        median = sorted(each[name] for each in stages)[2]
        lines.append(f"| {name} | {median:.2f} |")
    return ["\n".join(lines), "cProfile, by the time in the function itself:\n\n```\n" + _top(stats) + "\n```"]


def _top(stats: Path) -> str:
    found = pstats.Stats(str(stats))
    by_time = sorted(found.stats.items(), key=lambda each: -each[1][2])  # type: ignore[attr-defined]
    rows = [f"{'calls':>9} {'tottime':>8} {'cumtime':>8}"]
    for (file, line, name), (_, calls, own, whole, _) in by_time[:15]:
        where = name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
        rows.append(f"{calls:>9} {own:>8.3f} {whole:>8.3f}  {where}")
    return "\n".join(rows)


def time_stages(path: Path) -> dict[str, float]:
    """Each stage alone, over all rows; µs a row. What workers, window and loop cost is what the whole has more."""
    from overnight.disk import Disk
    from overnight.duplicates import Duplicates
    from overnight.judge import judge_source, number_lines
    from overnight.options import RunOptions
    from overnight.output import RowFile
    from overnight.parse import parse_request
    from overnight.records import answer_row
    from overnight.settings import make_router
    from overnight.source import open_source

    router = make_router(_make_engine(), RunOptions())
    times: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        outcome = work()
        times[name] = time.perf_counter() - began
        return outcome

    with tempfile.TemporaryDirectory() as folder, open_source(str(path), stage=Path(folder), max_line_bytes=0) as file:
        timed("first pass: judge every line", lambda: judge_source(file, duplicates=Duplicates()))
        numbered = timed("read line", lambda: list(chain.from_iterable(map(number_lines, file.blocks()))))
        requests = timed("parse", lambda: [parse_request(line, n, at) for n, (at, line) in enumerate(numbered)])
        timed("route", lambda: [router.refuse(request) for request in requests])
        timed("attempt, without a timeout", lambda: _attempt_all(requests, timeout=0.0))
        answers = timed("attempt with timeout", lambda: _attempt_all(requests))
        pairs = list(zip(requests, answers, strict=True))
        rows = timed("render", lambda: [answer_row(request, answer, _make_key()) for request, answer in pairs])
        output = RowFile(Path(folder) / "out.jsonl", Disk())
        output.open(0)
        timed("write", lambda: _write_all(output, rows))
        timed("sync", output.sync)
        output.close()
    runner = _make_runner(iter(requests))
    timed("route, attempt and render by the runner: its workers and window too", lambda: _loop(runner.run()))
    return {name: seconds / len(requests) * 1e6 for name, seconds in times.items()}


def _make_engine() -> Any:
    from overnight.engines.base import EngineContext
    from overnight.engines.echo import EchoEngine

    return EchoEngine(EngineContext())


def _make_key() -> Any:
    from overnight.records import RowKey

    return RowKey("0" * 12, "0" * 8)


def _make_runner(items: Iterator[Any], **pace: float) -> Any:
    from overnight.options import RunOptions
    from overnight.output import Sink
    from overnight.runner import Runner
    from overnight.settings import make_pace, make_router
    from overnight.window import NOWHERE, Window

    class Nowhere(Sink):
        """The whole runner is measured without the writing."""

        def finish(self, row: Any) -> None:
            self.window.finish(row.index)

        async def drain(self) -> bool:
            while self.window.release() != NOWHERE:
                pass
            self.room.set()
            return False

    engine, options = _make_engine(), RunOptions(**pace)  # type: ignore[arg-type]
    return Runner(
        items, engine, Nowhere(Window(INFLIGHT, 16 * INFLIGHT)), router=make_router(engine, options), key=_make_key(),
        pace=make_pace(options),
    )  # fmt: skip


def _attempt_all(requests: list[Any], **pace: float) -> list[Any]:
    """64 loops, as the runner has 64 workers, but nothing else of it."""
    runner, answers, left = _make_runner(iter(()), **pace), [None] * len(requests), iter(requests)

    async def work() -> None:
        for request in left:
            answers[request.index] = await runner._attempt(request)  # noqa: SLF001 - the stage in question

    async def work_all() -> None:
        await asyncio.gather(*(work() for _ in range(INFLIGHT)))

    _loop(work_all())
    return answers


def _write_all(output: Any, rows: list[Any]) -> None:
    """In pieces as large as the runner's."""
    left = iter(rows)
    while part := list(islice(left, 512)):
        output.append(b"".join(row.data for row in part))


def _loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


if __name__ == "__main__":
    print(json.dumps(time_stages(Path(sys.argv[2]))))
