"""`processes.jsonl` of a run folder: the command, the versions and the first step of each process that trained there."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwopt.training.run import Run

PROCESSES, METRICS = "processes.jsonl", "metrics.jsonl"


def add_process(run: Run) -> None:
    """Append the line of this process. Raises OSError if it cannot be written."""
    prepared = run.prepared
    add_line(
        run,
        samples=len(prepared.train),
        steps_per_epoch=run.steps_per_epoch,
        data={part: store.folder.name for part, store in prepared.parts.items()},
        metric_directions=dict(run.task.metric_directions),
    )


def add_line(run: Any, **facts: Any) -> None:
    """Append the line of this process, which trains `run`, with further `facts`. Raises OSError if it cannot be written."""
    entry = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(sys.orig_argv),
        "folder": str(Path.cwd()),
        "hwopt": version("hwopt"),
        "python": platform.python_version(),
        "operating_system": platform.platform(),
        "step": run.step,
        "total_steps": run.total_steps,
        **facts,
    }
    with open(run.folder / PROCESSES, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


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
