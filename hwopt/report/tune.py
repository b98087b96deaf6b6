"""The screen of `hwopt tune`: a progress line, one line per trial, and the result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hwopt.records.throughput import Unit
from hwopt.report.sheet import gib, known
from hwopt.report.status_line import status_line
from hwopt.report.terminal import say
from hwopt.text import printable
from hwopt.trials.tune_rows import TrialRow, TuneListener, TuneResult, rate_text, ratio_text

UNITS: dict[Unit, str] = {"tokens": "real tokens/s", "samples": "samples/s", "steps": "steps/s"}


class TuneProgress(TuneListener):
    """A line on standard error that says what the search does. Prints nothing if standard error is not a terminal."""

    def on_planning(self, what: str) -> None:
        status_line.show(f"planning: {what}")

    def on_begin(self, number: int, most: int, setting: str) -> None:
        status_line.show(f"trial {number} of at most {most}: {setting}")


class TuneScreen(TuneProgress):
    """Prints trials as they end, and the result."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_trial(self, row: TrialRow) -> None:
        if row.number == 1:
            self.line(("trial", UNITS[row.unit], "of the start", "memory", "setting"), "bold")
        if row.failure:
            cells = ("-", "-", "-", f"{row.setting}: {row.outcome}")
        else:
            ratio = known(row.ratio and row.ratio.value, "{:.2f}".format)
            cells = (known(row.rate, rate_text), ratio, known(row.peak_gib, gib), row.setting)
        self.line((str(row.number), *cells), "yellow" if row.failure else "")

    def line(self, cells: Sequence[str], style: str) -> None:
        number, rate, ratio, memory, setting = map(printable, cells)
        self.console.print(Text(f"{number:>5}  {rate:>13}  {ratio:>12}  {memory:>10}  {setting}", style=style))

    def show_result(self, result: TuneResult) -> None:
        """Print the best setting against the start, why the search ended, and what was written."""
        best = result.best
        if result.improved:
            say(self.console, "best", f"{ratio_text(best.ratio)} times the speed of the start: {best.setting}", "bold green")
        else:
            say(self.console, "best", "the start: no trial is clearly faster. No file is written", "bold green")
        say(self.console, "ended", result.ending)
        if result.file is not None:
            say(self.console, "written", str(result.file))
        if result.job_sets:
            text = f"the job sets {', '.join(result.job_sets)}, which wins over the profile. Remove it from the job"
            say(self.console, "note", text, "yellow")
