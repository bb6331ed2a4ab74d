"""The inputs at the edge of reference/edge-cases.md, 3a to 3d, through whole runs with the echo engine.

Each is run with `--on-invalid row`, where it must give the row of the table, and with `--on-invalid fail`, where what
is no request is refused before anything starts. Names carry the table's row.
"""
# ruff: noqa: N802 - the rows of the table have capital letters

import asyncio
import gzip
import json
import os
import sys
import tracemalloc
from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overnight
import overnight.errors
from overnight.batch import prepare_batch
from overnight.endpoints import ENDPOINTS
from overnight.engines.base import Engine, EngineContext, NoOptions
from overnight.errors import BatchInvalid, InputChanged, UsageError
from overnight.judge import judge_source
from overnight.options import RunOptions, make
from overnight.progress import Watcher
from overnight.records import Answer
from overnight.source import MIN_LINE_LIMIT, open_source

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
HI = '{"model":"m","messages":[{"role":"user","content":"hi"}]}'
ERROR_FIELDS = {"message", "type", "param", "code"}


def line(custom_id="x", *, body=HI, url=CHAT, method="POST", extra=""):
    """L(x) of the table, or a variant."""
    return f'{{"custom_id":"{custom_id}","method":"{method}","url":"{url}","body":{body}{extra}}}'.encode()


def with_(**fields):
    """A chat body with further fields."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def refuse_constant(name):
    raise ValueError(name)


class Notes(Watcher):
    def __init__(self):
        self.notes = []

    def on_note(self, text):
        self.notes.append(text)


class Ground:
    """A folder in which inputs are run."""

    def __init__(self, folder):
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.environ = {"OVERNIGHT_CACHE": str(folder / "cache")}
        self.notes = []
        self.summary = None

    def prepare(self, data, on_invalid="row", name="in.jsonl", **options):
        path = self.folder / name
        if data is not None:
            path.write_bytes(data)
        watcher = Notes()
        self.notes = watcher.notes
        values = {"input_file": str(path), "output_file": str(self.output), "engine": "echo", "on_invalid": on_invalid}
        chosen = make(RunOptions, {"overwrite": True, "sync_interval": 3600, **values, **options})
        return prepare_batch(chosen, environ=self.environ, watcher=watcher)

    def run(self, data, on_invalid="row", **options):
        """The rows of a run; each is one whole line of strict JSON in UTF-8, of OpenAI's shape."""
        with self.prepare(data, on_invalid, **options) as batch:
            self.summary = asyncio.run(batch.run())
        text = self.output.read_bytes().decode()
        assert text == "" or text.endswith("\n")
        rows = [json.loads(each, parse_constant=refuse_constant) for each in text.splitlines()]
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert list(row) == ["id", "custom_id", "response", "error"]
            assert (row["response"] is None) != (row["error"] is None)
            if row["response"]:
                assert list(row["response"]) == ["status_code", "request_id", "body"]
        assert self.summary.counts.total == self.summary.counts.written == len(rows)
        assert not [each.name for each in self.folder.iterdir() if each.name.startswith("out.jsonl.")]
        return rows

    def both(self, data, **options):
        """The rows of a file that is right, which both settings must give alike."""
        rows = self.run(data, "fail", **options)
        again = self.run(data, "row", **options)
        assert [row["custom_id"] for row in again] == [row["custom_id"] for row in rows]
        assert [row["response"] and row["response"]["body"] for row in again] == [
            row["response"] and row["response"]["body"] for row in rows
        ]
        return rows

    def echoed(self, data, **options):
        """What the engine was given for each request, as Python objects."""
        rows = self.both(data, **options)
        assert all(row["response"]["status_code"] == 200 for row in rows), rows
        return [row["response"]["body"]["echo"] for row in rows]

    def refused(self, data, **options):
        """The message with which a file is refused; nothing was touched."""
        self.output.unlink(missing_ok=True)
        with pytest.raises(BatchInvalid) as caught:
            self.prepare(data, "fail", **options)
        assert caught.value.exit_code == 2
        assert not self.output.exists()
        return str(caught.value)

    def problem(self, bad, code, param=None, custom_id=None, words=""):
        """Hold a line that is no request between two good ones, under both settings; its row's message comes back."""
        data = line("before") + b"\n" + bad + b"\n" + line("after") + b"\n"
        message = self.refused(data)
        assert "line 2" in message
        assert code in message
        assert "holds 1 line that cannot be run" in message
        before, row, after = self.run(data)
        assert (before["custom_id"], after["custom_id"]) == ("before", "after")
        assert before["response"]["status_code"] == after["response"]["status_code"] == 200
        assert row["custom_id"] == custom_id
        assert row["response"] is None
        error = row["error"]
        assert list(error) == ["code", "message", "param", "line"]
        assert (error["code"], error["param"], error["line"]) == (code, param, 2)
        assert words in error["message"]
        assert self.summary.counts.failed == 1
        return error["message"]

    def answered(self, data, status, code, param=None, **options):
        """Hold a single request that is answered with an error under both settings; its message comes back."""
        for row in (self.run(data, "fail", **options)[0], self.run(data, "row", **options)[0]):
            assert row["error"] is None
            assert row["response"]["status_code"] == status
            error = row["response"]["body"]["error"]
            assert set(error) == ERROR_FIELDS
            assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
        return error["message"]


@pytest.fixture
def ground(tmp_path):
    return Ground(tmp_path)


# -- 3a: framing and encoding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n", b"\r\n", b"\xef\xbb\xbf", gzip.compress(b"")])
def test_F1_F2_nothing_to_run_gives_an_empty_output_and_opens_no_engine(ground, data):
    log = ground.folder / "log"
    with ground.prepare(data, "fail") as batch:
        batch.engine._options = type(batch.engine._options)(echo_log=str(log))
        summary = asyncio.run(batch.run())
    assert summary.counts.total == 0
    assert not log.exists()
    assert ground.output.read_bytes() == b""
    assert ground.both(data) == []


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the engine's library is not installed")
def test_F1_an_empty_input_needs_no_engine_that_could_be_opened(ground):
    assert ground.both(b"", engine="llama", model="/no/such/model.gguf") == []


def test_F3_a_missing_final_newline_makes_no_difference(ground):
    assert len(ground.echoed(line("a"))) == 1
    assert ground.output.read_bytes().endswith(b"}\n")


def test_F4_blank_lines_are_skipped_and_counted_in_line_numbers(ground):
    data = line("a") + b"\n\n\n \t \n" + line("b") + b"\n\n"
    assert [row["custom_id"] for row in ground.both(data)] == ["a", "b"]
    rows = ground.run(line("a") + b"\n\n \n[1]\n")
    assert rows[1]["error"]["line"] == 4
    assert "line 4: " in ground.refused(line("a") + b"\n\n \n[1]\n")


def test_F5_lines_may_end_in_crlf(ground):
    rows = ground.both(line("a") + b"\r\n" + line("b") + b"\r\n\r\n")
    assert [row["custom_id"] for row in rows] == ["a", "b"]


def test_F6_a_lone_carriage_return_is_white_space(ground):
    data = line("a").replace(b",", b",\r", 1).replace(b'"messages"', b'\r"messages"')
    assert ground.echoed(data) == [json.loads(HI)]


def test_F7_a_file_with_carriage_returns_for_line_ends_is_one_bad_line(ground):
    message = ground.problem(line("a") + b"\r" + line("b"), "invalid_json_line", words="extra data at column ")
    assert f"column {len(line('a')) + 2}" in message


def test_F8_unicode_separators_inside_pass_and_go_out_as_escapes(ground):
    body = '{"messages":[],"x":"a\u2028b\u2029c\u0085d"}'
    [echo] = ground.echoed(line("\u2028\u0085", body=body))
    assert echo["x"] == "a\u2028b\u2029c\u0085d"
    assert b"\\u2028b\\u2029c\\u0085d" in ground.output.read_bytes()


def test_F9_one_byte_order_mark_is_dropped(ground):
    assert ground.echoed(b"\xef\xbb\xbf" + line("a")) == [json.loads(HI)]
    [row] = ground.run(b"\xef\xbb\xbf\xef\xbb\xbf" + line("a"))
    assert row["error"]["code"] == "invalid_json_line"
    assert "byte order mark" in row["error"]["message"]


def test_F9_a_byte_order_mark_between_two_joined_files_is_told(ground):
    ground.problem(b"\xef\xbb\xbf" + line("a"), "invalid_json_line", words="a byte order mark")


def test_F11_a_byte_that_is_not_utf8_spoils_its_own_line_only(ground):
    bad = line("a").replace(b"hi", b"h\xffi")
    column = bad.index(b"\xff") + 1
    ground.problem(bad, "invalid_json_line", words=f"Not UTF-8: byte 0xff at column {column}")
    ground.problem(line("a").replace(b"hi", b"\xed\xa0\x80"), "invalid_json_line", words="Not UTF-8: byte 0xed")


def test_F11_utf16_is_named(ground):
    [first, *_] = ground.run(line("a").decode().encode("utf-16"))
    assert "UTF-16" in first["error"]["message"]


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "\\ud83d \\ude00", "\\ude00\\ud83d"])
def test_F13_half_a_surrogate_pair_is_an_error_record(ground, half):
    ground.problem(line("a", body=with_(x=0).replace("0", f'"{half}"')), "invalid_json_line", None, "a", "Half a surr")
    ground.problem(line(half), "invalid_json_line", words="Half a surrogate pair at column 15")


def test_F14_a_surrogate_pair_is_the_same_text_again(ground):
    [echo] = ground.echoed(line("\\ud83d\\ude00", body=with_(x="\U0001f600")))
    assert echo["x"] == "\U0001f600"
    assert json.loads(ground.output.read_bytes())["custom_id"] == "\U0001f600"


@pytest.mark.parametrize("control", [b"\x09", b"\x0b", b"\x00", b"\x1f"])
def test_F15_a_raw_control_character_in_a_text_is_no_json(ground, control):
    ground.problem(line("a").replace(b"hi", control), "invalid_json_line", words="invalid control character at column ")


def test_F16_an_escaped_null_is_passed_on(ground):
    [echo] = ground.echoed(line("a", body=with_(x="\0")))
    assert echo["x"] == "\0"


@pytest.mark.parametrize(
    "data",
    [gzip.compress(line("a") + b"\n" + line("b")), gzip.compress(line("a")) + gzip.compress(b"\n" + line("b")),
     zstd.compress(line("a") + b"\n" + line("b")), zstd.compress(line("a")) + zstd.compress(b"\n" + line("b"))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"])
def test_F20_compressed_input_is_read_whatever_its_name(ground, data, name):
    assert [row["custom_id"] for row in ground.both(data, name=name)] == ["a", "b"]


def test_F21_a_line_of_ten_megabytes_is_run(ground):
    text = "x" * 10_000_000
    [echo] = ground.echoed(line("a", body=with_(x=text)))
    assert echo["x"] == text


@pytest.mark.parametrize("over", [1, 1000, MIN_LINE_LIMIT * 5])
def test_F21_a_line_beyond_the_cap_is_an_error_record_and_the_next_is_run(ground, over):
    bad = line("big", body=with_(x="")).replace(b'"x": ""', b'"x": "%s"' % (b"x" * MIN_LINE_LIMIT))
    bad += b" " * over
    data = line("a") + b"\n" + bad + b"\n" + line("b") + b"\n"
    assert "--max-line-bytes allows 262,144" in ground.refused(data, max_line_bytes="256KiB")
    rows = ground.run(data, max_line_bytes="256KiB")
    assert [row["custom_id"] for row in rows] == ["a", None, "b"]
    assert rows[1]["error"] == {
        "code": "invalid_json_line",
        "message": f"The line has {len(bad):,} bytes; --max-line-bytes allows 262,144",
        "param": None,
        "line": 2,
    }


def test_F22_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "in.jsonl"
    peaks = []
    for count in (5_000, 80_000):
        path.write_bytes(b"".join(line(f"id-{number}") + b"\n" for number in range(count)))
        with open_source(str(path), stage=tmp_path / "staged", max_line_bytes=MIN_LINE_LIMIT) as source:
            tracemalloc.start()
            assert judge_source(source).good == count
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.5


@pytest.mark.parametrize("bad", [b"# a comment", b"// a comment"])
def test_F23_a_comment_is_told(ground, bad):
    ground.problem(bad, "invalid_json_line", words="JSON Lines knows no comments")


@pytest.mark.parametrize(
    "data", [json.dumps(json.loads(line("a")), indent=2).encode(), b"[\n" + line("a") + b",\n" + line("b") + b"\n]\n"]
)
def test_F23_pretty_printed_json_and_an_array_are_hinted_at(ground, data):
    hint = "this looks like pretty-printed JSON or one JSON array: write one request a line (jq -c '.[]')"
    assert hint in ground.refused(data)
    rows = ground.run(data)
    assert len(rows) == len(data.splitlines())
    assert hint in rows[0]["error"]["message"]


def test_F24_a_last_line_cut_in_a_text_is_an_error_record(ground):
    data = line("a") + b"\n" + line("b")[:60]
    assert "line 2, column " in ground.refused(data)
    rows = ground.run(data)
    assert rows[0]["response"]["status_code"] == 200
    assert rows[1]["error"]["code"] == "invalid_json_line"
    assert rows[1]["error"]["line"] == 2


def change_first(path):
    with path.open("r+b") as file:
        file.write(b" ")


def change_last(path):
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b" ")


def grow(path):
    with path.open("ab") as file:
        file.write(line("new") + b"\n")


def shrink(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [change_first, change_last, grow, shrink])
def test_F25_an_input_that_changes_ends_the_run_with_a_true_prefix(ground, change):
    ids = [f"id-{number}" for number in range(8_000)]
    with ground.prepare(b"".join(line(each) + b"\n" for each in ids)) as batch:
        change(ground.folder / "in.jsonl")
        with pytest.raises(InputChanged) as caught:
            asyncio.run(batch.run())
    assert caught.value.exit_code == 3
    rows = ground.output.read_bytes().splitlines() if ground.output.exists() else []
    assert [json.loads(row)["custom_id"] for row in rows] == ids[: len(rows)]
    assert all(json.loads(row)["response"]["body"]["echo"] == json.loads(HI) for row in rows)


def test_F25_an_input_replaced_by_a_rename_is_run_as_it_was(ground):
    with ground.prepare(line("a") + b"\n" + line("b")) as batch:
        (ground.folder / "new").write_bytes(line("c"))
        (ground.folder / "new").replace(ground.folder / "in.jsonl")
        asyncio.run(batch.run())
    assert [json.loads(each)["custom_id"] for each in ground.output.read_bytes().splitlines()] == ["a", "b"]


# -- 3b: JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "kind"), [(b"[1]", "an array"), (b"42", "a number"), (b'"x"', "a string"), (b"null", "null")]
)
def test_J1_a_line_that_is_no_object_is_an_error_record(ground, bad, kind):
    ground.problem(bad, "invalid_request", words=f"A request must be a JSON object, not {kind}")


@pytest.mark.parametrize("bad", [line("a") + line("b"), line("a") + b",", line("a") + b" " + line("b")])
def test_J2_more_than_one_value_on_a_line_is_told_with_its_column(ground, bad):
    column = bad[len(line("a")) :].index(bad[len(line("a")) :].strip()) + len(line("a")) + 1
    ground.problem(bad, "invalid_json_line", words=f"extra data at column {column}")


@pytest.mark.parametrize("key", ["custom_id", "method", "url", "body", "\\u0062ody"])
def test_J3_a_doubled_key_is_refused(ground, key):
    name = json.loads(f'"{key}"')
    value = HI if name == "body" else '"POST"' if name == "method" else f'"{CHAT}"' if name == "url" else '"z"'
    custom_id = None if name == "custom_id" else "a"
    words = f"The key {name!r} stands twice in this line"
    ground.problem(line("a", extra=f',"{key}":{value}'), "invalid_json_line", name, custom_id, words)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_J4_what_is_no_number_of_json_is_an_error_record(ground, number):
    bad = line("NaN", body=with_(temperature=0).replace(": 0", f": {number}"))
    words = f"{number} at column {bad.rindex(number.encode()) + 1}"
    ground.problem(bad, "invalid_json_line", words=words)


BIG = "9" * 40
RAW_BODIES = {
    "J6 seed of 40 nines": f'{{"messages":[],"seed":{BIG}}}',
    "J6 a number of 4,000 digits": f'{{"messages":[],"seed":{"9" * 4_000}}}',
    "J8 types as written": '{"messages":[],"seed":1.0,"n":"2"}',
    "J11 numbers as written": f'{{"messages":[],"n":{{"a":9007199254740993,"b":1.10,"c":1E5,"d":-0.0,"e":{BIG}}}}}',
    "J12 order, white space and escapes": '{ "z" : 1 ,\t"messages":[{"content":"\\/\\u0068\\n"}] , "a":{"b" :2} }',
    "unknown fields": '{"_x":null,"messages":[],"vllm_xargs":{"k":[1,{"y":1e400}]}}',
    "keys that stand twice": '{"messages":[1],"messages":[2],"model":"a","model":"b","k":1,"k":1}',
    "text of other scripts": '{"messages":[{"content":"é 漢字 \U0001f600 \ufeff \x7f"}]}',
}


@pytest.mark.parametrize("body", RAW_BODIES.values(), ids=RAW_BODIES)
def test_J6_J8_J11_J12_a_body_reaches_the_engine_byte_by_byte(ground, body):
    ground.both(line("a", body=body))
    assert b'"echo":' + body.encode() + b"}}" in ground.output.read_bytes()


@pytest.mark.parametrize("value", ['"True"', "true", "1"])
def test_J8_a_text_that_servers_take_for_true_counts_as_stream(ground, value):
    body = with_(stream=0).replace(": 0", f": {value}")
    ground.answered(line("a", body=body), 400, "streaming_unsupported", "stream")


@pytest.mark.parametrize("number", ["01", "+1", ".5", "1.", "0x1", "1_0", "--1"])
def test_J9_a_number_that_json_does_not_know_is_an_error_record(ground, number):
    ground.problem(line("a", body=with_(seed=0).replace(": 0", f": {number}")), "invalid_json_line", words="Not JSON: ")


def test_J9_single_quotes_are_an_error_record(ground):
    ground.problem(line("a").replace(b'"', b"'"), "invalid_json_line", words="in double quotes at column 2")


def test_J12_keys_in_any_order_with_escapes_are_the_same_request(ground):
    data = f'{{"url" : "\\/v1\\/chat\\/completions","b\\u006fdy":{HI} ,"custom_id":"\\u0068","method":"POST"}}'.encode()
    assert ground.echoed(data) == [json.loads(HI)]
    assert json.loads(ground.output.read_bytes())["custom_id"] == "h"


@pytest.mark.parametrize("extra", [',"priority":3', ',"_note":"x"', ',"x":{"body":{},"custom_id":"y"}', ',"":null'])
def test_J13_an_unknown_key_is_accepted_with_one_note(ground, extra):
    assert ground.echoed(line("a", extra=extra) + b"\n" + line("b", extra=extra)) == [json.loads(HI)] * 2
    assert len([note for note in ground.notes if "Unknown top-level keys are ignored" in note]) == 1


# -- 3c: the envelope ------------------------------------------------------------------------------------------------


def without(field):
    whole = json.loads(line("a"))
    del whole[field]
    return json.dumps(whole).encode()


def test_E1_no_custom_id_is_an_error_record_with_null(ground):
    ground.problem(without("custom_id"), "missing_required_parameter", "custom_id", None, "custom_id is missing")


@pytest.mark.parametrize("value", ["1", "null", '""', "true", "[]", "{}", "1.5"])
def test_E2_a_custom_id_that_is_no_text_is_an_error_record(ground, value):
    ground.problem(line("x").replace(b'"x"', value.encode(), 1), "invalid_request", "custom_id")


@pytest.mark.parametrize("text", [" a ", "x" * 65, "x" * 10_000, "\U0001f600", "a\nb", "\u2028", "\0", '"\\', "../a"])
def test_E2_any_other_custom_id_is_echoed_exactly(ground, text):
    for written in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        [row] = ground.both(line(written))
        assert row["custom_id"] == text


def test_E3_a_repeated_custom_id_runs_each_time_with_one_note(ground):
    bodies = [with_(n=number) for number in range(3)]
    data = b"\n".join(line(name, body=body) for name, body in zip("aba", bodies, strict=True))
    rows = ground.both(data)
    assert [row["custom_id"] for row in rows] == ["a", "b", "a"]
    assert [row["response"]["body"]["echo"]["n"] for row in rows] == [0, 1, 2]
    [note] = [note for note in ground.notes if "repeat" in note]
    assert note.startswith("1 line")


def test_E4_no_method_is_an_error_record(ground):
    ground.problem(without("method"), "missing_required_parameter", "method", "a", "method is missing")


@pytest.mark.parametrize("method", ["GET", "", "PUT"])
def test_E5_another_method_is_an_error_record(ground, method):
    ground.problem(line("a", method=method), "invalid_request", "method", "a", f"method must be POST, not {method!r}")


def test_E5_post_in_small_letters_is_accepted(ground):
    assert ground.echoed(line("a", method="post")) == [json.loads(HI)]


def test_E6_no_url_is_an_error_record(ground):
    ground.problem(without("url"), "missing_required_parameter", "url", "a", "url is missing")
    bad = line("a").replace(f'"{CHAT}"'.encode(), b"null")
    ground.problem(bad, "missing_required_parameter", "url", "a", "url is null")
    ground.problem(bad.replace(b"null", b"7"), "invalid_request", "url", "a", "url must be a string, not a number")


def test_E7_no_body_is_an_error_record(ground):
    ground.problem(without("body"), "missing_required_parameter", "body", "a", "body is missing")
    ground.problem(line("a", body="null"), "missing_required_parameter", "body", "a", "body is null")
    for body in ('"text"', "[]", "1", json.dumps(HI)):
        ground.problem(line("a", body=body), "invalid_request", "body", "a", "body must be a JSON object")


def test_E8_endpoints_may_be_mixed(ground):
    data = line("a") + b"\n" + line("b", url="/v1/embeddings", body='{"model":"m","input":"x"}')
    assert [echo.get("input") for echo in ground.echoed(data)] == [None, "x"]


@pytest.mark.parametrize(
    "url",
    ["/chat/completions", "v1/chat/completions", "chat/completions", f"{CHAT}/", f"{CHAT}?x=1", f"{CHAT}/?a=/b#c",
     f"https://api.openai.com{CHAT}", f"http://169.254.169.254{CHAT}?api-version=2"],
)  # fmt: skip
def test_E9_a_url_is_normalised(ground, url):
    assert ground.echoed(line("a", url=url)) == [json.loads(HI)]


@pytest.mark.parametrize("url", ["/V1/CHAT/COMPLETIONS", "/v1/v1/chat/completions", "/", "", "https://api.openai.com"])
def test_E9_an_unknown_url_is_answered_404(ground, url):
    message = ground.answered(line("a", url=url), 404, "invalid_url", "url")
    assert message == f"URL {url} is not a supported endpoint. Supported endpoints: {', '.join(ENDPOINTS)}"


def test_E10_completions_are_supported(ground):
    body = '{"model":"m","prompt":["a","b"],"max_tokens":2,"echo":true,"logprobs":1}'
    ground.both(line("a", url="/v1/completions", body=body))
    assert b'"echo":' + body.encode() in ground.output.read_bytes()


@pytest.mark.parametrize("url", ["/anything/score", "/v1/v1/score", "/foo/rerank"])
def test_E11_score_under_any_other_path_is_an_error(ground, url):
    body = '{"model":"m","queries":"q","documents":["d"],"query":"q"}'
    ground.answered(line("a", url=url, body=body), 404, "invalid_url", "url")


def test_E12_responses_are_supported_and_what_is_not_is_told(ground):
    assert ground.echoed(line("a", url="/v1/responses", body='{"input":"hi"}')) == [{"input": "hi"}]
    for url in ("/v1/moderations", "/v1/images/generations", "/v1/videos"):
        message = ground.answered(line("a", url=url, body='{"input":"hi"}'), 404, "invalid_url", "url")
        assert "/v1/responses" in message
        assert [note for note in ground.notes if url in note]


def test_E13_one_bad_line_among_ten_thousand_is_one_error_record(ground):
    lines = [line(f"id-{number}") for number in range(10_000)]
    lines[7_000] = lines[7_000][:-1]
    data = b"\n".join(lines)
    assert "line 7,001, column " in ground.refused(data)
    rows = ground.run(data)
    assert [row["custom_id"] for row in rows] == [None if n == 7_000 else f"id-{n}" for n in range(10_000)]
    assert Counter(row["error"] and row["error"]["code"] for row in rows) == {None: 9_999, "invalid_json_line": 1}
    assert (ground.summary.counts.completed, ground.summary.counts.failed) == (9_999, 1)
    assert not ground.summary.all_failed


# -- 3d: bodies ------------------------------------------------------------------------------------------------------


def test_B1_without_a_model_the_engines_is_used(ground):
    assert ground.echoed(line("a", body='{"messages":[]}'), served_model_name="served") == [{"messages": []}]
    assert ground.echoed(line("a", body='{"messages":[],"model":null}'), served_model_name="served")


def test_B2_an_unknown_model_is_answered_404(ground):
    data = line("a") + b"\n" + line("b", body='{"model":"served","messages":[]}')
    for on_invalid in ("fail", "row"):
        bad, good = ground.run(data, on_invalid, served_model_name="served")
        assert good["response"]["status_code"] == 200
        assert bad["error"] is None
        assert bad["response"]["status_code"] == 404
        assert bad["response"]["body"]["error"]["code"] == "model_not_found"
        assert bad["response"]["body"]["error"]["param"] == "model"
        assert [note for note in ground.notes if "a model that is not served" in note]
    assert [
        row["response"]["status_code"] for row in ground.both(data, served_model_name="x", ignore_request_model=True)
    ] == [
        200,
        200,
    ]


@pytest.mark.parametrize("on_invalid", ["fail", "row"])
def test_B2_a_file_in_which_no_line_asks_for_the_served_model_is_refused(ground, on_invalid):
    with pytest.raises(
        UsageError, match=r"asks for the model that is served: the lines ask for 'm', served is 'served'"
    ):
        ground.prepare(line("a"), on_invalid, served_model_name="served")
    assert not ground.output.exists()


def test_B3_two_models_in_a_file_are_judged_line_by_line(ground):
    data = b"\n".join(line(name, body=f'{{"model":"{name}","messages":[]}}') for name in "abc")
    rows = ground.both(data, served_model_name=("a", "c"))
    assert [row["response"]["status_code"] for row in rows] == [200, 404, 200]


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [(CHAT, '{"model":"m"}', "messages"), (CHAT, '{"prompt":"x"}', "messages"), ("/v1/completions", "{}", "prompt"),
     ("/v1/responses", "{}", "input"), ("/v1/embeddings", "{}", "input"), ("/score", '{"text_1":"x"}', "text_2"),
     ("/v2/rerank", '{"query":"x"}', "documents"), ("/v1/audio/transcriptions", '{"file":"x"}', "file_url")],
)  # fmt: skip
def test_B4_a_body_without_what_its_endpoint_needs_is_answered_400(ground, url, body, field):
    data = line("a") + b"\n" + line("b", url=url, body=body)
    assert "line 2: invalid_request: body." in ground.refused(data)
    _, row = ground.run(data)
    assert (row["custom_id"], row["error"], row["response"]["status_code"]) == ("b", None, 400)
    error = row["response"]["body"]["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "invalid_request",
        f"body.{field}",
        "invalid_request_error",
    )


ENGINES_BUSINESS = {
    "B5 no messages": '{"messages":[]}',
    "B5 null": '{"messages":null}',
    "B5 content null": '{"messages":[{"role":"user","content":null}]}',
    "B5 roles": '{"messages":[{"role":"assistant","content":"x"},{"role":"nobody","content":"y"},7]}',
    "B7 stream_options": '{"messages":[],"stream_options":{"include_usage":true}}',
    "B7 stream false": '{"messages":[],"stream":false}',
    "B8 n": '{"messages":[],"n":3}',
    "B8 n 0": '{"messages":[],"n":0}',
    "B8 n -1": '{"messages":[],"n":-1}',
    "B8 n 10000": '{"messages":[],"n":10000}',
    "B9 max_tokens": '{"messages":[],"max_tokens":-1}',
    "B9 max_tokens 0": '{"messages":[],"max_tokens":0}',
    "B9 max_tokens large": '{"messages":[],"max_tokens":1000000}',
    "B16 others": '{"messages":[],"priority":-1,"cache_salt":"s","user":"u","metadata":{"a":"b"},"store":true,'
    '"service_tier":"flex"}',
    "B17 unknown": '{"messages":[],"no_such_field":{"a":[1,2,{"b":null}]}}',
}


@pytest.mark.parametrize("body", ENGINES_BUSINESS.values(), ids=ENGINES_BUSINESS)
def test_B5_B7_B8_B9_B16_B17_what_a_parameter_means_is_the_engines_business(ground, body):
    assert ground.echoed(line("a", body=body)) == [json.loads(body)]
    assert b'"echo":' + body.encode() in ground.output.read_bytes()


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_B5_to_B10_what_the_engine_refuses_is_answered_so_and_the_others_are_run(ground, status):
    lines = [line(f"id-{number}") for number in range(20)]
    lines[9] = line("too long", body=with_(echo={"status": status}))
    rows = ground.both(b"\n".join(lines))
    assert Counter(row["response"]["status_code"] for row in rows) == {200: 19, status: 1}
    assert rows[9]["response"]["status_code"] == status
    assert rows[9]["response"]["body"]["error"]["message"] == f"scripted status {status}"
    assert rows[9]["error"] is None


@pytest.mark.parametrize("url", [CHAT, "/v1/completions", "/v1/responses"])
def test_B6_a_streamed_request_is_answered_400_and_the_others_are_run(ground, url):
    body = '{"messages":[],"prompt":"x","input":"x","stream":true,"echo":{"fault":"hang"}}'
    ground.answered(line("a", url=url, body=body), 400, "streaming_unsupported", "stream")
    data = line("a") + b"\n" + line("b", url=url, body=body) + b"\n" + line("c")
    assert [row["response"]["status_code"] for row in ground.both(data)] == [200, 400, 200]


def test_B9_a_request_that_never_ends_is_ended_by_its_timeout(ground):
    data = line("a", body=with_(echo={"fault": "hang"})) + b"\n" + line("b")
    for on_invalid in ("fail", "row"):
        hung, good = ground.run(data, on_invalid, timeout=0.05, max_attempts=1)
        assert hung["response"] is None
        assert hung["error"]["code"] == "request_timeout"
        assert good["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("fault", "code"), [("error", "engine_error"), ("invalid", "invalid_answer"), ("nan", "invalid_answer")]
)
def test_a_request_that_breaks_its_answer_is_a_row(ground, fault, code):
    data = line("a", body=with_(echo={"fault": fault})) + b"\n" + line("b")
    bad, good = ground.both(data, max_attempts=1)
    assert (bad["response"], bad["error"]["code"]) == (None, code)
    assert good["response"]["status_code"] == 200


# -- answers ---------------------------------------------------------------------------------------------------------


class Scripted(Engine):
    """Gives prepared bodies, by the request's place."""

    name = "scripted"
    summary = "prepared bodies"
    endpoints = frozenset(ENDPOINTS)
    max_inflight = 4
    models = None

    def __init__(self, *answers):
        super().__init__(EngineContext(), NoOptions())
        self.answers = answers

    async def answer(self, request):
        await asyncio.sleep(0)
        return self.answers[request.index]


def rows_for(*bodies):
    async def collect():
        engine = Scripted(*(Answer(200, body) for body in bodies))
        return [row async for row in overnight.run_lines([line(f"r{n}") for n in range(len(bodies))], engine)]

    return asyncio.run(collect())


GOOD_ANSWERS = [
    (rb'{"t":"\ud800"}', "\ud800"),
    (b'{"t":"\xed\xa0\x80"}', "\ud800"),
    (b'{"t":"\xe2\x80\xa8\xe2\x80\xa9\xc2\x85"}', "\u2028\u2029\x85"),
    (b'{"t":"\\u0000"}', "\0"),
    (b'{\r\n  "t" :\n"x"\n}\n', "x"),
    (b'{"t":"' + b"y" * 5_000_000 + b'"}', "y" * 5_000_000),
    (rb'{"t":"\u000b\u000c\u001c\n"}', "\x0b\x0c\x1c\n"),
]
BAD_ANSWERS = [b'{"t":NaN}', b'{"t":Infinity}', b'{"t":-Infinity}', b'{"t":"\x00"}', b'{"t":"\xff"}', b"", b"<html>",
               b'{"t":1', b'"t" 1', b'{"t":"a\nb"}', b"1\n2"]  # fmt: skip


def test_F13_O14_any_answer_becomes_one_valid_line_in_its_place():
    bodies = [body for pair in zip(GOOD_ANSWERS, BAD_ANSWERS, strict=False) for body in (pair[0][0], pair[1])]
    bodies += BAD_ANSWERS[len(GOOD_ANSWERS) :]
    rows = rows_for(*bodies)
    text = b"".join(row.data for row in rows).decode()
    lines = text.splitlines()
    assert len(lines) == len(bodies) == len(rows)
    expected = dict(GOOD_ANSWERS)
    for index, (body, each) in enumerate(zip(bodies, lines, strict=True)):
        whole = json.loads(each, parse_constant=refuse_constant)
        assert whole["custom_id"] == f"r{index}"
        if body in expected:
            assert whole["response"]["body"] == {"t": expected[body]}
            assert rows[index].json() == whole
        else:
            assert whole["response"] is None
            assert whole["error"]["code"] == "invalid_answer"


@given(st.lists(st.binary(max_size=30) | st.text(max_size=8).map(json.dumps).map(str.encode), max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_answers_become_as_many_valid_lines(bodies):
    rows = rows_for(*bodies)
    lines = b"".join(row.data for row in rows).decode().splitlines()
    assert [json.loads(each, parse_constant=refuse_constant)["custom_id"] for each in lines] == [
        f"r{index}" for index in range(len(bodies))
    ]


# -- whatever the input ----------------------------------------------------------------------------------------------

pieces = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [line("a"), line("b"), line("a")[:40], line("a")[40:], b"\r", b"\x00", b"{}", b"[1]", b" ", line("c", url="/x"),
         line("d", body=with_(stream=True)), line("e", body="{}"), line("\\ud800"), b"[" * 3000, b"\xef\xbb\xbf",
         line("f", extra=',"x":' + "[" * 960 + "]" * 960), line("g", body='{"messages":' + "[" * 970 + "]" * 970 + "}")]
    ),
)  # fmt: skip


@given(st.lists(pieces, max_size=8).map(b"\n".join))
@settings(max_examples=60, deadline=None)
def test_any_bytes_give_one_row_for_each_line_that_is_not_blank(tmp_path_factory, data):
    data = line("first") + b"\n" + data
    rows = Ground(tmp_path_factory.mktemp("any")).run(data)
    assert len(rows) == sum(1 for each in data.split(b"\n") if each and not each.isspace())


@given(st.binary(max_size=60))
@settings(max_examples=40, deadline=None)
def test_any_file_is_run_or_refused_in_our_own_words(tmp_path_factory, data):
    ground = Ground(tmp_path_factory.mktemp("any"))
    for on_invalid in ("fail", "row"):
        try:
            ground.run(data, on_invalid)
        except overnight.errors.InputError as error:
            code = error.exit_code
        else:
            code = 0
        assert code in {0, 2}
        assert ground.output.exists() == (code == 0)
        ground.output.unlink(missing_ok=True)
