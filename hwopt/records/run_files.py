"""The files of a run folder: their names, and the readers of the small ones."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

JOB, PROFILE, PLAN = "job.toml", "profile.toml", "plan.json"
PROCESSES, METRICS = "processes.jsonl", "metrics.jsonl"
EVIDENCE, MEMORY = "evidence.json", "memory.json"
STATUS, SUMMARY = "status.json", "summary.json"
LEFT_OUT, OUT_OF_MEMORY = "left_out.json", "out_of_memory.json"
EVAL_ROWS, SAMPLES = "eval_rows.csv", "samples.jsonl"
LOG, REPORT = "run.log", "report.html"
FINAL = "final"
"""The folder of the trained model."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without a readable one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without an incomplete line, as a killed process leaves it; [] without a file."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def read_status(folder: Path) -> tuple[int | None, str]:
    """The exit code and the message of `status.json`; (None, "") without a readable file."""
    status = read_object(folder / STATUS)
    return status.get("exit_code"), status.get("message", "")


def status_code(folder: Path) -> int | None:
    """The exit code in `status.json`; None while the run trains or without a readable file."""
    return read_status(folder)[0]


def completed_steps(folder: Path) -> int:
    """The number of steps of a complete run; 0 for a run without a summary."""
    return int(read_object(folder / SUMMARY).get("step", 0))


def read_evidence(path: Path) -> list[dict[str, Any]]:
    """name, status and what was seen of each plugin, after the first and the last step of a process.

    Inactive evidence of either step counts. Active evidence counts more than unknown one: the last step may be too small to tell.
    """
    first = read_object(path)
    last = {entry["name"]: entry for entry in first.get("at_end", {}).get("plugins", [])}
    found = []
    for entry in first.get("plugins", []):
        both = [last.pop(entry["name"], entry), entry]
        found.append(next((each for status in ("inactive", "active") for each in both if each["status"] == status), both[0]))
    return [*found, *last.values()]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def metric_values(line: dict[str, Any]) -> dict[str, float | None]:
    """The entries of `line` that are numbers, or None: a number that was not finite. Those of a table in it as "table.key"."""
    found: dict[str, float | None] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": number for inner, number in metric_values(value).items()}
        elif value is None or is_number(value):
            found[key] = value
    return found
