"""Which request may start and which row may be written, so that the output keeps the input's order. Pure."""

from typing import Generic, TypeVar

Place = TypeVar("Place")


class Window(Generic[Place]):
    """Bounds the requests in flight, and the rows that are started but not yet written; gives rows back in order.

    Requests are numbered 0, 1, 2 … in the order of the output. A place says where a finished row lies until its
    turn comes. `max_ahead` bounds what is started and not yet released; None leaves only `max_inflight`.
    """

    def __init__(self, max_inflight: int, max_ahead: int | None = None, first: int = 0) -> None:
        if max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, not {max_inflight}")
        if max_ahead is not None and max_ahead < max_inflight:
            raise ValueError(f"max_ahead must be at least max_inflight ({max_inflight}), not {max_ahead}")
        self.max_inflight = max_inflight
        self.max_ahead = max_ahead
        self.started = first
        self.written = first
        self.waiting: dict[int, Place] = {}

    @property
    def inflight(self) -> int:
        """How many are started and not finished."""
        return self.started - self.written - len(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether nothing may start now."""
        ahead = self.started - self.written
        return ahead - len(self.waiting) >= self.max_inflight or (
            self.max_ahead is not None and ahead >= self.max_ahead
        )

    def start(self) -> int:
        """Take the next request; its index comes back."""
        if self.is_full:
            raise RuntimeError(f"nothing may start: {self!r}")
        self.started += 1
        return self.started - 1

    def finish(self, index: int, place: Place) -> bool:
        """Take a finished row's place; whether it is that row's turn comes back."""
        if index in self.waiting or not self.written <= index < self.started:
            raise RuntimeError(f"request {index} cannot finish: {self!r}")
        self.waiting[index] = place
        return index == self.written

    def release(self, at_most: int) -> list[Place]:
        """The places of the rows whose turn has come, in order; they count as written."""
        ready: list[Place] = []
        while self.written in self.waiting and len(ready) < at_most:
            ready.append(self.waiting.pop(self.written))
            self.written += 1
        return ready

    def __repr__(self) -> str:
        return (
            f"<Window {self.max_inflight}: {self.inflight} inflight, {len(self.waiting)} waiting, "
            f"{self.written} written>"
        )
