"""Writes the files of a run folder for a training loop that is not hwopt's, so that `hwopt report` and `compare` read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from hwopt.errors import exit_code_of
from hwopt.planning.plan import Plan
from hwopt.plugin import Observation
from hwopt.runs.journal import drop_rows_after, finite
from hwopt.runs.processes import add_line
from hwopt.runs.status import SUMMARY, write_status
from hwopt.system.atomic_folder import write_json
from hwopt.training import evidence
from hwopt.training.listener import Listener, Row, Summary


class ScriptRun(Protocol):
    """What is read of the run of a script (`hwopt.hosts`)."""

    folder: Path
    plan: Plan
    samples: int
    error: BaseException | None
    observation: Observation

    @property
    def step(self) -> int: ...


class ScriptJournal(Listener):
    """Listener of rank 0. The files stand in the output folder of the script, beside its checkpoints."""

    def __init__(self) -> None:
        self.evidence: dict[str, Any] = {}

    def on_start(self, run: ScriptRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / SUMMARY).unlink(missing_ok=True)  # its presence marks a complete run
        drop_rows_after(run.folder / "metrics.jsonl", run.step, run.step)
        add_line(run, samples=run.samples, metric_directions={})
        write_json(run.folder / "plan.json", run.plan.to_dict())
        write_status(run.folder, None, "running")

    def on_evidence(self, run: ScriptRun, found: list[Any]) -> None:
        self.evidence = evidence.to_dict(found, run.observation, run.step)
        write_json(run.folder / "evidence.json", self.evidence)

    def on_final_evidence(self, run: ScriptRun, found: list[Any]) -> None:
        at_end = evidence.to_dict(found, run.observation, run.step)
        write_json(run.folder / "evidence.json", self.evidence | {"at_end": at_end})

    def on_log(self, run: ScriptRun, row: Row) -> None:
        with open(run.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")

    def on_finish(self, run: ScriptRun, summary: Summary) -> None:
        write_json(run.folder / SUMMARY, finite(summary))

    def on_end(self, run: ScriptRun, ending: str) -> None:
        if run.folder.is_dir():
            code = 0 if run.error is None else exit_code_of(run.error) or 1
            write_status(run.folder, code, ending)
