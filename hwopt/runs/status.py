"""`status.json` (exit code and message) and `summary.json` (final metrics) of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hwopt.system.atomic_folder import write_json

if TYPE_CHECKING:
    from hwopt.training.listener import Summary

SUMMARY = "summary.json"


def write_status(folder: Path, exit_code: int | None, message: str) -> None:
    """Write `status.json`. `exit_code` is None while the run trains. Launchers lose the exit code; this file keeps it."""
    write_json(folder / "status.json", {"exit_code": exit_code, "message": message})


def status_code(folder: Path) -> int | None:
    """Return the exit code in `status.json`; None while the run trains or without a readable file."""
    return read_status(folder)[0]


def read_status(folder: Path) -> tuple[int | None, str]:
    """Return the exit code and the message of `status.json`; (None, "") without a readable file."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        code, message = status["exit_code"], status["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    return (code if isinstance(code, int) else None), str(message)


def read_summary(folder: Path) -> Summary:
    """Return the final metrics of a complete run; {} without a readable file."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def completed_steps(folder: Path) -> int:
    """Return the number of steps of a complete run; 0 for a run without a summary."""
    return int(read_summary(folder).get("step", 0))
