"""The input's lines as a run takes them: requests, rows where there is nothing to ask, places of rows that wait."""

from array import array  # noqa: TC003 - as everywhere else
from collections.abc import Iterator
from typing import NamedTuple

from .judge import number_lines, oversized_problem
from .parse import parse_request
from .records import Problem, Request, Row, RowKey, digest_line, problem_row
from .source import Block, Source
from .window import NOWHERE

Items = Iterator[Request | Row | int]


class Line(NamedTuple):
    """A line of the input that gets a row; `text` is None for one beyond the limit of `oversized` bytes."""

    number: int
    text: bytes | None
    oversized: int = 0

    @property
    def digest(self) -> str:
        """What a row's id says of the line."""
        return digest_line(b"%d" % self.oversized if self.text is None else self.text)

    @property
    def custom_id(self) -> str | None:
        """The custom_id that the line's row echoes."""
        return None if self.text is None else parse_request(self.text, 0, self.number).custom_id


def read_lines(source: Source) -> Iterator[Line]:
    """The lines that get a row, in order. Raises InputChanged."""
    for block in source.blocks():
        if block.data is None:
            yield Line(block.number, None, block.oversized)
            continue
        for number, text in number_lines(block):
            yield Line(number, text)


def line_item(line: Line, index: int, key: RowKey, limit: int) -> Request | Row:
    """A line of the input as a request, or the row that it gets where it is none."""
    if line.text is None:
        problem = oversized_problem(Block(line.number, None, line.oversized), limit)
        return problem_row(problem, index, line.number, line.digest, key)
    return request_or_row(line.text, index, line.number, key)


def request_or_row(text: bytes, index: int, number: int, key: RowKey) -> Request | Row:
    """The request in a line, or the row that says what is wrong with it."""
    request = parse_request(text, index, number)
    if isinstance(request, Problem):
        return problem_row(request, index, number, digest_line(text), key)
    return request


def missing_items(source: Source, first: int, places: "array[int]", key: RowKey) -> Items:
    """What is to be done for each request from `first` on; `places` are those of the rows that wait already."""
    for index, line in enumerate(read_lines(source)):
        ahead = index - first
        if ahead < 0:
            continue
        if ahead < len(places) and places[ahead] != NOWHERE:
            yield places[ahead]
        else:
            yield line_item(line, index, key, source.max_line_bytes)


def chosen_items(source: Source, chosen: "array[int]", key: RowKey) -> Items:
    """The requests with these indexes, which ascend."""
    wanted = iter(chosen)
    index = next(wanted, None)
    for at, line in enumerate(read_lines(source)):
        if index is None:
            return
        if at == index:
            yield line_item(line, at, key, source.max_line_bytes)
            index = next(wanted, None)
