"""Where overnight keeps what is not the user's own file."""

import sys
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache folder for overnight: $OVERNIGHT_CACHE, else where the platform keeps caches."""
    if environ.get("OVERNIGHT_CACHE"):
        return Path(environ["OVERNIGHT_CACHE"])
    home = home_folder(environ)
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "overnight"
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "overnight" / "Cache"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "overnight"


def home_folder(environ: Mapping[str, str]) -> Path:
    """The user's home, as the environment names it."""
    return Path(environ.get("HOME") or Path.home())
