"""What `hwopt report --watch` shows of a run of another process: a panel on a terminal, else one line per log point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hwopt.records.run_record import RunRecord
from hwopt.report.measurements import NAMES
from hwopt.report.screen import Speed, log_line
from hwopt.report.sheet import with_unit
from hwopt.text import printable

GRADES = {True: "bold green", False: "bold red", None: "bold"}
FIGURES = {
    "loss": ("loss", "{:.4f}"),
    "learning rate": ("learning_rate", "{:.3g}"),
    "gradient norm": ("grad_norm", "{:.3g}"),
    "real tokens/s": ("tokens_per_second", "{:,.0f}"),
    "samples/s": ("samples_per_second", "{:,.1f}"),
    "peak memory": ("peak_memory_gib", "{:.2f} GiB of {memory} GiB"),
    "GPU use": ("gpu_utilization", "{:.0f} %, mean {gpu_use:.0f} %"),
    "waiting for data": ("data_wait", "{:.1%}"),
    "skipped updates": ("skipped_updates", "{:.0f}"),
}
"""Label -> (key of a log point, how it is shown)."""


def panel(record: RunRecord, warnings: list[str], width: int) -> Group:
    """The state of the run: progress, the newest log point, the newest evaluation, evidence and the last warnings."""
    parts: list[Any] = [Text.assemble((record.name, "bold"), f"  {record.plan['profile']}, {record.plan['hardware']['name']}")]
    if total := record.total_steps:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=min(record.step, total), width=min(width, 60)))
        parts.append(bar)
    style = GRADES[None if record.exit_code is None else record.complete]
    parts.append(Text.assemble((record.state, style), f"  {printable(record.message)}" if record.exit_code else ""))
    grid = Table.grid(padding=(0, 2))
    for label, value in panel_rows(record):
        grid.add_row(Text(label, style="dim"), Text(printable(value), overflow="fold"))
    parts.append(grid)
    parts += [Text(printable(line), style="yellow") for line in warnings]
    return Group(*parts)


def panel_rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """(label, value with its unit) of the newest rows."""
    if not record.log_rows:
        yield "log", "no log point yet: data and model are being prepared, or the first steps run"
        return
    row = with_nan(record.log_rows[-1])
    if record.exit_code is None and record.total_steps:
        yield "time left", str(seconds_left(record))
    others = {"memory": record.plan["hardware"].get("memory_gib"), "gpu_use": record.gpu_use}
    yield from ((label, form.format(row[key], **others)) for label, (key, form) in FIGURES.items() if key in row)
    for name in ("power_watts", "temperature_celsius", "throttled_share"):
        if (value := row.get(f"use.{name}")) is not None:
            yield NAMES[name].removesuffix(", mean"), with_unit(name, value)
    if record.evaluations:
        yield "evaluation", plain_line(record, record.evaluations[-1]).removeprefix("eval ")
    if record.evidence:
        active = sum(entry["status"] == "active" for entry in record.evidence)
        yield "evidence", f"{active} of {len(record.evidence)} plugins are active"


def with_nan(row: Mapping[str, float | None]) -> dict[str, float]:
    """`row` with NaN for values that were not finite, which JSON cannot hold."""
    return {key: math.nan if value is None else value for key, value in row.items()}


def seconds_left(record: RunRecord) -> timedelta:
    """The remaining time, at the mean speed of the last log points."""
    speed = Speed()
    for row in record.log_rows[-20:]:
        if row.get("steps_per_second"):
            speed.add(dict(row))
    return speed.seconds_left((record.total_steps or 0) - record.step)


def plain_line(record: RunRecord, row: Mapping[str, float | None]) -> str:
    """One row of metrics as a line for a file or a pipe."""
    return log_line(with_nan(row), record.total_steps)
