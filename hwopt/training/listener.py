"""Listener: receives the events of a run. The terminal, the journal, a tracker and the watchdog are listeners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Run = Any
"""hwopt.training.run.Run, which imports this module."""

Row = dict[str, float]
"""Metric name (as in Hugging Face's Trainer) -> value."""


class Listener:
    """Receives the events of a run. Every hook does nothing by default. Only the first rank shows and writes."""

    def started(self, run: Run) -> None:
        """The run is built and restored; nothing is trained yet."""

    def steps_begin(self, run: Run) -> None:
        """The first step of this process comes next. `steps_end` follows, also after an error."""

    def steps_end(self, run: Run) -> None:
        """No step of this process follows."""

    def evidence(self, run: Run, found: list[Any]) -> None:
        """After the first step: (plugin decision, evidence) of every applied plugin."""

    def row(self, run: Run, row: Row) -> None:
        """A log point, or an evaluation (its keys begin with `eval_`)."""

    def said(self, run: Run, message: str) -> None:
        """A note for the user."""

    def warned(self, run: Run, message: str) -> None:
        """A warning for the user."""

    def heartbeat(self, run: Run) -> None:
        """The run is alive. Called for every micro-batch, so it must be fast."""

    def ran_out_of_memory(self, run: Run, rows: int) -> None:
        """Micro-batches of the planned size do not fit; those of `rows` rows do."""

    def saved(self, run: Run, folder: Path) -> None:
        """A checkpoint, or the best weights, is complete on disk."""

    def finished(self, run: Run, summary: Row) -> None:
        """Training is over and `final/` is written."""


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def started(self, run: Run) -> None:
        for listener in self.listeners:
            listener.started(run)

    def steps_begin(self, run: Run) -> None:
        for listener in self.listeners:
            listener.steps_begin(run)

    def steps_end(self, run: Run) -> None:
        for listener in self.listeners:
            listener.steps_end(run)

    def evidence(self, run: Run, found: list[Any]) -> None:
        for listener in self.listeners:
            listener.evidence(run, found)

    def row(self, run: Run, row: Row) -> None:
        for listener in self.listeners:
            listener.row(run, row)

    def said(self, run: Run, message: str) -> None:
        for listener in self.listeners:
            listener.said(run, message)

    def warned(self, run: Run, message: str) -> None:
        for listener in self.listeners:
            listener.warned(run, message)

    def heartbeat(self, run: Run) -> None:
        for listener in self.listeners:
            listener.heartbeat(run)

    def ran_out_of_memory(self, run: Run, rows: int) -> None:
        for listener in self.listeners:
            listener.ran_out_of_memory(run, rows)

    def saved(self, run: Run, folder: Path) -> None:
        for listener in self.listeners:
            listener.saved(run, folder)

    def finished(self, run: Run, summary: Row) -> None:
        for listener in self.listeners:
            listener.finished(run, summary)
