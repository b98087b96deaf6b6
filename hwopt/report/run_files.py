"""What a person reads of a run, as listeners: run.log, report.html, lines; and `hwopt.train`, which passes them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwopt import api
from hwopt.report.report_file import ReportFile
from hwopt.report.run_log import RunLog
from hwopt.text import printable
from hwopt.training.listener import Listener, Listeners, Summary


def with_run_files(*listeners: Listener) -> Listeners:
    """`listeners`, and those that write report.html and run.log. The log comes last, so that it holds what the others say."""
    return Listeners(*listeners, ReportFile(), RunLog())


def train(job: Path | str | None = None, profile: str = "auto", *, listener: Listener | None = None, **given: Any) -> Summary:
    """`api.train`, with run.log and report.html in the run folder, as `hwopt run` writes them."""
    return api.train(job, profile, listener=with_run_files(*([listener] if listener else [])), **given)


class Lines(Listener):
    """Prints what the plan says and what evidence finds, as lines between those of the script."""

    def on_message(self, run: Any, message: str) -> None:
        print(f"hwopt: {printable(message)}", flush=True)

    def on_warning(self, run: Any, message: str) -> None:
        self.on_message(run, f"WARNING: {message}")

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        for decision, evidence in found:
            self.on_message(run, f"after step {run.step}: {evidence.status:8} {decision.name}: {evidence.seen}")

    def on_final_evidence(self, run: Any, found: list[Any]) -> None:
        self.on_evidence(run, found)
