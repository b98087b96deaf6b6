"""Samples: the usable rows of one part of the data, before they are tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import Rows


@dataclass(frozen=True)
class Samples:
    """What the model reads of each sample, its label, and its place."""

    places: Places
    bad_rows: BadRows
    columns: list[list[Any]]
    """One list per column, with a text, a list of words, a conversation or an image for each sample."""
    labels: list[Any]
    """One per sample; empty if labels are tokens."""
    documents: bool = False
    """Each sample is a whole text file."""

    @classmethod
    def of(cls, rows: Rows, columns: list[list[Any]], labels: list[Any] | None = None) -> Samples:
        """The rows that are not bad. Raises DataError as `Rows.usable` does."""
        return cls(rows.places, rows.bad_rows, columns, labels or [], rows.documents).take(rows.usable())

    def __len__(self) -> int:
        return len(self.places.numbers)

    def take(self, samples: Sequence[int]) -> Samples:
        """Some of the samples."""
        return replace(
            self,
            places=self.places.take(samples),
            columns=[[column[sample] for sample in samples] for column in self.columns],
            labels=[self.labels[sample] for sample in samples] if self.labels else [],
        )


@dataclass(frozen=True)
class Named:
    """The names of the label numbers, and lines for the screen about the labels."""

    names: tuple[str, ...] = ()
    """Empty if labels are tokens."""
    notes: tuple[str, ...] = ()
