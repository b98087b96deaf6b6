"""The files that a person reads of a run, as listeners: report.html and run.log; and `hwopt.train`, which passes them in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.report.html import write_page
from hwopt.report.page import REPORT, page_of
from hwopt.report.run_log import RunLog
from hwopt.runs.record import is_run_folder, read_record
from hwopt.text import first_line
from hwopt.training.listener import DONE, Listener, Listeners, Summary

if TYPE_CHECKING:
    from hwopt.training.run import Run


class ReportFile(Listener):
    """Writes the report of a run when it ends. A report that cannot be written is a warning: the run itself is complete."""

    def on_end(self, run: Run, ending: str) -> None:
        if not is_run_folder(run.folder):
            return
        try:
            write_page(page_of([read_record(run.folder)]), run.folder / REPORT)
        except Exception as error:  # of a template, a file or a figure
            run.warn(f"{run.folder / REPORT} could not be written: {first_line(error)}")
        else:
            if ending == DONE:
                run.say(f"The report of the run is {run.folder / REPORT}")


def with_run_files(*listeners: Listener) -> Listeners:
    """`listeners`, and those that write report.html and run.log. The log comes last, so that it holds what the others say."""
    return Listeners(*listeners, ReportFile(), RunLog())


def train(job: Path | str | None = None, profile: str = "auto", *, listener: Listener | None = None, **given: Any) -> Summary:
    """`api.train`, with run.log and report.html in the run folder, as `hwopt run` writes them."""
    from hwopt import api

    return api.train(job, profile, listener=with_run_files(*([listener] if listener else [])), **given)
