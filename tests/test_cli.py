"""How the command ends when something is wrong with what it was given: exit codes and messages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import COMMAND, Ended, child_environ, overnight, request_line, write_requests


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "in.jsonl", 3)


def refused(*words: object, cwd: Path, code: int = 2) -> str:
    """The message of a run that must end with `code`, and must have written no rows to standard output."""
    ended = overnight(*words, cwd=cwd)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("overnight: ") == 1
    return ended.stderr


def run_echo(folder: Path, *words: object) -> Ended:
    return overnight("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "echo", *words, cwd=folder)


# -- usage ---------------------------------------------------------------------------------------------------------


def test_no_command_shows_the_commands_and_exits_with_2(tmp_path: Path) -> None:
    ended = overnight(cwd=tmp_path)
    assert ended.returncode == 2
    assert "usage: overnight COMMAND" in ended.stdout


def test_an_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    assert "Did you mean validate?" in refused("validat", cwd=tmp_path)


def test_the_version_is_one_line(tmp_path: Path) -> None:
    import overnight as package

    assert overnight("--version", cwd=tmp_path).stdout == f"overnight {package.__version__}\n"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("run", "--max-inflite", "3"), "--max-inflight"),
        (("run", "--engine", "echo", "--ekko-delay=5ms"), "--echo-delay"),
        (("run", "--max-num-seq", "3"), "--max-num-seqs"),
        (("validate", "--input-fil", "x"), "--input-file"),
        (("engines", "--hepl"), "--help"),
    ],
)
def test_an_unknown_flag_names_the_nearest(tmp_path: Path, words: tuple[str, ...], nearest: str) -> None:
    message = refused(*words, cwd=tmp_path)
    assert f"Did you mean {nearest}?" in message
    assert words[0] in message.partition("See ")[2]


def test_an_abbreviated_flag_is_unknown(tmp_path: Path) -> None:
    assert "--max-inflight" in refused("run", "--max-infl", "3", cwd=tmp_path)


def test_a_word_without_a_flag_is_refused(tmp_path: Path) -> None:
    assert "'requests.jsonl' stands alone" in refused("run", "requests.jsonl", cwd=tmp_path)


def test_a_flag_without_its_value_is_refused(tmp_path: Path) -> None:
    assert "--model" in refused("run", "--model", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("run", "-o", "out.jsonl"), "--input-file"),
        (("run", "-i", "in.jsonl"), "--output-file"),
        (("validate",), "--input-file"),
    ],
)
def test_a_missing_file_flag_is_named_with_an_example(
    tmp_path: Path, requests: Path, words: tuple[str, ...], missing: str
) -> None:
    message = refused(*words, cwd=tmp_path)
    assert f"{missing} is needed" in message
    assert "-i requests.jsonl" in message


@pytest.mark.parametrize(
    ("words", "gist"),
    [
        (("--max-inflight", "0"), "at least 1"),
        (("--max-inflight", "-1"), "at least 1"),
        (("--max-inflight", "many"), "at least 1"),
        (("--max-inflight", "2.5"), "at least 1"),
        (("--timeout", "soon"), "30s"),
        (("--max-line-bytes", "big"), "512MiB"),
        (("--on-invalid", "maybe"), "fail, row"),
        (("--echo-delay", "fast"), "30s"),
        (("--overwrite=maybe",), "--overwrite"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(
    tmp_path: Path, requests: Path, words: tuple[str, ...], gist: str
) -> None:
    ended = run_echo(tmp_path, *words)
    assert ended.returncode == 2
    assert words[0].partition("=")[0] in ended.stderr
    assert gist in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_missing_input_is_refused(tmp_path: Path) -> None:
    assert "in.jsonl: No such file" in run_echo(tmp_path).stderr
    assert run_echo(tmp_path).returncode == 2


def test_a_folder_as_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").mkdir()
    ended = run_echo(tmp_path)
    assert (ended.returncode, "folder" in ended.stderr) == (2, True)


@pytest.mark.parametrize("output", ["no/such/out.jsonl", "."])
def test_an_output_without_its_folder_is_refused(tmp_path: Path, requests: Path, output: str) -> None:
    message = refused("run", "-i", "in.jsonl", "-o", output, "--engine", "echo", cwd=tmp_path)
    assert "folder" in message


@pytest.mark.parametrize("kind", ["relative path", "symlink", "hard link"])
def test_one_file_as_input_and_output_is_refused_and_kept(tmp_path: Path, requests: Path, kind: str) -> None:
    before = requests.read_bytes()
    output = tmp_path / "out.jsonl"
    if kind == "symlink":
        output.symlink_to("in.jsonl")
    elif kind == "hard link":
        output.hardlink_to(requests)
    else:
        output = Path("..", tmp_path.name, "in.jsonl")
    words = ("-i", requests, "-o", output, "--engine", "echo", "--overwrite")
    assert "same file" in refused("run", *words, cwd=tmp_path)
    assert requests.read_bytes() == before


@pytest.mark.parametrize("path", ["in.jsonl", "out.jsonl", "./sub/../in.jsonl"])
def test_a_summary_that_would_take_a_batch_files_place_is_refused(tmp_path: Path, requests: Path, path: str) -> None:
    (tmp_path / "sub").mkdir()
    before = requests.read_bytes()
    ended = run_echo(tmp_path, "--summary-json", path)
    assert (ended.returncode, "same file" in ended.stderr) == (2, True)
    assert requests.read_bytes() == before


def test_a_summary_without_its_folder_is_refused_before_anything_starts(tmp_path: Path, requests: Path) -> None:
    ended = run_echo(tmp_path, "--summary-json", "no/such/folder.json")
    assert (ended.returncode, "folder" in ended.stderr) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()


# -- lines and models ----------------------------------------------------------------------------------------------


def test_bad_lines_are_listed_up_to_20_and_then_counted(tmp_path: Path) -> None:
    lines = [request_line("good"), *["{"] * 30, '{"custom_id": "x"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    ended = run_echo(tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("  line ") == 20
    assert "31 lines" in ended.stderr
    assert "11 more" in ended.stderr
    assert "--on-invalid row" in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_that_asks_for_other_models_is_refused_before_the_load(tmp_path: Path) -> None:
    write_requests(tmp_path / "in.jsonl", 3, model="gpt-4o-mini")
    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--engine", "llama", "--model", "mine.gguf")
    message = refused("run", *words, cwd=tmp_path)
    assert "'gpt-4o-mini'" in message
    assert "'mine.gguf'" in message
    assert "--ignore-request-model" in message
    assert not (tmp_path / "out.jsonl").exists()


# -- engines -------------------------------------------------------------------------------------------------------


def test_an_unknown_engine_names_those_there_are(tmp_path: Path, requests: Path) -> None:
    message = refused("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine", "nosuch", cwd=tmp_path)
    assert "nosuch" in message
    assert "echo, llama" in message


def test_an_unknown_engine_with_a_flag_of_its_own_is_refused_all_the_same(tmp_path: Path) -> None:
    assert "echo, llama" in refused("run", "--engine", "nosuch", "--nosuch-threads", "3", cwd=tmp_path)


@pytest.mark.parametrize(("engine", "flag", "owner"), [("echo", "--threads", "llama"), ("llama", "--echo-log", "echo")])
def test_a_flag_of_another_engine_is_refused_by_name(
    tmp_path: Path, requests: Path, engine: str, flag: str, owner: str
) -> None:
    message = refused("run", "--engine", engine, flag, "2", cwd=tmp_path)
    assert f"{flag} is an option of the engine {owner}, not of {engine}" in message


def test_the_list_of_engines_says_what_each_serves(tmp_path: Path) -> None:
    ended = overnight("engines", cwd=tmp_path)
    echo, llama = ended.stdout.split("\n\n")
    assert echo.startswith("echo: ")
    assert "/v1/audio/transcriptions" in echo
    assert llama.startswith("llama: ")
    assert "/v1/embeddings" in llama
    assert "installed" in llama
    assert ended.stderr == ""
    assert max(map(len, ended.stdout.splitlines())) <= 110


HIDE_LIBRARY = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name == "xllamacpp" else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


@pytest.fixture
def without_library(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE_LIBRARY)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))}


def test_an_engine_without_its_library_is_listed_with_the_pip_command(
    tmp_path: Path, without_library: dict[str, str]
) -> None:
    ended = overnight("engines", cwd=tmp_path, environ=without_library)
    assert ended.returncode == 0
    assert "xllamacpp not installed. Install it: pip install 'overnight[llama]'" in ended.stdout
    assert "echo: " in ended.stdout


def test_a_run_without_the_engines_library_says_how_to_install_it(
    tmp_path: Path, requests: Path, without_library: dict[str, str]
) -> None:
    ended = overnight("run", "-i", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path, environ=without_library)
    assert ended.returncode == 2
    assert "pip install 'overnight[llama]'" in ended.stderr


def test_the_help_of_an_engine_needs_no_library(tmp_path: Path, without_library: dict[str, str]) -> None:
    assert "--max-model-len" in overnight("run", "--help-all", cwd=tmp_path, environ=without_library).stdout


# -- streams that are closed or full -------------------------------------------------------------------------------


def shell(script: str, folder: Path) -> Ended:
    """A shell's run of a script in which $OVERNIGHT is the command."""
    environ = child_environ(folder, OVERNIGHT=" ".join(COMMAND))
    return subprocess.run(
        ["/bin/bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_reader_that_leaves_early_ends_a_listing_quietly(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{\n" * 20_000)
    ended = shell("$OVERNIGHT validate -i in.jsonl | head -n 1; exit ${PIPESTATUS[0]}", tmp_path)
    assert ended.returncode == 141
    assert ended.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_message(tmp_path: Path) -> None:
    ended = shell("$OVERNIGHT engines > /dev/full", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "overnight: Cannot write to standard output: No space left on device\n"


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, requests: Path) -> None:
    (tmp_path / "file").touch()
    words = ("run", "-i", "in.jsonl", "-o", "-", "--engine", "echo")
    ended = overnight(*words, cwd=tmp_path, environ={"OVERNIGHT_CACHE": str(tmp_path / "file" / "cache")})
    assert ended.returncode in {2, 3}
    assert ended.stdout == ""
    assert "file" in ended.stderr
    assert "standard output" not in ended.stderr


def test_a_closed_standard_output_is_one_message(tmp_path: Path) -> None:
    ended = shell("$OVERNIGHT engines >&-", tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


def test_rows_to_a_closed_standard_output_are_a_failed_run(tmp_path: Path, requests: Path) -> None:
    ended = shell("$OVERNIGHT run -i in.jsonl -o - --engine echo >&-", tmp_path)
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr


def test_closed_standard_streams_never_lend_their_numbers_to_a_file(tmp_path: Path, requests: Path) -> None:
    ended = shell("$OVERNIGHT run -i in.jsonl -o out.jsonl --engine echo <&- >&- 2>&-", tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "out.jsonl").read_text().count('"custom_id"') == 3


def test_a_path_that_is_no_utf_8_can_be_told(tmp_path: Path) -> None:
    name = b"caf\xe9.jsonl"
    try:
        write_requests(Path(os.fsdecode(bytes(tmp_path) + b"/" + name)), 1)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    ended = subprocess.run(
        [sys.executable, "-m", "overnight", "validate", "-i", name], cwd=tmp_path, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
