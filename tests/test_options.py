"""options: what texts and TOML values stand for, and what is refused with which words."""

import contextlib
import tomllib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.errors import UnknownOption, UsageError
from overnight.options import (
    TOPICS,
    RunOptions,
    list_options,
    make,
    option,
    parse_count,
    parse_duration,
    parse_size,
    shaping,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0", 0), ("1.5s", 1.5), ("10m", 600), ("10 min", 600), ("2h", 7200), ("1D", 86400), ("250ms", 0.25),
     (" 3 s ", 3), ("1e-05", 1e-05), ("1.5E3", 1500)],
)  # fmt: skip
def test_a_duration_is_read(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-1", "+1", "1x", "1 2", "1h30m", ".5", "1.", "inf", "nan", "one", "9" * 400, "1e999"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="write a time such as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("512M", 512 << 20), ("512 mb", 512 << 20), ("1G", 1 << 30),
     ("64KiB", 1 << 16), ("1.5k", 1536), ("7B", 7), ("0", 0)],
)  # fmt: skip
def test_a_size_is_read(text, size):
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", ["", "M", "-1", "1T", "1 2", "0x10", "1iM", "inf", "9" * 400, "1e999G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="write a size such as"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "-1", "", "1.0", "1e3", "many", "+1", "²", "9" * 5000])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match=r"whole number|digits"):
        parse_count(text)


def test_a_count_is_read():
    assert parse_count("1") == 1
    assert parse_count(" 64 ") == 64


@given(st.text(max_size=20))
@settings(deadline=None)
def test_any_text_is_read_or_refused_by_a_value_error(text):
    for parse in (parse_duration, parse_size, parse_count):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@given(st.floats(0, 1e300))
@settings(deadline=None)
def test_a_float_from_python_is_the_duration_it_says(seconds):
    assert make(RunOptions, {"timeout": seconds}).timeout == seconds


def test_values_of_toml_are_taken_with_their_types():
    text = 'max_inflight = 8\ntimeout = 1.5\noverwrite = true\nserved_model_name = ["a", "b"]\nmax_line_bytes = "1M"'
    options = make(RunOptions, tomllib.loads(text))
    assert options.max_inflight == 8
    assert options.timeout == 1.5
    assert options.overwrite is True
    assert options.served_model_name == ("a", "b")
    assert options.max_line_bytes == 1 << 20
    assert make(RunOptions, tomllib.loads("timeout = 90")).timeout == 90.0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("overwrite", "yes", "--overwrite cannot be 'yes': it takes true or false"),
     ("overwrite", 1, "it takes true or false"),
     ("max_inflight", 0, "--max-inflight cannot be 0: it must be a whole number of at least 1"),
     ("max_inflight", True, "it takes a number"),
     ("max_inflight", [1], "it takes a number"),
     ("max_attempts", 2.5, "whole number"),
     ("timeout", "soon", "--timeout cannot be 'soon': write a time such as 90, 30s, 10m or 2h"),
     ("timeout", {}, "it takes a number"),
     ("timeout", float("nan"), "write a time"),
     ("timeout", -1, "write a time"),
     ("model", True, "it takes a text"),
     ("model", ("a",), "it takes a text"),
     ("on_invalid", "skip", "--on-invalid cannot be 'skip': it must be one of fail, row"),
     ("served_model_name", ["a", True], "it takes a text"),
     ("served_model_name", ["a", None], "it takes a text")],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_with_its_flag_and_why(name, value, words):
    with pytest.raises(UsageError) as caught:
        make(RunOptions, {name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize("name", list(list_options(RunOptions)))
def test_none_stands_for_the_default(name):
    assert getattr(make(RunOptions, {name: None}), name) == list_options(RunOptions)[name].default


def test_a_flag_that_may_have_a_value_is_taken_with_and_without():
    values = {True: "failed", False: "", None: "", "failed": "failed", "all": "all"}
    assert {value: make(RunOptions, {"retry_errors": value}).retry_errors for value in values} == values
    with pytest.raises(UsageError, match="one of failed, all"):
        make(RunOptions, {"retry_errors": "some"})


def test_one_text_for_an_option_that_may_be_repeated_is_one_value():
    assert make(RunOptions, {"served_model_name": "abc"}).served_model_name == ("abc",)


@pytest.mark.parametrize(
    ("wrong", "near"), [("max_inflght", "max_inflight"), ("on_invald", "on_invalid"), ("overwite", "overwrite")]
)
def test_an_unknown_name_is_refused_and_the_nearest_named(wrong, near):
    with pytest.raises(UnknownOption, match=f"There is no option {wrong} of overnight run. Did you mean {near}?"):
        make(RunOptions, {wrong: 1}, " of overnight run")


def test_a_name_like_no_other_gets_no_hint():
    with pytest.raises(UnknownOption) as caught:
        make(RunOptions, {"zzzzzzzz": 1})
    assert "Did you mean" not in str(caught.value)


def test_every_option_has_its_help_its_topic_and_a_default_that_it_would_take():
    for each in list_options(RunOptions).values():
        assert each.help
        assert each.topic in TOPICS
        assert each.flag == "--" + each.name.replace("_", "-")
        assert each.default == "" or each.read(each.default) == each.default


def test_what_shapes_answers_is_told_apart():
    shapes = shaping(RunOptions(engine="echo", timeout=1.0))
    assert shapes["engine"] == "echo"
    assert "timeout" not in shapes
    assert "input_file" not in shapes


def test_an_engines_own_table_is_read_the_same_way():
    @dataclass(frozen=True, kw_only=True)
    class Own:
        level: int = option(3, "How much", "engine", shapes=True)
        ratio: float | None = option(None, "How much of it", "engine")
        places: tuple[int, ...] = option((), "Where", "engine")
        inner: int = 9

    assert list(list_options(Own)) == ["level", "ratio", "places"]
    made = make(Own, {"level": "7", "ratio": "0.5", "places": ["1", 2]})
    assert made == Own(level=7, ratio=0.5, places=(1, 2))
    assert shaping(made) == {"level": 7}
    with pytest.raises(UsageError, match="--level cannot be 'x'"):
        make(Own, {"level": "x"})
    with pytest.raises(UnknownOption):
        make(Own, {"inner": 1})
