"""What the screen shows of predictions and evaluations of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hwopt.report.classes import class_sheets
from hwopt.report.terminal import say, short_path, show_sheet, table


def show_classes(console: Console, details: Mapping[str, Any], title: str) -> None:
    """Print the metrics of each class and the confusion matrix, if `details` has them."""
    for sheet in class_sheets(details, title):
        console.print()
        show_sheet(console, sheet)


def show_evaluation(console: Console, report: Any) -> None:
    """Print the metrics of a trained model on a file, and those of each class."""
    for note in report.notes:
        say(console, "note", note, "yellow")
    say(console, "evaluated", f"{short_path(report.run)} on {report.source}: {report.samples:,} samples")
    console.print(table(("metric", ""), ((name, f"{value:.4f}") for name, value in report.metrics.items())))
    show_classes(console, report.details, "label")


@contextmanager
def counting(console: Console, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows (how many are done, of how many) as a progress bar, if the console is a terminal."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with ExitStack() as stack:
        bar = Progress(*columns, console=console, transient=True)

        def show(done: int, total: int) -> None:
            if not bar.task_ids:  # the model is loaded, and the number of rows is known
                stack.enter_context(bar)
                bar.add_task("")
            bar.update(bar.task_ids[0], completed=done, total=total)

        yield show
