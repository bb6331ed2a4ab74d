"""Writing in order against writing on completion, where requests take unequal time.

Four workloads, 256 in flight, about 50 ms a request. The rival is a bare asyncio loop that appends each row as it
finishes, in any order, with no journal, no ids and no checks. Both are timed from the first start to the last row
synced. As a script it is the rival: `python order.py FILE OUTPUT`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from common import Figure, Report, interleave, make_file, ratio, run_child

REQUESTS = 20_000
INFLIGHT = 256
BASE_S = 0.05
BAR = 0.98


def uniform(_: int, __: random.Random) -> float:
    return BASE_S


def one_in_fifty(_: int, chance: random.Random) -> float:
    return BASE_S * (16 if chance.random() < 0.02 else 1)


def heavy_tail(_: int, chance: random.Random) -> float:
    """Log-normal with a mean of about 50 ms, and one in a thousand beyond a second."""
    return min(chance.lognormvariate(-3.7, 1.2), 5.0)


def one_each_window(n: int, _: random.Random) -> float:
    return BASE_S * (16 if n % 4096 == 2048 else 1)


WORKLOADS: dict[str, Callable[[int, random.Random], float]] = {
    "uniform": uniform,
    "2 % take 16 x longer": one_in_fifty,
    "heavy tail": heavy_tail,
    "a long one in each 4,096": one_each_window,
}


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Rows a second in order, by rows a second on completion."""
    figures = []
    for name, delay in WORKLOADS.items():
        path = make_file(folder / f"order-{delay.__name__}.jsonl", partial(_lines, delay))
        contenders = {
            f"{name}: in order": partial(_ours, path, folder),
            f"{name}: on completion": partial(_bare, path, folder),
        }
        ours, bare = interleave(contenders, options.rounds).values()
        figures += [
            ratio(
                f"{name}: in order ÷ on completion", [run for run, _ in ours], [run for run, _ in bare], at_least=BAR
            ),
            ratio(f"{name}: the whole process", [whole for _, whole in ours], [whole for _, whole in bare]),
            Figure(f"{name}: in order", [run for run, _ in ours], "rows/s"),
        ]
    return Report("order", figures)


def _lines(delay: Callable[[int, random.Random], float]) -> Iterator[str]:
    chance = random.Random(7)
    for n in range(REQUESTS):
        body = {"messages": [{"role": "user", "content": "x" * 200}], "echo": {"delay": round(delay(n, chance), 4)}}
        yield (
            json.dumps({"custom_id": f"request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body})
            + "\n"
        )


def _ours(path: Path, folder: Path) -> tuple[float, float]:
    summary = folder / "order-summary.json"
    child = run_child([
        "-m", "overnight", "run", "--engine", "echo", "--no-progress", "-i", path, "-o", folder / "order-out.jsonl",
        "--overwrite", "--max-inflight", str(INFLIGHT), "--summary-json", summary,
    ])  # fmt: skip
    return REQUESTS / json.loads(summary.read_text(encoding="utf-8"))["run_s"], REQUESTS / child.wall_s


def _bare(path: Path, folder: Path) -> tuple[float, float]:
    child = run_child([__file__, path, folder / "order-bare.jsonl"])
    return REQUESTS / child.json(), REQUESTS / child.wall_s


class _Echo(msgspec.Struct):
    delay: float


class _Body(msgspec.Struct):
    echo: _Echo


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


async def bare_loop(path: Path, output: Path) -> float:
    """Seconds from the first start to the last row synced."""
    decode, decode_body = msgspec.json.Decoder(_Line).decode, msgspec.json.Decoder(_Body).decode
    with path.open("rb") as lines, output.open("wb", buffering=0) as rows:
        began = time.perf_counter()

        async def work() -> None:
            for text in lines:
                line = decode(text)
                await asyncio.sleep(decode_body(line.body).echo.delay)
                rows.write(b'{"custom_id":"%s","response":%s}\n' % (line.custom_id.encode(), bytes(line.body)))

        async with asyncio.TaskGroup() as group:
            for _ in range(INFLIGHT):
                group.create_task(work())
        os.fsync(rows.fileno())
        return time.perf_counter() - began


if __name__ == "__main__":
    print(asyncio.run(bare_loop(Path(sys.argv[1]), Path(sys.argv[2]))))
