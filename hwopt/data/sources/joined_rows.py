"""Join the rows of several sources with the same columns to one table. Each row keeps its place in its own source."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import SHOWN, BadRows, Places
from hwopt.data.mixture import Mixture
from hwopt.data.sources.json_reader import json_text
from hwopt.data.sources.rows import Rows
from hwopt.errors import DataError
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Numbering:
    """Numbers for the rows of several sources. The number of a row is its own number plus the start of its source."""

    starts: tuple[int, ...]

    def part(self, number: int) -> tuple[int, int]:
        """(index of the source, own number) of a row."""
        index = bisect_right(self.starts, number) - 1
        return index, number - self.starts[index]


@dataclass(frozen=True)
class JoinedPlaces(Places):
    """The places of samples in several sources."""

    numbering: Numbering
    parts: tuple[Places, ...]
    groups: tuple[int, ...]
    """For each of `parts`, the source of the mixture that it belongs to."""
    names: tuple[str, ...]
    """The sources of the mixture."""
    weights: tuple[float, ...] = ()
    """The weight of each source of a mixture; empty if the data is not a mixture."""

    def at(self, sample: int) -> str:
        """The place of a sample, such as "train-2.csv:12"."""
        index, number = self.numbering.part(self.numbers[sample])
        return replace(self.parts[index], numbers=[number]).at(0)

    def source_of(self, sample: int) -> str:
        """The source of a sample."""
        return self.parts[self.numbering.part(self.numbers[sample])[0]].source

    def take(self, samples: Sequence[int]) -> JoinedPlaces:
        """The places of some of the samples."""
        return replace(self, numbers=[self.numbers[sample] for sample in samples])

    def mixture(self) -> Mixture | None:
        """The sources of the samples with their weights; None without weights."""
        import numpy as np

        if not self.weights:
            return None
        index = np.searchsorted(np.array(self.numbering.starts), np.asarray(self.numbers, np.int64), side="right") - 1
        return Mixture(self.names, self.weights, np.array(self.groups, np.int64)[index])


class JoinedBadRows(BadRows):
    """The bad rows of several sources. Each source has its own limits; documents, of one row each, have them together."""

    def __init__(self, source: str, numbering: Numbering, parts: Sequence[BadRows]) -> None:
        super().__init__(source, "row", parts[0].strict, parts[0].max_fraction)
        self.numbering, self.parts = numbering, parts
        for start, part in zip(numbering.starts, parts, strict=True):
            self.reasons |= {start + number: reason for number, reason in part.reasons.items()}
            self.cells |= {start + number: cells for number, cells in part.cells.items()}
        self.hint = next((part.hint for part in parts if part.cells and part.hint is not None), None)

    def add(self, number: int, reason: str, cells: Mapping[str, Any] | None = None) -> None:
        """Record a bad row of its source."""
        index, own = self.numbering.part(number)
        self.parts[index].add(own, reason, cells)
        super().add(number, reason, cells)

    def place(self, number: int) -> str:
        """The place of a row in its own source."""
        index, own = self.numbering.part(number)
        return self.parts[index].place(own)

    def check(self, usable: Sequence[int]) -> None:
        """Raise DataError if too many rows of a source are bad, or too many documents."""
        self.usable = len(usable)
        own: list[list[int]] = [[] for _ in self.parts]
        for number in usable:
            index, one = self.numbering.part(number)
            own[index].append(one)
        documents: list[int] = []
        bad_documents: dict[int, str] = {}
        for start, part, numbers in zip(self.numbering.starts, self.parts, own, strict=True):
            if len(numbers) + len(part.reasons) > 1:
                part.check(numbers)
                continue
            documents += [start + number for number in numbers]
            bad_documents |= {start + number: reason for number, reason in part.reasons.items()}
        self.check_rows(bad_documents, documents)

    def named(self, numbers: Sequence[int]) -> str:
        """The places of the first of some rows."""
        return ", ".join(map(self.place, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")

    def to_dict(self) -> dict[str, Any]:
        """The entry in left_out.json."""
        rows = []
        for number in sorted(self.reasons):
            index, own = self.numbering.part(number)
            part = self.parts[index]
            rows.append({"file": part.source, part.unit: own, "why": self.reasons[number]})
        return {"source": self.source, "rows": self.usable + len(rows), "left_out": rows}


def joined(
    parts: Sequence[Rows], source: str, groups: Sequence[int] = (), names: Sequence[str] = (), weights: Sequence[float] = ()
) -> Rows:
    """The rows of all `parts`, in this order. `groups`, `names` and `weights` describe a mixture (JoinedPlaces).

    Raises DataError if two sources differ in their columns.
    """
    table, non_strings = joined_table(parts)
    starts, numbers, start = [], [], 0
    for rows in parts:
        starts.append(start)
        numbers += [start + number for number in rows.places.numbers]
        start += 1 + max(max(rows.places.numbers, default=0), max(rows.bad_rows.reasons, default=0))
    numbering = Numbering(tuple(starts))
    places = JoinedPlaces(
        source, "row", numbers, numbering, tuple(rows.places for rows in parts), tuple(groups), tuple(names), tuple(weights)
    )
    notes = tuple(note for rows in parts for note in rows.notes)
    return Rows(table, places, JoinedBadRows(source, numbering, [rows.bad_rows for rows in parts]), non_strings, notes)


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
    for name in found:
        if found.count(name) > 1:
            raise DataError(f"{other.source}: has {found.count(name)} columns named {name!r}; rename all but one")
    if missing or extra:
        less = f"has no column {listing(list(map(repr, missing)))}" if missing else ""
        more = f"has the column {listing(list(map(repr, extra)))}, which {first.source} lacks" if extra else ""
        near = nearest(missing[0], extra) if missing else ""
        of_first = f" of {first.source}" if missing else ""
        raise DataError(
            f"{other.source}: {' and '.join(filter(None, (less + of_first, more)))}.{near} "
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
    columns = [decoded(rows.table[name]) for rows in parts]
    try:
        tables = [pa.table({name: column}) for column in columns]
        return pa.concat_tables(tables, promote_options="permissive")[name], originals
    except pa.ArrowException as error:
        values = [value for column in columns for value in column.to_pylist()]
        try:
            # as within one JSON file: mixed types are stored as JSON text, since the job may not need the column
            texts = [None if value is None else json_text(value) for value in values]
        except TypeError:
            other = next(rows for rows in parts if rows.table[name].type != parts[0].table[name].type)
            raise DataError(
                f"{other.source}: column {name!r} holds {other.table[name].type}, that of {parts[0].source} "
                f"{parts[0].table[name].type}; store the same type in all files"
            ) from error
    originals |= {row: value for row, value in enumerate(values) if not isinstance(value, str | None)}
    return pa.chunked_array([pa.array(texts, pa.string())]), originals


def decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """`column` without dictionary encoding."""
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
