"""What `hwopt report --watch` shows of a run of another process: a panel on a terminal, else one line per log point."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hwopt.report.measurements import NAMES, with_unit
from hwopt.report.memory import gib
from hwopt.report.screen import Speed, metrics_of
from hwopt.text import printable

if TYPE_CHECKING:
    from hwopt.records.run_record import RunRecord

GRADES = {True: "bold green", False: "bold red", None: "bold"}


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
    for label, value in figures(record):
        grid.add_row(Text(label, style="dim"), Text(printable(value), overflow="fold"))
    parts.append(grid)
    parts += [Text(printable(line), style="yellow") for line in warnings]
    return Group(*parts)


def figures(record: RunRecord) -> Iterator[tuple[str, str]]:
    """(label, value with its unit) of the newest rows."""
    if not record.log_rows:
        yield "log", "no log point yet: data and model are being prepared, or the first steps run"
        return
    row = record.log_rows[-1]
    if record.exit_code is None and record.total_steps:
        yield "time left", str(seconds_left(record))
    yield "loss", number(row.get("loss"), ".4f")
    yield "learning rate", number(row.get("learning_rate"), ".3g")
    yield "gradient norm", number(row.get("grad_norm"), ".3g")
    yield "real tokens/s", number(row.get("tokens_per_second"), ",.0f")
    yield "samples/s", number(row.get("samples_per_second"), ",.1f")
    memory = record.plan["hardware"].get("memory_gib")
    peak = row.get("peak_memory_gib")
    yield "peak memory", "-" if peak is None else f"{gib(peak)} of {memory} GiB"
    if "gpu_utilization" in row:
        yield "GPU use", f"{number(row['gpu_utilization'], '.0f')} %, mean {number(record.gpu_use, '.0f')} %"
    for key in ("use.power_watts", "use.temperature_celsius", "use.throttled_share"):
        if (value := row.get(key)) is not None:
            name = key.removeprefix("use.")
            yield NAMES[name].removesuffix(", mean"), with_unit(name, value)
    yield "waiting for data", number(row.get("data_wait"), ".1%")
    if row.get("skipped_updates"):
        yield "skipped updates", number(row["skipped_updates"], ".0f")
    if record.evaluations:
        yield "evaluation", eval_text(record)
    if record.evidence:
        active = sum(entry["status"] == "active" for entry in record.evidence)
        yield "evidence", f"{active} of {len(record.evidence)} plugins are active"


def number(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"


def eval_text(record: RunRecord) -> str:
    """The newest evaluation."""
    finite = {key: value for key, value in record.evaluations[-1].items() if value is not None}
    return evaluation_line(finite)


def evaluation_line(row: dict[str, Any], prefix: str = "eval") -> str:
    """The metrics of an evaluation, or of the test, with its step."""
    return f"at step {int(row['step'])} (epoch {row['epoch']:.2f}): {'  '.join(metrics_of(row, prefix))}"


def seconds_left(record: RunRecord) -> timedelta:
    """The remaining time, at the mean speed of the last log points."""
    speed = Speed()
    for row in record.log_rows[-20:]:
        if row.get("steps_per_second"):
            speed.add({"steps_per_second": row["steps_per_second"] or 0.0})
    return speed.seconds_left((record.total_steps or 0) - record.step)


def plain_line(record: RunRecord, row: Any) -> str:
    """One row of metrics as a line for a file or a pipe."""
    finite = {key: value for key, value in row.items() if value is not None}
    for kind in ("eval", "test"):
        if any(key.startswith(f"{kind}_") for key in row):
            return f"{kind} {evaluation_line(finite, kind)}"
    parts = [
        f"step {int(row['step'])}/{record.total_steps or '?'}",
        f"loss {number(row.get('loss'), '.4f')}",
        f"{number(row.get('tokens_per_second'), ',.0f')} tokens/s",
        f"peak {number(row.get('peak_memory_gib'), '.2f')} GiB",
    ]
    if "gpu_utilization" in row:
        parts.append(f"GPU {number(row['gpu_utilization'], '.0f')} %")
    return "  ".join([*parts, f"data wait {number(row.get('data_wait'), '.0%')}"])
