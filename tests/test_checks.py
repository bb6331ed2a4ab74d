"""What is refused before the model loads, and what is only noted."""

from collections import Counter

import pytest

from overnight.checks import list_notes, refuse_batch
from overnight.engines.base import EngineContext
from overnight.engines.echo import EchoEngine
from overnight.errors import UsageError
from overnight.judge import OTHERS, Verdict, shorten
from overnight.options import RunOptions

OPTIONS = RunOptions(input_file="in.jsonl", output_file="out.jsonl", engine="echo")


def serving(*names: str) -> EchoEngine:
    return EchoEngine(EngineContext(served=names))


def asking(models: dict[str | None, int], **facts) -> Verdict:
    return Verdict(requests=sum(models.values()), models=Counter(models), **facts)


def test_a_file_whose_lines_all_ask_for_another_model_is_refused():
    with pytest.raises(UsageError, match=r"'gpt'.*'mine'.*--ignore-request-model"):
        refuse_batch(asking({"gpt": 3}), OPTIONS, serving("mine"))


def test_a_served_model_may_be_among_more_names_than_are_kept():
    refuse_batch(asking({"gpt": 3, OTHERS: 5}), OPTIONS, serving("mine"))


def test_a_served_name_that_is_kept_shortened_is_known():
    name = "org/" + "x" * 300
    refuse_batch(asking({shorten(name): 3}), OPTIONS, serving(name))
    assert not list(list_notes(asking({shorten(name): 3}), OPTIONS, serving(name)))


def test_lines_without_a_model_are_served():
    refuse_batch(asking({None: 1, "gpt": 3}), OPTIONS, serving("mine"))


def test_lines_that_ask_for_a_model_that_is_not_served_are_counted():
    notes = list(list_notes(asking({"mine": 1, "gpt": 3}), OPTIONS, serving("mine")))
    assert notes == ["3 lines ask for a model that is not served: each gets a 404 row"]


def test_a_note_shows_no_terminal_escapes_from_the_file():
    verdict = asking({None: 1}, unknown_keys={"\x1b[2J"}, endpoints=Counter({"/v1/\x1b[2J": 1}))
    notes = "\n".join(list_notes(verdict, OPTIONS, serving()))
    assert "\x1b" not in notes
    assert "1 line asks for" in notes


def test_one_line_is_spoken_of_in_the_singular():
    verdict = asking({None: 1}, duplicates=1, problem_codes=Counter({"invalid_url": 1}))
    notes = list(list_notes(verdict, OPTIONS, serving()))
    assert notes[0].startswith("1 line repeats an earlier custom_id")
    assert notes[1].startswith("1 line is no request")
