"""How long `overnight --help` takes, beside an interpreter that does nothing."""

import argparse
from pathlib import Path

from common import Figure, Report, interleave, ratio, run_child

ROUNDS = 21


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Both commands, whole processes."""
    contenders = {
        "python -c pass": lambda: run_child(["-c", "pass"], cwd=folder),
        "python -m overnight --help": lambda: run_child(["-m", "overnight", "--help"], cwd=folder),
    }
    runs = interleave(contenders, max(options.rounds, ROUNDS), warm_up=True, quiet=True)
    walls = {name: [1000 * run.wall_s for run in found] for name, found in runs.items()}
    bare, ours = walls.values()
    figures = [Figure(name, values, "ms") for name, values in walls.items()]
    return Report("help", [*figures, ratio("--help ÷ pass", ours, bare, at_most=6)])
