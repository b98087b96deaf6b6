"""Rows of data that cannot be used: skipped, counted and listed with their line; or an error at the first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from hwopt.errors import DataError

MAX_CONSECUTIVE = 100
"""With this many consecutive bad rows, the file as a whole is rejected."""
MAX_FRACTION = 0.05
"""With a greater fraction of bad rows, a source is rejected, unless data.max_bad_rows allows it."""
SHOWN = 5
"""Number of lines that the note lists."""

Unit = Literal["line", "row"]


@dataclass(frozen=True)
class Places:
    """The places of samples in their source: for each sample, the 1-based number of its first line, or of its row."""

    source: str
    unit: Unit
    numbers: Sequence[int]

    def at(self, sample: int) -> str:
        """The place of a sample, such as "train.csv:12"."""
        return place(self.source, self.unit, self.numbers[sample])

    def take(self, samples: Sequence[int]) -> Places:
        """The places of some of the samples."""
        return Places(self.source, self.unit, [self.numbers[sample] for sample in samples])


def place(source: str, unit: Unit, number: int) -> str:
    """The text for a line or row of `source` in messages."""
    return f"{source}:{number}" if unit == "line" else f"{source}: row {number}"


class BadRows:
    """The bad rows of one source: line or row number -> reason. If `strict`, the first bad row raises DataError."""

    def __init__(self, source: str, unit: Unit, strict: bool, max_fraction: float | None = None) -> None:
        """`max_fraction` of bad rows is allowed; None: MAX_FRACTION, and no label may occur in bad rows only."""
        self.source, self.unit, self.strict, self.max_fraction = source, unit, strict, max_fraction
        self.reasons: dict[int, str] = {}
        self.cells: dict[int, Mapping[str, Any]] = {}
        """The cells of bad rows that were split into columns but could not be decoded, by number and column."""
        self.hint: Callable[[], str] | None = None
        """Returns a sentence that says how to read the undecodable rows."""
        self.usable = 0
        """Number of usable rows at the last `check`."""

    def add(self, number: int, reason: str, cells: Mapping[str, Any] | None = None) -> None:
        """Record a bad row, with its `cells` if it could not be decoded. The first `reason` given for a row is kept."""
        if cells is not None:
            self.cells[number] = cells
        if self.strict:
            raise DataError(
                f"{place(self.source, self.unit, number)}: {reason}. {self.advice('Fix or remove it')}, "
                "or set data.on_bad_row = 'skip'"
            )
        self.reasons.setdefault(number, reason)

    def advice(self, otherwise: str) -> str:
        """How to make the rows usable: the hint if some could not be decoded."""
        return self.hint() if self.cells and self.hint is not None else otherwise

    def check(self, usable: Sequence[int]) -> None:
        """Raise DataError if too many rows are bad, all or too many consecutive ones. `usable`: numbers of the usable rows."""
        self.usable = len(usable)
        if not self.reasons:
            return
        first = min(self.reasons)
        if not usable:
            raise DataError(
                f"{self.source}: none of its {len(self.reasons):,} rows can be used. "
                f"First one: {self.unit} {first}: {self.reasons[first]}. {self.advice('Check that this is the right file')}"
            )
        good, consecutive = set(usable), 0
        for number in sorted({*self.reasons, *good}):
            consecutive = 0 if number in good else consecutive + 1
            if consecutive == MAX_CONSECUTIVE:
                raise DataError(
                    f"{place(self.source, self.unit, number)}: {self.reasons[number]}. "
                    f"The {MAX_CONSECUTIVE} rows up to here cannot be used. "
                    f"{self.advice('Check that this is the right file, with these columns')}"
                )
        self.check_fraction()

    def check_fraction(self) -> None:
        """Raise DataError if a greater fraction of the rows is bad than `max_fraction`."""
        total = self.usable + len(self.reasons)
        limit = MAX_FRACTION if self.max_fraction is None else self.max_fraction
        if len(self.reasons) > limit * total:
            allowed = min(1.0, ceil(100 * len(self.reasons) / total) / 100)
            raise DataError(
                f"{self.source}: {len(self.reasons):,} of {total:,} rows cannot be used, more than {limit:.0%}: "
                f"{self.summary()}. {self.advice('Fix or remove these rows')}. "
                f"To train on the other rows, set data.max_bad_rows = {allowed:g}"
            )

    def summary(self) -> str:
        """The first lines or rows, and the most frequent reasons."""
        numbers = sorted(self.reasons)
        shown = ", ".join(f"{number:,}" for number in numbers[:SHOWN]) + (", …" if len(numbers) > SHOWN else "")
        counts = Counter(reason.split(": ")[0] for reason in self.reasons.values()).most_common(3)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in counts) if len(counts) > 1 else counts[0][0]
        return f"{self.unit if len(numbers) == 1 else f'{self.unit}s'} {shown} ({why})"

    def note(self) -> str:
        """One line for the screen: how many rows were skipped, which ones, and why."""
        bad = len(self.reasons)
        return f"skipped {bad:,} of {self.usable + bad:,} rows of {self.source}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        """The entry of this source in left_out.json."""
        rows = [{self.unit: number, "why": self.reasons[number]} for number in sorted(self.reasons)]
        return {"source": self.source, "rows": self.usable + len(rows), "left_out": rows}
