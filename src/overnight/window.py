"""Which request may start and which row may be written, so that the output keeps the input's order. Pure."""

from array import array

# Where a finished row lies while it waits. Places are numbers of 64 bits: 8 bytes for a row that waits.
NOWHERE = 0  # not finished
IN_HAND = 1  # finished in this turn, and held by whoever calls


class Window:
    """Bounds the requests in flight, and gives finished rows' places back in order.

    Requests are numbered from `first` in the order of the output. A place says where a finished row lies until its
    turn comes. `max_ahead` bounds what is started and not yet released; None leaves only `max_inflight`. `is_held`
    stops starts altogether, for as long as it is set.
    """

    def __init__(self, max_inflight: int, max_ahead: int | None = None, first: int = 0) -> None:
        if max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, not {max_inflight}")
        if max_ahead is not None and max_ahead < max_inflight:
            raise ValueError(f"max_ahead must be at least max_inflight ({max_inflight}), not {max_ahead}")
        self.max_inflight = max_inflight
        self.max_ahead = max_ahead
        self.is_held = False
        self.started = first
        self.written = first
        self.waiting = 0
        self._base = first  # the index of the first place in the array
        self._places = array("Q")

    @property
    def inflight(self) -> int:
        """How many are started and not finished."""
        return self.started - self.written - self.waiting

    @property
    def is_full(self) -> bool:
        """Whether nothing may start now."""
        ahead = self.started - self.written
        return (
            ahead - self.waiting >= self.max_inflight
            or self.is_held
            or (self.max_ahead is not None and ahead >= self.max_ahead)
        )

    @property
    def is_next_there(self) -> bool:
        """Whether a row's turn has come."""
        return self.place(self.written) != NOWHERE

    def start(self) -> int:
        """Take the next request; its index comes back."""
        if self.is_full:
            raise RuntimeError(f"nothing may start: {self!r}")
        self._places.append(NOWHERE)
        self.started += 1
        return self.started - 1

    def skip(self, place: int) -> int:
        """Take the next request as one that was finished in an earlier run; its index comes back."""
        self._places.append(place)
        self.started += 1
        self.waiting += 1
        return self.started - 1

    def finish(self, index: int, place: int = IN_HAND) -> None:
        """Take a finished row's place."""
        if self.place(index) != NOWHERE or not self.written <= index < self.started:
            raise RuntimeError(f"request {index} cannot finish: {self!r}")
        self._places[index - self._base] = place
        self.waiting += 1

    def place(self, index: int) -> int:
        """Where a row lies; NOWHERE for one that is not finished, not started, or written."""
        return self._places[index - self._base] if self.written <= index < self.started else NOWHERE

    def move(self, index: int, place: int) -> None:
        """A row that waits lies elsewhere now."""
        if self.place(index) == NOWHERE:
            raise RuntimeError(f"row {index} does not wait: {self!r}")
        self._places[index - self._base] = place

    def release(self) -> int:
        """The place of the row whose turn it is, which counts as written; NOWHERE while it is not finished."""
        place = self.place(self.written)
        if place != NOWHERE:
            self.written += 1
            self.waiting -= 1
            passed = self.written - self._base
            if passed == len(self._places) or (passed >= 4096 and passed * 2 > len(self._places)):  # noqa: PLR2004
                del self._places[:passed]
                self._base = self.written
        return place

    def __repr__(self) -> str:
        return f"<Window {self.max_inflight}: {self.inflight} inflight, {self.waiting} waiting, {self.written} written>"
