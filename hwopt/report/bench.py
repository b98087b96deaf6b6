"""The table of a bench, on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from hwopt.report.memory import gib
from hwopt.report.terminal import say, show_table
from hwopt.report.verdicts import Line
from hwopt.trials.bench_rows import Bench, BenchRow

ABSENT = "-"
COLOURS = {"good": "green", "bad": "red", "open": "yellow", "result": ""}
FAILED = ("crashed", "timed out", "out of memory")
"""Endings of a trial that ran."""
COLUMNS = ("variant", "time/step", "time/epoch", "samples/s", "real tokens/s", "peak memory", "speed", "loss", "note")


def show_bench(console: Console, bench: Bench) -> None:
    """Print the facts, the table, and how to read it."""
    for label, text in bench.facts.items():
        say(console, label, text)
    console.print()
    show_table(console, COLUMNS, [cells(row) for row in bench.rows], folded=8)
    console.print()
    for label, text in legend(bench).items():
        say(console, label, text)
    for note in bench.notes:
        say(console, "note", note, "yellow")
    console.print()
    for line in verdict(bench):
        say(console, f"verdict, {line.label}", line.text, COLOURS[line.grade])


def verdict(bench: Bench) -> Iterator[Line]:
    """What the profile gains in speed, what it costs in memory, and which variants differ or failed."""
    profile, baseline = bench.row("profile"), bench.row("baseline")
    if profile is None or baseline is None:
        return
    yield speed_line(bench, profile)
    if profile.peak_gib is not None and baseline.peak_gib is not None:
        yield Line("memory", f"{gib(profile.peak_gib)} at the peak, the baseline {gib(baseline.peak_gib)}", "result")
    if apart := [row.name for row in bench.rows if row.loss_agrees is False]:
        yield Line("loss", f"{', '.join(apart)}: the losses differ by more than the plugins promise", "bad")
    if failed := [f"{row.name} ({row.ending})" for row in bench.rows if row.ending in FAILED]:
        yield Line("trials", f"failed: {', '.join(failed)}", "bad")


def speed_line(bench: Bench, profile: BenchRow) -> Line:
    """The speed of the profile, and the plugin that contributes most of it."""
    found = profile.speedup
    if found is None:
        return Line("speed", f"the profile has no speed: {note_text(profile)}", "open")
    text = f"the profile trains {found.value:.2f} ({found.low:.2f} to {found.high:.2f}) times the samples/s of the baseline"
    if not found.clear:
        return Line("speed", f"{text}: no clear difference in {found.rounds} rounds", "open")
    effects = {
        row.name.removeprefix("+ "): effect.value
        for row in bench.rows
        if row.role == "added"
        and (effect := row.speedup) is not None
        and effect.clear
        and (effect.value > 1) == (found.value > 1)
    }
    most = max(effects, key=lambda name: abs(math.log(effects[name])), default="")
    return Line("speed", f"{text}; most of it by {most}" if most else text, "good" if found.value > 1 else "bad")


def legend(bench: Bench) -> dict[str, str]:
    """How the table is to be read, by label."""
    found = {"speed": "samples/s relative to the reference: median of the rounds (lowest to highest)"}
    if (floor := bench.floor) is not None:
        found["noise"] = (
            f"two copies of the baseline differ by x{floor.low:.3f} to x{floor.high:.3f}; "
            '"=" marks a difference that is not clearly larger'
        )
    if bench.memory_kind:
        found["peak memory"] = bench.memory_kind
    return found


def cells(row: BenchRow) -> tuple[str, ...]:
    """The cells of a row, in the order of COLUMNS."""
    return (
        row.name,
        seconds_text(row.seconds_per_step),
        seconds_text(row.seconds_per_epoch),
        ABSENT if row.samples_per_second is None else f"{row.samples_per_second:,.4g}",
        ABSENT if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        ABSENT if row.peak_gib is None else gib(row.peak_gib),
        speed_text(row),
        loss_text(row),
        note_text(row),
    )


UNITS = ((120.0, "min", 60.0), (1.0, "s", 1.0), (0.0, "ms", 1e-3))
"""(seconds from which the unit is used, unit, its seconds)."""


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    unit, size = next((unit, size) for least, unit, size in UNITS if seconds >= least)
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def speed_text(row: BenchRow) -> str:
    """The ratio with its range and its reference; "=" before one that is not clear."""
    found = row.speedup
    if found is None:
        return "1" if row.role == "baseline" and row.rounds else ABSENT
    if found.rounds == 1:
        return f"x{found.value:.2f} of {row.reference} (1 round)"
    sign = "" if found.clear or row.role == "copy" else "= "
    return f"{sign}x{found.value:.2f} ({found.low:.2f} to {found.high:.2f}) of {row.reference}"


def loss_text(row: BenchRow) -> str:
    if not row.loss:
        return ABSENT
    return {True: "ok: ", False: "DIFFERS: ", None: ""}[row.loss_agrees] + row.loss


def note_text(row: BenchRow) -> str:
    if row.ending == "completed":
        return row.note
    return f"{row.ending}: {row.note}" if row.note else row.ending
