"""`status.json` (exit code and message), `summary.json` (final metrics) and other small JSON files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwopt.system.atomic_folder import write_json

STATUS, SUMMARY = "status.json", "summary.json"


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
