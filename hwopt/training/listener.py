"""Listener: receives the events of a run. The terminal, the journal, a tracker and the watchdog are listeners."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

Run = Any  # hwopt.training.run.Run, which imports this module

Row = dict[str, Any]  # metric name (as in Hugging Face's Trainer) -> number. `use` is a dict of how well the device is used.

Summary = dict[str, Any]  # a row of totals, and results that are not one number, such as the metrics of each class
DONE = "done"  # how a run that is complete ended


class Listener:
    """Receives the events of a run. Every hook does nothing by default. Only the first rank shows and writes."""

    def on_stage(self, what: str) -> None:
        """A part of the start, such as reading the data, begins. It may take minutes; there is no run yet."""

    def on_start(self, run: Run) -> None:
        """The run is built and restored; nothing is trained yet."""

    def on_steps_begin(self, run: Run) -> None:
        """The first step of this process comes next. `steps_end` follows, also after an error."""

    def on_steps_end(self, run: Run) -> None:
        """No step of this process follows."""

    def on_evidence(self, run: Run, found: list[Any]) -> None:
        """After the first step of this process: (plugin decision, evidence) of every applied plugin."""

    def on_final_evidence(self, run: Run, found: list[Any]) -> None:
        """After the last step of the run: the evidence of every applied plugin once more."""

    def on_log(self, run: Run, row: Row) -> None:
        """A log point, or an evaluation (its keys begin with `eval_`)."""

    def on_message(self, run: Run, message: str) -> None:
        """A note for the user."""

    def on_warning(self, run: Run, message: str) -> None:
        """A warning for the user."""

    def on_heartbeat(self, run: Run) -> None:
        """The run is alive. Called for every micro-batch, so it must be fast."""

    def on_out_of_memory(self, run: Run, rows: int) -> None:
        """Micro-batches of the planned size do not fit; those of `rows` rows do."""

    def on_save(self, run: Run, folder: Path) -> None:
        """A checkpoint, or the best weights, is complete on disk."""

    def on_finish(self, run: Run, summary: Summary) -> None:
        """Training is over and `final/` is written."""

    def on_end(self, run: Run, ending: str) -> None:
        """The run ended: "done", or the exit code with the message, as in status.json; "" where another rank has written it."""


class Listeners(Listener):
    """Several listeners as one. Each event goes to all of them, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners
        for event in [name for name in vars(Listener) if name.startswith("on_")]:
            setattr(self, event, partial(self.tell, event))

    def tell(self, event: str, *arguments: Any) -> None:
        for listener in self.listeners:
            getattr(listener, event)(*arguments)
