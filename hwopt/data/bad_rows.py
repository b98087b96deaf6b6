"""Rows of data that cannot be used: left out, counted, and named by their place in the file; or an error at the first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hwopt.errors import DataError

MAX_CONSECUTIVE = 100
"""Bad rows one after another: by then it is not the rows that are wrong."""
SHOWN = 5

Unit = Literal["line", "row"]


@dataclass(frozen=True)
class Places:
    """Where samples come from: a source, and for each of them the line (1-based; its first one) or row of it."""

    source: str
    unit: Unit
    numbers: Sequence[int]

    def at(self, sample: int) -> str:
        return place(self.source, self.unit, self.numbers[sample])

    def take(self, samples: Sequence[int]) -> Places:
        return Places(self.source, self.unit, [self.numbers[sample] for sample in samples])


def place(source: str, unit: Unit, number: int) -> str:
    return f"{source}:{number}" if unit == "line" else f"{source}: row {number}"


class BadRows:
    """The bad rows of one source: number -> why. With `strict` the first one is an error."""

    def __init__(self, source: str, unit: Unit, strict: bool) -> None:
        self.source, self.unit, self.strict = source, unit, strict
        self.whys: dict[int, str] = {}
        self.kept = 0
        """How many are left, as last checked."""

    def add(self, number: int, why: str) -> None:
        """`why` goes on from "the row …"."""
        if self.strict:
            raise DataError(f"{place(self.source, self.unit, number)}: {why}; mend or remove it, or set data.on_bad_row = 'skip'")
        self.whys.setdefault(number, why)

    def check(self, kept: Sequence[int]) -> None:
        """Raises DataError where no row is left beside the `kept` ones, or too many bad ones follow each other."""
        self.kept = len(kept)
        if not self.whys:
            return
        first = min(self.whys)
        if not kept:
            raise DataError(
                f"{self.source}: none of its {len(self.whys):,} rows can be used; the first one, "
                f"{self.unit} {first}, {self.whys[first]}"
            )
        good, in_a_row = set(kept), 0
        for number in sorted({*self.whys, *good}):
            in_a_row = 0 if number in good else in_a_row + 1
            if in_a_row == MAX_CONSECUTIVE:
                raise DataError(
                    f"{place(self.source, self.unit, number)}: the {MAX_CONSECUTIVE}th row in a row that cannot be used "
                    f"({self.whys[number]}); is it the right file, and are these its columns?"
                )

    def note(self) -> str:
        """One line for the screen."""
        numbers = sorted(self.whys)
        shown = ", ".join(f"{number:,}" for number in numbers[:SHOWN]) + (", …" if len(numbers) > SHOWN else "")
        reasons = Counter(why.split(": ")[0] for why in self.whys.values()).most_common(3)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in reasons) if len(reasons) > 1 else reasons[0][0]
        units = self.unit if len(numbers) == 1 else f"{self.unit}s"
        verb = "was" if len(numbers) == 1 else "were"
        return f"{len(numbers):,} of {self.kept + len(numbers):,} rows of {self.source} {verb} left out: {units} {shown} ({why})"

    def to_dict(self) -> dict[str, Any]:
        found = [{self.unit: number, "why": self.whys[number]} for number in sorted(self.whys)]
        return {"source": self.source, "rows": self.kept + len(found), "left_out": found}
