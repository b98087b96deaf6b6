"""`status.json` and `summary.json` of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hwopt.system.atomic_folder import write_json
from hwopt.training.listener import Row

if TYPE_CHECKING:
    pass


SUMMARY = "summary.json"


def write_status(folder: Path, exit_code: int | None, message: str) -> None:
    """`exit_code` is None while the run goes on; launchers lose it, this file does not."""
    write_json(folder / "status.json", {"exit_code": exit_code, "message": message})


def status_code(folder: Path) -> int | None:
    """The exit code in `status.json`; None while the run goes on, or where there is no such file."""
    return read_status(folder)[0]


def read_status(folder: Path) -> tuple[int | None, str]:
    """Exit code and message of `status.json`; (None, "") where there is none that can be read."""
    try:
        found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        code, message = found["exit_code"], found["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    return (code if isinstance(code, int) else None), str(message)


def summary_of(folder: Path) -> Row:
    """What a complete run has found; {} where there is nothing that can be read."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def steps_done(folder: Path) -> int:
    """Of a complete run; 0 where nobody can tell."""
    return int(summary_of(folder).get("step", 0))
