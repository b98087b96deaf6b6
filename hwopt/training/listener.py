"""Listeners of a run: the terminal, the journal, a tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwopt.training.run import Run


Row = dict[str, float]


class Listener:
    """Whoever wants to hear of a run: the screen, the journal, a tracker. Every hook does nothing by default."""

    def started(self, run: Run) -> None: ...

    def evidence(self, run: Run, found: list[Any]) -> None:
        """After step 1: (plan entry, evidence) of every applied plugin."""

    def row(self, run: Run, row: Row) -> None:
        """A log point, or an evaluation (its keys begin with `eval_`)."""

    def said(self, run: Run, message: str) -> None:
        """What is good to know; `warned`: what somebody should look at."""

    def warned(self, run: Run, message: str) -> None: ...

    def finished(self, run: Run, summary: Row) -> None: ...


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def started(self, run: Run) -> None:
        for listener in self.listeners:
            listener.started(run)

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

    def finished(self, run: Run, summary: Row) -> None:
        for listener in self.listeners:
            listener.finished(run, summary)
