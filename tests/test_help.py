"""The help screens, and what the documents say of flags and commands."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import child_environ, overnight
from overnight.cli import COMMANDS
from overnight.cli.flags import EXTRA_FLAGS
from overnight.cli.validate import ValidateOptions
from overnight.engines import list_engines, load_engine
from overnight.options import TOPICS, Option, RunOptions, list_options

ROOT = Path(__file__).parent.parent
ENGINE_TABLES = [load_engine(name).options_type for name in list_engines()]
ALL_OPTIONS = [
    pytest.param(option, id=f"{table.__name__} {option.flag}")
    for table in (RunOptions, ValidateOptions, *ENGINE_TABLES)
    for option in list_options(table).values()
]


def help_of(folder: Path, *words: str) -> list[str]:
    ended = overnight(*words, cwd=folder)
    assert ended.returncode == 0
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def flags_of(lines: list[str]) -> list[str]:
    """The flags that a help screen describes, in its order."""
    return [match[1] for line in lines if (match := re.match(r"  (?:-\w, |    )(--[a-z-]+)", line))]


def topics_of(lines: list[str]) -> list[str]:
    return [line[:-1] for line in lines if re.fullmatch(r"[a-z]+:", line)]


# -- screens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("help",)])
def test_the_first_help_lists_every_command_with_what_it_does(tmp_path: Path, words: tuple[str, ...]) -> None:
    lines = help_of(tmp_path, *words)
    for name, what in COMMANDS.items():
        assert any(line.split() == [name, *what.split()] for line in lines)


@pytest.mark.parametrize("words", [(), ("run",), ("run", "--engine", "echo"), ("validate",), ("engines",)])
def test_a_help_screen_fits_110_columns(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert max(map(len, help_of(tmp_path, *words, "--help"))) <= 110


def test_the_help_of_run_fits_a_screen_and_shows_common_options_only(tmp_path: Path) -> None:
    lines = help_of(tmp_path, "run", "--help")
    assert lines[2].startswith("Answers every request")
    common = {option.flag for option in list_options(RunOptions).values() if option.common}
    assert len(lines) <= 40
    assert set(flags_of(lines)) == common | set(EXTRA_FLAGS)
    assert "--help-all shows every option" in "\n".join(lines)


@pytest.mark.parametrize("engine", ["llama", "echo"])
def test_the_whole_help_shows_every_option_once_by_topic(tmp_path: Path, engine: str) -> None:
    lines = help_of(tmp_path, "run", "--help-all", "--engine", engine)
    options = [*list_options(RunOptions).values(), *list_options(load_engine(engine).options_type).values()]
    flags = flags_of(lines)
    assert len(flags) == len(set(flags))
    assert set(flags) == {option.flag for option in options} | set(EXTRA_FLAGS)
    assert topics_of(lines) == [*TOPICS, "more"]
    in_order = sorted(options, key=lambda option: TOPICS.index(option.topic))
    assert flags[: len(options)] == [option.flag for option in in_order]


def test_the_engine_of_the_toml_file_is_the_one_whose_options_are_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('engine = "echo"')
    assert "--echo-delay" in flags_of(help_of(tmp_path, "run", "--config", "run.toml", "--help-all"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_under_both_flags(tmp_path: Path, command: str) -> None:
    assert help_of(tmp_path, command, "-h") == help_of(tmp_path, command, "--help")


def test_a_default_is_shown_once_and_in_its_unit(tmp_path: Path) -> None:
    text = " ".join(" ".join(help_of(tmp_path, "run", "--help-all")).split())
    for part in re.split(r" (?=--[a-z])", text):
        assert part.count("default:") <= 1, part
    assert "0 for no limit (default: 1h)" in text
    assert "(at least 256KiB; default: 512MiB)" in text
    assert ") (" not in text


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_every_option_is_explained_in_a_phrase(option: Option) -> None:
    assert option.help.strip() == option.help != ""
    assert option.help[0].isupper()
    assert not option.help.endswith(".")
    assert option.topic in TOPICS


# -- what help costs -----------------------------------------------------------------------------------------------


def modules_of(folder: Path, *words: str) -> set[str]:
    """The modules that a command imports."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "overnight", *words], cwd=folder, env=child_environ(folder),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("words", [("--help",), ("--version",)])
def test_the_first_help_imports_no_engine_no_event_loop_and_no_json(tmp_path: Path, words: tuple[str, ...]) -> None:
    modules = modules_of(tmp_path, *words)
    assert "overnight.cli" in modules
    heavy = {"asyncio", "msgspec", "rich", "json", "argparse", "overnight.engines", "overnight.batch"}
    assert modules & heavy == set()


@pytest.mark.parametrize("words", [("run", "--help"), ("run", "--help-all"), ("engines",)])
def test_no_help_imports_an_engines_library(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert modules_of(tmp_path, *words) & {"xllamacpp", "aiohttp", "huggingface_hub", "rich"} == set()


# -- what the documents say ----------------------------------------------------------------------------------------

DOCUMENTS = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Programs whose flags are their own affair, where they stand first in a command.
OTHER_PROGRAMS = {
    "brew", "cat", "curl", "docker", "git", "gunzip", "hf", "jq", "kill", "llama-server", "nohup", "parallel", "pip",
    "pipx", "pytest", "python", "python3", "ruff", "srun", "sbatch", "split", "systemctl", "tmux", "uv", "uvx", "vllm",
    "scripts/crash-test", "zcat", "zstd",
}  # fmt: skip
# Flags of other programs that stand alone in inline code, and the sentence says whose they are.
OTHER_FLAGS = {"--enable-metrics": "vLLM's; docs/from-vllm.md says that it is not there yet"}
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def commands_in(document: Path) -> list[str]:
    """Each piece of code that may be a command or name a flag: fenced lines and inline code, cut at pipes."""
    text = document.read_text()
    pieces = _INLINE.findall(_FENCE.sub("", text))
    for block in _FENCE.findall(text):
        pieces += block.replace("\\\n", " ").splitlines()
    return [part.strip() for piece in pieces for part in re.split(r"\|\|?|&&|;", piece.removeprefix("$ ")) if part]


def known_flags(words: list[str]) -> set[str]:
    """The flags of the command that a piece of code calls; of all where it calls none."""
    tables: dict[str, list[type]] = {"run": [RunOptions, *ENGINE_TABLES], "validate": [ValidateOptions], "engines": []}
    command = words[words.index("overnight") + 1] if "overnight" in words[:-1] else ""
    chosen = tables.get(command, [RunOptions, ValidateOptions, *ENGINE_TABLES])
    return {option.flag for table in chosen for option in list_options(table).values()} | {*EXTRA_FLAGS, "--version"}


def strangers_in(document: Path) -> list[str]:
    """Flags and commands of overnight that a document names and that do not exist."""
    found = []
    for piece in commands_in(document):
        words = piece.split()
        if not words or (words[0] in OTHER_PROGRAMS and "overnight" not in words):
            continue
        known = known_flags(words)
        found += [flag for flag in _FLAG.findall(piece) if flag not in known and flag not in OTHER_FLAGS]
        for before, word in itertools.pairwise(words):
            if before == "overnight" and re.fullmatch("[a-z]+", word) and word not in {*COMMANDS, "help"}:
                found.append(f"overnight {word}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_and_command_in_the_documents_exists(document: Path) -> None:
    assert strangers_in(document) == []


def test_a_flag_that_does_not_exist_would_be_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "Use `--max-inflite 3`, or `overnight rum -i x`.\n```sh\npip install --pre x\novernight run \\\n  --quick 3 | "
        "jq --slurp .\novernight validate --engine echo\n```\nNot code: --nothing\n"
    )
    assert strangers_in(document) == ["--max-inflite", "overnight rum", "--quick", "--engine"]
