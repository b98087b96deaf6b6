"""The labels of multi-label classification: lists, delimited texts, or one column of 0 and 1 for each label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwopt.data.sources.columns import is_scalar
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import find_column, string_values
from hwopt.errors import DataError
from hwopt.tasks.labels import class_names
from hwopt.text import truncate

if TYPE_CHECKING:
    import pyarrow as pa

DELIMITERS = ("|", ";", ",")
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


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

    Rows without a value, or with items that are not labels, are marked as bad. Raises DataError for a column of another type.
    """
    import pyarrow as pa

    column = find_column(rows.table, name, rows.source, "data.label")
    classes = class_names(rows.table, name)
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type)
    if not (text or is_list(column.type)):
        raise DataError(
            f"{rows.source}: column {name!r} holds {column.type}; labels must be lists, texts such as 'a{delimiter} b', "
            'or one column of 0 and 1 for each label (data.label = ["a", "b"])'
        )
    original = rows.non_strings.get(name, {})
    found: list[list[str]] = []
    for row, value in enumerate(string_values(column, rows, name) if text else column.to_pylist()):
        value = original.get(row, value)
        items = value.split(delimiter) if isinstance(value, str) else value
        found.append([])
        if not isinstance(items, list):
            rows.mark_bad(
                row, f"{name!r} has no value" if value is None else f"{name!r} is not a list of labels: {truncate(value)}"
            )
            continue
        labels = [label_name(item, classes) for item in items]
        if None in labels:
            rows.mark_bad(row, f"{name!r} has an item that is not a label: {truncate(items[labels.index(None)])}")
            continue
        found[row] = list(dict.fromkeys(label for label in labels if label))
    return found


def label_name(item: Any, classes: Sequence[str] | None) -> str | None:
    """The label that `item` of a list stands for; "" for blank text, None if it is not a label."""
    if classes and isinstance(item, int):
        return classes[item] if 0 <= item < len(classes) else None
    if isinstance(item, str):
        return item.strip()
    return str(int(item)) if isinstance(item, int) else None


def is_list(kind: Any) -> bool:
    """Whether `kind` is a type of lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_list_of_labels(table: pa.Table, name: str) -> bool:
    """Whether the column holds lists of strings or integers."""
    import pyarrow as pa

    kind = table[name].type if table.column_names.count(name) == 1 else pa.null()
    return is_list(kind) and (pa.types.is_string(kind.value_type) or pa.types.is_integer(kind.value_type))


def is_flag(table: pa.Table, name: str) -> bool:
    """Whether all values of the column are 0 or 1, and both occur."""
    if not is_scalar(table, name):
        return False
    values = {FLAGS.get(str(value).strip().lower()) for value in table[name].unique().to_pylist()}
    return values == {False, True}
