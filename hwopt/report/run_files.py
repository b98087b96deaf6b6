"""What a person reads in a run folder, run.log and report.html, as listeners; and `hwopt.train`, which writes both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwopt import api
from hwopt.report.report_file import ReportFile
from hwopt.report.run_log import RunLog
from hwopt.training.listener import Listener, Listeners, Summary


def with_run_files(*listeners: Listener) -> Listeners:
    """`listeners`, and those that write report.html and run.log. The log comes last, so that it holds what the others say."""
    return Listeners(*listeners, ReportFile(), RunLog())


def train(job: Path | str | None = None, profile: str = "auto", *, listener: Listener | None = None, **given: Any) -> Summary:
    """`api.train`, with run.log and report.html in the run folder, as `hwopt run` writes them."""
    return api.train(job, profile, listener=with_run_files(*([listener] if listener else [])), **given)
