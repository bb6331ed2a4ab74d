"""Which custom_ids stand more than once, at 8 bytes a line.

Hashes are kept in buckets by their low bits, in memory up to ten million lines and in a file beyond; each bucket is
then small enough to be looked through as a set. A 64-bit hash may call two different ids equal once in 10⁵ batches
of 10⁷ lines: good enough for a warning, and `Duplicates.hashes` lets a second reading name the lines.
"""

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

BUCKETS = 256
MAX_IN_MEMORY = 10_000_000


class Duplicates:
    """Collects custom_ids; says afterwards how many lines repeat one that stood before."""

    def __init__(self, spill_folder: Path | None = None, max_in_memory: int = MAX_IN_MEMORY) -> None:
        self._buckets = [array("q") for _ in range(BUCKETS)]
        self._in_memory = 0
        self._max_in_memory = max_in_memory
        self._folder = spill_folder
        self._file: IO[bytes] | None = None
        self._chunks: list[list[tuple[int, int]]] = [[] for _ in range(BUCKETS)]  # (offset, bytes) in the file

    def add_all(self, custom_ids: Sequence[str]) -> None:
        """Take some more lines' ids."""
        buckets = self._buckets
        for value in map(hash, custom_ids):
            buckets[value & (BUCKETS - 1)].append(value)
        self._in_memory += len(custom_ids)
        if self._in_memory >= self._max_in_memory:
            self._spill()

    def count(self) -> int:
        """How many lines repeat an earlier line's id."""
        return sum(len(values) - len(set(values)) for values in self._each_bucket())

    def hashes(self, at_most: int = 10_000) -> set[int]:
        """The hashes of ids that stand more than once; `hash(custom_id)` of this process finds them again."""
        found: set[int] = set()
        for values in self._each_bucket():
            seen: set[int] = set()
            found.update(value for value in values if value in seen or seen.add(value))  # type: ignore[func-returns-value]
            if len(found) >= at_most:
                break
        return found

    def close(self) -> None:
        """Give back memory and the file."""
        self._buckets = [array("q") for _ in range(BUCKETS)]
        if self._file:
            self._file.close()

    def _spill(self) -> None:
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed in close()
        for chunks, bucket in zip(self._chunks, self._buckets, strict=True):
            chunks.append((self._file.tell(), len(bucket) * bucket.itemsize))
            bucket.tofile(self._file)
            del bucket[:]
        self._in_memory = 0

    def _each_bucket(self) -> "Iterator[array[int]]":
        for chunks, bucket in zip(self._chunks, self._buckets, strict=True):
            values = array("q", bucket)
            for offset, size in chunks:
                assert self._file
                self._file.seek(offset)
                values.frombytes(self._file.read(size))
            if self._file:
                self._file.seek(0, 2)
            yield values
