"""The terminal, and what is printed of a plan. hwopt.report.screen prints what happens in a run."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hwopt.config.job_sources import described, shares_of
from hwopt.report.sheet import ABSENT, Sheet, gib, value_text
from hwopt.report.status_line import LEAST, status_line
from hwopt.text import counted, millions, printable, short_place

if TYPE_CHECKING:
    from hwopt.hardware.device import Hardware
    from hwopt.planning.decisions import PluginDecision
    from hwopt.planning.plan import Plan

STYLES = {"apply": "green", "fallback": "yellow", "skip": "yellow", "active": "green", "inactive": "red", "unknown": "yellow"}
"""Decision or status of evidence -> its style."""
LEAST_FOLDED = 24
"""The least width of a folded column of a table, which else becomes blocks of lines."""
TRAILING_SPACES = re.compile(r" +$", re.MULTILINE)
VERDICTS = {True: ("fits", "bold green"), False: ("DOES NOT FIT", "bold red"), None: ("UNKNOWN", "bold yellow")}
"""Whether a plan fits -> the word, its style."""


def show_verdict(console: Console, plan: Plan) -> None:
    """Print whether the plan fits if its memory was planned, the rows of a step, and how many plugins are on, in one line."""
    if plan.refused:
        say(console, "WILL NOT RUN", str(plan.refused), "bold red")
    memory, parts = plan.memory, []
    if memory is not None:
        least = "at least " if memory.lower_bound else ""
        peak = max(memory.peak_gib, memory.eval_peak_gib or 0.0)
        shown = f"{peak:.1f}" if peak >= 0.1 else gib(peak)
        parts.append(f"{least}{shown} of {memory.free_gib:.1f} GiB")
    counts = Counter(entry.decision for entry in plan.entries)
    fallback = f", {counts['fallback']} by fallback" if counts["fallback"] else ""
    on = counts["apply"] + counts["fallback"]
    parts += [f"{plan.batch.step} rows a step", f"{on} of {len(plan.entries)} plugins on{fallback}"]
    word, style = ("plan", "bold") if memory is None else VERDICTS[memory.fits]
    say(console, word, "; ".join(parts), style)


def show_plan(console: Console, plan: Plan, verbose: bool = True) -> None:
    """Print the verdict, then plugin, decision and reason in the order of application.

    Plugins that change the training method come first. Without `verbose`, what is applied has one line on a terminal and no
    options; what falls back or is skipped has its whole reason.
    """
    show_problem(console, plan.hardware)
    show_verdict(console, plan)
    say(console, "profile", " — ".join(filter(None, (plan.profile.name, plan.profile.content.summary))))
    say(console, "hardware", describe_device(plan.hardware))
    say(console, "model", f"{plan.model.architecture}, {millions(plan.model.parameters)} parameters ({plan.job.model.label})")
    sizes, world = plan.batch, plan.world_size
    micro = f"micro-batches of up to {counted(sizes.train, 'row')} (x {sizes.accumulation(world)}), eval {sizes.eval_rows()}"
    say(console, "batch", f"{counted(sizes.step, 'row')} a step{f' on {world} ranks' if world > 1 else ''}, {micro}")
    if shares_of(plan.job.data.train):
        say(console, "mixture", f"{described(plan.job.data.train)} of the samples of an epoch")
    for entry in plan.applied():
        if entry.plugin.effect == "method":
            say(console, "changes the training method", f"{entry.name}: {entry.reason}", "bold magenta")
    for note in plan.notes:
        say(console, "note", note, "yellow")
    rows = [(e.name, e.decision, options_text(e) if verbose else e.reason) for e in plan.entries]
    short = set() if verbose else {number for number, entry in enumerate(plan.entries) if entry.decision == "apply"}
    columns = ("plugin", "decision", "why")
    console.print(table(columns, one_line(columns, rows, short, console.width)))


def describe_device(hardware: Hardware) -> str:
    device = f"{hardware.name}, {hardware.free_memory_gib:g} of {hardware.memory_gib:g} GiB free"
    if hardware.amd:
        device += f", {hardware.amd} ({hardware.architecture})"
    elif hardware.compute_capability:
        device += f", compute capability {hardware.capability_text} ({hardware.architecture})"
    if hardware.memory_limit_gib is not None:
        device += ", limited by --memory-limit"
    return device + (" (the profile's card, not this machine)" if hardware.source == "described" else "")


def show_problem(console: Console, hardware: Hardware) -> None:
    """Print why torch cannot use the cards of this machine, if it cannot."""
    if hardware.problem:
        text = Text.assemble(("PROBLEM: ", "bold red"), printable(hardware.problem))
        console.print(text, soft_wrap=True)  # a command that is broken into lines cannot be copied


def options_text(entry: PluginDecision) -> str:
    """The reason of a decision, with the options of a plugin that is applied."""
    options = entry.options.model_dump(mode="json", exclude_none=True).items()
    shown = ", ".join(f"{key} {value_text(value)}" for key, value in options)
    return entry.reason if entry.decision == "skip" or not shown else f"{entry.reason} [{shown}]"


def one_line(columns: Sequence[str], rows: Sequence[Sequence[str]], short: Container[int], width: int) -> Iterator[Sequence[str]]:
    """`rows`, with the last cell of each row in `short` cut between two words so that the row fits into `width` columns."""
    others = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)][:-1]
    left = width - sum(others) - 2 * len(others)
    for number, row in enumerate(rows):
        text = " ".join(printable(row[-1]).split())
        yield [*row[:-1], shorten(text, max(left, 1), placeholder=" …", break_on_hyphens=False)] if number in short else row


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], folded: int | None = 2) -> Table:
    """A plain table whose column `folded` wraps. Decisions and states are coloured; cells are never read as markup."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number != folded)
    for row in rows:
        made.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) for cell in row))
    return made


def show_sheet(console: Console, sheet: Sheet) -> None:
    """Print a sheet, or one block of lines per row if the terminal is too narrow. A cell is never cut.

    Blocks leave out empty cells, and in a sheet with a column of remarks, the folded one, those of absent values.
    """
    cells = [[printable(cell) for cell in row] for row in sheet.rows]
    widths = [max(map(cell_len, column)) for column in zip(sheet.columns, *cells, strict=True)]
    if sheet.folded is not None:
        widths[sheet.folded] = min(widths[sheet.folded], LEAST_FOLDED)
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:
        console.print(table(sheet.columns, cells, sheet.folded))
    else:
        for heading, *values in cells:
            console.print(Text(heading, style="bold"))
            for column, value in zip(sheet.columns[1:], values, strict=True):
                if value and (value != ABSENT or sheet.folded is None):
                    line = Text.assemble((f"{column}: " if column else "", "default"), (value, STYLES.get(value, "")))
                    console.print(Padding(line, (0, 0, 0, 2)))
    if sheet.note:
        say(console, "note", sheet.note)


def say(console: Console, label: str, text: str, style: str = "bold") -> None:
    console.print(Text.assemble((f"{label}: ", style), printable(text)))


def say_parts(console: Console, label: str, parts: Iterable[str]) -> None:
    """Print `parts` on one line, or on lines that break between two parts, so that a name and its number stay together."""
    lines = [f"{label}:"]
    for part in map(printable, parts):
        fits = cell_len(lines[-1]) + 2 + cell_len(part) <= console.width
        lines[-1:] = [f"{lines[-1]}  {part}"] if fits else [lines[-1], f"  {part}"]
    console.print(Text("\n".join(lines)))


def short_path(path: Path) -> str:
    """`path`, relative to the working directory if it is in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class Terminal(Console):
    """A console that ignores a closed pipe (`| head`), so that the run continues, and a COLUMNS variable such as 0.

    Output that is not a terminal is never folded: a log file or `grep` gets whole lines.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"file": sys.stdout, **options})  # the real stdout, also while a plugin's prints go to stderr
        if not self.is_terminal and "width" not in options:
            self.width = 1 << 20
        if self.width < LEAST:
            self.width = 80

    def print(self, *objects: Any, **options: Any) -> None:
        status_line.clear()
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        text = TRAILING_SPACES.sub("", captured.get())  # those that pad the last column of a table
        super().print(text, end="", markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def show_values(console: Console, plan: Plan) -> None:
    """Print every option, hyperparameter and job key that has a value, with its source."""
    rows = [
        (f"plugins.{entry.name}.{key}", value, entry.provenance[key])
        for entry in plan.entries
        for key, value in entry.options.model_dump(mode="json").items()
    ]
    tables = {"training": plan.training, "model": plan.job.model, "data": plan.job.data, "task": plan.job.task}
    for dotted, place in sorted(plan.provenance.items()):
        name, key = dotted.split(".", 1)
        rows.append((dotted, tables[name].model_dump(mode="json")[key], place))
    shown = [(key, value_text(value), short_place(place)) for key, value, place in rows if value is not None]
    show_sheet(console, Sheet(("value", "", "from"), shown, folded=1))
