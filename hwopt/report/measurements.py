"""Tables of the measurements in a summary: each of its tables of numbers, such as GPU use or the parts of a step, with units.

A name ends with its unit, as in `power_watts`. What is measured is the run's business; a report shows all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNITS = {
    "percent": ("{:.0f}", " %"),
    "share": ("{:.1%}", ""),
    "gib": ("{:.2f}", " GiB"),
    "seconds": ("{:.4g}", " s"),
    "milliseconds": ("{:.4g}", " ms"),
    "ms": ("{:.4g}", " ms"),
    "watts": ("{:.0f}", " W"),
    "celsius": ("{:.0f}", " °C"),
    "mhz": ("{:,.0f}", " MHz"),
    "joules": ("{:.4g}", " J"),
}
"""The last word of a name -> (format, unit)."""


def measurement_tables(summary: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(name, rows of label and value) of each table of numbers in `summary`."""
    for name, value in summary.items():
        if isinstance(value, Mapping) and (rows := list(figures_of(value))):
            yield name.replace("_", " "), rows


def figures_of(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(label, value with its unit) of each number and text of a table, and of the tables in it."""
    for name, value in values.items():
        label = f"{above} {name}".strip()
        if isinstance(value, Mapping):
            yield from figures_of(value, label)
        elif isinstance(value, bool | str):
            yield label.replace("_", " "), str(value)
        elif isinstance(value, int | float):
            yield with_unit(label, value)


def with_unit(name: str, value: float) -> tuple[str, str]:
    """The label without the unit, and the value with it."""
    stem, _, last = name.rpartition("_")
    if name.endswith("_per_second"):
        unit = name.removesuffix("_per_second").rpartition("_")[2]
        return name.replace("_", " "), f"{value:{',.0f' if value >= 1000 else '.4g'}} {unit}/s"
    form, unit = UNITS.get(last, ("{:,.4g}", ""))
    return (stem if unit or last == "share" else name).replace("_", " "), form.format(value) + unit
