"""Join the rows of several sources with the same columns to one table. Each row keeps its place in its own source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Origins, Places
from hwopt.data.mixture import Mixture
from hwopt.data.sources.json_reader import to_table
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import find_column
from hwopt.errors import DataError
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa


def joined(parts: Sequence[Rows], source: str, mixed: Mixture | None) -> Rows:
    """The rows of all `parts`, in this order; `mixed` has the source of each part.

    Raises DataError if two parts differ in their columns.
    """
    table, non_strings = joined_table(parts)
    starts, numbers, start = [], [], 0
    for rows in parts:
        starts.append(start)
        numbers += [start + number for number in rows.places.numbers]
        start += 1 + max(max(rows.places.numbers, default=0), max(rows.bad_rows.reasons, default=0))
    origins = Origins(tuple(rows.source for rows in parts), tuple(rows.places.unit for rows in parts), tuple(starts))
    first = parts[0].bad_rows
    bad_rows = BadRows(source, "row", first.strict, first.max_fraction, origins)
    for start, rows in zip(starts, parts, strict=True):
        bad_rows.reasons |= {start + number: reason for number, reason in rows.bad_rows.reasons.items()}
        bad_rows.cells |= {start + number: cells for number, cells in rows.bad_rows.cells.items()}
        bad_rows.hint = bad_rows.hint or (rows.bad_rows.hint if rows.bad_rows.cells else None)
    places = Places(source, "row", numbers, origins, mixed)
    documents = all(rows.documents for rows in parts)
    return Rows(table, places, bad_rows, non_strings, documents, tuple(note for rows in parts for note in rows.notes))


def joined_table(parts: Sequence[Rows]) -> tuple[pa.Table, dict[str, dict[int, Any]]]:
    """(table, values that are not strings as in `Rows`) of all parts. Raises DataError if two differ in their columns."""
    import pyarrow as pa

    filled = [rows for rows in parts if rows.table.num_rows or rows.table.num_columns]
    first = filled[0]
    for rows in filled[1:]:
        refuse_other_columns(first, rows)
    columns, non_strings = [], {}
    for name in first.table.column_names:
        column, originals = joined_column(filled, name)
        columns.append(column)
        if originals:
            non_strings[name] = originals
    table = pa.Table.from_arrays(columns, names=first.table.column_names)
    return table.replace_schema_metadata(first.table.schema.metadata), non_strings


def refuse_other_columns(first: Rows, other: Rows) -> None:
    """Raise DataError if the columns of `other` are not those of `first`."""
    expected, found = first.table.column_names, other.table.column_names
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    less = f"has no column {listing(list(map(repr, missing)))} of {first.source}" if missing else ""
    more = f"has the column {listing(list(map(repr, extra)))}, which {first.source} lacks" if extra else ""
    if less or more:
        near = nearest(missing[0], extra) if missing else ""
        raise DataError(
            f"{other.source}: {' and '.join(filter(None, (less, more)))}.{near} "
            "Sources that are read together need the same columns"
        )
    classes, others = class_labels(first.table), class_labels(other.table)
    for name in [name for name in expected if classes.get(name) != others.get(name)]:
        raise DataError(
            f"{other.source}: the classes of column {name!r} are {truncate(others.get(name))}, those of {first.source} are "
            f"{truncate(classes.get(name))}; store the labels as strings"
        )


def class_labels(table: pa.Table) -> dict[str, Any]:
    """The class names of the ClassLabel columns of `datasets`, by column."""
    raw = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(raw).get("info", {}).get("features") or {}
    return {name: kind.get("names") for name, kind in features.items() if kind.get("_type") == "ClassLabel"}


def joined_column(parts: Sequence[Rows], name: str) -> tuple[pa.ChunkedArray, dict[int, Any]]:
    """(column of all parts, row -> original of values that are not strings in a column of mixed types)."""
    import pyarrow as pa

    originals: dict[int, Any] = {}
    start = 0
    for rows in parts:
        originals |= {start + row: value for row, value in rows.non_strings.get(name, {}).items()}
        start += rows.table.num_rows
    columns = [find_column(rows.table, name, rows.source) for rows in parts]
    columns = [column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column for column in columns]
    try:
        tables = [pa.table({name: column}) for column in columns]
        return pa.concat_tables(tables, promote_options="permissive")[name], originals
    except pa.ArrowException:  # as within one JSON file, mixed types become JSON text, since the job may not need the column
        table, mixed = to_table([{name: value} for column in columns for value in column.to_pylist()])
        return table[name], originals | mixed.get(name, {})
