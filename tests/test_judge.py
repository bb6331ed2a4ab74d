"""judge: the first pass finds the same, block by block, as a reading line by line would."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.duplicates import Duplicates
from overnight.judge import (
    MAX_KEPT_NAMES,
    MAX_KEPT_PROBLEMS,
    OTHERS,
    describe_problem,
    judge_source,
    number_lines,
    report_problems,
)
from overnight.parse import parse_request
from overnight.records import Problem
from overnight.source import MIN_LINE_LIMIT, open_source

CHAT = "/v1/chat/completions"


def good(custom_id="a", url=CHAT, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"messages": [], **body}}).encode()


def judge(path, data, **facts):
    path.write_bytes(data)
    with open_source(str(path), stage=path.with_name("staged"), max_line_bytes=MIN_LINE_LIMIT) as source:
        duplicates = Duplicates(path.parent)
        return judge_source(source, duplicates=duplicates, **facts)


def by_line(data):
    """The verdict of a reading line by line."""
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    found = [(n, parse_request(line, 0, n)) for n, line in enumerate(lines, 1) if line and not line.isspace()]
    problems = [(n, each) for n, each in found if isinstance(each, Problem)]
    requests = [each for _, each in found if not isinstance(each, Problem)]
    ids = Counter(each.custom_id for each in requests)
    return {
        "lines": len(lines),
        "requests": len(found),
        "good": len(requests),
        "problems": problems,
        "problem_codes": Counter(each.code for _, each in problems),
        "endpoints": Counter(each.endpoint or each.url for each in requests),
        "models": Counter(each.model for each in requests),
        "streamed": sum(each.is_streamed for each in requests),
        "duplicates": ids.total() - len(ids),
    }


def assert_same(path, data):
    verdict = judge(path, data)
    expected = by_line(data)
    assert {name: getattr(verdict, name) for name in expected} == expected
    assert verdict.bytes == len(data)
    assert verdict.problem_count == len(expected["problems"])


ENDS = [b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n", b"\n \t\n", b"\r", b"", b" ", b",\n", b"\n\x0b\n"]
PIECES = [
    good(), good("b"), good("a", model="m"), good("c", "/v1/none", model="n"), good("d", stream=True),
    good("e", model=7), b" " + good("f"), good("g") + b" ", good("h").replace(b'"POST"', b'"post"'),
    good("é\u2028😀"),
    '{"custom_id":"é","method":"POST","url":"/score","body":{"text_1":"\u2028","text_2":"😀"}}'.encode(),
    good("i")[:-1] + b',"_note":{}}', good("j")[:-1] + b',"custom_id":"a"}', good("k").replace(b"messages", b"prompts"),
    good("l").replace(b"POST", b"GET"), good(""), good("m")[:50], good("m")[50:], good("n").replace(b" ", b"\n", 3),
    good("o").replace(b"[]", b"NaN"), good("p").replace(b"[]", b'"\\ud800"'), good("q").replace(b"[]", b'"\xff"'),
    good("r").replace(b'{"messages": []}', b"[]"), b"{}", b"[1]", b"null", b"}{", b"{", b"}", b'""', b"# x",
    b"{}{}", good("s") + good("t"), b"[" * 2000, good("u").replace(b"[]", b"[" * 600 + b"]" * 600),
]  # fmt: skip
mixes = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(ENDS)), max_size=12).map(
    lambda pairs: b"".join(piece + end for piece, end in pairs)
)


@given(mixes)
@settings(max_examples=400, deadline=None)
def test_the_verdict_is_that_of_a_reading_line_by_line(tmp_path_factory, data):
    assert_same(tmp_path_factory.getbasetemp() / "mix.jsonl", data)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_get_a_verdict(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    if not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf")) and data[1:4] != b"\x2a\x4d\x18":
        assert_same(path, data)
    if not data.startswith(b"\xef\xbb\xbf"):
        assert_same(path, good() + b"\n" + data)
        assert_same(path, good("b") + b"\n" + data.replace(b"\n", good()))


@pytest.mark.parametrize("seed", range(6))
def test_the_verdict_is_the_same_over_many_blocks(tmp_path, seed):
    dice = random.Random(seed)
    data = b"".join(
        good(f"id-{dice.randrange(4000)}", model=dice.choice("xyz")) + b"\n"
        if dice.random() < 0.999
        else dice.choice(PIECES) + dice.choice(ENDS)
        for _ in range(12_000)
    )
    assert_same(tmp_path / "in.jsonl", data)


@pytest.mark.parametrize(
    "data",
    [good() + good("b") + b"\n" + good("c").replace(b" ", b"\n", 1) + b"\n",
     good() + b"\r" + good("b") + b"\n" + good("c")[:30] + b"\n" + good("c")[30:] + b"\n",
     b'{"a":{}}\n'.join([good()] * 3), b'{"custom_id":"a","method":"POST","url":"/x","body":{"a":{"b":1}\n}}\n{}{}\n'],
)  # fmt: skip
def test_as_many_objects_as_lines_do_not_hide_two_on_one_line(tmp_path, data):
    assert_same(tmp_path / "in.jsonl", data)
    assert judge(tmp_path / "in.jsonl", data).problem_count > 0


def test_blank_lines_count_in_line_numbers_alone(tmp_path):
    verdict = judge(tmp_path / "in.jsonl", b"\n \t\r\n" + good() + b"\n\n[1]\n\n")
    assert (verdict.lines, verdict.requests, verdict.good) == (6, 2, 1)
    assert [number for number, _ in verdict.problems] == [5]


def test_only_what_runs_counts_as_repeated(tmp_path):
    bad = good("a").replace(b"messages", b"prompts")
    for around in (b"", b"[1]\n"):
        assert judge(tmp_path / "in.jsonl", around + good("a") + b"\n" + bad + b"\n" + good("b")).duplicates == 0
        assert judge(tmp_path / "in.jsonl", around + good("a") + b"\n" + bad + b"\n" + good("a")).duplicates == 1


def test_a_line_beyond_the_limit_is_a_problem_that_names_the_limit(tmp_path):
    data = good() + b"\n" + good("b", x="x" * MIN_LINE_LIMIT) + b"\n" + good("c") + b"\n"
    verdict = judge(tmp_path / "in.jsonl", data)
    assert (verdict.lines, verdict.good, verdict.requests) == (3, 2, 3)
    [(number, problem)] = verdict.problems
    assert (number, problem.code) == (2, "invalid_json_line")
    size = len(data.split(b"\n")[1])
    assert problem.message == f"The line has {size:,} bytes; --max-line-bytes allows {MIN_LINE_LIMIT:,}"


def test_names_beyond_a_thousand_are_counted_together(tmp_path):
    total = MAX_KEPT_NAMES + 300
    data = b"".join(good(str(n), f"/{n}", model=f"m{n}") + b"\n" for n in range(total))
    verdict = judge(tmp_path / "in.jsonl", data + data)
    for names in (verdict.endpoints, verdict.models):
        assert len(names) == MAX_KEPT_NAMES + 1
        assert names.total() == 2 * total
        assert names[OTHERS] == 600
    assert verdict.duplicates == total


def test_long_names_are_shortened_and_still_counted(tmp_path):
    data = b"".join(
        good(str(n), "/" + "u" * 5000, model="m" * 5000)[:-1] + b',"%s":1}\n' % (b"k" * 5000) for n in range(9)
    )
    verdict = judge(tmp_path / "in.jsonl", data)
    for names in (verdict.endpoints, verdict.models):
        [(name, count)] = names.items()
        assert len(name) < 300
        assert count == 9
    [key] = verdict.unknown_keys
    assert len(key) < 300


def test_a_line_of_very_many_unknown_keys_does_not_keep_them_all(tmp_path):
    data = good()[:-1] + b"".join(b',"k%d":1' % n for n in range(5000)) + b"}\n"
    verdict = judge(tmp_path / "in.jsonl", data)
    assert len(verdict.unknown_keys) == MAX_KEPT_NAMES
    assert verdict.good == 1


def test_problems_beyond_ten_thousand_are_only_counted(tmp_path):
    seen = []
    done = []
    verdict = judge(
        tmp_path / "in.jsonl",
        b"[1]\n" * (MAX_KEPT_PROBLEMS + 5),
        on_problem=lambda number, _: seen.append(number),
        on_block=done.append,
    )
    assert len(verdict.problems) == MAX_KEPT_PROBLEMS
    assert verdict.problem_count == MAX_KEPT_PROBLEMS + 5
    assert seen == list(range(1, MAX_KEPT_PROBLEMS + 6))
    assert done[-1] == verdict.bytes


def test_the_report_shows_twenty_and_counts_the_rest(tmp_path):
    verdict = judge(tmp_path / "in.jsonl", b"[1]\n" * 1500 + b"x\n" * 30)
    report = report_problems(verdict, "in.jsonl").splitlines()
    assert len(report) == 21
    assert report[0] == "  line 1: invalid_request: A request must be a JSON object, not an array"
    assert report[20] == (
        "  … and 1,510 more (in all invalid_request: 1,500, invalid_json_line: 30). "
        "List them: overnight validate -i in.jsonl"
    )
    assert len(report_problems(judge(tmp_path / "in.jsonl", b"[1]\n" * 20), "in.jsonl").splitlines()) == 20


def test_a_problem_in_words_says_where():
    assert describe_problem(1234, Problem("c", "why", column=5)) == "line 1,234, column 5: c: why"
    assert describe_problem(1, Problem("c", "why")) == "line 1: c: why"


def test_number_lines_gives_what_gets_a_row(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\na\n \r\n\x0c\nb")
    with open_source(str(path), stage=path.with_name("staged"), max_line_bytes=MIN_LINE_LIMIT) as source:
        assert [each for block in source.first_pass() for each in number_lines(block)] == [(2, b"a"), (5, b"b")]
