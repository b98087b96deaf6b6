"""What `hwopt report --watch` shows of a run of another process: a panel on a terminal, else one line per log point."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hwopt.records.run_record import MetricRow, RunRecord, value_of
from hwopt.report.screen import Speed, log_line
from hwopt.text import printable

GRADES = {True: "bold green", False: "bold red", None: "bold"}


def panel(record: RunRecord, warnings: list[str], width: int) -> Group:
    """The state of the run: progress, the newest log point and evaluation, and the last warnings."""
    parts: list[Any] = [Text.assemble((record.name, "bold"), f"  {record.plan['profile']}, {record.plan['hardware']['name']}")]
    if total := record.total_steps:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=min(record.step, total), width=min(width, 60)))
        parts.append(bar)
    style = GRADES[None if record.exit_code is None else record.complete]
    parts.append(Text.assemble((record.state, style), f"  {printable(record.message)}" if record.exit_code else ""))
    speed = Speed()
    for row in record.log_rows[-20:]:
        if row.get("steps_per_second"):
            speed.add(dict(row))
    left = speed.seconds_left((total or 0) - record.step)
    newest = record.log_rows[-1:] + record.evaluations[-1:]
    lines = [log_line(with_nan(row), total, left if record.exit_code is None else None) for row in newest]
    parts += map(Text, lines or ["no log point yet: data and model are being prepared, or the first steps run"])
    parts += [Text(printable(line), style="yellow") for line in warnings]
    return Group(*parts)


def plain_line(record: RunRecord, row: MetricRow) -> str:
    """One row of metrics as a line for a file or a pipe."""
    return log_line(with_nan(row), record.total_steps)


def with_nan(row: MetricRow) -> dict[str, float]:
    """`row` with NaN for values that were not finite."""
    return {key: value_of(row, key) for key in row}
