"""The labels of classification: one class a row, or several ones; read from columns, put in order, and weighted."""

from __future__ import annotations

import ast
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from hwopt.config.job import Job
from hwopt.data.sources.columns import is_scalar, is_whole, type_of
from hwopt.data.sources.number_format import is_decimal
from hwopt.data.sources.rows import Rows, class_names, holds_text, is_list, values_type
from hwopt.data.sources.tables import find_column
from hwopt.errors import DataError, InputError
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from transformers import PretrainedConfig


DELIMITERS = ("|", ";", ",")
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def read_labels(rows: Rows, name: str) -> list[str]:
    """The label of each row: its text, exactly as in the file. "01", "1" and "1.0" are three labels.

    A number or a boolean of a typed column or of JSON is spelled as JSON writes its type: 3 is "3", 3.0 is "3.0", True is "true".
    Rows without a label are marked as bad, with "" here. Raises DataError for a column of fractions.
    """
    import pyarrow as pa

    table, source = rows.table, rows.source
    column = find_column(table, name, source, "data.label")
    kind = values_type(column.type)
    text = holds_text(kind)
    known = text or is_whole(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if not known:
        lists = "; for lists of labels set task.kind = 'multi-label-classification'" if is_list(kind) else ""
        raise DataError(f"{source}: column {name!r} holds {kind}; labels must be strings or integers{lists}")
    classes = class_names(table, name)
    originals = rows.non_strings.get(name, {})
    labels: list[str] = []
    for row, value in enumerate(value for chunk in column.chunks for value in chunk.to_pylist()):
        value, label = originals.get(row, value), ""
        if value is None or not str(value).strip() or value != value or (classes and not 0 <= value < len(classes)):
            rows.mark_bad(row, f"{name!r} has no label ({truncate(value)})")
        elif isinstance(value, list | dict):
            rows.mark_bad(row, f"{name!r} is not a label: {truncate(value)}")
        elif isinstance(value, float) and not value.is_integer() and not text:
            raise DataError(
                f"{rows.places.at(row)}: {name!r} is {value}, a measurement; expected classes. "
                "Choose another column with data.label, or set task.kind = 'regression'"
            )
        else:
            label = classes[value] if classes else label_text(value)
        labels.append(label)
    return labels


class TypedLabel(str):
    """The label of a cell that is not a text: files of other types may spell the same value otherwise."""


def label_text(value: Any) -> str:
    """The label of a cell: a text as it is, a number or a boolean as JSON writes it."""
    return sys.intern(value) if isinstance(value, str) else typed_label(str(value).lower())  # one object for all equal texts


typed_label = lru_cache(10_000)(TypedLabel)


def in_the_spelling_of(names: Sequence[str], label: str) -> str:
    """`label`, or that of `names` which is the same value in another type: the integer 3 is 3.0, and a boolean may be "True"."""
    if label in names or not isinstance(label, TypedLabel):
        return label
    return next((name for name in names if name.lower().removesuffix(".0") == label.removesuffix(".0")), label)


def one_label_column(job: Job) -> str:
    """The label column of the job. Raises ValueError if it has several."""
    if len(job.data.label) > 1:
        raise ValueError(f"data.label: {job.task.kind} takes one column, got {listing(job.data.label)}")
    return job.data.label[0]


def label_order(labels: list[str], classes: list[str] | None, config: PretrainedConfig) -> tuple[str, ...]:
    """The labels that occur, by number: in the order of the model or the data set, else sorted (numbers by value)."""
    found = set(labels)
    own = [name for _, name in sorted((getattr(config, "id2label", None) or {}).items())]
    if len(own) == len(found) and set(own) == found:
        return tuple(own)
    if classes:
        return tuple(name for name in classes if name in found)
    return tuple(sorted_labels(found))


def sorted_labels(found: Iterable[str]) -> list[str]:
    """The labels in sorted order, by value if each is a number."""
    labels = sorted(found)
    return sorted(labels, key=float) if all(is_decimal(label, ".") for label in labels) else labels


def similar_labels(names: Iterable[str]) -> list[str]:
    """A line that names labels which differ by case, blanks or Unicode form only; empty if there are none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        seen = "".join(filter(str.isprintable, unicodedata.normalize("NFKC", name).casefold()))  # without zero-width characters
        groups.setdefault(seen.replace(" ", ""), []).append(name)
    alike = [group for group in groups.values() if len(group) > 1]
    if not alike:
        return []
    shown = listing([" and ".join(map(truncate, group)) for group in alike], 3)
    return [f"labels that differ by case, blanks or Unicode form only: {shown}. hwopt trains each as a class of its own"]


IMBALANCED = 20  # with so many times more samples of the most frequent label than of the rarest one, the screen warns


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


def read_flags(rows: Rows, names: Sequence[str]) -> list[list[str]]:
    """The names of the columns that have 1 in each row. Rows with another value than 0 or 1 are marked as bad."""
    found: list[list[str]] = [[] for _ in range(rows.table.num_rows)]
    for name in names:
        for row, value in enumerate(find_column(rows.table, name, rows.source, "data.label").to_pylist()):
            flag = FLAGS.get(str(value).strip().lower())
            if flag is None:
                rows.mark_bad(row, f"{name!r} is neither 0 nor 1: {truncate(value)}")
            elif flag:
                found[row].append(name)
    return found


def read_sets(rows: Rows, name: str, delimiter: str) -> list[list[str]]:
    """The labels of each row, each one once: the items of a list, or the parts of a text between delimiters; [] for none.

    Rows without a value, or with items that are not labels, are marked as bad. Raises DataError for a column of another type,
    or of lists with 0 or 1 for each label.
    """
    column = find_column(rows.table, name, rows.source, "data.label")
    classes = class_names(rows.table, name)
    text = holds_text(column.type)
    if not (text or is_list(column.type)):
        raise DataError(
            f"{rows.source}: column {name!r} holds {column.type}; labels must be lists, texts such as 'a{delimiter} b', "
            'or one column of 0 and 1 for each label (data.label = ["a", "b"])'
        )
    original = rows.non_strings.get(name, {})
    found: list[list[str]] = []
    seen: set[str] = set()
    flags = ""  # the first row with an item twice
    for row, value in enumerate(column.to_pylist()):
        value = original.get(row, value)
        items = parts_of(value, delimiter) if isinstance(value, str) else value
        found.append([])
        if not isinstance(items, list):
            problem = "has no value" if value is None else f"is not a list of labels: {truncate(value)}"
            rows.mark_bad(row, f"{name!r} {problem}")
            continue
        spelled = [str(item).strip().lower() for item in items]
        seen.update(spelled)
        flags = flags or (f"{rows.places.at(row)}: {name!r} is {truncate(items)}" if len({*spelled}) < len(spelled) else "")
        labels = [label_name(item, classes) for item in items]
        if None in labels:
            rows.mark_bad(row, f"{name!r} has an item that is not a label: {truncate(items[labels.index(None)])}")
            continue
        found[row] = list(dict.fromkeys(label for label in labels if label))
    if flags and seen <= FLAGS.keys():
        raise DataError(
            f"{flags}, a 0 or 1 for each label; hwopt reads lists of the labels that a row has. Write such lists, or a column of "
            "0 and 1 for each label, and name these columns in data.label"
        )
    return found


def parts_of(text: str, delimiter: str) -> Any:
    """The labels in `text`: between delimiters, or of a list in JSON or Python, as csv files have it; None for other lists."""
    if not re.fullmatch(r"\[[^][]*\]", text.strip()):
        return [part.strip() for part in text.split(delimiter)]
    joined = re.search(r"""["']\s+["']""", text)  # numpy prints no commas, and Python joins such texts
    for read in (json.loads, ast.literal_eval)[: 1 if joined else 2]:
        with suppress(ValueError, SyntaxError):
            return read(text.strip())
    return None


def label_name(item: Any, classes: Sequence[str] | None) -> str | None:
    """The label that `item` of a list stands for, a text exactly as it is; "" for blank text, None if it is not a label."""
    if classes and isinstance(item, int):
        return classes[item] if 0 <= item < len(classes) else None
    if isinstance(item, str):
        return item if item.strip() else ""
    return label_text(item) if isinstance(item, int) else None


def is_list_of_labels(table: pa.Table, name: str) -> bool:
    """Whether the column holds lists of strings or integers."""
    import pyarrow as pa

    kind = type_of(table, name)
    return is_list(kind) and (holds_text(kind.value_type) or pa.types.is_integer(kind.value_type))


def is_flag(table: pa.Table, name: str) -> bool:
    """Whether all values of the column are 0 or 1, and both occur."""
    if not is_scalar(table, name):
        return False
    values = {FLAGS.get(str(value).strip().lower()) for value in table[name].unique().to_pylist()}
    return values == {False, True}
