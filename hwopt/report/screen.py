"""Screen: prints what happens in a run: evidence after step 1, log points, evaluations, a summary.

On a terminal the log points are one line with a progress bar. In a log file or a notebook each prints a line.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hwopt.records.run_record import MetricRow, RunRecord, value_of
from hwopt.report.classes import show_classes
from hwopt.report.sheet import seconds_text
from hwopt.report.status_line import status_line
from hwopt.report.terminal import say, say_parts, table
from hwopt.text import counted, cut, printable
from hwopt.training.listener import Listener, Row, Summary

if TYPE_CHECKING:
    from hwopt.training.run import Run

SMOOTHING = 0.3  # weight of the last log point in the mean speed from which the remaining time is estimated
STARTING = "starting"
"""What the live line shows before the first step; then "training", and from the first log point on the metrics."""
LINE = {
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.3g}",
    "steps_per_second": "{:.3g} steps/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "samples_per_second": "{:,.1f} samples/s",
    "peak_memory_gib": "peak {:.2f} GiB",
    "gpu_utilization": "GPU {:.0f} %",
    "data_wait": "data wait {:.0%}",
    "skipped_updates": "skipped {:.0f}",
}
"""Key of a log point -> how a line of a file shows it."""
SHORT = {
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "samples_per_second": "{:,.0f} samples/s",
    "peak_memory_gib": "{:.2f} GiB",
}
"""The same of the live line, which has the samples only where there are no tokens."""
SUMMARY_FORMS = {"data_wait": "{:.1%}", "peak_memory_gib": "{:.2f} GiB", "gpu_utilization": "{:.0f} %"}
"""Key of the summary -> how it is shown."""


class Screen(Listener):
    def __init__(self, console: Console, verbose: bool = False) -> None:
        """`verbose`: evidence of every plugin, instead of those that are not active."""
        self.console, self.verbose = console, verbose
        self.speed = Speed()
        self.progress: Progress | None = None

    def on_stage(self, what: str) -> None:
        status_line.show(what)

    def on_start(self, run: Run) -> None:
        for note in run.notes:
            say(self.console, "data", note)
        self.show_warnings(run)
        samples = len(run.prepared.train)
        held_out = f", {len(run.prepared.eval):,} held out" if run.prepared.eval is not None else ""
        say(self.console, "run", f"{run.folder}: {counted(samples, 'sample')}{held_out}, {counted(run.total_steps, 'step')}")
        if self.console.is_terminal:
            # one line as wide as the terminal; the bar takes what the numbers leave
            columns = (TextColumn("{task.fields[step]}"), BarColumn(bar_width=None), TextColumn("{task.fields[rest]}"))
            self.progress = Progress(*columns, console=self.console, refresh_per_second=4, transient=True, expand=True)
            self.progress.add_task("", total=run.total_steps, completed=run.step, step=progress_of(run), rest=STARTING)
            self.progress.start()

    def on_evidence(self, run: Run, found: list[Any]) -> None:
        shown = [(entry, seen) for entry, seen in found if self.verbose or seen.status != "active"]
        counts = Counter(seen.status for _, seen in found)
        text = f"after step {run.step:,}, {counts['active']} of {len(found)} plugins are active in the running process"
        if counts["unknown"] and not counts["inactive"]:
            text += f", none is inactive, and {counts['unknown']} cannot be observed here"
        say(self.console, "evidence", text)
        if shown:
            rows = ((entry.name, seen.status, seen.seen) for entry, seen in shown)
            self.console.print(table(("plugin", "evidence", "seen"), rows))

    def on_log(self, run: Run, row: Row) -> None:
        for kind in ("test", "eval"):
            if f"{kind}_loss" in row:
                label = f"{kind} at step {int(row['step']):,} (epoch {row['epoch']:.2f})"
                return say_parts(self.console, label, metric_texts(row, kind))
        self.speed.add(row)
        left = self.speed.seconds_left(run.total_steps - int(row["step"]))
        if self.progress is not None:
            keys = [key for key in SHORT if key in row and not (key == "samples_per_second" and "tokens_per_second" in row)]
            rest = "  ".join([f"ETA {left}", *(SHORT[key].format(row[key]) for key in keys)])
            self.progress.update(self.progress.task_ids[0], rest=rest)
            self.on_heartbeat(run)
        else:
            self.console.print(Text(log_line(row, run.total_steps, left)), soft_wrap=True)

    def on_heartbeat(self, run: Run) -> None:
        """Update step and bar of the live line. Called for every micro-batch; the line is drawn four times a second."""
        if self.progress is not None:
            (task,) = self.progress.tasks
            rest = "training" if run.step and task.fields["rest"] == STARTING else task.fields["rest"]
            self.progress.update(task.id, completed=run.step, step=progress_of(run), rest=rest)

    def on_message(self, run: Run, message: str) -> None:
        say(self.console, "note", message)

    def on_warning(self, run: Run, message: str) -> None:
        say(self.console, "WARNING", message, "bold red")

    def on_finish(self, run: Run, summary: Summary) -> None:
        self.close()
        for prefix, title in (("best_eval_", "evaluation, best weights"), ("test_", "test, best weights")):
            details = {name.removeprefix(prefix): value for name, value in summary.items() if name.startswith(prefix)}
            show_classes(self.console, details, title)
        self.console.print()
        self.console.print(table(("summary", ""), summary_rows(summary)))
        if verdict := summary.get("verdict"):
            say(self.console, "verdict", f"{verdict['limit']}: {verdict['figure']}. Next: {verdict['next']}")
        self.show_warnings(run)
        say(self.console, "model", f"{run.folder / 'final'}, {weights_text(summary)} (open it with from_pretrained)")
        if hasattr(run.skeleton, "save_pretrained"):  # another model is built in Python
            rest = "" if run.prepared.chat_tokens.chat else " FILE -o predictions.csv"
            say(self.console, "next", f"hwopt predict {shlex.quote(str(run.folder))}{rest}")

    def show_warnings(self, run: Run) -> None:
        for warning in run.prepared.warnings:
            say(self.console, "data", warning, "bold yellow")

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def weights_text(summary: Summary) -> str:
    best = [(key.removeprefix("best_"), value) for key, value in summary.items() if key.startswith("best_eval_")]
    if "best_step" not in summary or not best:
        return f"the weights of step {summary['step']:,}, the last one: nothing was evaluated"
    (metric, value), *_ = best
    return f"the weights of step {summary['best_step']:,}, which has the best {metric}: {value:.4g}"


class Speed:
    """The mean speed of the last log points. The first one of a process is left out: its first step compiles and allocates."""

    def __init__(self) -> None:
        self.rows = 0
        self.seconds_per_step = 0.0

    def add(self, row: Row) -> None:
        """Add a log point; the second one replaces the first."""
        self.rows += 1
        weight = 1.0 if self.rows <= 2 else SMOOTHING
        self.seconds_per_step += weight * (1 / max(row["steps_per_second"], 1e-9) - self.seconds_per_step)

    def seconds_left(self, steps: int) -> timedelta:
        """The remaining time of `steps` steps, in whole seconds."""
        return timedelta(seconds=round(steps * self.seconds_per_step))


def log_line(found: MetricRow, total_steps: int | None, left: timedelta | None = None) -> str:
    """A log point, or an evaluation, as a line of a file. A value that was not finite is "nan"."""
    row = {key: value_of(found, key) for key in found}
    for kind in ("eval", "test"):
        if any(key.startswith(f"{kind}_") for key in row):
            return f"{kind} at step {int(row['step'])} (epoch {row['epoch']:.2f}): {'  '.join(metric_texts(row, kind))}"
    parts = [f"step {int(row['step'])}/{total_steps or '?'}", *([] if left is None else [f"ETA {left}"])]
    return "  ".join([*parts, *(form.format(row[key]) for key, form in LINE.items() if key in row)])


def progress_of(run: Run) -> str:
    return f"step {run.step:,}/{run.total_steps:,}"


def metric_texts(row: Row, prefix: str) -> list[str]:
    """The metrics of an evaluation, or of the test, without its speed."""
    shown = [key for key in row if key.startswith(prefix) and not key.endswith(("_runtime", "_samples_per_second"))]
    return [f"{key.removeprefix(f'{prefix}_')} {row[key]:.4f}" for key in shown]


def summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """(name, value with its unit) of every number in `summary`, and the shares of a mixture."""
    for key, value in summary.items():
        if key == "mixture":
            total = sum(row["samples_per_epoch"] for row in value)
            yield key, ", ".join(f"{row['samples_per_epoch'] / total:.1%} {cut(row['source'], 40)}" for row in value)
        elif isinstance(value, int | float):
            yield key, summary_text(key, value)


def summary_text(key: str, value: float) -> str:
    """A number of a summary with its unit."""
    if key.endswith("_runtime"):
        return seconds_text(value)
    if key.endswith("_per_second"):
        number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return f"{number} {key.removesuffix('_per_second').rpartition('_')[2]}/s"
    if key in SUMMARY_FORMS:
        return SUMMARY_FORMS[key].format(value)
    if key in ("step", "best_step", "epoch") or isinstance(value, int):
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{value:.4f}"


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
    lines = [log_line(row, total, left if record.exit_code is None else None) for row in newest]
    parts += map(Text, lines or ["no log point yet: data and model are being prepared, or the first steps run"])
    parts += [Text(printable(line), style="yellow") for line in warnings]
    return Group(*parts)
