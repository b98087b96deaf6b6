"""RunLog: everything that a run prints, in run.log of its folder, whatever the terminal shows."""

from __future__ import annotations

from datetime import datetime
from io import StringIO
from typing import TYPE_CHECKING

from hwopt.errors import StorageError
from hwopt.report.screen import Screen
from hwopt.report.terminal import Terminal, show_plan
from hwopt.runs.record import LOG

if TYPE_CHECKING:
    from hwopt.training.run import Run


class RunLog(Screen):
    """The screen of rank 0 in a file. A resumed run appends to it. Notes from before the folder exists follow the plan."""

    def __init__(self) -> None:
        self.early = StringIO()
        super().__init__(Terminal(file=self.early, color_system=None), verbose=True)

    def on_stage(self, what: str) -> None:
        """Nothing: a stage is a line of the terminal."""

    def on_start(self, run: Run) -> None:
        try:
            self.console.file = open(run.folder / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{run.folder / LOG} could not be written: {error.strerror or error}") from error
        self.console.print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}")
        show_plan(self.console, run.plan)
        self.console.file.write(self.early.getvalue())
        super().on_start(run)

    def on_end(self, run: Run, ending: str) -> None:
        if ending:
            self.console.file.write(f"{ending}\n")
        self.console.file.close()
        self.console.file = self.early = StringIO()
