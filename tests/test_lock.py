"""One run at a time on one output."""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import overnight
from batches import Ground, end_of, kill, lines_of, slow_first, wait_for
from conftest import request_line
from overnight.disk import Disk
from overnight.errors import OutputRefused
from overnight.lock import Locked, lock_file, unlock_file


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    ground.close()


def hold(path: Path) -> "subprocess.Popen[bytes]":
    """A child that holds the lock."""
    code = (
        "import sys; from pathlib import Path; from overnight.disk import Disk; from overnight.lock import lock_file\n"
        "lock_file(Path(sys.argv[1]), Disk()); print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    assert child.stdout.readline() == b"locked\n"
    return child


def test_a_second_run_is_refused_naming_process_and_host_and_touches_nothing(ground: Ground) -> None:
    ground.write(slow_first(5))
    first = ground.start()
    wait_for(lambda: len(ground.ahead()) == 4)
    before = ground.look()
    code, err = end_of(ground.start())
    assert code == 2
    assert f"is being written by process {first.pid} on {socket.gethostname()}" in err
    assert "Nothing was touched" in err
    assert ground.look() == before
    with pytest.raises(OutputRefused, match=f"process {first.pid} on"):
        ground.run()
    kill(first)


def test_a_run_that_has_written_nothing_yet_is_named_too(ground: Ground) -> None:
    ground.write(slow_first(1))
    child = hold(ground.head)
    with pytest.raises(OutputRefused, match=f"process {child.pid} on {socket.gethostname()}"):
        ground.run()
    kill(child)
    ground.head.write_text('{"run":{"pid":1,"host":"elsewhere","at":0}}\n')  # of a run before
    child = hold(ground.head)
    with pytest.raises(OutputRefused, match=f"process {child.pid} on {socket.gethostname()}"):
        ground.run()
    kill(child)


def test_a_lock_that_a_killed_run_left_is_not_in_the_way(ground: Ground) -> None:
    ground.write(slow_first(5))
    child = ground.start()
    wait_for(lambda: len(ground.ahead()) == 4)
    kill(child)
    assert ground.head.exists()
    ground.write([request_line("r0"), *lines_of(4, 1)])
    ground.run()
    assert ground.asked() == ["r0"]


def test_a_child_that_outlives_the_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from overnight.disk import Disk\n"
        "from overnight.lock import lock_file\n"
        "lock_file(Path(sys.argv[1]), Disk())\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(60)\n"
        "print(pid, flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    parent = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert parent.stdout
    worker = int(parent.stdout.readline())
    with pytest.raises(Locked):
        lock_file(path, Disk())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        os.kill(worker, 0)  # it lives, and has the file open
        unlock_file(lock_file(path, Disk()), Disk())
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_may_lock_what_its_parent_gave_up(tmp_path: Path) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    descriptor = lock_file(tmp_path / "lock", Disk())
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(ready, 1)
            lock_file(tmp_path / "lock", Disk())
            code = 0
        finally:
            os._exit(code)
    unlock_file(descriptor, Disk())
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(ready)
    os.close(go)


def test_one_process_may_not_lock_a_file_twice_and_keeps_its_first_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    descriptor = lock_file(path, Disk())
    (tmp_path / "link").hardlink_to(path)
    for name in ("lock", "link"):
        with pytest.raises(Locked) as caught:
            lock_file(tmp_path / name, Disk())
        assert caught.value.pid == os.getpid()
    child = subprocess.run(
        [sys.executable, "-c", "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | 4)", path],
        capture_output=True, check=False,
    )  # fmt: skip
    assert b"BlockingIOError" in child.stderr
    unlock_file(descriptor, Disk())
    unlock_file(lock_file(path, Disk()), Disk())


def test_two_runs_in_one_process_on_one_output_are_refused(ground: Ground) -> None:
    ground.write([request_line("r0", echo={"delay": 0.2})])

    async def run_both() -> list[object]:
        runs = [overnight.run_batch(ground.input, ground.output, engine="echo", echo_delay=0.5) for _ in range(2)]
        return await asyncio.gather(*runs, return_exceptions=True)

    ends = asyncio.run(run_both())
    assert sorted(type(end).__name__ for end in ends) == ["OutputRefused", "Summary"]
    refusal = next(end for end in ends if isinstance(end, OutputRefused))
    assert f"process {os.getpid()} on" in str(refusal)
    assert ground.ids() == ["r0"]


def test_a_file_that_was_replaced_before_it_was_locked_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    class Replacing(Disk):
        opened = 0

        def open(self, path: Path, *, create: bool = False) -> int:
            descriptor = super().open(path, create=create)
            self.opened += 1
            if self.opened == 1:  # the last holder removes it, and another run makes it anew
                path.unlink()
                path.write_text("anew")
            elif self.opened == 2:
                path.unlink()
            return descriptor

    disk = Replacing()
    descriptor = lock_file(path, disk)
    assert disk.opened == 3
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    unlock_file(descriptor, disk)


@pytest.mark.parametrize("words", [["--model", "x"], ["--nonsense"], []], ids=["complete", "flags", "no input"])
def test_nothing_of_the_lock_stays_behind_a_run_that_completed_or_was_refused(ground: Ground, words: list[str]) -> None:
    if words != []:
        ground.write(lines_of(3))
        ground.run()
        before = ground.look()
        assert end_of(ground.start(*words))[0] == 2
        assert ground.look() == before
    else:
        assert end_of(ground.start())[0] == 2
    assert ground.files() == []


def test_of_two_runs_that_start_at_the_same_instant_one_runs(ground: Ground) -> None:
    ground.write([request_line("r0", echo={"delay": 0.5}), *lines_of(20, 1)])
    code = (
        "import sys; from overnight.cli import main; import overnight.batch, overnight.engines.echo\n"
        "print('ready', flush=True); sys.stdin.readline(); sys.exit(main())"
    )
    words = ["run", "-i", ground.input, "-o", ground.output, "--engine", "echo", "--no-progress"]
    for _ in range(10):
        both = [
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env={**os.environ, "OVERNIGHT_CACHE": str(ground.folder / "cache")},
            )
            for _ in range(2)
        ]  # fmt: skip
        for child in both:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
        for child in both:
            assert child.stdin
            child.stdin.write(b"\n")
            child.stdin.flush()
        ends = [(*child.communicate(timeout=30), child.returncode) for child in both]
        assert sorted(code for *_, code in ends) == [0, 2], ends
        assert any(b"is being written by process" in err for _, err, _ in ends)
        assert ground.ids() == [f"r{n}" for n in range(21)]
        assert ground.files() == []
        ground.output.unlink()


def test_the_lock_is_held_from_before_the_input_is_read(ground: Ground) -> None:
    os.mkfifo(ground.input)
    first = ground.start()
    wait_for(ground.head.exists)
    time.sleep(0.05)
    code, err = end_of(ground.start())
    assert code == 2
    assert f"process {first.pid} on" in err
    with ground.input.open("wb") as pipe:
        pipe.write(request_line("a").encode())
    assert end_of(first)[0] == 0
    assert ground.ids() == ["a"]
