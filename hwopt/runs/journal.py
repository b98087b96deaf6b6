"""The files of a run folder: job.toml, profile.toml, plan.json, evidence.json, metrics.jsonl, status.json."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from hwopt.errors import StorageError
from hwopt.system.atomic_folder import write_json
from hwopt.training import evidence as observe
from hwopt.training.listener import Listener, Row

if TYPE_CHECKING:
    from hwopt.planning.plan import Plan
    from hwopt.training.run import Run
from hwopt.runs.status import SUMMARY, write_status


class Journal(Listener):
    """Writes the run folder; only the main rank has one."""

    def started(self, run: Run) -> None:
        folder = run.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            evaluated = run.checkpoint.content.get("evaluated", run.step) if run.checkpoint else 0
            (folder / SUMMARY).unlink(missing_ok=True)  # it says that the run is complete
            keep_rows(folder / "metrics.jsonl", run.step, evaluated)
            (folder / "job.toml").write_text(to_toml(job_table(run.plan)), encoding="utf-8")
            (folder / "profile.toml").write_text(to_toml(profile_table(run.plan)), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{folder} could not be written: {error.strerror or error}") from error
        write_json(folder / "plan.json", run.plan.to_dict())
        if run.prepared.left_out:
            write_json(folder / "left_out.json", run.prepared.left_out)
        write_status(folder, None, "running")

    def evidence(self, run: Run, found: list[Any]) -> None:
        write_json(run.folder / "evidence.json", observe.to_dict(found, run.observation))

    def row(self, run: Run, row: Row) -> None:
        try:
            with open(run.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
                file.write(json.dumps(finite) + "\n")  # JSON has no NaN
        except OSError as error:
            raise StorageError(f"metrics.jsonl could not be written: {error.strerror or error}") from error

    def finished(self, run: Run, summary: Row) -> None:
        write_json(run.folder / SUMMARY, summary)


def keep_rows(path: Path, step: int, evaluated: int) -> None:
    """Where a run goes on, the rows of what is made again go, and what a killed process has written of a line.

    That is what comes behind `step`, and evaluations behind the step `evaluated`: of a signal's checkpoint, the step before.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            if row["step"] <= (evaluated if any(key.startswith("eval_") for key in row) else step):
                kept.append(line if line.endswith("\n") else f"{line}\n")
    staging = path.with_suffix(".partial")
    staging.write_text("".join(kept), encoding="utf-8")
    staging.replace(path)


def job_table(plan: Plan) -> dict[str, Any]:
    """The job as it was run, every default written out: `hwopt run job.toml` repeats it."""
    table = plan.job.model_dump(mode="json", exclude={"training"}, exclude_none=True)
    return table | {"training": plan.training.model_dump(mode="json", exclude_none=True)}


def profile_table(plan: Plan) -> dict[str, Any]:
    """The profile with its parents merged in and every option written out, as it was resolved."""
    content = plan.profile.content.model_dump(
        mode="json", exclude={"extends", "plugins", "claims", "training"}, exclude_none=True
    )
    content["training"] = plan.profile.content.training.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    content["plugins"] = {
        entry.name: entry.options.model_dump(mode="json", exclude_none=True)
        | ({"enabled": False} if entry.decision == "skip" else {})
        for entry in plan.entries
    }
    return content


def to_toml(table: dict[str, Any]) -> str:
    return tomlkit.dumps({key: value for key, value in table.items() if value is not None})
