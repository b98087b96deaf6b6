"""What `hwopt tune` prints: one line per trial, and the result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hwopt.records.throughput import Unit
from hwopt.report.sheet import ABSENT, gib, known
from hwopt.report.status_line import folded
from hwopt.report.terminal import say
from hwopt.text import printable
from hwopt.trials.tuning import TrialRow, TuneResult, rate_text, ratio_text

UNITS: dict[Unit, str] = {"tokens": "real tokens/s", "samples": "samples/s", "steps": "steps/s"}


def show_trial(console: Console, row: TrialRow) -> None:
    """Print a trial that ended; before the first one the headings."""
    if row.number == 1:
        show_cells(console, ("trial", UNITS[row.unit], "of the start", "memory", "setting"), "bold")
    if row.failure:
        cells = (ABSENT, ABSENT, ABSENT, f"{row.setting}: {row.outcome}")
    else:
        ratio = known(row.ratio and row.ratio.value, "{:.2f}".format)
        cells = (known(row.rate, rate_text), ratio, known(row.peak_gib, gib), row.setting)
    show_cells(console, (str(row.number), *cells), "yellow" if row.failure else "")


def show_cells(console: Console, cells: Sequence[str], style: str) -> None:
    number, rate, ratio, memory, setting = map(printable, cells)
    before = f"{number:>5}  {rate:>13}  {ratio:>12}  {memory:>10}  "
    console.print(Text(folded(before + setting, console.file, " " * len(before)), style=style), soft_wrap=True)


def show_result(console: Console, result: TuneResult) -> None:
    """Print the best setting against the start, why the search ended, and what was written."""
    best = result.best
    if result.file is not None:
        say(console, "best", f"{ratio_text(best.ratio)} times the speed of the start: {best.setting}", "bold green")
    else:
        say(console, "best", "the start: no trial is clearly faster. No file is written", "bold green")
    say(console, "ended", result.ending)
    if result.file is not None:
        say(console, "written", str(result.file))
    if result.job_sets:
        text = f"the job sets {', '.join(result.job_sets)}, which wins over the profile. Remove it from the job"
        say(console, "note", text, "yellow")
