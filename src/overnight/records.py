"""One line as data: a request on its way in, an answer or a failure, and the row on its way out.

A body is never decoded into objects and encoded again: what came in as bytes goes out as bytes (`one_line` says
which few bytes change). A row is OpenAI's (https://platform.openai.com/docs/api-reference/batch/request-output):
`id`, `custom_id`, `response {status_code, request_id, body}`, `error`.
"""

import hashlib
import json
import re
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

# Every code that a row or a validation error can carry, and what it says.
# OpenAI's, by what its Batch API was seen to answer:
INVALID_JSON_LINE = "invalid_json_line"  # the line is not one JSON value
MISSING_REQUIRED_PARAMETER = "missing_required_parameter"  # a field of the envelope is missing
INVALID_REQUEST = "invalid_request"  # a field has the wrong form, or the body lacks what its endpoint needs
INVALID_URL = "invalid_url"  # no such endpoint
MODEL_NOT_FOUND = "model_not_found"  # body.model is not served
STREAMING_UNSUPPORTED = "streaming_unsupported"  # body.stream is true
DUPLICATE_CUSTOM_ID = "duplicate_custom_id"  # a warning of `overnight validate`
# ours, for failures in the run:
REQUEST_TIMEOUT = "request_timeout"  # no answer within --timeout
CONNECTION_ERROR = "connection_error"  # no connection, or one that broke
INVALID_ANSWER = "invalid_answer"  # the engine answered what is no JSON
ENGINE_ERROR = "engine_error"  # the engine failed at this request
ENGINE_DIED = "engine_died"  # this request ends the engine that answers it
BATCH_EXPIRED = "batch_expired"  # not run in time


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request: a line that can be run.

    `index` counts requests from 0, `line` the input's lines from 1. `endpoint` is the path of the table that
    `url` names, or None; `body` the bytes as written; `model` is body.model, None where it names none;
    `digest` identifies the line's bytes.
    """

    index: int
    line: int
    custom_id: str
    url: str
    endpoint: str | None
    body: bytes
    model: str | None
    is_streamed: bool
    digest: str


class Problem(msgspec.Struct, frozen=True, gc=False):
    """Why a line is no request, in the fields of OpenAI's batch errors; `column` is in characters, from 1.

    `status` is set where a server would have answered with it (a body that lacks what its endpoint needs).
    """

    code: str
    message: str
    param: str | None = None
    column: int | None = None
    custom_id: str | None = None
    status: int | None = None


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What an engine gave for a request: an HTTP status and a JSON body, as bytes."""

    status: int
    body: bytes
    request_id: str | None = None
    retry_after_s: float | None = None


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why a request got no answer; `code` is one of this module's."""

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One line of the output, and what the counts need of it.

    `data` is the line with its newline. `code` is empty for a completed request, else the error's code (or
    `http_` and the status); `message` says more. Token counts are those of the answer's usage; `line` is the input's
    (0 for a row that was read back).
    """

    index: int
    custom_id: str | None
    data: bytes
    code: str = ""
    message: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    line: int = 0

    def json(self) -> dict[str, Any]:
        """The row as Python objects; numbers lose what Python's float cannot hold."""
        row: dict[str, Any]
        try:
            row = msgspec.json.decode(self.data)
        except msgspec.DecodeError:  # JSON all the same: half a surrogate pair, or a number that is too large
            row = json.loads(self.data, parse_int=_read_int)
        return row


def _read_int(digits: str) -> float:
    """Python refuses to read integers of more than 4,300 digits."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


class RowKey(NamedTuple):
    """What every row's id of one run shares: the digest of the settings that shape answers, and the run's own part."""

    settings: str
    run: str

    def row_id(self, digest: str, index: int) -> str:
        """`batch_req_`, 16 digits for the input line, 12 for the settings, then what makes it unique."""
        return f"batch_req_{digest}{self.settings}{self.run}{index:x}"


def digest_line(line: bytes | memoryview) -> str:
    """16 hexadecimal digits that identify a line's bytes."""
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def digest_settings(settings: dict[str, Any]) -> str:
    """12 hexadecimal digits that identify the settings that shape answers."""
    canonical = msgspec.json.encode(settings, order="deterministic")
    return hashlib.blake2b(canonical, digest_size=6).hexdigest()


# -- an answer's bytes ---------------------------------------------------------------------------------------------


class Usage(msgspec.Struct, gc=False):
    """Token counts of an answer, under the names of either API: chat's, or the Responses API's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: Raw | UnsetType = UNSET
    input_tokens_details: Raw | UnsetType = UNSET


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _ErrorBody(msgspec.Struct, gc=False):
    message: str | None = None


class _AnswerHead(msgspec.Struct, gc=False):
    usage: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_decode_head = msgspec.json.Decoder(_AnswerHead).decode
_decode_usage = msgspec.json.Decoder(Usage).decode
_decode_details = msgspec.json.Decoder(_Details).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode
_check_json = msgspec.json.Decoder(Raw).decode

# What str.splitlines() and JavaScript take for a line's end although JSON does not, as UTF-8.
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
# A surrogate encoded as if it were a character: not UTF-8, but some servers send it.
_RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# Escapes from left to right: a pair, a lone surrogate (group 1), any other.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def one_line(body: bytes) -> bytes:
    """The same JSON value in bytes that no reader takes for more than one line of UTF-8.

    Line breaks go (JSON has them between tokens only); U+2028, U+2029, U+0085 and lone surrogates become
    escapes. To be asked only of what `read_head` took for JSON: a line break in a number would join two.
    """
    if b"\n" in body or b"\r" in body:
        body = body.replace(b"\n", b"").replace(b"\r", b"")
    if not body.isascii():
        for raw, escape in _SEPARATORS:
            body = body.replace(raw, escape)
        body = _RAW_SURROGATE.sub(lambda match: b"\\u%04x" % ord(match[0].decode("utf-8", "surrogatepass")), body)
    return body


def find_lone_surrogate(text: bytes) -> int:
    """Where the first escape of half a surrogate pair stands; -1 where there is none."""
    return next((match.start() for match in _ESCAPES.finditer(text) if match[1]), -1)


def without_lone_surrogates(body: bytes) -> bytes:
    """JSON that strict decoders take: U+FFFD for each escape of half a surrogate pair."""
    return _ESCAPES.sub(lambda match: rb"\ufffd" if match[1] else match[0], body)


def read_head(body: bytes) -> _AnswerHead | None:
    """Usage and error of an answer that is valid JSON; None when it is no JSON value in UTF-8.

    Halves of surrogate pairs are let pass, as escapes and as bytes: `one_line` makes both escapes.
    """
    head = _read_strictly(body)
    if head is None:
        mended = without_lone_surrogates(_RAW_SURROGATE.sub(b"\xef\xbf\xbd", body))
        head = _read_strictly(mended) if mended != body else None
    return head


def _read_strictly(body: bytes) -> _AnswerHead | None:
    try:
        if not body.isascii():
            body.decode()
        return _decode_head(body)
    except msgspec.ValidationError:
        return _AnswerHead() if _is_json(body) else None  # no object: a transcription's text, for one
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


def _is_json(body: bytes) -> bool:
    try:
        _check_json(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def read_tokens(usage: Raw | UnsetType) -> tuple[int, int, int]:
    """Prompt, completion and cached tokens; zeros where the usage is absent or is nothing that we know."""
    if usage is UNSET:
        return 0, 0, 0
    try:
        counts = _decode_usage(usage)
        details = counts.prompt_tokens_details or counts.input_tokens_details or UNSET
        cached = None if details is UNSET or bytes(details) == b"null" else _decode_details(details).cached_tokens
    except (msgspec.MsgspecError, RecursionError):
        return 0, 0, 0
    return (counts.prompt_tokens or counts.input_tokens or 0, counts.completion_tokens or counts.output_tokens or 0,
            cached or 0)  # fmt: skip


def error_message(head: _AnswerHead, body: bytes) -> str:
    """What an error answer says, for the summary."""
    if head.error is UNSET:
        return body[:200].decode(errors="replace")
    try:
        message = _decode_error(head.error).message
    except (msgspec.MsgspecError, RecursionError):
        message = None
    return message or bytes(head.error).decode()


# -- rows ----------------------------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """A value of ours as one line of JSON; lone surrogates in it become U+FFFD."""
    try:
        return one_line(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return without_lone_surrogates(json.dumps(value).encode())


def error_answer(status: int, message: str, *, code: str | None, param: str | None = None) -> Answer:
    """An answer as an OpenAI server words a refusal."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return Answer(status, msgspec.json.encode({"error": error}))


def answer_row(request: Request, answer: Answer, key: RowKey) -> Row:
    """The row of a request that an engine (or the runner in its place) answered."""
    head = read_head(answer.body)
    if head is None:
        shown = answer.body[:80].decode(errors="replace")
        why = f"The engine answered with status {answer.status} and what is not JSON: {shown!r}"
        return failure_row(request, Failure(INVALID_ANSWER, why), key)
    body = one_line(answer.body)
    row_id = key.row_id(request.digest, request.index)
    request_id = f"req_{key.run}{request.index:x}" if answer.request_id is None else answer.request_id
    data = b'{"id":"%s","custom_id":%s,"response":{"status_code":%d,"request_id":%s,"body":%s},"error":null}\n' % (
        row_id.encode(), encode(request.custom_id), answer.status, encode(request_id), body)  # fmt: skip
    if answer.status >= 400:  # noqa: PLR2004 - HTTP's line between answers and errors
        message = error_message(head, body)
        return Row(request.index, request.custom_id, data, f"http_{answer.status}", message, line=request.line)
    return Row(request.index, request.custom_id, data, "", "", *read_tokens(head.usage), request.line)


def failure_row(request: Request, failure: Failure, key: RowKey) -> Row:
    """The row of a request that never got an HTTP answer."""
    error = {"code": failure.code, "message": failure.message}
    data = _row_without_response(key.row_id(request.digest, request.index), request.custom_id, error)
    return Row(request.index, request.custom_id, data, failure.code, failure.message, line=request.line)


def problem_row(problem: Problem, index: int, line: int, digest: str, key: RowKey) -> Row:
    """The row in the place of a line that is no request."""
    if problem.status is not None and problem.custom_id is not None:
        stand_in = Request(index, line, problem.custom_id, "", None, b"", None, False, digest)
        answer = error_answer(problem.status, problem.message, code=problem.code, param=problem.param)
        return answer_row(stand_in, answer, key)
    error = {"code": problem.code, "message": problem.message, "param": problem.param, "line": line}
    data = _row_without_response(key.row_id(digest, index), problem.custom_id, error)
    return Row(index, problem.custom_id, data, problem.code, problem.message, line=line)


def _row_without_response(row_id: str, custom_id: str | None, error: dict[str, Any]) -> bytes:
    return encode({"id": row_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"
