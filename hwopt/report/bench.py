"""The table and the verdict of a bench, on the terminal and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from hwopt.report.page import render
from hwopt.report.sheet import ABSENT, Sheet, gib, known, seconds_text
from hwopt.report.terminal import say, show_sheet
from hwopt.report.verdicts import Line
from hwopt.trials.benchmark import Bench, BenchRow

COLOURS = {"good": "green", "bad": "red", "open": "yellow", "result": ""}
COLUMNS = ("variant", "time/step", "time/epoch", "samples/s", "real tokens/s", "peak memory", "speed", "loss", "note")
SPEED_FIRST = (0, 6, 1, 2, 3, 4, 5, 7, 8)  # the columns of the page: a narrow window shows the name and the speed


def show_bench(console: Console, bench: Bench) -> None:
    """Print the facts, the table, and how to read it."""
    for label, text in bench.facts.items():
        say(console, label, text)
    console.print()
    show_sheet(console, Sheet(COLUMNS, [cells(row) for row in bench.rows], folded=8))
    console.print()
    for label, text in legend(bench).items():
        say(console, label, text)
    for note in bench.notes:
        say(console, "note", note, "yellow")
    console.print()
    for line in bench_verdict(bench):
        say(console, f"verdict, {line.label}", line.text, COLOURS[line.grade])


def bench_page(bench: Bench, command: str) -> str:
    """The page of `bench`, which `command` measured."""
    rows = [[row[number] for number in SPEED_FIRST] for row in (COLUMNS, *map(cells, bench.rows))]
    return render(
        "bench.html",
        f"What {bench.facts.get('profile', 'the profile')} gains",
        facts=bench.facts.items(),
        notes=bench.notes,
        verdict=list(bench_verdict(bench)),
        variants=Sheet(rows[0], rows[1:], "Medians of the rounds"),
        legend=legend(bench).items(),
        command=command,
    )


def bench_verdict(bench: Bench) -> Iterator[Line]:
    """What the profile gains in speed, what it costs in memory, and which variants differ or failed."""
    profile, baseline = bench.row("profile"), bench.row("baseline")
    if profile is None or baseline is None:
        return
    yield speed_line(bench, profile)
    if profile.peak_gib is not None and baseline.peak_gib is not None:
        yield Line("memory", f"{gib(profile.peak_gib)} at the peak, the baseline {gib(baseline.peak_gib)}", "result")
    if apart := [row.name for row in bench.rows if row.loss_agrees is False]:
        yield Line("loss", f"{', '.join(apart)}: the losses differ by more than the plugins promise", "bad")
    endings = ("crashed", "timed out", "out of memory")
    if failed := [f"{row.name} ({row.ending})" for row in bench.rows if row.ending in endings]:
        yield Line("trials", f"failed: {', '.join(failed)}", "bad")


def speed_line(bench: Bench, profile: BenchRow) -> Line:
    """The speed of the profile, and the plugin that contributes most of it."""
    found = profile.speedup
    if found is None:
        return Line("speed", f"the profile has no speed: {note_text(profile)}", "open")
    text = f"the profile trains {found.value:.2f} ({found.low:.2f} to {found.high:.2f}) times the samples/s of the baseline"
    if not found.clear:
        return Line("speed", f"{text}: no clear difference in {found.rounds} rounds", "open")
    added = {row.name.removeprefix("+ "): row.speedup for row in bench.rows if row.role == "added"}
    effects = {
        name: abs(math.log(effect.value))
        for name, effect in added.items()
        if effect is not None and effect.clear and (effect.value > 1) == (found.value > 1)
    }
    if effects:
        text += f"; most of it by {max(effects, key=effects.__getitem__)}"
    return Line("speed", text, "good" if found.value > 1 else "bad")


def legend(bench: Bench) -> dict[str, str]:
    found = {"speed": "samples/s relative to the reference: median of the rounds (lowest to highest)"}
    copy = bench.row("copy")
    if copy is not None and (floor := copy.speedup) is not None:
        found["noise"] = (
            f"two copies of the baseline differ by x{floor.low:.3f} to x{floor.high:.3f}; "
            '"=" marks a difference that is not clearly larger'
        )
    if bench.memory_kind:
        found["peak memory"] = bench.memory_kind
    return found


def cells(row: BenchRow) -> tuple[str, ...]:
    """The cells of a row, in the order of COLUMNS."""
    agrees = {True: "ok: ", False: "DIFFERS: ", None: ""}[row.loss_agrees]
    return (
        row.name,
        known(row.seconds_per_step, seconds_text),
        known(row.seconds_per_epoch, seconds_text),
        known(row.samples_per_second, "{:,.4g}".format),
        known(row.tokens_per_second, "{:,.0f}".format),
        known(row.peak_gib, gib),
        speed_text(row),
        f"{agrees}{row.loss}" if row.loss else ABSENT,
        note_text(row),
    )


def speed_text(row: BenchRow) -> str:
    """The ratio with its range and its reference; "=" before one that is not clear."""
    found = row.speedup
    if found is None:
        return "1" if row.role == "baseline" and row.rounds else ABSENT
    if found.rounds == 1:
        return f"x{found.value:.2f} of {row.reference} (1 round)"
    sign = "" if found.clear or row.role == "copy" else "= "
    return f"{sign}x{found.value:.2f} ({found.low:.2f} to {found.high:.2f}) of {row.reference}"


def note_text(row: BenchRow) -> str:
    if row.ending == "completed":
        return row.note
    return f"{row.ending}: {row.note}" if row.note else row.ending
