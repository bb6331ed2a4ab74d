"""The protocol between the runner (and later the benchmark) and whatever answers requests.

An engine is opened with `async with`, says which endpoints it serves and how many requests keep it busy, and
answers. It never raises for what one request did wrong, and never retries: the runner alone does. It raises
`EngineLost` when it can answer no more. Cancelling `answer` must end the work on that request soon.

Engines are found by name through the entry-point group `overnight.engines`. A module there must import cheaply:
its library is imported in `__aenter__`, or where `missing` looks for it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overnight.records import Answer, Failure, Request


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine is opened with, besides its own options.

    `model` is --model as given (None: the engine's default); `served` the names from --served-model-name;
    `log_path` where its own log goes (None: nowhere; "-": stderr); `on_progress` is told (what, done, total) of
    a download; `environ` is the process's environment.
    """

    model: str | None = None
    served: tuple[str, ...] = ()
    log_path: str | None = None
    environ: Mapping[str, str] | None = None
    on_progress: Callable[[str, int, int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """For an engine that has none of its own."""


class Engine(abc.ABC):
    """Answers requests. Class attributes are known without opening it; instance attributes once it is open."""

    name: ClassVar[str]
    summary: ClassVar[str]  # half a line for people
    options_type: ClassVar[type] = NoOptions
    endpoints: frozenset[str]  # on the class: what it can serve at all; once open: what it serves with this model
    pip: ClassVar[str] = ""  # the command that installs its library
    any_path: ClassVar[bool] = False  # whether it knows paths beyond the table of endpoints

    max_inflight: int  # how many requests keep it busy; may be known only once it is open

    def __init__(self, context: EngineContext, options: object) -> None:
        self.context = context
        self.options = options

    @classmethod
    def missing(cls) -> str | None:
        """What of its library is not installed; None where it can be used."""
        return None

    @property
    @abc.abstractmethod
    def models(self) -> tuple[str, ...] | None:
        """The names that requests may ask for, known before it is open; None takes any."""

    @property
    def identity(self) -> dict[str, object]:
        """What of the model shapes answers, known before it is open."""
        return {"model": self.context.model}

    def check(self) -> None:  # noqa: B027 - most engines have nothing to refuse
        """Refuse, before anything is loaded, what could not be opened. Raises OvernightError."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:  # noqa: B027 - nor to give back
        """Give everything back; requests in flight were cancelled and awaited before."""

    @abc.abstractmethod
    async def answer(self, request: Request) -> Answer | Failure:
        """Answer one request. Raises EngineLost when no request can be answered any more."""
