"""What options make: the engine, how requests are tried, and the settings that shape answers."""

from collections.abc import Mapping
from typing import Any

from .engines import find_engine, load_engine
from .engines.base import Engine, EngineContext
from .errors import UnknownOption
from .options import RunOptions, list_options, make, shaping
from .progress import Watcher
from .retry import RetryPolicy
from .routing import Router
from .runner import Pace


def make_engine(
    options: RunOptions, engine_options: Mapping[str, object], environ: Mapping[str, str], watcher: Watcher
) -> Engine:
    """The engine that the options name, not yet open; `check_engine` says whether it can be.

    Raises EngineMissing, UnknownOption, UsageError.
    """
    kind = load_engine(options.engine)
    context = EngineContext(
        model=options.model,
        served=options.served_model_name,
        log_path="-" if options.verbose else None,
        environ=environ,
        on_progress=watcher.on_download,
    )
    return kind(context, make(kind.options_type, engine_options, f" of the engine {options.engine}"))


def check_engine(options: RunOptions, engine: Engine) -> None:
    """Refuse, before anything is loaded, an engine that could not be opened. Raises OvernightError."""
    find_engine(options.engine)
    engine.check()


def split_options(values: Mapping[str, object]) -> tuple[RunOptions, dict[str, object]]:
    """The run's options, and what is left for its engine. Raises UnknownOption where neither knows a name."""
    known = list_options(RunOptions)
    mine = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    options = make(RunOptions, mine)
    if rest:
        theirs = list_options(load_engine(options.engine).options_type)
        for name in rest:
            if name not in theirs:
                raise UnknownOption(name, [*known, *theirs], f" of overnight run or of the engine {options.engine}")
    return options, rest


def settings_of(engine: Engine, options: RunOptions) -> dict[str, Any]:
    """The settings that shape answers, for the digest in each row's id."""
    mine = {name: value for name, value in shaping(options).items() if name != "model"}
    return {**mine, **engine.identity, "engine_options": shaping(engine.options)}


def make_router(engine: Engine, options: RunOptions) -> Router:
    """What of the requests the open engine is asked."""
    models = None if options.ignore_request_model else engine.models
    return Router(engine.endpoints, models, any_path=engine.any_path)


def make_pace(options: RunOptions) -> Pace:
    """How requests are tried."""
    return Pace(timeout_s=options.timeout, retry=RetryPolicy(max_attempts=options.max_attempts))
