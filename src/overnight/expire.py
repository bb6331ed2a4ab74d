"""A run's end by the clock: when to stop so that all is on the disk in time, and the rows of what did not run."""

from array import array  # noqa: TC003 - as everywhere else

from .items import line_item, read_lines
from .output import Output, drain_all
from .records import BATCH_EXPIRED, Failure, Request, RowKey, failure_row
from .source import Source
from .window import NOWHERE

MARGIN_S = 0.5  # for the last sync
EXPIRE_SLICE = 1000  # rows between two turns of the loop
EXPIRE_ROW_S = 3e-5  # one row's time, measured at 1e-5 to 2e-5


def plan_stop(left_s: float, grace_s: float, rows_to_expire: int) -> tuple[float, float]:
    """In how many seconds starts must stop, and how long what is in flight may then take.

    `left_s` are the seconds to the deadline. Of a short time the grace takes half at most.
    """
    left_s -= MARGIN_S + rows_to_expire * EXPIRE_ROW_S
    grace_s = min(grace_s, max(left_s, 0.0) / 2)
    return max(left_s - grace_s, 0.0), grace_s


async def expire(output: Output, source: Source, places: "array[int]", kept: int, key: RowKey) -> None:
    """Give every request that has no answer a `batch_expired` row; `places` are the rows that wait, from `kept` on."""
    window = output.window
    first = window.written
    for index, line in enumerate(read_lines(source)):
        ahead = index - kept
        if index < first or (index < window.started and window.place(index) != NOWHERE):
            continue
        if window.started <= index and ahead < len(places) and places[ahead] != NOWHERE:
            window.skip(places[ahead])
        else:
            item = line_item(line, index, key, source.max_line_bytes)
            if isinstance(item, Request):
                item = failure_row(item, Failure(BATCH_EXPIRED, "This request was not run in time"), key)
            output.put(item)
        if index % EXPIRE_SLICE == 0:
            await drain_all(output)
    await output.drain()  # also where there is no row: the file is to be whole, and there
    await drain_all(output)
