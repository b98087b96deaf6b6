"""`report.html` of a run folder: written at the end of every run, however it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hwopt.errors import StorageError
from hwopt.records.run_record import RunRecord
from hwopt.report.page import page_of
from hwopt.runs.record import is_run_folder, read_record
from hwopt.text import first_line
from hwopt.training.listener import DONE, Listener

if TYPE_CHECKING:
    from hwopt.training.run import Run

REPORT = "report.html"


class ReportFile(Listener):
    """Writes the report of a run when it ends. A report that cannot be written is a warning: the run itself is complete."""

    def on_end(self, run: Run, ending: str) -> None:
        if not is_run_folder(run.folder):
            return
        try:
            write_page([read_record(run.folder)], run.folder / REPORT)
        except Exception as error:  # of a template, a file or a figure
            run.warn(f"{run.folder / REPORT} could not be written: {first_line(error)}")
        else:
            if ending == DONE:
                run.say(f"The report of the run is {run.folder / REPORT}")


def write_page(records: Sequence[RunRecord], path: Path) -> None:
    """Write the report of `records`. Raises StorageError if the file cannot be written."""
    text = page_of(records)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
