"""The labels of classification: read from a column, put in order, and weighted."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from hwopt.config.job import Job
from hwopt.data.sources.number_format import is_decimal
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import find_column, string_values
from hwopt.errors import DataError, InputError
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from transformers import PretrainedConfig


def read_labels(rows: Rows, name: str) -> list[str]:
    """The label of each row: its text, exactly as in the file. "01", "1" and "1.0" are three labels.

    Typed columns have no spelling: there the integer 3 and the float 3.0 are the label "3", and True is "true".
    Rows without a label are marked as bad, with "" here. Raises DataError for a column of fractions.
    """
    import pyarrow as pa

    table, source = rows.table, rows.source
    column = find_column(table, name, source, "data.label")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    known = text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if not known:
        lists = "; for lists of labels set task.kind = 'multi-label-classification'" if pa.types.is_list(kind) else ""
        raise DataError(f"{source}: column {name!r} holds {kind}; labels must be strings or integers{lists}")
    classes = class_names(table, name)
    values: list[Any] = list(string_values(column, rows, name)) if text else column.to_pylist()
    for row, value in enumerate(values):
        original = rows.non_strings.get(name, {}).get(row)
        if value is None or value == "" or value != value or (classes and not 0 <= value < len(classes)):
            rows.mark_bad(row, f"{name!r} has no label ({truncate(value)})")
            values[row] = None
        elif isinstance(original, list | dict):
            rows.mark_bad(row, f"{name!r} is not a label: {truncate(original)}")
            values[row] = None
        elif isinstance(value, float) and not value.is_integer():
            raise DataError(
                f"{rows.places.at(row)}: {name!r} is {value}, a measurement; expected classes. "
                "Choose another column with data.label, or set task.kind = 'regression'"
            )
    if classes:
        return ["" if value is None else classes[value] for value in values]
    return ["" if value is None else label_text(value) for value in values]


def label_text(value: Any) -> str:
    """The label of a cell: a text as it is, a whole number without a fraction, a boolean as JSON writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value) if isinstance(value, float) else value)


def one_label_column(job: Job) -> str:
    """The label column of the job. Raises ValueError if it has several."""
    if len(job.data.label) > 1:
        raise ValueError(f"data.label: {job.task.kind} takes one column, got {listing(job.data.label)}")
    return job.data.label[0]


def class_names(table: pa.Table, name: str) -> list[str] | None:
    """The class names of a column of ClassLabel of `datasets`, or of lists of it, by number; None for other columns."""
    if b"huggingface" not in (table.schema.metadata or {}) or name not in table.column_names:
        return None
    import datasets

    feature = datasets.Features.from_arrow_schema(table.schema).get(name)
    feature = getattr(feature, "feature", feature)
    return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def label_order(labels: list[str], classes: list[str] | None, config: PretrainedConfig) -> tuple[str, ...]:
    """The labels that occur, by number: in the order of the model or the data set, else sorted (numbers by value)."""
    found = set(labels)
    own = [name for _, name in sorted((getattr(config, "id2label", None) or {}).items())]
    if len(own) == len(found) and set(own) == found:
        return tuple(own)
    if classes:
        return tuple(name for name in classes if name in found)
    if all(is_decimal(label, ".") for label in found):
        return tuple(sorted(found, key=lambda label: (float(label), label)))
    return tuple(sorted(found))


def similar_labels(names: Iterable[str]) -> list[str]:
    """A line that names labels which differ by case, blanks or Unicode form only; empty if there are none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    alike = [group for group in groups.values() if len(group) > 1]
    if not alike:
        return []
    shown = listing([" and ".join(map(truncate, group)) for group in alike], 3)
    return [f"labels that differ by case, blanks or Unicode form only: {shown}. hwopt trains each as a class of its own"]


IMBALANCED = 20
"""With so many times more samples of the most frequent label than of the rarest one, the screen warns."""


def imbalance(names: tuple[str, ...], labels: NDArray[np.int64]) -> list[str]:
    """A warning if one label is much rarer than another one in the training data."""
    import numpy as np

    counts = np.bincount(labels, minlength=len(names))
    rarest = int(counts.argmin())
    if counts.max() < IMBALANCED * max(int(counts[rarest]), 1):
        return []
    return [
        f"imbalanced labels: {truncate(names[rarest])} has {counts[rarest]:,} of {len(labels):,} training samples "
        f"({counts[rarest] / len(labels):.1%}). Judge by f1 instead of accuracy; task.class_weights = 'balanced' may help"
    ]


def label_weights(
    wanted: Literal["balanced"] | Mapping[str, float], names: tuple[str, ...], labels: NDArray[np.int64]
) -> tuple[float, ...]:
    """The weight of each label number. "balanced": samples / (classes x samples of the class), as in scikit-learn.

    A label that a table omits has weight 1. Raises InputError for a label that is not in the training data.
    """
    import numpy as np

    if wanted == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        return tuple((len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))).tolist())
    assert not isinstance(wanted, str)
    for label in wanted:
        if label not in names:
            raise InputError(
                f"task.class_weights: the training data has no label {truncate(label)}.{nearest(label, names)} "
                f"It has: {listing(names)}"
            )
    return tuple(float(wanted.get(name, 1.0)) for name in names)
