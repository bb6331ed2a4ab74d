"""What the tests share: input files, rows read back, and the command in a child process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "overnight")
CHAT = "/v1/chat/completions"


def request_line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    """One line of input; `body` comes beside messages."""
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write_requests(path: Path, count: int, **body: Any) -> Path:
    """A file of requests r0, r1, …, all with the same body."""
    path.write_text("".join(f"{request_line(f'r{index}', **body)}\n" for index in range(count)))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an output; each must be a whole line."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def ids_of(rows: list[dict[str, Any]]) -> list[str]:
    """The rows' custom_ids."""
    return [row["custom_id"] for row in rows]


def child_environ(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose cache is in `folder`, and in which nothing is fetched."""
    return {**os.environ, "OVERNIGHT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "110", **more}


def overnight(
    *words: object, cwd: Path, stdin: str | bytes = "", environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end, in `cwd`; a traceback is never how it ends."""
    ended = subprocess.run(
        [*COMMAND, *map(str, words)], cwd=cwd, input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True, timeout=60, check=False, env=child_environ(cwd, **(environ or {})),
    )  # fmt: skip
    out, err = ended.stdout.decode(), ended.stderr.decode()
    assert "Traceback" not in err, err
    return Ended(ended.args, ended.returncode, out, err)


Ended = subprocess.CompletedProcess[str]
