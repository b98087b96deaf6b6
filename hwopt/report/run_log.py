"""RunLog: everything that a run prints, in run.log of its folder, whatever the terminal shows."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from hwopt.errors import StorageError
from hwopt.report.screen import Screen
from hwopt.report.terminal import Terminal, show_plan
from hwopt.runs.record import LOG
from hwopt.training.listener import Listener, Row, Summary

if TYPE_CHECKING:
    from hwopt.training.run import Run


class RunLog(Listener):
    """Listener of rank 0. A resumed run appends to the log. Notes from before the folder exists come first."""

    def __init__(self) -> None:
        self.early: list[tuple[str, str]] = []
        self.file: TextIO | None = None
        self.screen: Screen | None = None

    def on_start(self, run: Run) -> None:
        try:
            self.file = open(run.folder / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{run.folder / LOG} could not be written: {error.strerror or error}") from error
        console = Terminal(file=self.file, color_system=None)
        self.screen = Screen(console, verbose=True)
        console.print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}")
        show_plan(console, run.plan)
        for kind, message in self.early:
            getattr(self.screen, kind)(run, message)
        self.screen.on_start(run)

    def on_evidence(self, run: Run, found: list[Any]) -> None:
        if self.screen is not None:
            self.screen.on_evidence(run, found)

    def on_log(self, run: Run, row: Row) -> None:
        if self.screen is not None:
            self.screen.on_log(run, row)

    def on_message(self, run: Run, message: str) -> None:
        self.note("on_message", run, message)

    def on_warning(self, run: Run, message: str) -> None:
        self.note("on_warning", run, message)

    def on_finish(self, run: Run, summary: Summary) -> None:
        if self.screen is not None:
            self.screen.on_finish(run, summary)

    def note(self, kind: str, run: Run, message: str) -> None:
        """Write a message, or keep it until the log is open."""
        if self.screen is None:
            self.early.append((kind, message))
        else:
            getattr(self.screen, kind)(run, message)

    def on_end(self, run: Run, ending: str) -> None:
        if self.file is not None:
            if ending:
                self.file.write(f"{ending}\n")
            self.file.close()
        self.file = self.screen = None
