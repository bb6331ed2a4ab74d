"""Engines by name, through the entry-point group `overnight.engines`."""

from importlib.metadata import EntryPoint, entry_points

from overnight.errors import EngineMissing

from .base import Engine

GROUP = "overnight.engines"


def list_engines() -> dict[str, EntryPoint]:
    """Every registered engine's entry point, by name; nothing is imported."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def load_engine(name: str) -> type[Engine]:
    """The class of an engine, whether or not its library is installed. Raises EngineMissing."""
    points = list_engines()
    if name not in points:
        raise EngineMissing(name, f"it is none of {', '.join(points)}")
    try:
        engine: type[Engine] = points[name].load()
    except ImportError as error:
        raise EngineMissing(name, f"its module cannot be imported ({error})") from error
    return engine


def find_engine(name: str) -> type[Engine]:
    """The class of an engine that can be used. Raises EngineMissing."""
    engine = load_engine(name)
    missing = engine.missing()
    if missing:
        raise EngineMissing(name, missing, engine.pip)
    return engine
