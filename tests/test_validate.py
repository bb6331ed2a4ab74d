"""`overnight validate`: every problem by place and code, counts, exit codes."""

import gzip
import json
from pathlib import Path

import pytest

from conftest import Ended, overnight, request_line, write_requests

EMBEDDINGS = "/v1/embeddings"


def validate(folder: Path, text: str, code: int = 0) -> list[str]:
    """The lines of the report on an input."""
    (folder / "in.jsonl").write_text(text)
    ended = overnight("validate", "-i", "in.jsonl", cwd=folder)
    return report(ended, code)


def report(ended: Ended, code: int = 0) -> list[str]:
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def counted(lines: list[str]) -> dict[str, str]:
    """The counts of a report, by what is counted."""
    pairs = (line.split(maxsplit=1) for line in lines if line.startswith("   "))
    return {what: count for count, what in pairs}


def test_a_good_file_is_counted_by_endpoint_and_model(tmp_path: Path) -> None:
    lines = [
        request_line("a", model="small"), request_line("b", model="small"), request_line("c", EMBEDDINGS, input="x"),
    ]  # fmt: skip
    text = "\n".join(lines)
    found = validate(tmp_path, text)
    assert found[0] == f"in.jsonl: 3 lines, {len(text)} bytes, 3 requests, 0 with problems"
    assert counted(found) == {"/v1/chat/completions": "2", EMBEDDINGS: "1", "small": "2", "(none named)": "1"}


def test_one_is_not_called_many(tmp_path: Path) -> None:
    assert ": 1 line, " in validate(tmp_path, request_line("a"))[0]
    assert ", 1 request, " in validate(tmp_path, request_line("a"))[0]


def test_an_empty_file_is_good(tmp_path: Path) -> None:
    assert validate(tmp_path, "") == ["in.jsonl: 0 lines, 0 bytes, 0 requests, 0 with problems"]


def test_every_problem_is_named_by_line_code_and_column(tmp_path: Path) -> None:
    no_url = json.dumps({"custom_id": "b", "method": "POST", "body": {}})
    no_messages = json.dumps({"custom_id": "d", "method": "POST", "url": "/v1/chat/completions", "body": {}})
    text = "\n".join([request_line("a"), no_url, "", '{"custom_id": }', no_messages, *["[]"] * 30])
    found = validate(tmp_path, text, code=2)
    problems = [line for line in found if line.startswith("line ")]
    assert len(problems) == 33
    assert problems[0].startswith("line 2: missing_required_parameter: ")
    assert problems[1].startswith("line 4, column 15: invalid_json_line: ")
    assert problems[2].startswith("line 5: ")
    assert "messages" in problems[2]
    assert "34 requests, 33 with problems" in found[34]


def test_the_problems_are_counted_by_code(tmp_path: Path) -> None:
    assert counted(validate(tmp_path, "{\n{\n{\n", code=2)) == {"invalid_json_line": "3"}


def test_repeated_custom_ids_are_named_with_both_lines_and_are_no_error(tmp_path: Path) -> None:
    lines = [request_line(name) for name in ("a", "b", "a", "c", "b", "a")]
    found = validate(tmp_path, "\n".join(lines))
    assert [line.partition(" (")[0] for line in found[:3]] == [
        "line 3: duplicate_custom_id: custom_id 'a' stood on line 1",
        "line 5: duplicate_custom_id: custom_id 'b' stood on line 2",
        "line 6: duplicate_custom_id: custom_id 'a' stood on line 1",
    ]
    assert counted(found)["duplicate_custom_id: they run all the same"] == "3"


def test_what_will_be_refused_in_the_run_is_said(tmp_path: Path) -> None:
    found = validate(tmp_path, f"{request_line('a', '/v1/nosuch')}\n{request_line('b', stream=True)}\n")
    counts = counted(found)
    assert counts["/v1/nosuch (no endpoint: each gets a 404 row)"] == "1"
    assert counts["streamed: each gets a 400 row"] == "1"


def test_unknown_top_level_keys_are_named(tmp_path: Path) -> None:
    line = json.dumps({**json.loads(request_line("a")), "priority": 1})
    assert "priority" in validate(tmp_path, line)[-1]


@pytest.mark.parametrize("path", ["-", "/dev/stdin", "in.jsonl"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_other_inputs_are_judged_as_plain_files_are(tmp_path: Path, *, path: str, is_packed: bool) -> None:
    data = write_requests(tmp_path / "in.jsonl", 4).read_bytes()
    if is_packed:
        data = gzip.compress(data)
        (tmp_path / "in.jsonl").write_bytes(data)
    found = report(overnight("validate", "-i", path, cwd=tmp_path, stdin=data))
    assert "4 requests, 0 with problems" in found[0]
    assert not any(file.is_file() for file in (tmp_path / "cache").rglob("*"))


def test_a_missing_file_is_one_message(tmp_path: Path) -> None:
    ended = overnight("validate", "-i", "no.jsonl", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "overnight: Cannot read the input no.jsonl: No such file or directory\n"


def test_a_broken_gzip_is_one_message(tmp_path: Path) -> None:
    path = write_requests(tmp_path / "in.jsonl", 2000)
    path.write_bytes(gzip.compress(path.read_bytes())[:-400])
    ended = overnight("validate", "-i", path, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("overnight: Cannot read the input ")


def test_a_line_beyond_the_limit_is_a_problem_that_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request_line("long", filler="x" * 400_000))
    ended = overnight("validate", "-i", "in.jsonl", "--max-line-bytes", "256KiB", cwd=tmp_path)
    found = report(ended, code=2)
    assert "262,144" in found[0]
