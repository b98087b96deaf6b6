"""The rows that were read from one source, the place of each row, and the bad rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source."""

    strict: bool = True  # the first bad row is an error
    max_bad_rows: float | None = None  # allowed fraction of bad rows; None: the default of `BadRows`
    encoding: str | None = None  # of a text file; None: UTF-8, or UTF-16 with a byte order mark
    delimiter: str | None = None  # of a csv or tsv file; None: guessed from the header of a csv file, a tab in a tsv file
    max_rows: int | None = None  # read the first rows of each source only
    streaming: bool = False  # read hub data sets without downloading all of their files; goes with `max_rows`
    format: str | None = None  # of files, such as "conll"; None: by the extension


@dataclass(frozen=True)
class Rows:
    """The rows of a source that could be read, with their places, and the bad rows."""

    table: pa.Table
    places: Places
    bad_rows: BadRows
    non_strings: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Column of JSON -> table row -> the value in the file, where the table holds another one.

    That is in columns with mixed types, stored as strings, and in those with objects, stored with the keys of all rows.
    """
    documents: bool = False  # each row is a whole text file
    notes: tuple[str, ...] = ()  # lines for the screen

    @property
    def source(self) -> str:
        return self.places.source

    def mark_bad(self, row: int, reason: str) -> None:
        """Record that a row of the table cannot be used."""
        self.bad_rows.add(self.places.numbers[row], reason)

    def usable(self) -> list[int]:
        """The rows of the table that are not bad. Raises DataError as `BadRows.check` does."""
        usable = [row for row, number in enumerate(self.places.numbers) if number not in self.bad_rows.reasons]
        self.bad_rows.check([self.places.numbers[row] for row in usable])
        return usable

    def first(self, number: int) -> Rows:
        """The first `number` rows, with the bad rows before the last of them, and a note; all rows if there are no more."""
        total = self.table.num_rows
        if total <= number:
            return self
        numbers = self.places.numbers[:number]
        self.bad_rows.forget_after(numbers[-1])
        return replace(
            self,
            table=self.table.slice(0, number),
            places=replace(self.places, numbers=numbers),
            non_strings={
                name: {row: value for row, value in values.items() if row < number} for name, values in self.non_strings.items()
            },
            notes=(*self.notes, f"{self.source}: the first {number:,} of {total:,} rows are read (data.max_rows)"),
        )
