"""Run a file of OpenAI requests through any inference engine: every answer, in order, once.

import overnight

summary = overnight.run("requests.jsonl", "answers.jsonl")            # or: await overnight.run_batch(...)

async with overnight.open_engine("llama") as engine:
    row = await overnight.run_line(line, engine)
    async for row in overnight.run_lines(lines, engine):
        print(row.custom_id, row.json()["response"])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["OvernightError", "Row", "Summary", "open_engine", "run", "run_batch", "run_line", "run_lines"]

if TYPE_CHECKING:
    from .errors import OvernightError
    from .library import open_engine, run, run_batch, run_line, run_lines
    from .progress import Summary
    from .records import Row

_HOMES = {"OvernightError": "errors", "Row": "records", "Summary": "progress"}


def __getattr__(name: str) -> Any:
    """Import a public name where it is first used: `overnight --help` must not wait for an event loop."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES.get(name, 'library')}", __name__), name)
