"""The memory of a plan on the terminal: the parts, whether they fit, what would fit, what to change, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from hwopt.report.terminal import say, table

if TYPE_CHECKING:
    from hwopt.planning.memory_plan import Change, MemoryPlan, Prediction
    from hwopt.planning.plan import Plan


def show_memory(console: Console, plan: Plan) -> None:
    memory = plan.memory
    assert memory is not None, "asked for"
    console.print()
    rows = ((name.replace("_", " "), gib(size)) for name, size in memory.parts.items())
    console.print(table(("memory", "at the peak"), rows, folded=0))
    sizes = f"{memory.rows} x {memory.width} tokens ({memory.width_source})"
    evaluation = "" if memory.eval_peak_gib is None else f"; evaluation {gib(memory.eval_peak_gib)}"
    say(console, "peak", f"{gib(memory.peak_gib)} with micro-batches of {sizes}{evaluation}")
    say(console, "tier", f"{memory.tier}: {memory.error}" + (f"; {memory.note}" if memory.note else ""))
    word, style = ("fits", "bold green") if memory.fits else ("DOES NOT FIT", "bold red")
    say(console, word, f"{memory.free_gib:.2f} GiB free, {memory.reserve_gib:.2f} of them in reserve, {margin(memory)}", style)
    if memory.host_gib:
        say(console, "host", describe_host(memory))
    if memory.largest_train is not None:
        say(console, "most that fits", describe_most(memory))
    if memory.time is not None:
        say(console, "time", describe_time(memory.time))
    if memory.changes:
        shown = ((", ".join(c.lines), gib(c.saves_gib), "yes" if c.fits else "no", pace(c), c.cost) for c in memory.changes)
        console.print(table(("to change", "saves", "fits then", "time", "what it does"), shown, folded=4))


def show_forecast(console: Console, plan: Plan) -> None:
    """Before a run: one line where it fits, the whole table where it does not, nothing where nobody asked."""
    memory = plan.memory
    if memory is not None and memory.fits:
        usable = gib(memory.free_gib - memory.reserve_gib)
        say(console, "memory", f"{gib(memory.peak_gib)} of {usable} at the peak of a step ({memory.tier}: {memory.error})")
    elif memory is not None:
        show_memory(console, plan)


def show_side_by_side(console: Console, plans: Sequence[Plan]) -> None:
    """One row a profile."""
    rows = []
    for plan in plans:
        memory = plan.memory
        assert memory is not None, "asked for"
        skipped = ", ".join(f"{entry.name} {entry.decision}" for entry in plan.entries if entry.decision != "apply")
        fits = f"{'yes' if memory.fits else 'no'}, {margin(memory)}" + ("" if memory.host_fits else ", too little on the host")
        sizes = f"{memory.rows} x {memory.width}, {plan.batch.step} a step"
        most = "?" if memory.largest_train is None else f"{memory.largest_train:,}"
        total = "?" if memory.time is None else span(memory.time.total or memory.time.step)
        rows.append((plan.profile.name, plan.hardware.name, gib(memory.peak_gib), fits, sizes, most, total, skipped or "-"))
    columns = ("profile", "card", "peak", "fits", "micro-batch", "most rows", "time", "not as the profile says")
    console.print(table(columns, rows, folded=7))
    say(console, "time", "of the whole training where the data was read, else of a step; predicted by roofline")


def margin(memory: MemoryPlan) -> str:
    return f"{gib(abs(memory.margin_gib))} {'left' if memory.margin_gib >= 0 else 'missing'}"


def describe_host(memory: MemoryPlan) -> str:
    said = f"{gib(memory.host_gib)} more in the host's memory"
    if memory.host_free_gib is None:
        return said
    return f"{said}, which has {gib(memory.host_free_gib)} for it" + ("" if memory.host_fits else ": NOT ENOUGH")


def describe_most(memory: MemoryPlan) -> str:
    parts = [f"micro-batch {memory.largest_train:,}", f"evaluation batch {memory.largest_eval:,}"]
    if memory.largest_max_length is not None:
        parts.append(f"max_length {memory.largest_max_length:,} with {memory.rows} rows")
    return ", ".join(parts)


def pace(change: Change) -> str:
    return "as now" if change.slower == 1 else f"about {change.slower - 1:+.0%}"


def describe_time(time: Prediction) -> str:
    parts = [f"{span(time.step)} a step"]
    if time.epoch is not None and time.total is not None:
        parts += [f"{span(time.epoch)} an epoch", f"{span(time.total)} in all"]
    return f"{', '.join(parts)} ({time.basis})"


def gib(size: float) -> str:
    return f"{size:.2f} GiB" if size >= 0.1 else f"{size * 1024:.1f} MiB"


UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))


def span(seconds: tuple[float, float]) -> str:
    unit, size = next(((unit, size) for unit, size in UNITS if seconds[1] >= 2 * size), UNITS[-1])
    return f"{seconds[0] / size:.3g} to {seconds[1] / size:.3g} {unit}"
