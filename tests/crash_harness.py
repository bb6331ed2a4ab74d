"""Kills a run again and again, continues it, and holds every state of its files against what is promised.

    tests/crash_harness.py --kills 2000 --requests 400 --seed 1

Each round makes an input of its own (uneven delays, failures, bad lines, blank lines, equal custom_ids, a few rows of
1.5 MB), runs it undisturbed, then again in a child process that gets SIGKILL at random moments, also while it starts
and while it continues. After each kill `checker` (which shares no code with the package) looks at the files; what it
finds finished must never be run again, which the engine's own log tells.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checker

COMMAND = (sys.executable, "-m", "overnight", "run", "--engine", "echo", "--on-invalid", "row", "--no-progress")
BIG = 1_500_000
START_S = 0.45  # about what a run takes before its first request


class Failed(Exception):
    """A promise was broken."""


def make_input(path: Path, requests: int, rng: random.Random) -> dict[str, int]:
    """An input whose lines that get a row are `requests`; the index of each custom_id that names one line alone."""
    lines: list[str] = []
    owners: dict[str, int] = {}
    for index in range(requests):
        if rng.random() < 0.03:
            lines.append("   " if rng.random() < 0.5 else "")
        if rng.random() < 0.03:
            lines.append(rng.choice(['{"custom_id": "torn', "[1, 2]", '{"custom_id": 5}', "\x00\x00", '{"a": "é"}']))
            continue
        custom_id = "same" if rng.random() < 0.05 else f"r{index}"
        if custom_id != "same":
            owners[custom_id] = index
        script = make_script(rng)
        body = {"messages": [{"role": "user", "content": rng.choice(("hi", "é\u2028ü", "x" * 500))}], "echo": script}
        request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(request, ensure_ascii=rng.random() < 0.5))
    path.write_text("\n".join(lines) + ("\n" if rng.random() < 0.5 else ""))
    return owners


def make_script(rng: random.Random) -> dict[str, object]:
    """What happens to a request: mostly little, now and then much."""
    delay = rng.choice((0.0, rng.random() * 0.02, rng.random() * 0.05, rng.random() * 0.4))
    script: dict[str, object] = {"delay": round(delay, 4), "size": rng.choice((0, 0, 10, 3000))}
    luck = rng.random()
    if luck < 0.01:
        script["size"] = BIG
    elif luck < 0.05:
        script.update(status=rng.choice((400, 404)))
    elif luck < 0.08:
        script.update(fault=rng.choice(("error", "invalid", "nan")))
    elif luck < 0.10:
        script.update(status=500, times=1, retry_after=0.01)
    elif luck < 0.12:
        script.update(fault="refuse", retry_after=0.01, times=rng.choice((1, 5)))
    return script


class Round:
    """One input and its run, killed until it is done or the kills are used up."""

    def __init__(self, folder: Path, requests: int, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.log = folder / "echo.log"
        self.owners = make_input(self.input, requests, rng)
        self.kills = collections.Counter[str]()
        self.reruns = 0
        self.max_reruns = 0
        self._environ = {**os.environ, "OVERNIGHT_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": ""}

    def command(self, output: Path, log: Path) -> list[str]:
        words = ["-i", self.input, "-o", output, "--echo-log", log, "--max-inflight", 32]
        words += ["--sync-interval", self.rng.choice(("0", "10ms", "1s"))]
        return [*COMMAND, *map(str, words)]

    def run_undisturbed(self) -> list[dict[str, object]]:
        """What every run must come to."""
        output = self.folder / "undisturbed.jsonl"
        ended = subprocess.run(
            self.command(output, self.folder / "undisturbed.log"), env=self._environ, capture_output=True, check=False
        )
        if ended.returncode != 0:
            raise Failed(f"the undisturbed run ended with {ended.returncode}: {ended.stderr.decode()[-2000:]}")
        return [checker.essence(row) for row in checker.look(output).rows]

    def run(self, kills: int) -> None:
        """Run, kill at most so often, and compare."""
        expected = self.run_undisturbed()
        finished: set[int] = set()
        while not self.run_once(finished, is_killed=self.kills.total() < kills):
            found = checker.look(self.output)
            if not finished <= found.finished:
                raise Failed(f"rows that were finished are gone: {sorted(finished - found.finished)[:9]}")
            finished = found.finished
        found = checker.look(self.output)
        if found.has_journal or checker.segments(self.output) or found.torn:
            raise Failed("a completed run left a journal, or a torn row")
        rows = [checker.essence(row) for row in found.rows]
        if rows != expected:
            pairs = zip(rows, expected, strict=False)
            first = next((n for n, (row, wanted) in enumerate(pairs) if row != wanted), min(len(rows), len(expected)))
            raise Failed(f"{len(rows)} rows, expected {len(expected)}; the first that differs is {first}")

    def run_once(self, finished: set[int], *, is_killed: bool) -> bool:
        """One child process; whether it came to its end."""
        self.log.write_text("")
        child = subprocess.Popen(
            self.command(self.output, self.log), env=self._environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if is_killed:
            self._wait_and_kill(child)
        _, err = child.communicate()
        started = collections.Counter(re.findall(r"^(.*)\n", self.log.read_text(), re.MULTILINE))
        ran_twice = sorted(name for name in started if self.owners.get(name) in finished)
        if ran_twice:
            raise Failed(f"{len(ran_twice)} requests ran although their rows were in a file: {ran_twice[:9]}")
        if child.returncode == 0:
            return True
        if child.returncode != -signal.SIGKILL:
            raise Failed(f"a run ended with {child.returncode}: {err.decode()[-2000:]}")
        found = checker.look(self.output)
        self.kills["torn" if found.torn or found.damaged else "journal" if found.waiting else "other"] += 1
        lost = sum(1 for name in started if name in self.owners and self.owners[name] not in found.finished)
        self.reruns += lost
        self.max_reruns = max(self.max_reruns, lost)
        return False

    def _wait_and_kill(self, child: "subprocess.Popen[bytes]") -> None:
        """SIGKILL: now and then while it starts, mostly some time after its first request."""
        if self.rng.random() < 0.15:
            time.sleep(self.rng.random() * START_S)
        else:
            deadline = time.monotonic() + 20
            while not self.log.stat().st_size and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(self.rng.choice((0.0, 0.02, 0.1, 0.3)) * self.rng.random())
        child.kill()


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: list[str] | None = None) -> int:
    """Rounds until so many kills were made; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, metavar="N")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="in each round")
    parser.add_argument("--per-round", type=int, default=12, metavar="N", help="kills in a round, at most")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    options = parser.parse_args(words)
    began, rounds, reruns, most = time.monotonic(), 0, 0, 0
    kills = collections.Counter[str]()
    while kills.total() < options.kills:
        seed = options.seed * 1_000_003 + rounds
        with tempfile.TemporaryDirectory(prefix="overnight-crash-") as folder:
            attempt = Round(Path(folder), options.requests, random.Random(seed))
            try:
                attempt.run(min(options.per_round, options.kills - kills.total()))
            except (Failed, AssertionError) as error:
                kept = Path(tempfile.mkdtemp(prefix="overnight-crash-kept-"))
                Path(folder).rename(kept / "files")
                Path(folder).mkdir()
                say(f"round {rounds} (seed {seed}), after {attempt.kills.total()} kills: {error}\nfiles: {kept}")
                return 1
        rounds += 1
        kills += attempt.kills
        reruns += attempt.reruns
        most = max(most, attempt.max_reruns)
        say(f"round {rounds}: {kills.total()} of {options.kills} kills, {time.monotonic() - began:.0f} s")
    say(
        f"{kills.total()} kills in {rounds} rounds of {options.requests} requests, {time.monotonic() - began:.0f} s: "
        f"all whole, in order, none lost, none run twice that was in a file. Kills that left a torn line: "
        f"{kills['torn']}, rows in the journal: {kills['journal']}. Requests in flight at a kill: {most} at most, "
        f"{reruns / max(kills.total(), 1):.1f} on average"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
