"""Read the value of data.train, data.eval or data.test: one source, a glob, a list of sources, or a mixture with weights.

The rows of several sources become one table. Each row keeps its place in its own source.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job_sources import MixedSource, Sources, TrainingSources, paths_of
from hwopt.data.bad_rows import BadRows, Origins, Places
from hwopt.data.mixture import Mixture
from hwopt.data.sources.json_reader import to_table
from hwopt.data.sources.location import expand, extension, locate, path_of
from hwopt.data.sources.rows import JsonValues, ReadOptions, Rows, class_names, holds_objects, values_type, without_nulls
from hwopt.data.sources.tables import find_column, read_document, read_rows
from hwopt.errors import DataError
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa

    from hwopt.config.job import Data


@dataclass(frozen=True)
class Leaf:
    """One file, `datasets` folder or hub data set."""

    path: str
    split: str | None
    group: int  # the index in the job of the source that it belongs to


def leaves(sources: Sources | TrainingSources, split: str | None = None) -> list[Leaf]:
    """The files and data sets of `sources`, in order. Raises DataError for a glob without files and for a file given twice."""
    found: dict[tuple[str, str | None], Leaf] = {}
    parts: tuple[str | MixedSource, ...] = (sources,) if isinstance(sources, str) else sources
    for group, part in enumerate(parts):
        given, own = (part, None) if isinstance(part, str) else (part.path, part.split)
        own = own or split
        for path in expand(given):
            if (path, own) in found:
                raise DataError(f"{path}: is given twice, as {listing(paths_of(sources), 3)}; give it once")
            found[path, own] = Leaf(path, own, group)
    return list(found.values())


def read_options(data: Data) -> ReadOptions:
    """How the job reads its data."""
    names = ("max_bad_rows", "encoding", "delimiter", "max_rows", "streaming", "format")
    return ReadOptions(strict=data.on_bad_row == "stop", **{name: getattr(data, name) for name in names})


def refuse_missing(data: Data) -> None:
    """Raise DataError if a source of `data` does not exist, or if training reads a file of the evaluation or the test."""
    train = leaves(data.train, data.split)
    held_out = [leaf for sources, split in data.held_out.values() for leaf in leaves(sources, split)]
    kinds = {located(leaf, data.format, several=len(train) > 1) for leaf in train}
    for leaf in held_out:
        located(leaf, data.format, several=len(held_out) > 1)
    if data.streaming and "dataset" not in kinds:
        raise DataError("data.streaming: applies to data sets of the hub, and data.train has files only; omit it")
    files = {path_of(leaf.path).resolve() for leaf in held_out if path_of(leaf.path).is_file()}
    for leaf in train if len(train) > 1 else ():
        if path_of(leaf.path).resolve() in files:
            raise DataError(
                f"{leaf.path}: data.train has this file, and so has the evaluation or the test; a model must not train on what "
                "evaluates it. Move the file to another folder, or list the files of data.train"
            )


def located(leaf: Leaf, format: str | None, several: bool) -> str:
    """The kind of `leaf`. Raises DataError as `locate` does. An empty document is not an error if there are `several`."""
    return "file" if several and is_document(leaf, format) else locate(leaf.path, leaf.split, format)[0]


def is_document(leaf: Leaf, format: str | None) -> bool:
    """Whether `leaf` is a text file, which is one row."""
    return extension(Path(leaf.path), format) == ".txt" and path_of(leaf.path).is_file()


def read_all(sources: Sources | TrainingSources, split: str | None, options: ReadOptions, suffix: str = "") -> Rows:
    """The rows of all `sources`. `suffix` follows the name of a data set in messages. Raises DataError as `read_rows` does."""
    import numpy as np

    found = leaves(sources, split)
    mixed = [part for part in sources if isinstance(part, MixedSource)]
    if len(found) == 1 and not mixed:
        return read_rows(found[0].path, found[0].split, options, found[0].path + suffix)
    # a text file without text is a bad row instead of an error
    parts = [
        read_document(Path(leaf.path), options)
        if is_document(leaf, options.format)
        else read_rows(leaf.path, leaf.split, options, leaf.path + suffix)
        for leaf in found
    ]
    names = paths_of(sources)
    weights = tuple(part.weight for part in mixed)
    mixture = Mixture(tuple(names), weights, np.array([leaf.group for leaf in found])) if mixed else None
    rows = joined(parts, listing(names, 3) + suffix, mixture)
    if not rows.table.num_rows:
        rows.bad_rows.check([])
    return rows


def joined(parts: Sequence[Rows], source: str, mixed: Mixture | None) -> Rows:
    """The rows of all `parts`, in this order; `mixed` has the source of each part.

    Raises DataError if two parts differ in their columns.
    """
    table, non_strings = joined_table(parts)
    starts, numbers, start = [], array("q"), 0
    for rows in parts:
        starts.append(start)
        numbers.extend(start + number for number in rows.places.numbers)
        start += 1 + max(max(rows.places.numbers, default=0), max(rows.bad_rows.reasons, default=0))
    origins = Origins(tuple(rows.source for rows in parts), tuple(rows.places.unit for rows in parts), tuple(starts))
    first = parts[0].bad_rows
    bad_rows = BadRows(source, "row", first.strict, first.max_fraction, origins)
    for start, rows in zip(starts, parts, strict=True):
        bad_rows.reasons |= {start + number: reason for number, reason in rows.bad_rows.reasons.items()}
        bad_rows.hint = bad_rows.hint or rows.bad_rows.hint
    places = Places(source, "row", numbers, origins, mixed)
    documents = all(rows.documents for rows in parts)
    notes = tuple(line for rows in parts for line in rows.notes)
    warnings = tuple(line for rows in parts for line in rows.warnings)
    return Rows(table, places, bad_rows, non_strings, documents, notes, warnings)


def joined_table(parts: Sequence[Rows]) -> tuple[pa.Table, dict[str, Mapping[int, Any]]]:
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
    for name in expected:
        if (classes := class_names(first.table, name)) != (others := class_names(other.table, name)):
            raise DataError(
                f"{other.source}: the classes of column {name!r} are {truncate(others)}, those of {first.source} are "
                f"{truncate(classes)}; store the labels as strings"
            )


def joined_column(parts: Sequence[Rows], name: str) -> tuple[pa.ChunkedArray, Mapping[int, Any]]:
    """(column of all parts, row -> value in the file, as in `Rows.non_strings`)."""
    import pyarrow as pa

    columns = [find_column(rows.table, name, rows.source) for rows in parts]
    columns = [column.cast(values_type(column.type)) for column in columns]
    given = [rows.non_strings.get(name, {}) for rows in parts]
    originals: Mapping[int, Any] = {}
    if texts := [values.texts for values in given if isinstance(values, JsonValues)]:
        originals = JsonValues(pa.chunked_array([chunk for each in texts for chunk in each.chunks]))
    if len(texts) < len(parts):
        originals, start = {}, 0
        for column, values in zip(columns, given, strict=True):
            if not values and holds_objects(column.type) and any(column.type != other.type for other in columns):
                # one type for all gives their objects more keys, and makes the integer 1 the float 1.0
                values = {row: without_nulls(value) for row, value in enumerate(column.to_pylist()) if value is not None}
            originals |= {start + row: value for row, value in values.items()}
            start += len(column)
    try:
        tables = [pa.table({name: column}) for column in columns]
        return pa.concat_tables(tables, promote_options="permissive")[name], originals
    except pa.ArrowException:  # as within one JSON file, mixed types become JSON text, since the job may not need the column
        table, mixed = to_table([{name: value} for column in columns for value in column.to_pylist()])
        return table[name], {**mixed.get(name, {}), **originals}
