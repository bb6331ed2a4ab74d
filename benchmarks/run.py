"""Benchmarks of overnight, each beside what it is measured against: `python benchmarks/run.py [NAME ...]`.

Numbers never fail a run; a benchmark that cannot be run does.
"""

import argparse
import importlib
import json
import signal
import sys
import tempfile
from pathlib import Path

from common import Report, describe_machine, say, take_others

NAMES = ("help", "validate", "echo", "late", "order", "ahead", "llama")


def main() -> int:
    """Run the benchmarks that were named, or all, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender runs (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's values there")
    parser.add_argument(
        "--wait", type=float, default=30, metavar="SECONDS",
        help="before each run (not of help) wait at most so long for an idle machine (default: 30)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=128, help="llama: how many (default: 128)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="ahead: how many wait (default: 1,000,000)")
    parser.add_argument("--profile", action="store_true", help="echo: say where the time goes")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir()) / "overnight-benchmarks", metavar="FOLDER",
        help="where requests are made and kept, about 1 GB (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children are ended too
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    folder = options.data.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{describe_machine()}\n", flush=True)
    failures = 0
    found: dict[str, dict[str, object]] = {}
    for name in options.names or NAMES:
        say(f"{name}:")
        try:
            report: Report = importlib.import_module(name).measure(options, folder)
        except Exception as error:  # noqa: BLE001 - the other benchmarks can still be run
            say(f"{name} could not be run: {error}")
            failures += 1
            continue
        others = sorted(take_others()) or [0.0]
        report.notes.append(
            f"Other processes took {others[len(others) // 2]:.0%} of the machine in the middle run, and at most "
            f"{others[-1]:.0%}."
        )
        print(report.markdown() + "\n", flush=True)
        found[name] = report.as_dict()
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
