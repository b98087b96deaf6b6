"""Print runs or plans side by side: their figures, the ratio of their speeds, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from hwopt.records.run_record import RunRecord
from hwopt.report.comparison import (
    Difference,
    Quantity,
    describe_predicted_ratio,
    describe_ratio,
    differences,
    job_differences,
    plan_quantities,
    quantities,
    shown,
    speed_ratios,
    unique_names,
)
from hwopt.report.terminal import say, show_table
from hwopt.text import cut

MAX_VALUE = 48
"""Characters of a value in the table of differences."""


def show_runs(console: Console, records: Sequence[RunRecord]) -> None:
    """Print the figures of runs, their speeds against the first one, and what differs in their plans."""
    names = unique_names(records)
    show_quantities(console, names, quantities(records))
    for record, ratio in speed_ratios(records):
        name = next(name for each, name in zip(records, names, strict=True) if each is record)
        say(console, f"{name} against {names[0]}", describe_ratio(ratio))
    if others := job_differences(records):
        say(console, "different jobs", f"{', '.join(others)} differ: speeds and metrics are not comparable", "bold yellow")
    show_differences(console, names, differences([record.plan for record in records]))


def show_plans(console: Console, plans: Sequence[Mapping[str, Any]]) -> None:
    """Print the predicted figures of plans, their speeds against the first one, and what differs."""
    names = [str(plan["profile"]) for plan in plans]
    show_quantities(console, names, plan_quantities(plans))
    for name, plan in zip(names[1:], plans[1:], strict=True):
        if text := describe_predicted_ratio(plan, plans[0]):
            say(console, f"{name} against {names[0]}", text)
    show_differences(console, names, differences(plans))


def show_quantities(console: Console, names: Sequence[str], rows: Sequence[Quantity]) -> None:
    show_table(console, ("", *names), [(row.label, *row.values) for row in rows], folded=None)


def show_differences(console: Console, names: Sequence[str], found: Sequence[Difference]) -> None:
    console.print()
    if not found:
        say(console, "plan", "no difference")
        return
    rows = [(each.key, *(cut(shown(value), MAX_VALUE) for value in each.values)) for each in found]
    show_table(console, ("differs", *names), rows, folded=None)
