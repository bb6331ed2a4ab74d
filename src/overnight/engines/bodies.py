"""What of a body llama.cpp would let pass although it cannot be answered as asked, refused before it is. Pure.

The body itself is not changed: a few fields of it are read, and the rest stays bytes.

For editors: llama.cpp says status 500, which the runner would try again, for some faults of the request too. They can
be told only by their words; xllamacpp is pinned to one version, and a test holds each of them against it.
"""

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from overnight.records import Answer, error_answer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
GENERATING = frozenset({CHAT, "/v1/completions", RESPONSES})
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# OpenAI's bound on the names and values of a schema. llama.cpp compiles a schema, and samples by it, in the one thread
# that serves all requests, and stops for nobody: one of 1 MB held it for minutes.
MAX_SCHEMA_BYTES = 120_000
LIMITS = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")
REQUEST_FAULTS = re.compile(r"Failed to parse (messages|tools)|is too large to process|input is not supported")
TOO_LARGE = re.compile(r"(input \(\d+ tokens\) is too large to process)\. .*", re.DOTALL)


class _Message(msgspec.Struct):
    role: str | None = None
    content: Raw | UnsetType = UNSET


class _JsonSchema(msgspec.Struct):
    schema: Raw | UnsetType = UNSET


class _Format(msgspec.Struct):
    type: str | None = None
    schema: Raw | UnsetType = UNSET
    json_schema: _JsonSchema | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Function(msgspec.Struct):
    name: str | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Body(msgspec.Struct):
    messages: list[_Message] | UnsetType = UNSET
    n: float | None = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    max_output_tokens: float | None = None
    response_format: _Format | None = None
    text: Raw | UnsetType = UNSET  # the Responses API's; elsewhere a field that nobody knows


class _Choice(msgspec.Struct):
    tools: list[_Tool] | None = None
    tool_choice: Any = None


class _BadBody(ValueError):
    """What of a body is wrong, and in which field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


_decode = msgspec.json.Decoder(_Body).decode
_decode_text = msgspec.json.Decoder(_Text | None).decode
_decode_choice = msgspec.json.Decoder(_Choice).decode


def refuse_body(endpoint: str, body: bytes, template: str) -> Answer | None:
    """A 400 for a body that cannot be answered as it asks; None where llama.cpp is to judge.

    `template` is the model's chat template, empty where it has none.
    """
    if endpoint not in GENERATING:
        return None
    try:
        fields = _decode(body)
        _check_limits(fields)
        text = _decode_text(fields.text) if endpoint == RESPONSES and fields.text is not UNSET else None
        _check_format(text.format if text else fields.response_format)
        if endpoint == CHAT and fields.messages is not UNSET:
            _check_messages(fields.messages, template)
        if endpoint == CHAT and b'"tool_choice"' in body:
            _check_tool_choice(_decode_choice(body), template)
    except _BadBody as error:
        return error_answer(400, str(error), code=None, param=error.param)
    except msgspec.ValidationError as error:
        return error_answer(400, str(error), code=None)
    except (msgspec.DecodeError, RecursionError):  # llama.cpp says better what is no JSON to it
        return None
    return None


def _check_limits(fields: _Body) -> None:
    for name in LIMITS:
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise _BadBody(name, f"{name} must be at least 1, not {value:g}")


def _check_format(form: _Format | None) -> None:
    if form is None:
        return
    schema = form.json_schema.schema if form.json_schema else form.schema
    if schema is UNSET:
        if form.type == "json_schema":
            raise _BadBody("response_format", "response_format of type json_schema needs a schema")
        return
    text = bytes(schema)
    if text[:1] != b"{":
        raise _BadBody("response_format", "response_format: the schema must be an object")
    if len(text) > MAX_SCHEMA_BYTES:
        raise _BadBody("response_format", f"response_format: the schema is longer than {MAX_SCHEMA_BYTES:,} bytes")


def _check_messages(messages: list[_Message], template: str) -> None:
    if not messages:
        raise _BadBody("messages", "messages is empty: there is nothing to answer")
    for n, message in enumerate(messages):
        role = message.role
        if not role or (role not in ROLES and role not in template):
            raise _BadBody("messages", f"messages[{n}].role {role!r} is none of {', '.join(sorted(ROLES))}")
        if role != "assistant" and message.content is not UNSET and bytes(message.content) == b"null":
            raise _BadBody("messages", f"messages[{n}].content must not be null for the role {role}")


def _check_tool_choice(choice: _Choice, template: str) -> None:
    wanted = choice.tool_choice
    if wanted != "required" and not isinstance(wanted, dict):
        return
    names = [tool.function.name for tool in choice.tools or () if tool.function]
    if not names:
        raise _BadBody("tool_choice", "tool_choice asks for a tool, but there are no tools")
    if isinstance(wanted, dict):
        function = wanted.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise _BadBody("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
    if "tools" not in template:
        raise _BadBody("tool_choice", "tool_choice asks for a tool, but this model's chat template has none")


def reword(status: int, body: bytes) -> Answer:
    """llama.cpp's answer; a 500 that is the request's own fault as the 400 that it is."""
    if status == 500 and (fault := _read_fault(body)):  # noqa: PLR2004
        return error_answer(400, fault, code=None)
    return Answer(status, body)


class _Fault(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Fault


def _read_fault(body: bytes) -> str | None:
    try:
        message = msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.MsgspecError:
        return None
    advice = r"\1: a text that is embedded must fit one step of the engine; raise --max-num-batched-tokens"
    return TOO_LARGE.sub(advice, message) if REQUEST_FAULTS.search(message) else None
