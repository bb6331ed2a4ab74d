"""What a GGUF file's header says about its model, read without loading it.

The format is specified in ggml's docs/gguf.md (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), which
llama.cpp's docs/gguf.md pointed to first; versions 2 and 3, little endian, are read here. In short:

    "GGUF"  u32 version  u64 tensors  u64 pairs        then, pair by pair
    key     a string: u64 length, then UTF-8
    type    u32: 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64
    value   as its type says; an array is u32 element type, u64 count, then its elements

For editors: every length in the file is untrusted. Whatever moves the cursor goes through `_Cursor.skip`, which
refuses to leave the file, so that a broken file ends in ModelNotFound and never in a huge allocation or loop.
"""

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overnight.errors import ModelNotFound

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {kind: struct.Struct("<" + code) for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GgufInfo:
    """What the header says that decides how a model is served.

    `context_length` is in tokens, the length that the model was trained for. `pooling_type` is llama.cpp's number:
    0 none, 1 mean, 2 cls, 3 last, 4 rank (a reranker). None where the file does not say; texts are then empty.
    """

    architecture: str
    context_length: int | None
    pooling_type: int | None
    chat_template: str
    name: str

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a template of its own."""
        return self.chat_template != ""


def describe(path: str | Path) -> GgufInfo:
    """Read the model's outline from its header; raises ModelNotFound if the file is no sound GGUF of a model."""
    found = read_metadata(path)
    architecture = found.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _unsound(path, "its header names no architecture")
    name, template = found.get("general.name"), found.get("tokenizer.chat_template")
    return GgufInfo(
        architecture=architecture,
        context_length=_whole_number(found.get(f"{architecture}.context_length")),
        pooling_type=_whole_number(found.get(f"{architecture}.pooling_type")),
        chat_template=template if isinstance(template, str) else "",
        name=name if isinstance(name, str) else "",
    )


def read_metadata(path: str | Path, wanted: Iterable[str] | None = None) -> dict[str, object]:
    """Read the header's numbers, booleans and strings by key; arrays are stepped over and left out.

    `wanted` holds keys, or prefixes that end in a dot ("tokenizer."); None wants all. Raises ModelNotFound if the file
    cannot be read, is no GGUF of version 2 or 3, or ends before its header does.
    """
    names = None if wanted is None else frozenset(wanted)
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_pairs(_Cursor(data, path), names)
    except OSError as error:
        raise _unsound(path, error.strerror or str(error)) from error
    except ValueError as error:  # what mmap says of an empty file
        raise _unsound(path, "it is empty") from error


def _read_pairs(cursor: "_Cursor", names: frozenset[str] | None) -> dict[str, object]:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise _unsound(cursor.path, "it is no GGUF: its first four bytes are not GGUF")
    version = cursor.number(U32)
    if version not in VERSIONS:
        what = "big-endian" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise _unsound(cursor.path, f"it is {what}; versions 2 and 3, little endian, can be read")
    cursor.number(U64)  # tensors
    prefixes = tuple(name for name in names or () if name.endswith("."))
    found: dict[str, object] = {}
    for _ in range(cursor.number(U64)):
        key = cursor.string()
        kind = cursor.number(U32)
        if kind == ARRAY:
            cursor.skip_array()
        elif names is None or key in names or key.startswith(prefixes):
            found[key] = cursor.scalar(kind)
        else:
            cursor.skip_scalar(kind)
    return found


class _Cursor:
    """A place in the file that only moves forward, and never out of it."""

    def __init__(self, data: mmap.mmap, path: str | Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.end = len(data)

    def __repr__(self) -> str:
        return f"<GGUF header of {self.path}: byte {self.at} of {self.end}>"

    def skip(self, size: int) -> int:
        """Move on by `size` bytes; return where they began."""
        start = self.at
        if size > self.end - start:
            raise _unsound(self.path, f"its header is cut short or broken at byte {start:,} of {self.end:,}")
        self.at = start + size
        return start

    def take(self, size: int) -> bytes:
        start = self.skip(size)
        return self.data[start : self.at]

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def string(self) -> str:
        return self.take(self.number(U64)).decode("utf-8", "replace")

    def scalar(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        form = self._form(kind)
        value: object = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def skip_scalar(self, kind: int) -> None:
        self.skip(self.number(U64) if kind == STRING else self._form(kind).size)

    def skip_array(self) -> None:
        kind, count = self.number(U32), self.number(U64)
        if kind == STRING:
            self._skip_strings(count)
        elif kind == ARRAY:  # the specification allows it, llama.cpp does not
            raise _unsound(self.path, f"its header holds an array of arrays at byte {self.at:,}")
        else:
            self.skip(count * self._form(kind).size)

    def _skip_strings(self, count: int) -> None:
        """Walk over `count` strings: a vocabulary has up to 10⁶, so this loop holds no call but one."""
        at, last, data, length_at = self.at, self.end - U64.size, self.data, U64.unpack_from
        for _ in range(count):
            if at > last:
                break
            at += U64.size + length_at(data, at)[0]
        else:
            self.skip(at - self.at)
            return
        self.skip(self.end + 1)  # says where the array began

    def _form(self, kind: int) -> struct.Struct:
        form = SCALARS.get(kind)
        if form is None:
            raise _unsound(self.path, f"its header has a value of unknown type {kind} at byte {self.at:,}")
        return form


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _unsound(path: str | Path, reason: str) -> ModelNotFound:
    return ModelNotFound(f"The model file {path} cannot be read: {reason}.")
