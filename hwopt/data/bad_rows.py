"""Rows of data that cannot be used: skipped, counted and listed with their line; or an error at the first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from hwopt.errors import DataError

if TYPE_CHECKING:
    from hwopt.data.mixture import Mixture

MAX_CONSECUTIVE = 100
"""With this many consecutive bad rows, the file as a whole is rejected."""
MAX_FRACTION = 0.05
"""With a greater fraction of bad rows, a source is rejected, unless data.max_bad_rows allows it."""
SHOWN = 5
"""Number of lines that the note lists."""

RowUnit = Literal["line", "row"]


@dataclass(frozen=True)
class Places:
    """The places of samples in their source: for each sample, the 1-based number of its first line, or of its row."""

    source: str
    unit: RowUnit
    numbers: Sequence[int]

    def at(self, sample: int) -> str:
        """The place of a sample, such as "train.csv:12"."""
        return place(self.source, self.unit, self.numbers[sample])

    def take(self, samples: Sequence[int]) -> Places:
        """The places of some of the samples."""
        return Places(self.source, self.unit, [self.numbers[sample] for sample in samples])

    def source_of(self, sample: int) -> str:
        """The source of a sample."""
        return self.source

    def mixture(self) -> Mixture | None:
        """The sources of the samples with their weights; None if the data is not a mixture."""
        return None


def place(source: str, unit: RowUnit, number: int) -> str:
    """The text for a line or row of `source` in messages."""
    return f"{source}:{number}" if unit == "line" else f"{source}: row {number}"


class BadRows:
    """The bad rows of one source: line or row number -> reason. If `strict`, the first bad row raises DataError."""

    def __init__(self, source: str, unit: RowUnit, strict: bool, max_fraction: float | None = None) -> None:
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
            raise DataError(f"{self.place(number)}: {reason}. {self.advice('Fix or remove it')}, or set data.on_bad_row = 'skip'")
        self.reasons.setdefault(number, reason)

    def place(self, number: int) -> str:
        """The place of a row, such as "train.csv:12"."""
        return place(self.source, self.unit, number)

    def forget_after(self, last: int) -> None:
        """Remove the bad rows after the row `last`, which are not read."""
        self.reasons = {number: reason for number, reason in self.reasons.items() if number <= last}
        self.cells = {number: cells for number, cells in self.cells.items() if number <= last}

    def advice(self, otherwise: str) -> str:
        """How to make the rows usable: the hint if some could not be decoded."""
        return self.hint() if self.cells and self.hint is not None else otherwise

    def check(self, usable: Sequence[int]) -> None:
        """Raise DataError if too many rows are bad, all or too many consecutive ones. `usable`: numbers of the usable rows."""
        self.usable = len(usable)
        self.check_rows(self.reasons, usable)

    def check_rows(self, reasons: Mapping[int, str], usable: Sequence[int]) -> None:
        """`check` for some of the rows: the bad ones with their `reasons`, and the `usable` ones."""
        if not reasons:
            return
        first = min(reasons)
        if not usable:
            raise DataError(
                f"{self.source}: none of its {len(reasons):,} rows can be used. "
                f"First one: {self.named([first])}: {reasons[first]}. {self.advice('Check that this is the right file')}"
            )
        good, consecutive = set(usable), 0
        for number in sorted({*reasons, *good}):
            consecutive = 0 if number in good else consecutive + 1
            if consecutive == MAX_CONSECUTIVE:
                raise DataError(
                    f"{self.place(number)}: {reasons[number]}. "
                    f"The {MAX_CONSECUTIVE} rows up to here cannot be used. "
                    f"{self.advice('Check that this is the right file, with these columns')}"
                )
        self.check_fraction(reasons, len(reasons) + len(usable))

    def check_fraction(self, reasons: Mapping[int, str], total: int) -> None:
        """Raise DataError if a greater fraction of `total` rows is bad than `max_fraction`."""
        limit = MAX_FRACTION if self.max_fraction is None else self.max_fraction
        if len(reasons) > limit * total:
            allowed = min(1.0, ceil(100 * len(reasons) / total) / 100)
            raise DataError(
                f"{self.source}: {len(reasons):,} of {total:,} rows cannot be used, more than {limit:.0%}: "
                f"{self.summary(reasons)}. {self.advice('Fix or remove these rows')}. "
                f"To train on the other rows, set data.max_bad_rows = {allowed:g}"
            )

    def summary(self, reasons: Mapping[int, str] | None = None) -> str:
        """The first lines or rows, and the most frequent reasons. `reasons`: default all."""
        reasons = self.reasons if reasons is None else reasons
        counts = Counter(reason.split(": ")[0] for reason in reasons.values()).most_common(3)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in counts) if len(counts) > 1 else counts[0][0]
        return f"{self.named(sorted(reasons))} ({why})"

    def named(self, numbers: Sequence[int]) -> str:
        """The first of some rows, such as "lines 3, 12"."""
        shown = ", ".join(f"{number:,}" for number in numbers[:SHOWN]) + (", …" if len(numbers) > SHOWN else "")
        return f"{self.unit if len(numbers) == 1 else f'{self.unit}s'} {shown}"

    def note(self) -> str:
        """One line for the screen: how many rows were skipped, which ones, and why."""
        bad = len(self.reasons)
        return f"skipped {bad:,} of {self.usable + bad:,} rows of {self.source}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        """The entry of this source in left_out.json."""
        rows = [{self.unit: number, "why": self.reasons[number]} for number in sorted(self.reasons)]
        return {"source": self.source, "rows": self.usable + len(rows), "left_out": rows}
