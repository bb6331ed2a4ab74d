"""Runs that are killed or stopped and go on; `crash_harness.py` does the killing, and a person may let it do more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checker
import crash_harness
from conftest import child_environ, request_line

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

KILLS = int(os.environ.get("OVERNIGHT_KILLS", "60"))


@pytest.mark.timeout(KILLS * 10)
def test_a_run_that_is_killed_at_any_moment_goes_on_from_there(capsys: pytest.CaptureFixture[str]) -> None:
    code = crash_harness.main(["--kills", str(KILLS), "--requests", "300", "--per-round", "15", "--seed", "7"])
    assert code == 0, capsys.readouterr().out
    assert f"{KILLS} of {KILLS} kills" in capsys.readouterr().out


def start(folder: Path, *words: object) -> "subprocess.Popen[str]":
    command = [*crash_harness.COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--echo-log", "echo.log", *words]
    (folder / "echo.log").write_text("")
    return subprocess.Popen(
        [*map(str, command)], cwd=folder, env=child_environ(folder), stderr=subprocess.PIPE, text=True
    )


def wait_for_rows(output: Path, count: int) -> None:
    until = time.monotonic() + 30
    while not output.exists() or len(checker.look(output).finished) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_signal_leaves_what_was_finished_and_the_same_command_goes_on(
    tmp_path: Path, kind: signal.Signals, *, is_repeated: bool
) -> None:
    delays = [0.8 if n in (5, 6) else 0.02 * (n % 5) for n in range(60)]
    lines = [request_line(f"r{n}", echo={"delay": delay}) for n, delay in enumerate(delays)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    child = start(tmp_path, "--max-inflight", 4, "--grace", "0.1" if not is_repeated else "30")
    wait_for_rows(output, 12)
    began = time.monotonic()
    child.send_signal(kind)
    if is_repeated:
        time.sleep(0.05)
        child.send_signal(kind)
    _, err = child.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert child.returncode == 128 + kind, err
    assert "overnight run" in err
    found = checker.look(output)
    assert (found.torn, found.damaged) == (0, 0)
    assert len(found.rows) == 5
    assert found.waiting
    child = start(tmp_path, "--max-inflight", 16)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 0, err
    ran = {int(name[1:]) for name in (tmp_path / "echo.log").read_text().split()}
    assert ran == set(range(60)) - found.finished
    assert [row["custom_id"] for row in checker.look(output).rows] == [f"r{n}" for n in range(60)]
    assert not checker.look(output).has_journal
