"""Writes the files of a run folder: job and profile, plan, processes, evidence, memory, metrics, summary and status."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomlkit

from hwopt.errors import exit_code_of
from hwopt.inference.settings import KEY as INFERENCE
from hwopt.inference.settings import settings_of
from hwopt.planning.plan import Plan
from hwopt.records.run_files import (
    EVIDENCE,
    JOB,
    LEFT_OUT,
    MEMORY,
    METRICS,
    PLAN,
    PROCESSES,
    PROFILE,
    SUMMARY,
    read_json_lines,
)
from hwopt.runs.folder import write_status
from hwopt.system.atomic_folder import write_json
from hwopt.system.paths import writing
from hwopt.training import evidence as observe
from hwopt.training.failure import memory_by_kind
from hwopt.training.listener import Listener, Row, Summary
from hwopt.training.run import Run


class JournalFiles(Listener):
    """Writes what the run folders of all hosts have: evidence, memory, metrics and summary."""

    def __init__(self) -> None:
        self.evidence: dict[str, Any] = {}

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        self.evidence = observe.to_dict(found, run.observation, run.step)
        write_json(run.folder / EVIDENCE, self.evidence)
        write_json(run.folder / MEMORY, memory_by_kind(run))

    def on_final_evidence(self, run: Any, found: list[Any]) -> None:
        at_end = observe.to_dict(found, run.observation, run.step)
        write_json(run.folder / EVIDENCE, self.evidence | {"at_end": at_end})

    def on_log(self, run: Any, row: Row) -> None:
        with writing(run.folder / METRICS), open(run.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(row)) + "\n")

    def on_finish(self, run: Any, summary: Summary) -> None:
        write_json(run.folder / SUMMARY, without_nan(summary))


class Journal(JournalFiles):
    """Listener of rank 0 that writes the run folder."""

    def on_start(self, run: Run) -> None:
        folder = run.folder
        evaluated = run.checkpoint.content.get("evaluated", run.step) if run.checkpoint else 0
        with writing(folder):
            prepare_folder(run, evaluated)
            # every default is written out, so that `hwopt run job.toml` repeats the run
            job = run.plan.job.model_dump(mode="json", exclude={"training"}, exclude_none=True)
            job |= {"training": run.training.model_dump(mode="json", exclude_none=True)}
            (folder / JOB).write_text(tomlkit.dumps(job), encoding="utf-8")
            (folder / PROFILE).write_text(tomlkit.dumps(profile_table(run.plan)), encoding="utf-8")
            add_line(
                run,
                samples=len(run.prepared.train),
                steps_per_epoch=run.steps_per_epoch,
                data={part: store.folder.name for part, store in run.prepared.parts.items()},
                metric_directions=dict(run.task.metric_directions),
            )
        write_json(folder / PLAN, run.plan.to_dict() | {INFERENCE: asdict(settings_of(run))})
        if run.prepared.bad_rows:
            write_json(folder / LEFT_OUT, run.prepared.bad_rows)
        write_status(folder, None, "running")


class ScriptJournal(JournalFiles):
    """Listener of rank 0 for a training loop that is not hwopt's: in its output folder, `hwopt report` reads the run."""

    def on_start(self, run: Any) -> None:
        prepare_folder(run, run.step)
        add_line(run, samples=run.samples, metric_directions={})
        write_json(run.folder / PLAN, run.plan.to_dict())
        write_status(run.folder, None, "running")

    def on_end(self, run: Any, ending: str) -> None:
        if run.folder.is_dir():
            code = 0 if run.error is None else exit_code_of(run.error) or 1
            write_status(run.folder, code, ending)


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


def prepare_folder(run: Any, evaluated: int) -> None:
    """Make the folder of `run`, without what its process writes again. `evaluated`: step of the last evaluation that stays."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / SUMMARY).unlink(missing_ok=True)  # its presence marks a complete run
    drop_rows_after(run.folder / METRICS, run.step, evaluated)


def without_nan(value: Any) -> Any:
    """`value` with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drop_rows_after(path: Path, step: int, evaluated: int) -> None:
    """Remove the rows that a resumed run writes again, and an incomplete last line.

    Removes log rows after `step`, rows of the test, and evaluation rows after the step `evaluated`: a checkpoint saved at a
    signal may have skipped the evaluation of its step.
    """
    if not path.exists():
        return
    rows = []
    for row in read_json_lines(path):
        kinds = {key.partition("_")[0] for key in row}
        if "test" not in kinds and row.get("step", math.inf) <= (evaluated if "eval" in kinds else step):
            rows.append(json.dumps(row) + "\n")
    staging = path.with_suffix(".partial")
    staging.write_text("".join(rows), encoding="utf-8")
    staging.replace(path)


def profile_table(plan: Plan) -> dict[str, Any]:
    """The resolved profile: its parents merged, every option written out."""
    content = plan.profile.content.model_dump(mode="json", exclude={"extends", "plugins", "training"}, exclude_none=True)
    content["training"] = plan.profile.content.training.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    content["plugins"] = {
        entry.name: entry.options.model_dump(mode="json", exclude_none=True)
        | ({"enabled": False} if entry.decision == "skip" else {})
        for entry in plan.entries
    }
    return content


def command_line(words: list[str]) -> str:
    """The command of a process, as a shell takes it. The console script and `python -m hwopt` become "hwopt"."""
    for number, word in enumerate(words):
        if number and Path(word).name == "hwopt":
            return shlex.join(["hwopt", *words[number + 1 :]])
    return shlex.join(words)
