"""ProgressLine: says on standard error what a bench measures, and how long it still takes."""

from __future__ import annotations

from hwopt.report.status_line import status_line
from hwopt.trials.benchmark import BenchListener


class ProgressLine(BenchListener):
    """The last line of a terminal; elsewhere one line per round."""

    def on_plan(self, name: str) -> None:
        """The variant `name` is planned."""
        status_line.show(f"planning {name}")

    def on_round(self, number: int, rounds: int) -> None:
        status_line.announce("comparing losses without dropout" if number == 0 else f"round {number} of {rounds}")

    def on_trial(self, name: str, number: int, rounds: int, seconds_left: float | None) -> None:
        what = f"round {number} of {rounds}: {name}" if number else f"losses without dropout: {name}"
        status_line.show(f"{what}{duration(seconds_left)}")

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        status_line.clear()


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f", at most {seconds:.0f} s left" if seconds < 120 else f", at most {seconds / 60:.0f} min left"
