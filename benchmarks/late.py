"""The journal's own cost: every second row late, so that it is in constant use, against no row late.

The delays are the same in sum: 0.5 and 1.5 ms in turn, against 1 ms each.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import Figure, Report, interleave, make_file, ratio, run_child

REQUESTS = 100_000
DELAYS = {"every second row late": (0.0015, 0.0005), "none late": (0.001, 0.001)}
BAR = 0.8


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Rows a second with the journal in use, by rows a second without."""
    contenders = {}
    for name, delays in DELAYS.items():
        path = make_file(folder / f"late-{delays[0]}.jsonl", partial(_lines, delays))
        contenders[name] = partial(_run, path, folder)
    late, none = interleave(contenders, options.rounds, warm_up=True, wait_s=options.wait).values()
    figures = [
        ratio("every second row late ÷ none late", late, none, at_least=BAR),
        Figure("every second row late", late, "rows/s"),
        Figure("none late", none, "rows/s"),
    ]
    return Report("late", figures)


def _lines(delays: tuple[float, float]) -> Iterator[str]:
    for n in range(REQUESTS):
        body = {"messages": [{"role": "user", "content": "x" * 300}], "echo": {"delay": delays[n % 2]}}
        yield (
            json.dumps({"custom_id": f"request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body})
            + "\n"
        )


def _run(path: Path, folder: Path) -> float:
    summary = folder / "late-summary.json"
    run_child([
        "-m", "overnight", "run", "--engine", "echo", "--no-progress", "-i", path, "-o", folder / "late-out.jsonl",
        "--overwrite", "--summary-json", summary,
    ])  # fmt: skip
    return REQUESTS / json.loads(summary.read_text(encoding="utf-8"))["run_s"]
