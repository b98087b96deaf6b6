"""Sheet: a table of texts, for the terminal and for pages; and how figures become texts with units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwopt.planning.memory_plan import SEARCHED
from hwopt.text import cut, printable

ABSENT = "-"  # the cell of a value that was not measured
BASES = {"traced": "from a simulated step", "closed form": "by formula", "measured": "from a measured step"}
"""Tier of the memory planner -> what its figures come from."""
YES_OR_NO = {True: "yes", False: "no", None: "unknown"}
SECONDS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
UNITS = {
    "percent": "{:.0f} %",
    "share": "{:.1%}",
    "mfu": "{:.1%}",
    "gib": "{:.2f} GiB",
    "seconds": "{:.4g} s",
    "ms": "{:.4g} ms",
    "watts": "{:.0f} W",
    "celsius": "{:.0f} °C",
    "mhz": "{:,.0f} MHz",
    "joules": "{:.3g} J",
}
"""The word of a name that is its unit -> how the figure is shown."""


@dataclass(frozen=True)
class Sheet:
    """A table whose first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""  # what a page writes above the table
    note: str = ""  # what stands below it
    folded: int | None = None  # the column that wraps on a terminal; None: no cell wraps

    def is_numeric(self, column: int) -> bool:
        """Whether all cells of a column after the first one are numbers, with or without a unit."""
        return column > 0 and all(row[column][:1].isdigit() or row[column] == ABSENT for row in self.rows)

    def shortened(self, first: int, others: int) -> Sheet:
        """The sheet with cells of at most so many characters, which show control characters."""
        rows = [[cut(printable(cell), others if number else first) for number, cell in enumerate(row)] for row in self.rows]
        return replace(self, columns=[printable(column) for column in self.columns], rows=rows)


def known(value: Any, shown: Callable[[Any], str]) -> str:
    """`value` as `shown` writes it; a dash for None."""
    return ABSENT if value is None else shown(value)


def value_text(value: Any) -> str:
    """An option or a key of a plan; a list in its order of preference."""
    if value is None:
        return ABSENT
    if isinstance(value, list):
        return " > ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def gib(size: float) -> str:
    """`size`, in GiB, with its unit."""
    return f"{size:.2f} GiB" if size >= 0.1 else f"{size * 1024:.1f} MiB"


def largest_text(size: int) -> str:
    """The largest size that fits, which may be the largest one that the planner tries."""
    return f"{'at least ' if size >= SEARCHED else ''}{size:,}"


def margin_text(margin_gib: float) -> str:
    """The memory that is left or missing, in words."""
    return f"{gib(abs(margin_gib))} {'left' if margin_gib >= 0 else 'missing'}"


def seconds_text(*seconds: float) -> str:
    """A time, or both ends of a range, with three digits in one unit: "1.15 s", "72.5 to 156 ms"."""
    least = len(seconds)  # of a range, 2: its lower end would be a small fraction of the unit
    unit, size = next(((unit, size) for unit, size in SECONDS if seconds[-1] >= least * size), SECONDS[-1])
    return " to ".join(f"{float(f'{value / size:.3g}'):,g}" for value in seconds) + f" {unit}"


def with_unit(name: str, value: float) -> str:
    """A figure with the unit that its name ends with, or that stands before "per"."""
    word = name.split("_per_")[0].rpartition("_")[2]
    return UNITS.get(word, "{:,.4g}").format(value)
