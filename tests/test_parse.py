"""parse: a line is a request, or the problem that makes it none, by either way of looking at it."""

import json
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overnight.endpoints import ENDPOINTS
from overnight.parse import ENVELOPE_FIELDS, parse_request
from overnight.records import Problem, Request, digest_line, find_lone_surrogate

CHAT = "/v1/chat/completions"
SOUND = "body.file cannot be used in a batch: name the sound in body.file_url (http, https, or a data: URL)"


def line(*, custom_id='"a"', method='"POST"', url=f'"{CHAT}"', body='{"messages":[]}', extra=""):
    return f'{{"custom_id":{custom_id},"method":{method},"url":{url},"body":{body}{extra}}}'.encode()


def accept(data):
    request = parse_request(data, 3, 7)
    assert isinstance(request, Request), request
    assert (request.index, request.line, request.digest) == (3, 7, digest_line(data))
    return request


def refuse(data):
    problem = parse_request(data, 0, 1)
    assert isinstance(problem, Problem), problem
    return problem


# -- what is right -------------------------------------------------------------------------------------------------


def test_a_good_line_is_a_request_with_its_bodys_own_bytes():
    body = '{"model": "m",\t"messages" :[{"role":"user"}], "seed":%s,"t":1.10,"u":1E5}' % ("9" * 40)
    request = accept(line(body=body))
    assert request.body == body.encode()
    assert request.custom_id == "a"
    assert request.url == request.endpoint == CHAT
    assert request.model == "m"
    assert not request.is_streamed


@pytest.mark.parametrize(
    "body",
    ['{"messages":[]}', "{ }", '{"a":{"b":"}"}}', '{"\\u006d":1,"m":2}', '{"m":1,"m":2}', '{"é":"\u2028 \u0085 😀"}',
     '{"a":"\\ud83d\\ude00\\/\\u0000"}', '{"seed":' + "9" * 10_000 + "}", '{"a":-0,"b":1e999,"c":0.10E+1}',
     '{",":":","}":"{",":":","}'],
)  # fmt: skip
@pytest.mark.parametrize("extra", ["", ',"x":1', ',"x":{}', ',"x":"{}"', ',"x":[{"messages":[]}],"y":null', " ", "\r"])
def test_a_body_is_passed_byte_by_byte_wherever_it_stands(body, extra):
    assert accept(line(url='"/none"', body=body, extra=extra)).body == body.encode()
    start = f'{{"body":{body}{extra},"url":"/none","method":"POST","custom_id":"{{}}"}}'
    assert accept(start.encode()).body == body.encode()


def test_white_space_and_escapes_of_json_are_taken_anywhere():
    request = accept(b' \t\r{\r"url" : "\\/v1\\/chat/completions","b\\u006fdy":{"messages":1} ,"method":"POST",'
                     b'"custom_id":"\\u0068\\n\\u0000" }\r ')  # fmt: skip
    assert request.custom_id == "h\n\x00"
    assert request.endpoint == CHAT
    assert request.body == b'{"messages":1}'


@pytest.mark.parametrize("custom_id", [" a ", "x" * 65, "x" * 10_000, "😀", "a\nb", "\u2028", "{}", '"', "\\", "\x7f"])
def test_a_custom_id_is_echoed_exactly(custom_id):
    assert accept(line(custom_id=json.dumps(custom_id))).custom_id == custom_id
    assert accept(line(custom_id=json.dumps(custom_id, ensure_ascii=False))).custom_id == custom_id


@pytest.mark.parametrize("method", ["post", "Post", "POST"])
def test_a_method_may_be_written_in_any_case(method):
    accept(line(method=f'"{method}"'))


@pytest.mark.parametrize("url", ["", "/", "x", "/v1/moderations", "/" + "x" * 100_000])
def test_an_unknown_url_is_a_request_without_an_endpoint(url):
    request = accept(line(url=json.dumps(url), body="{}"))
    assert request.url == url
    assert request.endpoint is None


@pytest.mark.parametrize(
    ("value", "model"),
    [('"m"', "m"), ("null", None), ("1", None), ('["m"]', None), ('""', ""), ("{}", None), ('"\\ud83d\\ude00"', "😀"),
     ("9" * 30, None), ('"a","model":"b"', "b"), ('1,"model":"b"', "b"), ('"a","model":2', None)],
)  # fmt: skip
def test_the_model_is_that_of_the_body_where_it_names_one(value, model):
    assert accept(line(body=f'{{"messages":[],"model":{value}}}')).model == model


@pytest.mark.parametrize(
    "value",
    ["true", '"true"', '"TRUE"', '"True"', "1", "1.0", "1.00", "1e0", "10e-1", '"1"', '"yes"', '"on"', '"t"', '"Y"',
     '"tru\\u0065"', 'false,"stream":true'],
)  # fmt: skip
def test_what_a_server_takes_for_true_streams(value):
    assert accept(line(body=f'{{"messages":[],"stream":{value}}}')).is_streamed
    assert accept(line(body=f'{{"messages":[],"str\\u0065am":{value}}}')).is_streamed


@pytest.mark.parametrize(
    "value",
    ["false", "null", "0", "2", "-1", '"false"', '" true"', '""', "[]", "[true]", '{"stream":true}', "9" * 5000,
     "1e999", 'true,"stream":false', "[" * 500 + "]" * 500],
)  # fmt: skip
def test_all_else_does_not_stream(value):
    assert not accept(line(body=f'{{"messages":[],"stream":{value}}}')).is_streamed


def test_stream_inside_a_message_is_no_stream():
    assert not accept(line(body='{"messages":[{"stream":true}]}')).is_streamed


def test_a_head_that_was_remembered_does_not_answer_for_another_body():
    accept(line(body='{"model":"remember","messages":[]}'))
    assert refuse(line(body='{"model":"remember"}')).param == "body.messages"
    assert accept(line(body='{"model":"remember","messages":[],"stream":true}')).is_streamed
    assert refuse(line(url='"/v1/completions"', body='{"model":"remember","messages":[]}')).param == "body.prompt"
    for number in range(2500):
        assert accept(line(body=f'{{"model":"m{number}","messages":[]}}')).model == f"m{number}"
    assert refuse(line(body='{"model":"m2499"}')).param == "body.messages"


@pytest.mark.parametrize("endpoint", ENDPOINTS.values())
def test_a_body_with_any_one_alternative_is_whole(endpoint):
    for _ in range(2):
        for names in endpoint.requires:
            body = json.dumps(dict.fromkeys(names))
            assert accept(line(url=f'"{endpoint.path}"', body=body)).endpoint == endpoint.path
            problem = refuse(line(url=f'"{endpoint.path}"', body=json.dumps(dict.fromkeys(names[1:]))))
            assert (problem.code, problem.status, problem.custom_id) == ("invalid_request", 400, "a")


# -- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "column", "words"),
    [(b"{", 2, "expecting property name"),
     (b"not json", 1, "expecting value"),
     (line() + line(), 86, "extra data"),
     (line() + b",", 86, "extra data"),
     (line() + b"\x00", 86, "extra data"),
     (line() + b"\r" + line(), 87, "extra data"),
     (line(body='{"seed":01}'), 79, "expecting ',' delimiter"),
     (line(body='{"seed":+1}'), 78, "expecting value"),
     (line(body='{"seed":.5}'), 78, "expecting value"),
     (line(body='{"seed":1.}'), 79, "expecting ',' delimiter"),
     (b"{'custom_id':'a'}", 2, "expecting property name"),
     (line(body='{"a":"\t"}'), 76, "invalid control character"),
     (line(body='{"a":"\x0b"}'), 76, "invalid control character"),
     (line(body='{"a":"\x00"}'), 76, "invalid control character"),
     (line(custom_id='"\x1f"'), 15, "invalid control character"),
     (line(body='{"a":"\\x"}'), 76, r"invalid \escape"),
     (line(body='{"a":"\\u12g4"}'), 77, r"invalid \uXXXX escape"),
     (b"\xef\xbb\xbf" + line(), 1, "a byte order mark, which may stand only where the file begins"),
     (line()[:45], 40, "unterminated string"),
     ("ä".encode() + line(), 1, "expecting value"),
     (line(custom_id='"äöü"', body="x"), 72, "expecting value")],
)  # fmt: skip
def test_what_is_no_json_is_told_with_its_column_in_characters(data, column, words):
    problem = refuse(data)
    assert problem.code == "invalid_json_line"
    assert problem.column == column
    assert words in problem.message
    assert f"at column {column}" in problem.message


@pytest.mark.parametrize("data", [line(body='{"messages":[1,]}'), line(extra=","), line(extra=",,")])
def test_a_comma_too_many_is_told_near_where_it_stands(data):
    problem = refuse(data)
    assert problem.code == "invalid_json_line"
    assert abs(problem.column - data.rindex(b",")) <= 2


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_only_python_takes_for_a_number_is_refused_where_it_stands(constant):
    data = line(custom_id=json.dumps(f'x{constant}\\"{constant}'), body=f'{{"messages":[1,{constant}]}}')
    problem = refuse(data)
    assert problem.code == "invalid_json_line"
    assert problem.column == data.decode().rindex(constant) + 1
    assert problem.message == f"Not JSON: {constant} at column {problem.column} is no JSON number"


@pytest.mark.parametrize(
    ("data", "column"), [(b'{"a":"\xff"}', 7), ("ä\U0001f600".encode() + b"\xed\xa0\x80", 3), (b"\xc3", 1)]
)
def test_what_is_not_utf8_is_told_with_its_byte_and_column(data, column):
    problem = refuse(data)
    assert (problem.code, problem.column) == ("invalid_json_line", column)
    assert problem.message.startswith("Not UTF-8: byte 0x")


def test_utf16_is_named():
    assert "UTF-16" in refuse(line().decode().encode("utf-16")).message


@pytest.mark.parametrize(
    ("data", "hint"),
    [(b"[", "pretty-printed JSON or one JSON array"), (b" { ", "pretty-printed"), (b'[{"custom_id":1},', "jq -c '.[]'"),
     (b"# comment", "no comments"), (b"// comment", "no comments")],
)  # fmt: skip
def test_what_a_line_looks_like_is_hinted_at(data, hint):
    assert hint in refuse(data).message


@pytest.mark.parametrize(
    "half", ["\\ud800", "\\udc00", "\\uDBFF\\uD83D", "\\ud83dx\\ude00", "\\ude00\\ud83d", "\\\\\\ud800"]
)
@pytest.mark.parametrize("where", ["body", "key", "extra", "url"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(half, where):
    data = {
        "body": line(body=f'{{"messages":"{half}"}}'),
        "key": line(body=f'{{"messages":[],"{half}":1}}'),
        "extra": line(extra=f',"{half}":1'),
        "url": line(url=f'"{half}"'),
    }[where]
    problem = refuse(data)
    assert (problem.code, problem.custom_id) == ("invalid_json_line", "a")
    assert problem.message.startswith("Half a surrogate pair at column ")
    assert data[problem.column - 1 :].startswith(b"\\u")


def test_a_custom_id_with_half_a_pair_cannot_be_echoed():
    assert refuse(line(custom_id='"x\\ud800"')).custom_id is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[1]", "an array"), ("42", "a number"), ('"x"', "a string"), ("null", "null"), ("true", "true"),
     ("1.5", "a number"), ("9" * 5000, "a number")],
)  # fmt: skip
def test_a_line_that_is_no_object_says_what_it_is(text, kind):
    problem = refuse(text.encode())
    assert problem.code == "invalid_request"
    assert problem.message == f"A request must be a JSON object, not {kind}"


@pytest.mark.parametrize("field", ENVELOPE_FIELDS)
def test_a_missing_field_is_named_in_param(field):
    whole = json.loads(line())
    del whole[field]
    problem = refuse(json.dumps(whole).encode())
    assert (problem.code, problem.param) == ("missing_required_parameter", field)
    assert problem.custom_id == (None if field == "custom_id" else "a")


@pytest.mark.parametrize("field", ["method", "url", "body"])
def test_a_field_that_is_null_counts_as_missing(field):
    problem = refuse(line(**{field: "null"}))
    assert (problem.code, problem.param, problem.message) == ("missing_required_parameter", field, f"{field} is null")


@pytest.mark.parametrize("field", ["custom_id", "method", "url"])
@pytest.mark.parametrize("value", ["1", "1.5", "true", "[]", "{}", "9" * 5000, "1e5"])
def test_a_field_of_the_wrong_type_is_named_in_param(field, value):
    problem = refuse(line(**{field: value}))
    assert (problem.code, problem.param) == ("invalid_request", field)
    assert problem.message.startswith(f"{field} must be a string, not ")


@pytest.mark.parametrize("custom_id", ['""', "null"])
def test_an_empty_custom_id_is_none(custom_id):
    problem = refuse(line(custom_id=custom_id))
    assert (problem.code, problem.param, problem.custom_id) == ("invalid_request", "custom_id", None)


@pytest.mark.parametrize("method", ["GET", "", "POST ", "x" * 1000])
def test_another_method_is_refused(method):
    problem = refuse(line(method=f'"{method}"'))
    assert (problem.code, problem.param, problem.custom_id) == ("invalid_request", "method", "a")
    assert len(problem.message) < 100


@pytest.mark.parametrize("body", ["[]", "1", '"x"', '""', "true", '"{}"', "-1.5e3"])
def test_a_body_that_is_no_object_is_refused(body):
    problem = refuse(line(body=body))
    assert (problem.code, problem.param, problem.status) == ("invalid_request", "body", None)


def test_a_sound_in_the_field_of_the_server_is_pointed_to_file_url():
    problem = refuse(line(url='"/v1/audio/transcriptions"', body='{"file":"x"}'))
    assert (problem.param, problem.message, problem.status) == ("body.file_url", SOUND, 400)


@pytest.mark.parametrize("field", ENVELOPE_FIELDS)
@pytest.mark.parametrize("first", ['"a"', "1", "{}", "null"])
def test_a_field_that_stands_twice_is_refused_by_name(field, first):
    for name in (field, f"\\u{ord(field[0]):04x}{field[1:]}"):
        for data in (b'{"%s":%s,' % (name.encode(), first.encode()) + line()[1:],
                     line()[:-1] + b',"%s":%s}' % (name.encode(), first.encode())):  # fmt: skip
            problem = refuse(data)
            named = problem.message == f"The key {field!r} stands twice in this line"
            assert named or problem.param == field


def test_a_duplicate_key_is_seen_past_a_body_that_looks_like_the_rest_of_its_line():
    # Read from the middle, with text and structure swapped, this body begins again and runs on beyond its end.
    body = '{",":":","},":"{",":":","}'
    for extra in (',"custom_id":"b"', ',":":"{\\",","custom_id":"b"', ',"x":{",":":","},":1},"custom_id":"b"'):
        assert refuse(line(url='"/none"', body=body, extra=extra)).param == "custom_id"
    accept(line(url='"/none"', body=body, extra=',":":{",":":","},":1}'))


def test_a_custom_id_that_stands_twice_is_not_chosen_between():
    assert refuse(line(extra=',"custom_id":"z"')).custom_id is None
    assert refuse(b'{"custom_id":1,' + line()[1:]).custom_id is None
    assert refuse(line(extra=',"url":"/z"')).custom_id == "a"


def test_four_keys_with_one_twice_and_one_missing_are_refused():
    refuse(b'{"custom_id":"a","custom_id":"b","method":"POST","url":"/none"}')
    refuse(b'{"custom_id":"a","custom_id":"b","method":"POST","url":"/none","body":{}}')


# -- depth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [*range(880, 1010, 3), 5_000, 100_000])
def test_any_depth_is_a_request_or_a_problem(depth):
    for data in (
        line(body='{"messages":' + "[" * depth + "]" * depth + "}"),
        line(body='{"messages":' + "[" * depth + "]" * depth + "}", extra=',"x":1'),
        line(body='{"messages":' + '{"stream":' * depth + "1" + "}" * depth + "}"),
        line(body='{"messages":[],"model":' + "[" * depth + "]" * depth + "}"),
        line(extra=',"x":' + "[" * depth + "]" * depth),
        line(extra=',"x":' + '{"a":' * depth + "1" + "}" * depth),
        line(extra=',"x":' + "[" * depth),
        line(url='"/v1/audio/translations"', body='{"file":' + "[" * depth + "]" * depth + "}"),
        b"[" * depth,
        b"[" * depth + b"]" * depth,
        b'{"a":' * depth,
    ):
        found = parse_request(data, 0, 1)
        assert isinstance(found, Request | Problem)
        if isinstance(found, Problem) and depth > 10_000:
            assert found.code == "invalid_json_line"


def test_a_caller_deep_in_the_stack_gets_a_problem_not_an_exception():
    data = line(body='{"messages":' + "[" * 300 + "]" * 300 + "}", extra=',"x":1')

    def call(levels):
        return parse_request(data, 0, 1) if levels == 0 else call(levels - 1)

    for levels in range(500, sys.getrecursionlimit() - 250, 7):
        assert isinstance(call(levels), Request | Problem)


# -- properties ----------------------------------------------------------------------------------------------------


@st.composite
def envelopes(draw):
    """The four fields in any order."""
    text = draw(texts)
    fields = {"custom_id": text, "method": '"POST"', "url": text, "body": draw(values)}
    return ("{" + ",".join(f'"{key}":{fields[key]}' for key in draw(st.permutations(ENVELOPE_FIELDS))) + "}").encode()


keys = st.sampled_from([*ENVELOPE_FIELDS, "x", "b\\u006fdy", "", "é", "messages", "stream", "{}"])
texts = st.sampled_from(
    ["a", "POST", "post", CHAT, "/none", "", "{}", "\\ud800", "\\ud83d\\ude00", "é", "\\\\", '\\"', "\u2028", "\t", "m"]
).map('"{}"'.format)
atoms = st.one_of(
    texts, st.sampled_from(["1", "0", "-0", "1.10", "1e5", "null", "true", "NaN", "01", "9" * 50, "1e999"])
)


def objects(values):
    pair = st.tuples(keys, values).map(lambda each: '"{}":{}'.format(*each))
    comma = st.sampled_from([",", " , ", ",", ",,", ",\r"])
    return st.tuples(st.lists(pair, max_size=5), comma).map(lambda each: "{" + each[1].join(each[0]) + "}")


values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3).map(lambda v: f"[{','.join(v)}]") | objects(inner), max_leaves=6
)
lines = st.one_of(
    st.binary(max_size=40),
    objects(values).map(str.encode),
    st.tuples(texts, st.sampled_from(['"POST"', '"post"', "1"]), texts, values, st.just("") | keys, values).map(
        lambda v: line(custom_id=v[0], method=v[1], url=v[2], body=v[3], extra=f',"{v[4]}":{v[5]}' if v[4] else "")
    ),
    envelopes(),
)  # fmt: skip


def refuse_constant(name):
    raise ValueError(name)


def pairs_of(data):
    return json.loads(data.decode(), object_pairs_hook=list, parse_constant=refuse_constant)


@given(lines)
@settings(max_examples=800, deadline=None)
@example(line(extra=',"body":{}'))
def test_what_is_accepted_is_json_without_halves_of_pairs_or_doubled_keys(data):
    found = parse_request(data, 0, 1)
    if isinstance(found, Problem):
        assert found.code
        assert found.message
        assert found.column is None or 1 <= found.column <= len(data) + 1
        return
    names = [name for name, _ in pairs_of(data)]
    assert all(names.count(field) == 1 for field in ENVELOPE_FIELDS)
    whole = json.loads(data)
    json.dumps(whole, ensure_ascii=False).encode()
    assert find_lone_surrogate(data) == -1
    assert (found.custom_id, found.url) == (whole["custom_id"], whole["url"])
    assert json.loads(found.body) == whole["body"]
    assert found.body in data


@given(lines)
@settings(max_examples=800, deadline=None)
def test_what_is_refused_has_a_fault_that_python_sees_too(data):
    found = parse_request(data, 0, 1)
    if isinstance(found, Request) or found.param is not None:
        return
    try:
        pairs = pairs_of(data)
    except ValueError:
        return
    is_object = data.strip().startswith(b"{")
    assert not is_object or find_lone_surrogate(data) >= 0 or len(dict(pairs)) < len(pairs), found


@given(st.binary(max_size=200), st.binary(max_size=5), st.integers(0, 90))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_request_or_a_problem(data, patch, at):
    assert isinstance(parse_request(data, 0, 1), Request | Problem)
    good = line()
    for spoiled in (good[:at] + patch + good[at:], good[:at] + patch + good[at + len(patch) :], good[:at]):
        found = parse_request(spoiled, 0, 1)
        assert isinstance(found, Request | Problem)
        if isinstance(found, Request):
            pairs_of(spoiled)
