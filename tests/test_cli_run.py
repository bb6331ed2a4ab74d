"""`overnight run` from outside: flags and TOML, files and streams, how a run ends."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import COMMAND, Ended, child_environ, ids_of, overnight, read_rows, request_line, write_requests


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "in.jsonl", 5)


def run_echo(folder: Path, *words: object, code: int = 0) -> Ended:
    """Run in.jsonl to out.jsonl; nothing may stand on standard output."""
    ended = overnight("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo", *words, cwd=folder)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    return ended


def write_config(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return "run.toml"


# -- how a run ends ------------------------------------------------------------------------------------------------


def test_a_run_writes_every_row_in_order_and_exits_with_0(tmp_path: Path, requests: Path) -> None:
    ended = run_echo(tmp_path, "--echo-jitter", "20ms")
    assert ids_of(read_rows(tmp_path / "out.jsonl")) == ["r0", "r1", "r2", "r3", "r4"]
    assert "5 of 5 rows" in ended.stderr


def test_some_failed_rows_exit_with_0_and_with_1_where_that_is_asked(tmp_path: Path) -> None:
    lines = [request_line("good"), request_line("bad", echo={"status": 400})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run_echo(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    ended = run_echo(tmp_path, "--fail-on-error", code=1)
    assert "1 failed" in ended.stderr
    assert ids_of(read_rows(tmp_path / "out.jsonl")) == ["good", "bad"]


def test_a_run_whose_every_row_failed_exits_with_1(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 3, echo={"status": 400})
    run_echo(tmp_path, code=1)
    assert len(read_rows(tmp_path / "out.jsonl")) == 3


def test_an_empty_input_gives_an_empty_output_and_0(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    run_echo(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_lost_engine_ends_the_run_with_3_and_leaves_a_prefix(tmp_path: Path) -> None:
    fault = request_line("r5", echo={"fault": "lost", "delay": 0.2})
    lines = [fault if n == 5 else request_line(f"r{n}") for n in range(9)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ended = run_echo(tmp_path, code=3)
    assert "engine echo was lost" in ended.stderr
    rows = ids_of(read_rows(tmp_path / "out.jsonl"))
    assert rows == [f"r{n}" for n in range(len(rows))]
    assert len(rows) <= 5


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_with_its_code_a_prefix_and_the_command_that_goes_on(
    tmp_path: Path, name: str, code: int
) -> None:
    write_requests(tmp_path / "in.jsonl", 2000)
    words = ("run", "-i", "in.jsonl", "-o", "out put.jsonl", "--engine", "echo", "--echo-delay", "50ms")
    child = subprocess.Popen(
        [*COMMAND, *words, "--max-inflight", "2"], cwd=tmp_path, env=child_environ(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    output = tmp_path / "out put.jsonl"
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3)
    child.send_signal(getattr(signal, name))
    out, err = child.communicate(timeout=30)
    assert child.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    rows = ids_of(read_rows(output))
    assert rows == [f"r{n}" for n in range(len(rows))]
    assert 3 <= len(rows) < 2000
    assert f"{len(rows)} of 2,000 rows are written" in err
    assert f"\n  overnight {shlex.join(words)} --max-inflight 2\n" in err


def test_a_second_signal_ends_at_once_what_is_in_flight(tmp_path: Path) -> None:
    lines = [request_line("r0"), request_line("r1", echo={"fault": "hang"})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo", "--grace", "1h")
    child = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env=child_environ(tmp_path), stderr=subprocess.PIPE)
    output = tmp_path / "out.jsonl"
    wait_for(lambda: output.exists() and output.read_bytes().endswith(b"\n"))
    child.send_signal(signal.SIGINT)
    assert child.stderr
    while b"nothing more starts" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    err = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait(20) == 130
    assert "Traceback" not in err
    assert ids_of(read_rows(output)) == ["r0"]


@pytest.mark.parametrize("command", ["run", "validate"])
def test_an_interrupt_while_a_pipe_is_read_leaves_nothing_behind(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "in.fifo")
    words = [command, "-i", "in.fifo", *(["-o", "out.jsonl", "--engine", "echo"] if command == "run" else [])]
    child = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env=child_environ(tmp_path), stderr=subprocess.PIPE)
    with (tmp_path / "in.fifo").open("wb") as pipe:  # opened as soon as the child reads
        pipe.write(b"{}\n")
        pipe.flush()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"Traceback" not in err
    assert err.startswith(b"overnight: ")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def wait_for(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


# -- flags and TOML ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--echo-delay", "300ms"), ("--echo-delay=0.3s",), ("--echo-delay", "0.3")])
def test_a_duration_can_be_written_in_several_ways(tmp_path: Path, requests: Path, words: tuple[str, ...]) -> None:
    run_echo(tmp_path, *words, "--summary-json", "s.json")
    assert 0.3 <= json.loads((tmp_path / "s.json").read_text())["run_s"] < 2


def test_an_engines_options_may_stand_in_the_file_with_dashes_or_underscores(tmp_path: Path, requests: Path) -> None:
    config = write_config(tmp_path, 'echo-log = "log.txt"\necho_delay = 0.3\nmax-inflight = 5\n')
    run_echo(tmp_path, "--config", config, "--summary-json", "s.json")
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["max_inflight"] == 5
    assert summary["run_s"] >= 0.3
    assert len((tmp_path / "log.txt").read_text().split()) == 5


def test_flags_win_over_the_file(tmp_path: Path, requests: Path) -> None:
    text = 'engine = "llama"\nmax_inflight = 3\nfail-on-error = true\necho_delay = "20s"\n'
    words = ("--max-inflight", "2", "--echo-delay", "1ms", "--fail-on-error=false")
    write_requests(requests, 2, echo={"status": 400})
    requests.write_text(requests.read_text() + request_line("good"))
    run_echo(tmp_path, "--config", write_config(tmp_path, text), *words, "--summary-json", "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["max_inflight"] == 2


def test_the_file_alone_can_name_a_whole_run(tmp_path: Path, requests: Path) -> None:
    text = 'input-file = "in.jsonl"\noutput-file = "out.jsonl"\nengine = "echo"\n'
    ended = overnight("run", "--config", write_config(tmp_path, text), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 5


@pytest.mark.parametrize(
    ("text", "gist"),
    [
        ("max-inflite = 3", "Did you mean max_inflight?"),
        ("ekko_delay = 3", "Did you mean echo_delay?"),
        ("help = true", "no option help"),
        ("threads = 2", "threads is an option of the engine llama, not of echo"),
        ("overwrite = 1", "true or false"),
        ('overwrite = "yes"', "true or false"),
        ("max_inflight = true", "--max-inflight"),
        ("max_inflight = [1, 2]", "--max-inflight"),
        ("[echo]\ndelay = 1", "echo"),
        ("max_inflight = ", "is no TOML"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(tmp_path: Path, requests: Path, text: str, gist: str) -> None:
    ended = run_echo(tmp_path, "--config", write_config(tmp_path, text), code=2)
    assert gist in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_config_that_is_not_there_is_refused(tmp_path: Path, requests: Path) -> None:
    assert "no.toml: No such file" in run_echo(tmp_path, "--config", "no.toml", code=2).stderr


@pytest.mark.parametrize("how", ["flags", "list", "text"])
def test_an_option_may_be_repeated(tmp_path: Path, how: str) -> None:
    lines = [request_line("a", model="one"), request_line("b", model="two"), request_line("c", model="three")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words: tuple[str, ...] = ("--served-model-name", "one", "--served-model-name=two")
    if how != "flags":
        value = '["one", "two"]' if how == "list" else '"one"'
        words = ("--config", write_config(tmp_path, f"served-model-name = {value}"))
    run_echo(tmp_path, *words)
    served = [row["response"]["status_code"] for row in read_rows(tmp_path / "out.jsonl")]
    assert served == [200, 404 if how == "text" else 200, 404]


@pytest.mark.parametrize(("size", "code"), [("256KiB", 2), ("1M", 0), ("1048576", 0)])
def test_a_size_bounds_a_line(tmp_path: Path, size: str, code: int) -> None:
    (tmp_path / "in.jsonl").write_text(request_line("long", filler="x" * 300_000))
    ended = run_echo(tmp_path, "--max-line-bytes", size, code=code)
    assert ("--max-line-bytes" in ended.stderr) == (code == 2)


def test_bad_lines_may_become_rows_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{request_line('a')}\n{{\n{request_line('c')}\n")
    run_echo(tmp_path, "--on-invalid", "row")
    rows = read_rows(tmp_path / "out.jsonl")
    assert ids_of(rows) == ["a", None, "c"]
    assert rows[1]["error"]["line"] == 2


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_standard_input_to_standard_output_gives_rows_and_nothing_else(tmp_path: Path, output: str) -> None:
    lines = "\n".join(request_line(f"r{n}") for n in range(4))
    ended = overnight("run", "-i", "-", "-o", output, "--engine", "echo", cwd=tmp_path, stdin=lines)
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line)["custom_id"] for line in ended.stdout.splitlines()] == ["r0", "r1", "r2", "r3"]
    assert "4 of 4 rows" in ended.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_empty_standard_input_gives_no_rows(tmp_path: Path) -> None:
    ended = overnight("run", "-i", "-", "-o", "-", "--engine", "echo", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_fifos_carry_requests_in_and_rows_out(tmp_path: Path) -> None:
    for name in ("in.fifo", "out.fifo"):
        os.mkfifo(tmp_path / name)
    lines = "\n".join(request_line(f"r{n}") for n in range(50))
    rows: list[str] = []
    peers = [
        threading.Thread(target=lambda: (tmp_path / "in.fifo").write_text(lines), daemon=True),
        threading.Thread(target=lambda: rows.extend((tmp_path / "out.fifo").read_text().splitlines()), daemon=True),
    ]
    for peer in peers:
        peer.start()
    ended = overnight("run", "-i", "in.fifo", "-o", "out.fifo", "--engine", "echo", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for peer in peers:
        peer.join(10)
    assert [json.loads(row)["custom_id"] for row in rows] == [f"r{n}" for n in range(50)]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set()


def test_gzip_is_told_by_its_bytes(tmp_path: Path, requests: Path) -> None:
    requests.write_bytes(gzip.compress(requests.read_bytes()))
    run_echo(tmp_path)
    assert len(read_rows(tmp_path / "out.jsonl")) == 5


def test_a_reader_that_leaves_ends_the_run_with_a_message(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 3000, echo={"size": 1000})
    words = ("run", "-i", "in.jsonl", "-o", "-", "--engine", "echo", "--echo-delay", "1ms")
    child = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=child_environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    assert child.stderr
    assert child.stdout.readline().startswith(b"{")
    child.stdout.close()
    err = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait(30) != 0
    assert "Traceback" not in err
    assert "overnight: " in err


# -- what else is written ------------------------------------------------------------------------------------------


def test_the_error_file_holds_the_failed_rows_in_order(tmp_path: Path) -> None:
    lines = [request_line(f"r{n}", echo={"status": 400 if n % 3 == 0 else 200}) for n in range(10)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run_echo(tmp_path, "--error-file", "failed.jsonl", "--echo-jitter", "10ms")
    rows = read_rows(tmp_path / "out.jsonl")
    failed = [row for row in rows if row["response"]["status_code"] == 400]
    assert len(rows) == 10
    assert ids_of(failed) == ["r0", "r3", "r6", "r9"]
    assert read_rows(tmp_path / "failed.jsonl") == failed


def test_the_summary_file_holds_counts_reasons_and_times(tmp_path: Path) -> None:
    lines = [request_line("a", echo={"tokens": 7}), request_line("b", echo={"status": 422}), request_line("c")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run_echo(tmp_path, "--summary-json", "summary.json", "--max-inflight", "2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert summary["usage"]["completion_tokens"] == 8
    assert summary["failures"][0]["code"] == "http_422"
    assert summary["failures"][0]["custom_id"] == "b"
    assert summary["engine"] == "echo"
    assert summary["max_inflight"] == 2
    assert summary["output"] == "out.jsonl"
    assert summary["wall_s"] >= summary["run_s"] >= 0


def test_verbose_is_taken(tmp_path: Path, requests: Path) -> None:
    run_echo(tmp_path, "--verbose")
