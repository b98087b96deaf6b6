"""Results of a model: its metrics, those of each class or target, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from hwopt.report.sheet import Sheet, known
from hwopt.report.terminal import say, short_path, show_sheet, table
from hwopt.text import counted, cut

CORNER = "true \\ predicted"


class Limits(NamedTuple):
    """How much of the results is shown."""

    classes: int = 20  # rows of a table; of more classes, those with the lowest F1
    columns: int = 5  # labels up to which the whole confusion matrix is shown; of more, the most frequent errors
    label: int = 24  # characters of a label in a row
    heading: int = 10  # characters of a label above a column of the matrix; more if WIDTH has room for them


SCREEN = Limits()
WIDTH, GAP = 80, 2
"""Characters of a whole confusion matrix, and between its columns."""


def class_sheets(details: Mapping[str, Any], title: str, limits: Limits = SCREEN) -> Iterator[Sheet]:
    """The sheets of `details` (`Metrics.details`), which may have none. `title`: the heading of the first column."""
    if "classes" in details:
        yield class_sheet(details["classes"], title, limits)
    if "targets" in details:
        yield target_sheet(details["targets"], limits)
    if "confusion_matrix" in details:
        yield confusion_sheet(**details["confusion_matrix"], limits=limits)


def target_sheet(targets: Sequence[Mapping[str, Any]], limits: Limits = SCREEN) -> Sheet:
    names = [name for name in targets[0] if name != "target"]
    rows = [(cut(each["target"], limits.label), *(known(each[name], "{:.4g}".format) for name in names)) for each in targets]
    return Sheet(("target", *names), rows, "targets")


def class_sheet(classes: Sequence[Mapping[str, Any]], title: str, limits: Limits = SCREEN) -> Sheet:
    """Label, precision, recall, F1 and support of each class; of more than `limits.classes`, the lowest F1 first."""
    note = ""
    if len(classes) > limits.classes:
        note = f"the {limits.classes} classes with the lowest F1, of {len(classes):,}"
        classes = sorted(classes, key=lambda each: (each["f1"], -each["support"]))[: limits.classes]
    scores = ("precision", "recall", "f1")
    rows = [
        (cut(each["label"], limits.label), *(f"{each[name]:.4f}" for name in scores), f"{each['support']:,}") for each in classes
    ]
    return Sheet((title, *scores, "support"), rows, "classes", note)


def confusion_sheet(labels: Sequence[str], rows: Sequence[Sequence[int]], limits: Limits = SCREEN) -> Sheet:
    """The confusion matrix of up to `limits.columns` labels; of more, its most frequent errors."""
    short = [cut(label, limits.label) for label in labels]
    if len(labels) <= limits.columns:
        cells = [(label, *(f"{count:,}" for count in row)) for label, row in zip(short, rows, strict=True)]
        first = max(map(len, (CORNER, *short)))
        heading = max(limits.heading, (WIDTH - first) // len(labels) - GAP)
        return Sheet((CORNER, *(cut(label, heading) for label in labels)), cells, "confusion matrix")
    errors = sorted(
        (-count, true, predicted)
        for true, row in enumerate(rows)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    found = [(short[true], short[predicted], f"{-count:,}") for count, true, predicted in errors[: limits.classes]]
    note = f"the {limits.classes} most frequent of {len(errors):,} confusions" if len(errors) > limits.classes else ""
    return Sheet(("true label", "predicted label", "samples"), found, "most frequent confusions", note)


def show_classes(console: Console, details: Mapping[str, Any], title: str) -> None:
    """Print the metrics of each class and the confusion matrix, if `details` has them."""
    for sheet in class_sheets(details, title):
        console.print()
        show_sheet(console, sheet)


def show_evaluation(console: Console, report: Any) -> None:
    """Print the metrics of a trained model on a file, and those of each class."""
    for note in report.notes:
        say(console, "note", note, "yellow")
    say(console, "evaluated", f"{short_path(report.run)} on {report.source}: {counted(report.samples, 'sample')}")
    console.print(table(("metric", ""), ((name, f"{value:.4f}") for name, value in report.metrics.items())))
    show_classes(console, report.details, "label")
