"""Rows of data that cannot be used: skipped, counted and listed with their line; or an error at the first one."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from hwopt.errors import DataError
from hwopt.text import counted

if TYPE_CHECKING:
    from hwopt.data.mixture import Mixture

MAX_CONSECUTIVE = 100  # with this many consecutive bad rows, the file as a whole is rejected
MAX_FRACTION = 0.05  # with a greater fraction of bad rows, a source is rejected, unless data.max_bad_rows allows it
SHOWN = 5  # number of lines that the note lists

RowUnit = Literal["line", "row"]


@dataclass(frozen=True)
class Origins:
    """The sources of rows. The number of a row is its number in its source plus the start of that source."""

    names: tuple[str, ...]
    units: tuple[RowUnit, ...]
    starts: tuple[int, ...] = (0,)

    def part(self, number: int) -> tuple[int, int]:
        """(index of the source, own number) of a row."""
        index = bisect_right(self.starts, number) - 1
        return index, number - self.starts[index]

    def place(self, number: int) -> str:
        """The place of a row in its source, such as "train.csv:12"."""
        index, own = self.part(number)
        return f"{self.names[index]}:{own}" if self.units[index] == "line" else f"{self.names[index]}: row {own}"


@dataclass(frozen=True)
class Places:
    """The places of samples: for each sample, the 1-based number of its first line, or of its row."""

    source: str
    unit: RowUnit
    numbers: Sequence[int]
    several: Origins | None = None  # the sources, if there are several
    mixed: Mixture | None = None  # the mixture with each of the sources in place of a sample

    @property
    def origins(self) -> Origins:
        return self.several or Origins((self.source,), (self.unit,))

    def at(self, sample: int) -> str:
        """The place of a sample, such as "train.csv:12"."""
        return self.origins.place(self.numbers[sample])

    def take(self, samples: Sequence[int]) -> Places:
        return replace(self, numbers=array("q", (self.numbers[sample] for sample in samples)))

    def source_of(self, sample: int) -> str:
        return self.origins.names[self.origins.part(self.numbers[sample])[0]]

    def mixture(self) -> Mixture | None:
        """The sources of the samples with their weights; None if the data is not a mixture."""
        return None if self.mixed is None else self.mixed.take([self.origins.part(number)[0] for number in self.numbers])


class BadRows:
    """The bad rows of one or several sources: number -> reason. If `strict`, the first bad row raises DataError.

    Each source has its own limits; documents, of one row each, have them together.
    """

    def __init__(
        self, source: str, unit: RowUnit, strict: bool, max_fraction: float | None = None, several: Origins | None = None
    ) -> None:
        """`max_fraction` of bad rows is allowed; None: MAX_FRACTION, and no label may occur in bad rows only."""
        self.several = several
        self.source, self.unit, self.strict, self.max_fraction = source, unit, strict, max_fraction
        self.reasons: dict[int, str] = {}
        self.hint: Callable[[], str] | None = None
        """Returns a sentence that says how to read the rows that could not be decoded, if there are any."""
        self.good: Sequence[int] = ()
        """The usable rows at the last `check`."""

    def add(self, number: int, reason: str, hint: Callable[[], str] | None = None) -> None:
        """Record a bad row, with a `hint` if it could not be decoded. The first `reason` given for a row is kept."""
        self.hint = self.hint or hint
        if self.strict:
            raise DataError(f"{self.place(number)}: {reason}. {self.advice('Fix or remove it')}, or set data.on_bad_row = 'skip'")
        self.reasons.setdefault(number, reason)

    @property
    def origins(self) -> Origins:
        return self.several or Origins((self.source,), (self.unit,))

    def place(self, number: int) -> str:
        return self.origins.place(number)

    def forget_after(self, last: int) -> None:
        """Remove the bad rows after the row `last`, which are not read."""
        self.reasons = {number: reason for number, reason in self.reasons.items() if number <= last}

    def advice(self, otherwise: str) -> str:
        """How to make the rows usable: the hint if some could not be decoded."""
        return otherwise if self.hint is None else self.hint()

    def check(self, usable: Sequence[int]) -> None:
        """Raise DataError if too many rows are bad, all or too many consecutive ones. `usable`: numbers of the usable rows."""
        self.good = usable
        if not self.reasons:
            return None
        if self.several is None:
            return self._check(self.source, self.reasons, usable)
        source_of = {number: self.several.part(number)[0] for number in (*usable, *self.reasons)}
        rows = Counter(source_of.values())
        groups = {index: index if rows[index] > 1 else None for index in rows}  # None: the documents
        for group in dict.fromkeys(groups.values()):
            bad = {number: why for number, why in self.reasons.items() if groups[source_of[number]] == group}
            good = [number for number in usable if groups[source_of[number]] == group]
            self._check(self.source if group is None else self.several.names[group], bad, good)
        return None

    def check_again(self) -> None:
        """`check` after more rows turned out to be bad, with all rows of the sources, whatever part of the data they are in."""
        self.check([number for number in self.good if number not in self.reasons])

    def _check(self, source: str, reasons: Mapping[int, str], usable: Sequence[int]) -> None:
        if not reasons:
            return
        first, total = min(reasons), len(reasons) + len(usable)
        if not usable:
            raise DataError(
                f"{source}: none of its {counted(len(reasons), 'row')} can be used. "
                f"First one: {self.named([first], source)}: {reasons[first]}. {self.advice('Check that this is the right file')}"
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
        limit = MAX_FRACTION if self.max_fraction is None else self.max_fraction
        if len(reasons) > limit * total:
            allowed = min(1.0, ceil(100 * len(reasons) / total) / 100)
            raise DataError(
                f"{source}: {len(reasons):,} of {total:,} rows cannot be used, more than {limit:.0%}: "
                f"{self.summary(reasons, source)}. {self.advice('Fix or remove these rows')}. "
                f"To train on the other rows, set data.max_bad_rows = {allowed:g}"
            )

    def summary(self, reasons: Mapping[int, str] | None = None, source: str | None = None) -> str:
        """The first lines or rows, and the most frequent reasons. `reasons`: default all. `source`: as for `named`."""
        reasons = self.reasons if reasons is None else reasons
        counts = Counter(reason.split(": ")[0] for reason in reasons.values()).most_common(3)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in counts) if len(counts) > 1 else counts[0][0]
        return f"{self.named(sorted(reasons), source)} ({why})"

    def named(self, numbers: Sequence[int], source: str | None = None) -> str:
        """The first of some rows, such as "lines 3, 12"; with their file unless all are rows of `source`."""
        more = ", …" if len(numbers) > SHOWN else ""
        if self.several is not None and source not in self.several.names:
            return ", ".join(map(self.place, numbers[:SHOWN])) + more
        index, _ = self.origins.part(numbers[0])
        unit, shown = self.origins.units[index], ", ".join(f"{self.origins.part(number)[1]:,}" for number in numbers[:SHOWN])
        return f"{unit if len(numbers) == 1 else f'{unit}s'} {shown}{more}"

    def note(self) -> str:
        """One line for the screen: how many rows were skipped, which ones, and why."""
        bad = len(self.reasons)
        return f"skipped {bad:,} of {counted(len(self.good) + bad, 'row')} of {self.source}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        """The entry of this source in left_out.json."""
        rows: list[dict[str, Any]] = []
        for number in sorted(self.reasons):
            index, own = self.origins.part(number)
            file = {} if self.several is None else {"file": self.origins.names[index]}
            rows.append({**file, self.origins.units[index]: own, "why": self.reasons[number]})
        return {"source": self.source, "rows": len(self.good) + len(rows), "left_out": rows}
