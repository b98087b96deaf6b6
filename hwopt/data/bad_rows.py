"""Rows of data that cannot be used: skipped, counted and listed with their line; or an error at the first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hwopt.errors import DataError

MAX_CONSECUTIVE = 100
"""With this many consecutive bad rows, the file as a whole is rejected."""
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

    def __init__(self, source: str, unit: Unit, strict: bool) -> None:
        self.source, self.unit, self.strict = source, unit, strict
        self.reasons: dict[int, str] = {}
        self.usable = 0
        """Number of usable rows at the last `check`."""

    def add(self, number: int, reason: str) -> None:
        """Record a bad row. The first `reason` given for a row is kept."""
        if self.strict:
            raise DataError(
                f"{place(self.source, self.unit, number)}: {reason}. Fix or remove it, or set data.on_bad_row = 'skip'"
            )
        self.reasons.setdefault(number, reason)

    def check(self, usable: Sequence[int]) -> None:
        """Raise DataError if no row is usable, or too many consecutive rows are bad. `usable`: the numbers of the usable rows."""
        self.usable = len(usable)
        if not self.reasons:
            return
        first = min(self.reasons)
        if not usable:
            raise DataError(
                f"{self.source}: none of its {len(self.reasons):,} rows can be used. "
                f"First one: {self.unit} {first}: {self.reasons[first]}"
            )
        good, consecutive = set(usable), 0
        for number in sorted({*self.reasons, *good}):
            consecutive = 0 if number in good else consecutive + 1
            if consecutive == MAX_CONSECUTIVE:
                raise DataError(
                    f"{place(self.source, self.unit, number)}: {self.reasons[number]}. "
                    f"The {MAX_CONSECUTIVE} rows up to here cannot be used: check that this is the right file, with these columns"
                )

    def note(self) -> str:
        """One line for the screen: how many rows were skipped, which ones, and why."""
        numbers = sorted(self.reasons)
        shown = ", ".join(f"{number:,}" for number in numbers[:SHOWN]) + (", …" if len(numbers) > SHOWN else "")
        counts = Counter(reason.split(": ")[0] for reason in self.reasons.values()).most_common(3)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in counts) if len(counts) > 1 else counts[0][0]
        units = self.unit if len(numbers) == 1 else f"{self.unit}s"
        return f"skipped {len(numbers):,} of {self.usable + len(numbers):,} rows of {self.source}: {units} {shown} ({why})"

    def to_dict(self) -> dict[str, Any]:
        """The entry of this source in left_out.json."""
        rows = [{self.unit: number, "why": self.reasons[number]} for number in sorted(self.reasons)]
        return {"source": self.source, "rows": self.usable + len(rows), "left_out": rows}
