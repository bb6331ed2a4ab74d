"""What is seen of a run: the bar on a terminal, plain lines elsewhere, nothing where nobody looks any more."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import COMMAND, child_environ, ids_of, overnight, read_rows, request_line, write_requests
from overnight.cli.terminal import say
from overnight.cli.watch import BarWatcher, PlainWatcher, make_watcher
from overnight.progress import Clock, Counts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX terminals")

RUN = ("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo", "--max-inflight", "8")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\].*?\x07")


class Screen:
    """A terminal: what was written to it, until it is closed."""

    def __init__(self, columns: int = 110) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (30, columns))
        self.name = os.ttyname(self.slave)
        self.raw = b""
        self._is_open = True

    def read(self) -> bool:
        """Take what comes next; False at the end."""
        try:
            part = os.read(self.master, 65536)
        except OSError:
            return False
        self.raw += part
        return bool(part)

    def read_to_the_end(self) -> str:
        """Everything that was shown, without control sequences."""
        self.let_go()
        self.drain()
        return self.text

    def drain(self) -> None:
        """Take everything until nobody can write any more."""
        while self.read():
            pass

    def let_go(self) -> None:
        """Leave the child's side to the child."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw.decode(errors="replace"))

    def close(self) -> None:
        """The terminal goes away."""
        self.let_go()
        if self._is_open:
            os.close(self.master)
        self._is_open = False


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def start(
    screen: Screen, folder: Path, *words: str, term: str = "xterm-256color", first: str = "trap '' HUP"
) -> "subprocess.Popen[bytes]":
    """A run that has the terminal as its own, and (as under nohup) is not ended by its hanging up."""
    environ = child_environ(folder, TERM=term)
    environ.pop("COLUMNS")
    script = f'{first}; exec "$@" < {screen.name} > {screen.name} 2>&1'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *COMMAND, *words], cwd=folder, env=environ, start_new_session=True,
        stdin=screen.slave, stdout=screen.slave, stderr=screen.slave,
    )  # fmt: skip


def test_the_bar_shows_rows_rate_failures_and_ends_on_a_line_of_its_own(tmp_path: Path, screen: Screen) -> None:
    lines = [request_line(f"r{n}", echo={"status": 400 if n % 10 == 0 else 200, "delay": 0.1}) for n in range(80)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    child = start(screen, tmp_path, *RUN)
    shown = screen.read_to_the_end()
    assert child.wait(30) == 0, shown
    assert re.search(r"\d\d/80 · \d+\.\d/s · .*\d failed · .* left", shown)
    last = shown[shown.rindex("rows ━") :]
    assert re.match(r"rows ━+ 100% 80/80 · [\d.]+/s · \d+ tok/s · 8 failed\s*\r\n80 of 80 rows", last), last
    assert "left" not in last
    assert screen.raw.rfind(b"\x1b[?25h") > screen.raw.rfind(b"\x1b[?25l") >= 0  # the cursor is back
    assert "Traceback" not in shown


@pytest.mark.parametrize("columns", [30, 60])
def test_the_bar_keeps_to_one_line_on_a_narrow_terminal(tmp_path: Path, columns: int) -> None:
    screen = Screen(columns)
    write_requests(tmp_path / "in.jsonl", 16, echo={"delay": 0.2})
    child = start(screen, tmp_path, *RUN)
    shown = screen.read_to_the_end()
    screen.close()
    assert child.wait(30) == 0
    bars = [part for part in re.split(r"[\r\n]+", shown) if part.startswith("rows")]
    assert bars
    assert max(map(len, bars)) <= columns
    assert b"\x1b[1A" not in screen.raw  # rich goes up where the bar took a second line


@pytest.mark.parametrize("flag", ["--no-progress", "--verbose"])
def test_no_bar_is_drawn_where_none_is_wanted_or_a_log_would_cross_it(
    tmp_path: Path, screen: Screen, flag: str
) -> None:
    write_requests(tmp_path / "in.jsonl", 8, echo={"delay": 0.3})
    child = start(screen, tmp_path, *RUN, flag)
    shown = screen.read_to_the_end()
    assert child.wait(30) == 0
    assert "8 of 8 rows" in shown
    assert "━" not in shown
    assert b"\x1b" not in screen.raw


def test_a_terminal_without_a_cursor_gets_plain_lines(tmp_path: Path, screen: Screen) -> None:
    write_requests(tmp_path / "in.jsonl", 8, echo={"delay": 0.3})
    child = start(screen, tmp_path, *RUN, term="dumb")
    shown = screen.read_to_the_end()
    assert child.wait(30) == 0
    assert "8 of 8 rows" in shown
    assert b"\x1b" not in screen.raw


def test_a_pipe_gets_no_control_sequences(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 3)
    ended = overnight(*RUN, cwd=tmp_path)
    assert "\x1b" not in ended.stderr
    assert "3 of 3 rows" in ended.stderr


# -- a terminal that goes away -------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_run_outlives_its_terminal(tmp_path: Path, screen: Screen, term: str) -> None:
    write_requests(tmp_path / "in.jsonl", 40, echo={"delay": 0.25})
    child = start(screen, tmp_path, *RUN, term=term)
    awaited = "rows ━" if term != "dumb" else "40 requests"
    screen.let_go()
    while awaited not in screen.text and screen.read():
        pass
    screen.close()
    assert child.wait(30) == 0
    assert ids_of(read_rows(tmp_path / "out.jsonl")) == [f"r{n}" for n in range(40)]


def test_a_hang_up_that_is_not_ignored_ends_with_129_and_a_prefix(tmp_path: Path, screen: Screen) -> None:
    write_requests(tmp_path / "in.jsonl", 400, echo={"delay": 0.1})
    child = start(screen, tmp_path, *RUN, first=":")
    screen.let_go()
    while not re.search(r"[1-9]\d*/400", screen.text) and screen.read():
        pass
    screen.close()
    assert child.wait(30) == 129
    rows = ids_of(read_rows(tmp_path / "out.jsonl"))
    assert rows == [f"r{n}" for n in range(len(rows))]
    assert 8 <= len(rows) < 400


def test_a_run_outlives_whoever_read_its_standard_error(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 16, echo={"delay": 0.25})
    reading, writing = os.pipe()
    child = subprocess.Popen([*COMMAND, *RUN], cwd=tmp_path, env=child_environ(tmp_path), stderr=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    assert child.wait(30) == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 16


def test_a_full_disk_under_the_log_does_not_end_the_run(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    write_requests(tmp_path / "in.jsonl", 4)
    with Path("/dev/full").open("wb") as full:
        code = subprocess.run(
            [*COMMAND, *RUN], cwd=tmp_path, env=child_environ(tmp_path), stderr=full, check=False
        ).returncode
    assert code == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 4


# -- the watchers themselves ---------------------------------------------------------------------------------------


def test_plain_lines_come_once_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = PlainWatcher(interval_s=0.05)
    clock = Clock(Counts(total=10, completed=3, failed=1))
    watcher.on_tick(clock, 2)
    assert capsys.readouterr().err == ""
    time.sleep(0.06)
    watcher.on_tick(clock, 2)
    watcher.on_tick(clock, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "4/10" in said
    assert "1 failed" in said
    assert "2 inflight" in said


def test_the_first_pass_and_a_download_are_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = PlainWatcher(interval_s=0.01)
    time.sleep(0.02)
    watcher.on_pass(1000, 2000)
    time.sleep(0.02)
    watcher.on_download("model.gguf", 5_000_000, 9_000_000)
    watcher.on_download("model.gguf", 9_000_000, 9_000_000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "judging the input: 1,000 bytes read of 2,000", "model.gguf: 5 MB of 9 MB", "model.gguf: 9 MB of 9 MB",
    ]  # fmt: skip


def test_a_quiet_watcher_says_notes_only(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = make_watcher(is_quiet=True)
    watcher.on_tick(Clock(Counts(total=1)), 1)
    watcher.on_pass(1, 1)
    watcher.on_note("a note")
    assert capsys.readouterr().err == "a note\n"


def test_a_note_stands_above_the_bar_and_a_name_is_no_markup(screen: Screen) -> None:
    reader = threading.Thread(target=screen.drain, daemon=True)
    reader.start()
    with standard_error_on(screen):
        watcher = BarWatcher()
        watcher.on_download("[red]model[/red].gguf", 2, 2)
        watcher.on_start(Clock(Counts(total=5)))
        watcher.on_note("a [bold]note[/bold]")
        watcher.on_end()
        watcher.on_note("the last")
    screen.let_go()
    reader.join(10)
    assert "[red]model[/red].gguf" in screen.text
    assert "a [bold]note[/bold]\r\n" in screen.text
    assert screen.text.endswith("the last\r\n")


def test_a_message_is_folded_between_words_and_a_command_stays_whole(screen: Screen) -> None:
    command = f"  overnight run -i {'long/' * 40}in.jsonl -o out.jsonl"
    with standard_error_on(screen):
        say(f"{'eight in ' * 30}\n  {'indented ' * 30}\n{command}")
    shown = screen.read_to_the_end().replace("\r", "").rstrip("\n").split("\n")
    assert shown[-1] == command
    assert max(map(len, shown[:-1])) <= max(110, shutil.get_terminal_size().columns)
    assert {word for line in shown[:-1] for word in line.split()} == {"eight", "in", "indented"}
    assert any(line.startswith("    indented") for line in shown)


@contextlib.contextmanager
def standard_error_on(screen: Screen) -> Iterator[None]:
    """Descriptor 2 and sys.stderr are the terminal for a while."""
    kept, before = os.dup(2), sys.stderr
    os.dup2(screen.slave, 2)
    try:
        with open(2, "w", encoding="utf-8", closefd=False) as sys.stderr:
            yield
    finally:
        sys.stderr = before
        os.dup2(kept, 2)
        os.close(kept)
