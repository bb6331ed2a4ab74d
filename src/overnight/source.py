"""The input, whatever it is, as lines that can be read twice.

A path is opened once, so that a file replaced by a rename cannot mix two inputs. What cannot be read twice (a pipe,
a descriptor) is staged in a file first. Lines end at 0x0A only. Lines come in blocks of about 256 KiB, cut at line
ends in the same places at every reading: the first pass keeps a digest of each, and a later one compares before
it gives out a line.
"""

import gzip
import hashlib
import io
import os
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from .errors import InputChanged, InputError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, ZstdFile
else:
    from backports.zstd import ZstdError, ZstdFile

BLOCK_BYTES = 1 << 18  # larger ones fall out of the processor's cache: a third slower
MIN_LINE_LIMIT = BLOCK_BYTES  # a lower limit would have lines beyond it inside a block
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
# A zstd frame, or one of the sixteen kinds of skippable frame (RFC 8878, 3.1).
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"


class Block(msgspec.Struct, gc=False):
    """Whole lines, as they stand in the input; `number` is that of the first, from 1.

    A line beyond the limit is a block of its own, with `data` None and its length in `oversized`.
    """

    number: int
    data: bytes | None
    oversized: int = 0

    def lines(self) -> list[bytes]:
        """The lines without their ends."""
        lines = (self.data or b"").split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines


class Source:
    """An input that can be read from its start again and again; see `open_source`."""

    def __init__(self, name: str, raw: BinaryIO, max_line_bytes: int, staged: Path | None = None) -> None:
        self.name = name
        self.staged = staged
        self.max_line_bytes = max(max_line_bytes, MIN_LINE_LIMIT)
        self.keep_staged = False  # set where another run will need what was staged
        self._raw = raw
        self._digests = bytearray()  # 8 bytes for each block of the first pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; a staged copy goes, unless it is to be kept."""
        self._raw.close()
        if self.staged and not self.keep_staged:
            self.staged.unlink(missing_ok=True)

    def stat(self) -> os.stat_result:
        """The open file's, whatever its path names by now."""
        return os.fstat(self._raw.fileno())

    def first_pass(self) -> Iterator[Block]:
        """All blocks, from the start; their digests are kept for `blocks` to compare."""
        self._digests.clear()
        for block, digest in self._read():
            self._digests += digest
            yield block

    @property
    def digest(self) -> str:
        """Identifies the whole input (decompressed): a digest over those of its blocks, which the first pass made."""
        return hashlib.sha256(self._digests).hexdigest()[:32]

    def blocks(self) -> Iterator[Block]:
        """All blocks again, each compared with the first pass before it is given out.

        Raises InputChanged where the input is no longer what was judged.
        """
        expected = memoryview(bytes(self._digests))
        at = number = 0
        try:
            for block, digest in self._read():
                if expected[at : at + 8] != digest:
                    raise InputChanged(self.name, f"the lines from {block.number:,} on differ. Restore it to continue")
                at, number = at + 8, block.number
                yield block
        except InputError as error:
            raise InputChanged(self.name, str(error)) from error
        if at != len(expected):
            raise InputChanged(self.name, f"it ends after line {number:,}. Restore it to continue")

    def _read(self) -> Iterator[tuple[Block, bytes]]:
        """Blocks and their digests, from the start."""
        try:
            self._raw.seek(0)
            stream = _decompress(self._raw)
            number, mark = 1, _BOM
            while data := stream.read(BLOCK_BYTES):
                data, mark = data.removeprefix(mark), b""  # only the input's first block has one
                # Only the last line can be longer than a block, and so than the limit.
                if not data.endswith(b"\n"):
                    data += stream.readline(self.max_line_bytes + 1)
                is_whole = data.endswith(b"\n")
                start = data.rfind(b"\n", 0, -1) + 1
                if len(data) - start - is_whole <= self.max_line_bytes:
                    start = len(data)
                if start:
                    yield Block(number, data[:start]), _digest(data[:start])
                    number += data.count(b"\n", 0, start) + (not data.endswith(b"\n", 0, start))
                if start < len(data):
                    length = len(data) - start + (-1 if is_whole else _skip_line(stream))
                    yield Block(number, None, length), _digest(b"%d" % length)
                    number += 1
        except (OSError, EOFError, zlib.error, ZstdError) as error:
            raise InputError(self.name, str(error)) from error


def open_source(path: str, *, stage: Path, max_line_bytes: int) -> Source:
    """Open an input: a path, `-` for standard input, a FIFO or a descriptor; plain, gzip or zstd.

    What cannot be read twice is first copied to the file `stage`, which goes when the source is closed.
    Raises InputError.
    """
    if "\0" in path:
        raise InputError(repr(path), "a path has no null character")
    try:
        raw: BinaryIO = os.fdopen(os.dup(0), "rb", 0) if path == "-" else Path(path).open("rb", buffering=0)  # noqa: SIM115
        if stat.S_ISREG(os.fstat(raw.fileno()).st_mode) and not is_descriptor(path):
            return Source(path, raw, max_line_bytes)
        with raw:
            staged = _stage(raw, stage, path)
        return Source("standard input" if path == "-" else path, staged, max_line_bytes, stage)
    except IsADirectoryError as error:
        raise InputError(path, "it is a folder") from error
    except OSError as error:
        raise InputError(path, error.strerror or str(error)) from error


def is_descriptor(path: str) -> bool:
    """Whether a path names an open descriptor: opening one again may share its place in the file, or find it empty."""
    if path in {"-", "/dev/stdin", "/dev/stdout", "/dev/stderr"}:
        return True
    folders = ("/dev/fd/", "/proc/")
    return path.startswith(folders) or os.path.realpath(path).startswith(folders)


def _stage(raw: BinaryIO, stage: Path, path: str) -> BinaryIO:
    """Copy what can be read once into a file of the user's alone; what an earlier run left there is replaced."""
    copy: io.FileIO | None = None
    try:
        stage.parent.mkdir(parents=True, exist_ok=True)
        stage.unlink(missing_ok=True)
    except OSError as error:
        reason = f"{error.strerror or error}: name another folder with --output-tmp-dir"
        raise InputError(path, f"it can be read only once, and {stage} cannot be written ({reason})") from error
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        copy = io.FileIO(os.open(stage, flags, 0o600), "r+b")
        while chunk := _read_some(raw):
            rest = memoryview(chunk)
            while rest:
                rest = rest[copy.write(rest) :]
    except BaseException:  # a signal may come at any of these lines
        if copy:
            copy.close()
        stage.unlink(missing_ok=True)
        raise
    return copy


def _read_some(raw: BinaryIO) -> bytes:
    """The next bytes of a pipe or device; none only at its end, also where someone made it non-blocking."""
    read: Callable[[int], bytes | None] = raw.read
    while (chunk := read(BLOCK_BYTES)) is None:
        select.select([raw], [], [])
    return chunk


def _decompress(raw: BinaryIO) -> io.BufferedReader:
    """What the file holds, told by its first bytes and not by its name; the file itself stays open at the end."""
    magic = raw.read(4)
    raw.seek(0)
    borrowed = io.FileIO(raw.fileno(), "rb", closefd=False)
    if magic.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=borrowed, mode="rb"), BLOCK_BYTES)
    if magic == _ZSTD or (magic[1:] == _ZSTD_SKIPPABLE and 0x50 <= magic[0] <= 0x5F):  # noqa: PLR2004
        return io.BufferedReader(ZstdFile(borrowed, "rb"), BLOCK_BYTES)
    return io.BufferedReader(borrowed, BLOCK_BYTES)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _skip_line(stream: io.BufferedReader) -> int:
    """Read to the line's end without keeping it; its length comes back."""
    length = 0
    while part := stream.readline(BLOCK_BYTES):
        length += len(part)
        if part.endswith(b"\n"):
            return length - 1
    return length
