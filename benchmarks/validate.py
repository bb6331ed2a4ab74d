"""Judging 1,000,000 lines: every check of the first pass, beside a bare decode and beside a pydantic model.

As a script it is the child: `python validate.py ours|bare|pydantic FILE LINES` prints what its pass took, without
the interpreter's start and the imports.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from common import Figure, Report, chat_file, interleave, ratio, run_child

LINES = 1_000_000
PYDANTIC_LINES = 200_000  # it keeps nothing between lines, so a fifth of the file says as much per line


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """The three passes, each in a process of its own."""
    path = chat_file(folder, LINES)
    size = path.stat().st_size / LINES
    counts = {"ours": LINES, "bare": LINES, "pydantic": PYDANTIC_LINES}
    contenders = {
        name: lambda name=name, count=count: run_child([__file__, name, path, str(count)])
        for name, count in counts.items()
    }
    runs = interleave(contenders, options.rounds, wait_s=options.wait)
    rates = {name: [count / run.json()["wall_s"] for run in runs[name]] for name, count in counts.items()}
    per_cpu = {name: [count / run.json()["cpu_s"] for run in runs[name]] for name, count in counts.items()}
    return Report("validate", [
        Figure("overnight: every check, and the hash", rates["ours"], "lines/s"),
        Figure("bare msgspec decode", rates["bare"], "lines/s"),
        Figure(f"pydantic ({PYDANTIC_LINES:,} lines)", rates["pydantic"], "lines/s"),
        ratio("overnight ÷ bare msgspec", rates["ours"], rates["bare"], at_least=0.15),
        ratio("the same, by CPU time", per_cpu["ours"], per_cpu["bare"]),
        ratio("overnight ÷ pydantic", rates["ours"], rates["pydantic"], at_least=1.5),
        ratio("the same, by CPU time", per_cpu["ours"], per_cpu["pydantic"]),
        Figure("peak memory of overnight", [run.peak_mib for run in runs["ours"]], "MiB", at_most=120),
    ], [f"{LINES:,} lines of {size:.0f} bytes."])  # fmt: skip


# -- the children --------------------------------------------------------------------------------------------------


def pass_ours(path: str, count: int) -> int:
    """Overnight's first pass, as `overnight run` makes it."""
    from overnight.duplicates import Duplicates
    from overnight.judge import judge_source
    from overnight.source import open_source

    with tempfile.TemporaryDirectory() as folder:
        duplicates = Duplicates(Path(folder))
        with open_source(path, stage=Path(folder) / "stage", max_line_bytes=512 << 20) as source:
            verdict = judge_source(source, duplicates=duplicates)
        duplicates.close()
    assert verdict.good == count, verdict
    assert verdict.duplicates == 0
    return verdict.lines


def make_bare() -> Any:
    """The least that tells requests from other lines: a typed decoder that leaves the body alone."""
    import msgspec

    class Envelope(msgspec.Struct, gc=False):
        custom_id: str
        method: str
        url: str
        body: msgspec.Raw

    return msgspec.json.Decoder(Envelope).decode


def make_pydantic() -> Any:
    """One model for the whole line, its body typed as a chat request."""
    from pydantic_chat import BatchRequestInput

    return BatchRequestInput.model_validate_json


def pass_decoder(decode: Any, path: str, count: int) -> int:
    """Decode line by line, keeping nothing."""
    lines = 0
    with Path(path).open("rb", buffering=1 << 18) as file:
        for line in islice(file, count):
            decode(line)
            lines += 1
    return lines


def main() -> None:
    """One pass, timed."""
    name, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if name == "ours":
        import overnight.judge
        import overnight.source  # noqa: F401 - imported before the clock starts, as the others are

        began, began_cpu = time.perf_counter(), time.process_time()
        lines = pass_ours(path, count)
    else:
        decode = {"bare": make_bare, "pydantic": make_pydantic}[name]()
        began, began_cpu = time.perf_counter(), time.process_time()
        lines = pass_decoder(decode, path, count)
    times = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
    assert lines == count
    print(json.dumps(times))


if __name__ == "__main__":
    main()
