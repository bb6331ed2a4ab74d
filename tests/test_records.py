"""records: whatever an engine answers becomes one valid line of UTF-8, and one that says what it answers."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overnight.records import (
    Answer,
    Failure,
    Problem,
    Request,
    RowKey,
    answer_row,
    digest_line,
    digest_settings,
    encode,
    error_answer,
    failure_row,
    find_lone_surrogate,
    one_line,
    problem_row,
    read_head,
)

KEY = RowKey("a" * 12, "b" * 8)
ASK = Request(31, 40, "c-1", "/v1/chat/completions", "/v1/chat/completions", b"{}", "m", False, "d" * 16)
FFFD = "\ufffd"


def refuse_constant(name):
    raise ValueError(name)


def read(row):
    """The row's JSON, as a strict reader of lines takes it."""
    assert row.data.endswith(b"\n")
    text = row.data.decode()
    assert len(text.splitlines()) == 1
    assert text.splitlines() == text.split("\n")[:-1]
    return json.loads(text, parse_constant=refuse_constant)


def answered(body, status=200, **facts):
    row = answer_row(ASK, Answer(status, body, **facts), KEY)
    return row, read(row)


def body_of(body):
    row, whole = answered(body)
    assert row.code == "", row
    assert whole["error"] is None
    return whole["response"]["body"]


# -- the shape -----------------------------------------------------------------------------------------------------


def test_a_row_has_openais_fields_and_ids_of_ours():
    row, whole = answered(b'{"object":"x"}')
    assert whole == {
        "id": "batch_req_" + "d" * 16 + "a" * 12 + "b" * 8 + "1f",
        "custom_id": "c-1",
        "response": {"status_code": 200, "request_id": "req_bbbbbbbb1f", "body": {"object": "x"}},
        "error": None,
    }
    assert list(whole) == ["id", "custom_id", "response", "error"]
    assert (row.index, row.custom_id, row.code, row.message, row.line) == (31, "c-1", "", "", 40)
    assert row.json() == whole


def test_the_servers_own_request_id_is_kept():
    assert answered(b"{}", request_id="x\u2028y")[1]["response"]["request_id"] == "x\u2028y"
    assert answered(b"{}", request_id="")[1]["response"]["request_id"] == ""
    assert answered(b"{}", request_id="x\udc80")[1]["response"]["request_id"] == "x" + FFFD


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
def test_an_answer_of_an_error_is_a_response_and_a_failed_row(status):
    answer = error_answer(status, "no\u2028t so", code="c", param="p")
    row = answer_row(ASK, answer, KEY)
    error = {"message": "no\u2028t so", "type": "invalid_request_error", "param": "p", "code": "c"}
    assert read(row)["response"]["status_code"] == status
    assert read(row)["response"]["body"] == {"error": error}
    assert read(row)["error"] is None
    assert (row.code, row.message) == (f"http_{status}", "no\u2028t so")


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error":"text"}', '"text"'), (b'{"error":{"message":7}}', '{"message":7}'), (b'{"error":null}', "null"),
     (b'{"error":{"code":1}}', '{"code":1}'), (b'{"detail":"x"}', '{"detail":"x"}'), (b'"text"', '"text"'),
     (b'{"error":{"message":"\\ud800"}}', FFFD), (b'{"error":{"message":"\xed\xa0\x80"}}', FFFD), (b"[]", "[]"),
     (b'{"error":{"message":null}}', '{"message":null}')],
)  # fmt: skip
def test_any_error_body_says_something_for_the_summary(body, message):
    row, whole = answered(body, 500)
    assert (row.code, row.message) == ("http_500", message)
    assert whole["response"]["status_code"] == 500


def test_a_failure_has_no_response_but_its_code_and_message():
    row = failure_row(ASK, Failure("request_timeout", "No answer\nwithin \udcff 1 s"), KEY)
    whole = read(row)
    assert whole["response"] is None
    assert whole["error"] == {"code": "request_timeout", "message": f"No answer\nwithin {FFFD} 1 s"}
    assert (row.code, whole["custom_id"], row.line) == ("request_timeout", "c-1", 40)


def test_a_problem_has_no_response_but_says_its_line():
    row = problem_row(Problem("invalid_json_line", "why", "p", 3, None), 4, 9, "e" * 16, KEY)
    error = {"code": "invalid_json_line", "message": "why", "param": "p", "line": 9}
    assert read(row) == {"id": KEY.row_id("e" * 16, 4), "custom_id": None, "response": None, "error": error}
    assert (row.index, row.code, row.message, row.line) == (4, "invalid_json_line", "why", 9)


def test_a_problem_that_a_server_would_answer_is_answered():
    row = problem_row(Problem("invalid_request", "why", "body.messages", None, "x", 400), 4, 9, "e" * 16, KEY)
    whole = read(row)
    assert whole["response"]["status_code"] == 400
    assert whole["response"]["body"]["error"]["param"] == "body.messages"
    assert whole["error"] is None
    assert (row.index, row.custom_id, row.code) == (4, "x", "http_400")


@given(st.text())
@settings(deadline=None)
def test_any_custom_id_is_echoed_exactly(custom_id):
    request = Request(0, 1, custom_id, "", None, b"", None, False, "d" * 16)
    assert read(answer_row(request, Answer(200, b"{}"), KEY))["custom_id"] == custom_id
    assert read(failure_row(request, Failure("c", custom_id), KEY))["error"]["message"] == custom_id


# -- an answer's bytes ---------------------------------------------------------------------------------------------


def test_a_body_without_line_breaks_goes_out_byte_by_byte():
    body = '{"b":1.10,"a":1E5,"n":%s,"a":"\\/\\u0041 é😀","z":[ 1 , 2 ]}' % ("9" * 40)
    row, _ = answered(body.encode())
    assert b'"body":' + body.encode() + b"}," in row.data


def test_pretty_printed_json_becomes_one_line():
    value = {"a": [1, {"b": "x\ny"}], "c": 1.5}
    for text in (json.dumps(value, indent=2), json.dumps(value, indent="\t").replace("\n", "\r\n") + "\r\n"):
        assert body_of(text.encode()) == value


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
def test_separators_become_escapes(mark):
    text = f'{{"{mark}":"a{mark}b\\\\{mark}"}}'
    assert body_of(text.encode()) == {mark: f"a{mark}b\\{mark}"}


@pytest.mark.parametrize("control", ["\x00", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\n", "\r", "\t"])
def test_control_characters_pass_as_escapes_and_fail_raw(control):
    escaped = json.dumps({"a": control}).encode()
    assert body_of(escaped) == {"a": control}
    row, whole = answered(b'{"a":"%s"}' % control.encode())
    assert row.code == whole["error"]["code"] == "invalid_answer"


@pytest.mark.parametrize(
    ("raw", "value"),
    [(rb'{"a":"x\ud800y"}', "x\ud800y"), (b'{"a":"x\xed\xa0\x80y"}', "x\ud800y"), (b'{"a":"\xed\xbf\xbf"}', "\udfff"),
     (rb'{"a":"\udc00\ud800"}', "\udc00\ud800"), (b'{"a":"\xed\xa0\xbd\xed\xb8\x80"}', "😀"),
     (rb'{"a":"\ud83d\ude00"}', "😀"), (b'{"a":"\xed\x9f\xbf\xee\x80\x80"}', "\ud7ff\ue000")],
)  # fmt: skip
def test_half_a_surrogate_pair_passes_as_an_escape(raw, value):
    row, whole = answered(raw)
    assert whole["response"]["body"] == {"a": value}
    assert row.json() == whole


def test_half_a_pair_hides_neither_usage_nor_text_that_is_no_object():
    row, _ = answered(b'{"x":"\\ud800","usage":{"prompt_tokens":3,"completion_tokens":4}}')
    assert (row.prompt_tokens, row.completion_tokens) == (3, 4)
    assert body_of(rb'"\ud800"') == "\ud800"
    assert body_of(b'"\xed\xa0\x80"') == "\ud800"


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"\n", b"<html>", b'{"a":NaN}', b'{"a":Infinity}', b"[-Infinity]", b"NaN", b'{"a":1', b'{"a":1}x',
     b'"text" junk', b"[1,", b"[1] 2", b"nulll", b"tru", b"01", b"1.", b"'a'", b'{"a":"\xff"}', b'"\xff"', b"\xff",
     b'{"a":"\xe2\n\x82\xac"}', b"1\n2", b"[1\r2]", b"tru\ne", b'"x\ny"', b'{"a":"\\\xe2\x80\xa8"}',
     b'{"a":"\\\xed\xa0\x80"}', b"\xed\xa0\x80", b"\\ud800", b'{"a"\\ud800:1}', b'{"a":"\\u00\xc2\x85"}',
     b"\xef\xbb\xbf{}", b'{"a":1}\x00', b"\x00", b"[" * 100_000, b"{}{}", b"{}\n{}", b"{},"],
)  # fmt: skip
@pytest.mark.parametrize("status", [200, 500])
def test_what_is_no_json_is_a_failed_row(body, status):
    row, whole = answered(body, status)
    assert whole["response"] is None
    assert row.code == whole["error"]["code"] == "invalid_answer"
    assert f"status {status}" in whole["error"]["message"]
    assert len(row.data) < 1000


@pytest.mark.parametrize("body", [b'"text"', b"[]", b"null", b"1.10", b'"\xc2\x85"', b" true ", b"1e999"])
def test_an_answer_may_be_any_json_value(body):
    row, _ = answered(body)
    assert row.code == ""


@pytest.mark.parametrize(
    "body", [b'{"a":%s}' % (b"9" * 5000), b'{"a":1e999}', b'{"a":"\\ud800"}', b'{"a":-1e999,"b":"\\udc00"}']
)
def test_a_row_can_be_read_whatever_numbers_and_halves_it_holds(body):
    row = answer_row(ASK, Answer(200, body), KEY)
    assert "a" in row.json()["response"]["body"]


@pytest.mark.parametrize("depth", [*range(900, 1010, 2), 50_000])
def test_an_answer_of_any_depth_is_a_row(depth):
    nest = b"[" * depth + b"]" * depth
    for body in (nest, b'{"usage":%s}' % nest, b'{"error":%s}' % nest, b'{"error":{"message":%s}}' % nest,
                 b'{"usage":{"prompt_tokens_details":%s}}' % nest):  # fmt: skip
        for status in (200, 500):
            assert answer_row(ASK, Answer(status, body), KEY).data.count(b"\n") == 1


def test_five_megabytes_of_text_pass():
    text = "é\u2028x\n" * 1_000_000
    assert body_of(json.dumps({"t": text}, ensure_ascii=False).encode()) == {"t": text}


json_keys = st.text("usagerrot\u2028", max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.text(st.sampled_from('\u2028\u2029\x85\x00\n\r\\"u2d8\ud83d\ude00😀'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_keys, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(json_values, st.sampled_from([None, 1, "\t"]), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_json_value_passes_unchanged_in_any_writing(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    data = text.encode(errors="surrogatepass")
    got = body_of(data)
    # Halves that meet as bytes make their pair: so they do in UTF-16, where they come from.
    assert json.dumps(got) == json.dumps(json.loads(one_line(data)))
    if find_lone_surrogate(one_line(data)) < 0 or ascii_only:
        assert got == value or json.dumps(got) == json.dumps(value)


@given(st.binary(max_size=60), st.sampled_from([200, 400]))
@settings(max_examples=400, deadline=None)
@example(b'"\\\xe2\x80\xa8"', 200)
def test_any_bytes_are_one_valid_line(body, status):
    for each in (body, b'"%s"' % body, b'{"usage":%s}' % body, b'{"error":%s}' % body):
        row, whole = answered(each, status)
        assert (whole["response"] is None) == (row.code == "invalid_answer")
        row.json()


@given(st.text(st.sampled_from('\\ud8D3cCeE0fF"n/'), max_size=24))
@settings(max_examples=1500, deadline=None)
@example(r"\ud83d\ude00")
@example(r"\\ud800")
@example(r"\ud800\ud800\udc00")
def test_find_lone_surrogate_agrees_with_python(text):
    try:
        value = json.loads(f'"{text}"')
    except ValueError:
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        at = find_lone_surrogate(text.encode())
        assert at >= 0
        assert json.loads(f'"{text[at : at + 6]}"') in value
        assert read_head(b'"%s"' % text.encode()) is not None
    else:
        assert find_lone_surrogate(text.encode()) == -1


# -- usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [('{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}', (3, 4, 2)),
     ('{"input_tokens":3,"output_tokens":4,"input_tokens_details":{"cached_tokens":1}}', (3, 4, 1)),
     ('{"prompt_tokens":3,"completion_tokens":null,"prompt_tokens_details":null}', (3, 0, 0)),
     ('{"prompt_tokens":3,"prompt_tokens_details":{}}', (3, 0, 0)),
     ("null", (0, 0, 0)), ("[]", (0, 0, 0)), ("{}", (0, 0, 0)), ('{"prompt_tokens":"3"}', (0, 0, 0)),
     ('{"prompt_tokens":3,"prompt_tokens_details":7}', (0, 0, 0))],
)  # fmt: skip
def test_usage_is_read_under_either_apis_names(usage, tokens):
    row, _ = answered(b'{"usage":%s}' % usage.encode())
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == tokens


# -- digests and encoding ------------------------------------------------------------------------------------------


def test_digests_tell_lines_and_settings_apart_and_only_them():
    assert len(digest_line(b"x")) == 16
    assert digest_line(b"x") == digest_line(memoryview(b"x")) != digest_line(b"y")
    assert len(digest_settings({})) == 12
    assert digest_settings({"a": 1, "b": None}) == digest_settings({"b": None, "a": 1}) != digest_settings({"a": 1})


@given(st.text(st.characters(exclude_categories=[])))
@settings(deadline=None)
def test_encode_gives_one_line_of_utf8_for_any_text(text):
    line = encode({"a": text}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["a"] == "".join(FFFD if "\ud800" <= each <= "\udfff" else each for each in text)
