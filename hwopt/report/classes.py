"""A classifier's results as tables for the screen: the metrics of each class, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hwopt.text import cut

MAX_CLASSES = 20
"""Rows of a table; of more classes, those with the lowest F1."""
MAX_COLUMNS = 5
"""Labels up to which the whole confusion matrix is shown, so that it fits 80 columns; of more, the most frequent errors."""
CORNER = "true \\ predicted"
"""The heading of the first column of a confusion matrix."""
MAX_LABEL, MAX_HEADING = 24, 10
"""Characters of a label in a row, and above a column of the confusion matrix."""


class Sheet(NamedTuple):
    """A table of texts, with a note below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def class_sheets(
    details: Mapping[str, Any], title: str, max_classes: int = MAX_CLASSES, max_columns: int = MAX_COLUMNS
) -> Iterator[Sheet]:
    """The tables of `details` (`Metrics.details`), which may have none. `title`: the heading of the first column."""
    if "classes" in details:
        yield class_sheet(details["classes"], title, max_classes)
    if "confusion_matrix" in details:
        yield confusion_sheet(**details["confusion_matrix"], max_columns=max_columns)


def class_sheet(classes: Sequence[Mapping[str, Any]], title: str, max_classes: int = MAX_CLASSES) -> Sheet:
    """Label, precision, recall, F1 and support of each class; of more than `max_classes`, the lowest F1 first."""
    note = ""
    if len(classes) > max_classes:
        note = f"the {max_classes} classes with the lowest F1, of {len(classes):,}"
        classes = sorted(classes, key=lambda each: (each["f1"], -each["support"]))[:max_classes]
    rows = [
        (
            cut(each["label"], MAX_LABEL),
            *(f"{each[name]:.4f}" for name in ("precision", "recall", "f1")),
            f"{each['support']:,}",
        )
        for each in classes
    ]
    return Sheet((title, "precision", "recall", "f1", "support"), rows, note)


def confusion_sheet(labels: Sequence[str], rows: Sequence[Sequence[int]], max_columns: int = MAX_COLUMNS) -> Sheet:
    """The confusion matrix of up to `max_columns` labels; of more, its most frequent errors."""
    short = [cut(label, MAX_LABEL) for label in labels]
    if len(labels) <= max_columns:
        cells = [(label, *(f"{count:,}" for count in row)) for label, row in zip(short, rows, strict=True)]
        return Sheet((CORNER, *(cut(label, MAX_HEADING) for label in labels)), cells)
    errors = sorted(
        (-count, true, predicted)
        for true, row in enumerate(rows)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    found = [(short[true], short[predicted], f"{-count:,}") for count, true, predicted in errors[:MAX_CLASSES]]
    note = f"the {MAX_CLASSES} most frequent of {len(errors):,} confusions" if len(errors) > MAX_CLASSES else ""
    return Sheet(("true label", "predicted label", "samples"), found, note)
