"""The screen of `hwopt tune`: a progress line, one line per trial, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hwopt.report.memory import gib
from hwopt.report.status_line import status_line
from hwopt.report.terminal import say
from hwopt.report.throughput import Ratio, Unit
from hwopt.text import cut, printable

UNITS: dict[Unit, str] = {"tokens": "real tokens/s", "samples": "samples/s", "steps": "steps/s"}


@dataclass(frozen=True)
class TrialRow:
    """A trial, as reports show it."""

    number: int
    setting: str
    """What it changes."""
    assignments: tuple[str, ...]
    """The same as arguments of `--set`."""
    rate: float | None
    """Units per second; None for a failure."""
    unit: Unit
    peak_gib: float | None
    ratio: Ratio | None
    """Of its speed to that of the start."""
    failure: str = ""
    message: str = ""

    @property
    def outcome(self) -> str:
        """How it failed, in one line."""
        lines = self.message.strip().splitlines()
        return f"{self.failure}: {cut(lines[0], 160)}" if lines else self.failure


@dataclass(frozen=True)
class TuneResult:
    """What a search found."""

    rows: Sequence[TrialRow]
    best: TrialRow
    ending: str
    file: Path | None
    """The profile that was written; None if the start is the best setting."""
    job_sets: Sequence[str] = ()
    """Options of the best setting that the job sets otherwise, so that the profile does not count."""

    @property
    def improved(self) -> bool:
        return self.best.number != 1

    def to_dict(self) -> dict[str, Any]:
        """What `hwopt tune --format json` prints."""
        return {
            "trials": [asdict(row) for row in self.rows],
            "best": asdict(self.best),
            "ended": self.ending,
            "file": None if self.file is None else str(self.file),
            "job_sets": list(self.job_sets),
        }


def rate_text(rate: float) -> str:
    """`rate` with three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ratio_text(ratio: Ratio | None) -> str:
    """The ratio with its 95 % interval."""
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


class TuneProgress:
    """A line on standard error that says what the search does. Prints nothing if standard error is not a terminal."""

    def on_planning(self, what: str) -> None:
        status_line.show(f"planning: {what}")

    def on_begin(self, number: int, most: int, setting: str) -> None:
        """A trial starts."""
        status_line.show(f"trial {number} of at most {most}: {setting}")

    def on_trial(self, row: TrialRow) -> None:
        """A trial ended."""


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
            ratio = "-" if row.ratio is None else f"{row.ratio.value:.2f}"
            memory = "-" if row.peak_gib is None else gib(row.peak_gib)
            cells = ("-" if row.rate is None else rate_text(row.rate), ratio, memory, row.setting)
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
