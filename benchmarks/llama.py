"""Tokens per second of `overnight run` with its embedded engine, beside llama.cpp's own HTTP server.

As a script it is a child: `python llama.py serve SLOTS` serves on a loopback port until its standard input ends;
`python llama.py drive ADDRESS KEY FILE INFLIGHT` answers a file through it, and prints tokens and seconds.
"""

import argparse
import asyncio
import json
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, Report, interleave, make_file, ratio, run_child, say

MAX_TOKENS = 32
SLOTS = 4

_SUBJECTS = (
    "bread", "rivers", "lighthouses", "violins", "chess", "glaciers", "maps", "honey", "bridges", "clocks", "kites",
    "salt", "owls", "paper", "trains",
)  # fmt: skip
_ASKS = (
    "Write a short paragraph about {}.",
    "What should a child know about {} and {}?",
    "Compare {} with {} in three sentences, and say which of them is older, as far as you know.",
    "I am preparing a talk on {}. Name five questions that people may ask, in order, and answer the first.",
    "Tell a story in which {}, {} and {} matter, and in which it rains from the first sentence to the last one.",
)


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """The command, and the server with a client that keeps as many requests in flight."""
    path, few = (
        make_file(folder / f"llama-{count}.jsonl", partial(request_lines, count)) for count in (options.requests, SLOTS)
    )
    for warm_up in (run_overnight, run_server):  # the libraries and the model, from the disk into memory
        warm_up(few, folder)
    contenders = {"overnight": partial(run_overnight, path, folder), "server": partial(run_server, path, folder)}
    runs = interleave(contenders, options.rounds, wait_s=options.wait)
    ours, theirs = ([tokens / seconds for tokens, seconds in found] for found in runs.values())
    tokens = sorted({tokens for found in runs.values() for tokens, _ in found})
    figures = [
        Figure("overnight run --engine llama", ours, "tokens/s"),
        Figure("llama.cpp's server, an asyncio client", theirs, "tokens/s"),
        ratio("overnight ÷ server", ours, theirs, at_least=0.97),
    ]
    return Report("llama", figures, [f"Every run generated {' or '.join(f'{n:,}' for n in tokens)} tokens."])


def request_lines(count: int) -> Iterator[str]:
    """Chat requests of differing length that generate the same number of tokens each."""
    chance = random.Random(2)
    for n in range(count):
        ask = chance.choice(_ASKS)
        body = {
            "messages": [{"role": "user", "content": ask.format(*chance.sample(_SUBJECTS, ask.count("{}")))}],
            "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        line = {"custom_id": f"request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line) + "\n"


def run_overnight(path: Path, folder: Path) -> tuple[int, float]:
    """Tokens, and seconds from the first request's start to the last row."""
    summary = folder / "llama-summary.json"
    run_child([
        "-m", "overnight", "run", "--engine", "llama", "--max-num-seqs", str(SLOTS), "--no-progress", "-i", path,
        "-o", folder / "llama-out.jsonl", "--overwrite", "--summary-json", summary,
    ], cwd=folder)  # fmt: skip
    facts = json.loads(summary.read_text(encoding="utf-8"))
    assert facts["request_counts"]["failed"] == 0, facts
    return _told(facts["usage"]["completion_tokens"], facts["run_s"])


def run_server(path: Path, _: Path, inflight: int = SLOTS) -> tuple[int, float]:
    """The same of a server of its own; it is loaded when the clock starts."""
    with subprocess.Popen(
        [sys.executable, __file__, "serve", str(SLOTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout
            address, key = json.loads(server.stdout.readline())
            driven = run_child([__file__, "drive", address, key, path, str(inflight)]).json()
            return _told(driven["tokens"], driven["seconds"])
        finally:
            server.kill()


def _told(tokens: int, seconds: float) -> tuple[int, float]:
    say(f"  {tokens:,} tokens in {seconds:.1f} s")
    return tokens, seconds


# -- the children --------------------------------------------------------------------------------------------------


def serve(slots: int) -> None:
    """llama.cpp's server on a free loopback port, with the very parameters of our engine."""
    import os

    import xllamacpp

    from overnight.engines.base import EngineContext
    from overnight.engines.gguf import describe
    from overnight.engines.llama import LlamaEngine, LlamaOptions
    from overnight.models import DEFAULT_MODEL, resolve_model

    class OnLoopback(LlamaEngine):
        """The engine whose parameters these are, but for the private socket."""

        def _listen_on(self) -> str:
            return "127.0.0.1"

    engine = OnLoopback(EngineContext(), LlamaOptions(max_num_seqs=slots))
    model = resolve_model(DEFAULT_MODEL, environ=os.environ)
    key = secrets.token_urlsafe(16)
    params = engine._parameters(model.path, describe(model.path), key)  # noqa: SLF001 - they must be the same
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_threads_http = 2 * slots + 4  # a thread of the server stays with each kept connection
    server = xllamacpp.Server(params)
    print(json.dumps([server.listening_address, key]), flush=True)
    sys.stdin.read()
    os._exit(0)


async def drive(address: str, key: str, path: str, inflight: int) -> dict[str, Any]:
    """Keep `inflight` requests at the server, on connections that are kept, until all are answered."""
    import aiohttp

    requests = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]  # noqa: ASYNC240
    bodies = [(request["url"], json.dumps(request["body"]).encode()) for request in requests]
    left = iter(bodies)
    answers: list[bytes] = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(address, connector=connector, headers=headers) as session:
        async with session.get("/health") as response:
            assert response.status == 200, await response.text()

        async def work() -> None:
            for url, body in left:
                answers.append(await _post(session, url, body))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(inflight):
                group.create_task(work())
        seconds = time.perf_counter() - began
    assert len(answers) == len(bodies)
    tokens = sum(json.loads(answer)["usage"]["completion_tokens"] for answer in answers)
    return {"tokens": tokens, "seconds": seconds}


async def _post(session: Any, url: str, body: bytes) -> bytes:
    import aiohttp

    for attempt in (1, 2):  # the server closes a kept connection after some requests: then a new one
        try:
            async with session.post(url, data=body) as response:
                answer = await response.read()
                assert response.status == 200, answer
                return answer
        except aiohttp.ServerDisconnectedError:
            if attempt == 2:
                raise
    raise AssertionError


def main() -> None:
    """One child's part."""
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        address, key, path, inflight = sys.argv[2:]
        print(json.dumps(asyncio.run(drive(address, key, path, int(inflight)))))


if __name__ == "__main__":
    main()
