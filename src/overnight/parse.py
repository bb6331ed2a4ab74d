"""A line of the input becomes a request, or the problem that makes it none.

What is right is told fast, by a typed decoder that leaves the body alone; what is wrong is then looked at again by
`_explain`, slowly, to say where and why. Both must agree on what is right: `_explain` is asked only when the first
said no, and falls back to the decoder's own words.
"""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from .endpoints import REQUIRED_FIELDS, find_endpoint, missing_field
from .records import (
    INVALID_JSON_LINE,
    INVALID_REQUEST,
    MISSING_REQUIRED_PARAMETER,
    Problem,
    Request,
    digest_line,
    find_lone_surrogate,
)


class Envelope(msgspec.Struct, gc=False):
    """The four fields of OpenAI's batch request input."""

    custom_id: str
    method: str
    url: str
    body: Raw


ENVELOPE_FIELDS = Envelope.__struct_fields__
TOO_DEEP = "Nested too deeply to be read"
# Four keys and three strings: any other number of quotes means escapes, further keys, or one key twice.
_PLAIN_QUOTES = 14
_BRACE = ord("{")

# What the runner looks at in a body; all else passes unseen. A model that is no string is the engine's to refuse.
_FIELDS = [(name, Raw | UnsetType, UNSET) for name in ("stream", *REQUIRED_FIELDS)]
BodyHead = msgspec.defstruct("BodyHead", [("model", str | None, None), *_FIELDS], gc=False)
_OddBodyHead = msgspec.defstruct("_OddBodyHead", [("model", Raw | UnsetType, UNSET), *_FIELDS], gc=False)

# What servers (pydantic's lax booleans) take for true, besides the number 1.
_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})


class _Key:
    """A key of a line's object, equal to no other: a dictionary keeps those that stand twice."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_decode_envelope = msgspec.json.Decoder(Envelope).decode
_decode_body: Callable[[bytes | Raw], Any] = msgspec.json.Decoder(BodyHead).decode
_decode_odd_body: Callable[[bytes], Any] = msgspec.json.Decoder(_OddBodyHead).decode
_decode_keys = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=lambda _, name: _Key(name)).decode
# The heads of usual lines, by url and model: nearly all lines of a file share a few.
_heads: dict[tuple[str, str | None], "Head"] = {}
_MAX_HEADS = 1000
_MAX_NAME = 300


class Head(msgspec.Struct, frozen=True, gc=False):
    """What the runner needs to know of a good line besides its bytes.

    `needs` are the fields that make any body for this url whole; one that lacks them may have others in their place.
    """

    endpoint: str | None
    model: str | None
    is_streamed: bool
    unknown_keys: tuple[str, ...]
    needs: tuple[str, ...]


def parse_request(line: bytes, index: int, number: int) -> Request | Problem:
    """The request that line `number` (from 1) holds, as request `index` (from 0), or why it is none."""
    try:
        if not line.isascii():
            line.decode()
        envelope = _decode_envelope(line)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        return _explain(line, error)
    head = judge(line, envelope)
    if isinstance(head, Problem):
        return head
    return Request(
        index, number, envelope.custom_id, envelope.url, head.endpoint, bytes(envelope.body), head.model,
        head.is_streamed, digest_line(line),
    )  # fmt: skip


def judge(line: bytes, envelope: Envelope) -> Head | Problem:
    """The rest of the judgement on a line whose envelope could be decoded."""
    body = memoryview(envelope.body)
    start = len(line) - len(body) - 1
    # The usual line, without a copy or a call more than it takes: this runs once or twice for every line there is.
    if (
        line.startswith(body, start)
        and line.count(b'"', 0, start) == _PLAIN_QUOTES
        and envelope.custom_id
        and envelope.method == "POST"
        and body[0] == _BRACE
    ):
        try:
            fields = _decode_body(envelope.body)
        except (msgspec.ValidationError, RecursionError):
            return _judge_closely(line, bytes(body), envelope)
        head = _heads.get((envelope.url, fields.model))
        if head and fields.stream is UNSET:
            for name in head.needs:
                if getattr(fields, name) is UNSET:
                    break
            else:
                return head
    return _judge_closely(line, bytes(body), envelope)


def _judge_closely(line: bytes, body: bytes, envelope: Envelope) -> Head | Problem:
    if not envelope.custom_id:
        return _problem(INVALID_REQUEST, "custom_id is empty", "custom_id", envelope)
    if envelope.method.upper() != "POST":
        return _problem(INVALID_REQUEST, f"method must be POST, not {envelope.method[:40]!r}", "method", envelope)
    if body == b"null":
        return _problem(MISSING_REQUIRED_PARAMETER, "body is null", "body", envelope)
    if not body.startswith(b"{"):
        return _problem(INVALID_REQUEST, "body must be a JSON object", "body", envelope)
    try:
        keys = [key.name for key in _decode_keys(line)]
        twice = _find_twice(keys)
        if twice:
            return _stands_twice(twice, envelope.custom_id)
        return _judge_body(body, envelope, tuple(key for key in keys if key not in ENVELOPE_FIELDS))
    except RecursionError:  # the envelope's decoder stood a few calls higher on the stack
        return Problem(INVALID_JSON_LINE, TOO_DEEP, custom_id=envelope.custom_id)


def _find_twice(keys: list[str]) -> str | None:
    return next((key for key in ENVELOPE_FIELDS if keys.count(key) > 1), None)


def _stands_twice(key: str, custom_id: str | None) -> Problem:
    message = f"The key {key!r} stands twice in this line"
    return Problem(INVALID_JSON_LINE, message, key, custom_id=None if key == "custom_id" else custom_id)


def _judge_body(body: bytes, envelope: Envelope, unknown_keys: tuple[str, ...]) -> Head | Problem:
    try:
        fields = _decode_body(body)
        model = fields.model
    except msgspec.ValidationError:
        fields = _decode_odd_body(body)
        is_text = fields.model is not UNSET and bytes(fields.model).startswith(b'"')
        model = msgspec.json.decode(fields.model, type=str) if is_text else None
    endpoint = find_endpoint(envelope.url)
    if endpoint:
        lacking = missing_field(endpoint, {name for name in REQUIRED_FIELDS if getattr(fields, name) is not UNSET})
        if lacking:
            return _lacking(lacking, endpoint.path, body, envelope)
    path, needs = (endpoint.path, endpoint.requires[0]) if endpoint else (None, ())
    is_streamed = fields.stream is not UNSET and _is_true(bytes(fields.stream))
    head = Head(path, model, is_streamed, unknown_keys, needs)
    if not is_streamed and not unknown_keys and len(envelope.url) + len(model or "") < _MAX_NAME:
        if len(_heads) >= _MAX_HEADS:
            _heads.clear()
        _heads[envelope.url, model] = head
    return head


def _is_true(raw: bytes) -> bool:
    if raw[:1] in b"[{-":
        return False
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number beyond all bounds
        return False
    return value.lower() in _TRUE if isinstance(value, str) else value == 1


def _lacking(field: str, path: str, body: bytes, envelope: Envelope) -> Problem:
    message = f"body.{field} is missing: {path} needs it"
    if field == "file_url" and "file" in msgspec.json.decode(body, type=dict[str, Raw]):
        message = "body.file cannot be used in a batch: name the sound in body.file_url (http, https, or a data: URL)"
    return Problem(INVALID_REQUEST, message, f"body.{field}", None, envelope.custom_id, 400)


def _problem(code: str, message: str, param: str, envelope: Envelope) -> Problem:
    return Problem(code, message, param, None, envelope.custom_id or None)


# -- why a line is no request --------------------------------------------------------------------------------------


def _explain(line: bytes, error: Exception) -> Problem:
    """Say where and why a line could not be decoded."""
    try:
        text = line.decode()
    except UnicodeDecodeError as bad:
        column = len(line[: bad.start].decode()) + 1
        what = f"Not UTF-8: byte 0x{line[bad.start]:02x} at column {column}"
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            what += " (the file looks like UTF-16; save it as UTF-8)"
        return Problem(INVALID_JSON_LINE, what, column=column)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_Number, parse_float=_Number)
    except json.JSONDecodeError as bad:
        why = bad.msg[:1].lower() + bad.msg[1:].removesuffix(" at")
        if text.startswith("\ufeff"):
            why = "a byte order mark, which may stand only where the file begins,"
        what = f"Not JSON: {why} at column {bad.pos + 1}{_hint(text)}"
        return Problem(INVALID_JSON_LINE, what, column=bad.pos + 1)
    except _ConstantError as bad:
        column = next(match.start() for match in _CONSTANTS.finditer(text) if match[1]) + 1
        return Problem(INVALID_JSON_LINE, f"Not JSON: {bad} at column {column} is no JSON number", column=column)
    except RecursionError:
        return Problem(INVALID_JSON_LINE, TOO_DEEP)
    lone = find_lone_surrogate(line)
    if lone >= 0:
        column = len(line[:lone].decode()) + 1
        what = f"Half a surrogate pair at column {column}: it stands for no character"
        return Problem(INVALID_JSON_LINE, what, column=column, custom_id=_readable_id(value))
    return _explain_envelope(line, value, error)


def _explain_envelope(line: bytes, value: object, error: Exception) -> Problem:
    """Which field of a line that is JSON is missing or of the wrong type."""
    if isinstance(error, RecursionError):
        return Problem(INVALID_JSON_LINE, TOO_DEEP, custom_id=_readable_id(value))
    if not isinstance(value, dict):
        return Problem(INVALID_REQUEST, f"A request must be a JSON object, not {_kind(value)}")
    custom_id = _readable_id(value)
    for field in ENVELOPE_FIELDS:
        if value.get(field) is None and (field != "custom_id" or field not in value):
            state = "is null" if field in value else "is missing"
            return Problem(MISSING_REQUIRED_PARAMETER, f"{field} {state}", field, None, custom_id)
    for field in ("custom_id", "method", "url"):
        if not isinstance(value[field], str) or _is_number(value[field]):
            what = f"{field} must be a string, not {_kind(value[field])}"
            return Problem(INVALID_REQUEST, what, field, None, custom_id)
    with contextlib.suppress(RecursionError):
        twice = _find_twice([key.name for key in _decode_keys(line)])
        if twice:
            return _stands_twice(twice, custom_id)
    return Problem(INVALID_JSON_LINE, f"Not a request: {error}", None, None, custom_id)


# Strings, to be passed over, and what Python takes for numbers (group 1).
_CONSTANTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|(NaN|-?Infinity)', re.DOTALL)


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _ConstantError(ValueError):
    """NaN, Infinity or -Infinity."""


def _refuse_constant(name: str) -> None:
    raise _ConstantError(name)


def _is_number(value: object) -> bool:
    return isinstance(value, _Number)


def _readable_id(value: object) -> str | None:
    """The custom_id as far as there is one that a row can echo."""
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    if not isinstance(custom_id, str) or _is_number(custom_id):
        return None
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        return None
    return custom_id or None


def _kind(value: object) -> str:
    """The JSON type of a decoded value, with its article."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if _is_number(value):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, dict) else "an array"


def _hint(text: str) -> str:
    """What a line that is no JSON looks like."""
    start = text.strip()
    if start in {"{", "["} or (start.startswith("[") and not start.endswith("]")):
        return "; this looks like pretty-printed JSON or one JSON array: write one request a line (jq -c '.[]')"
    if start.startswith(("#", "//")):
        return "; JSON Lines knows no comments"
    return ""
