"""Rows: what was read from one source, where each row comes from, and which were unusable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Rows:
    """The rows of a source that could be read, where each comes from, and those that could not be."""

    table: pa.Table
    places: Places
    left_out: BadRows
    odd: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Of columns that hold several types: row of the table -> the value that is no string."""

    @property
    def source(self) -> str:
        return self.places.source

    def leave_out(self, row: int, why: str) -> None:
        self.left_out.add(self.places.numbers[row], why)

    def kept(self) -> list[int]:
        """The rows of the table that nobody has left out. Raises DataError where too many are."""
        kept = [row for row, number in enumerate(self.places.numbers) if number not in self.left_out.whys]
        self.left_out.check([self.places.numbers[row] for row in kept])
        return kept
