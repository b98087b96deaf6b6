"""`status.json` (exit code and message), `summary.json` (final metrics) and other small files of a run folder."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from hwopt.system.atomic_folder import write_json

STATUS, SUMMARY = "status.json", "summary.json"
PROCESSES, METRICS = "processes.jsonl", "metrics.jsonl"


def write_status(folder: Path, exit_code: int | None, message: str) -> None:
    """Write `status.json`. `exit_code` is None while the run trains. Launchers lose the exit code; this file keeps it."""
    write_json(folder / STATUS, {"exit_code": exit_code, "message": message})


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without a readable one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_status(folder: Path) -> tuple[int | None, str]:
    """The exit code and the message of `status.json`; (None, "") without a readable file."""
    status = read_object(folder / STATUS)
    return status.get("exit_code"), status.get("message", "")


def status_code(folder: Path) -> int | None:
    """The exit code in `status.json`; None while the run trains or without a readable file."""
    return read_status(folder)[0]


def read_summary(folder: Path) -> dict[str, Any]:
    """The final metrics of a complete run; {} without a readable file."""
    return read_object(folder / SUMMARY)


def completed_steps(folder: Path) -> int:
    """The number of steps of a complete run; 0 for a run without a summary."""
    return int(read_summary(folder).get("step", 0))


def command_line(words: list[str]) -> str:
    """The command of a process, as a shell takes it. The console script and `python -m hwopt` become "hwopt"."""
    for number, word in enumerate(words):
        if number and Path(word).name in ("hwopt", "hwopt.exe", "hwopt-script.py"):
            return shlex.join(["hwopt", *words[number + 1 :]])
    return shlex.join(words)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without an incomplete line, as a killed process leaves it; [] without a file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
