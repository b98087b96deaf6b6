"""`report.html` of a run folder: written at the end of every run, however it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hwopt.errors import StorageError
from hwopt.report.page import page_of
from hwopt.report.run_record import RunRecord
from hwopt.runs.record import is_run_folder, read_record
from hwopt.text import first_line

REPORT = "report.html"


def write_own_report(folder: Path) -> str:
    """Write the report of the run in `folder`, if it has started. Returns why it could not be written, or "". Never raises."""
    try:
        if is_run_folder(folder):
            write_page([read_record(folder)], folder / REPORT)
    except Exception as error:  # of a template, a file or a figure: the run itself is complete
        return f"{folder / REPORT} could not be written: {first_line(error)}"
    return ""


def write_page(records: Sequence[RunRecord], path: Path) -> None:
    """Write the report of `records`. Raises StorageError if the file cannot be written."""
    text = page_of(records)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
