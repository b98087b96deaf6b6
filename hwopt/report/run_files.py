"""The files that a person reads of a run, as listeners: report.html and run.log."""

from __future__ import annotations

from datetime import datetime
from io import StringIO
from typing import TYPE_CHECKING

from hwopt.records.run_files import LOG, REPORT
from hwopt.report.page import page_of
from hwopt.report.screen import Screen
from hwopt.report.terminal import Terminal, show_plan
from hwopt.runs.record import is_run_folder, read_record
from hwopt.system.paths import write_text, writing
from hwopt.text import first_line
from hwopt.training.listener import DONE, Listener, Listeners

if TYPE_CHECKING:
    from hwopt.training.run import Run


class ReportFile(Listener):
    """Writes the report of a run when it ends. A report that cannot be written is a warning: the run itself is complete."""

    def on_end(self, run: Run, ending: str) -> None:
        if not is_run_folder(run.folder):
            return
        try:
            write_text(run.folder / REPORT, page_of([read_record(run.folder)]))
        except Exception as error:  # of a template, a file or a figure
            run.warn(f"{run.folder / REPORT} could not be written: {first_line(error)}")
        else:
            if ending == DONE:
                run.say(f"The report of the run is {run.folder / REPORT}")


class RunLog(Screen):
    """The screen of rank 0 in run.log. A resumed run appends to it. Notes from before the folder exists follow the plan."""

    def __init__(self) -> None:
        self.early = StringIO()
        super().__init__(Terminal(file=self.early, color_system=None), verbose=True)

    def on_stage(self, what: str) -> None:
        """Nothing: a stage is a line of the terminal."""

    def on_start(self, run: Run) -> None:
        with writing(run.folder / LOG):
            self.console.file = open(run.folder / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.console.print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}")
        show_plan(self.console, run.plan)
        self.console.file.write(self.early.getvalue())
        super().on_start(run)

    def on_end(self, run: Run, ending: str) -> None:
        if ending:
            self.console.file.write(f"{ending}\n")
        self.console.file.close()
        self.console.file = self.early = StringIO()


def with_run_files(*listeners: Listener) -> Listeners:
    """`listeners`, and those that write report.html and run.log. The log comes last, so that it holds what the others say."""
    return Listeners(*listeners, ReportFile(), RunLog())
