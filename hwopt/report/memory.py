"""Print the memory of a plan: its parts, whether it fits, the largest sizes that fit, what to change, the time; ZeRO and FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from hwopt.memory.advice import PlanListener
from hwopt.memory.forecast.sharding import Comparison
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan, Prediction
from hwopt.planning.plan import Plan
from hwopt.report.sheet import BASES, YES_OR_NO, Sheet, gib, largest_text, margin_text, seconds_text
from hwopt.report.status_line import status_line
from hwopt.report.terminal import VERDICTS, say, show_plan, show_sheet, table
from hwopt.text import counted

PARTS = {"masters": "fp32 copies of weights", "temporary": "work memory"}
"""Names of parts of the memory that are not those of the plan."""


def show_memory(console: Console, plan: Plan) -> None:
    """Print everything that the memory plan holds, except for the changes."""
    memory = plan.memory
    assert memory is not None, "planned with memory"
    console.print()
    parts = {name: shown for name, size in memory.parts.items() if (shown := gib(size)) != gib(0.0)}  # no gradients in forward
    rows = ((PARTS.get(name, name.replace("_", " ")), shown) for name, shown in parts.items())
    console.print(table(("memory", "at the peak"), rows, folded=0))
    if memory.unpacked_gib:
        names = ", ".join(f"{name} {gib(size)}" for name, size in memory.unpacked_gib.items())
        say(console, "weights that keep their precision", f"{gib(sum(memory.unpacked_gib.values()))}: {names}", "bold red")
    images = plan.context.task.inputs == "images"
    sizes = f"{memory.rows} images" if images else f"{memory.rows} x {memory.width} tokens ({memory.width_source})"
    evaluation = "" if memory.eval_peak_gib is None else f"; evaluation {gib(memory.eval_peak_gib)}"
    least = "at least " if memory.lower_bound else ""
    reserved = "" if memory.reserved_gib is None else f"; torch reserves {gib(memory.reserved_gib)}"
    say(console, "peak", f"{least}{gib(memory.peak_gib)} with micro-batches of {sizes}{evaluation}{reserved}")
    say(console, "forecast", basis(memory) + (f"; {memory.note}" if memory.note else ""))
    word, style = VERDICTS[memory.fits]
    free = f"{memory.free_gib:.2f} GiB free, {memory.reserve_gib:.2f} GiB of it reserved"
    if memory.fits is None:
        text = f"{memory.note}. A step needs at least {gib(memory.peak_gib)}, without activations; {free}"
    else:
        text = f"{free}, {margin_text(memory.margin_gib)}"
    say(console, word, text, style)
    if memory.host_gib:
        say(console, "host memory", describe_host(memory))
    if memory.time is not None:
        say(console, "time", describe_time(memory.time))


def basis(memory: MemoryPlan) -> str:
    """What the figures come from, and how far off such figures were."""
    return f"{BASES[memory.tier]}: {memory.error}"


def show_largest(console: Console, memory: MemoryPlan) -> None:
    """Print the largest sizes that fit; nothing if the tier cannot tell."""
    if memory.largest_train is not None:
        say(console, "largest that fits", describe_largest(memory))


def show_change(console: Console, change: Change) -> None:
    label, style = ("fits with", "bold green") if change.fits else ("saves memory", "bold")
    time = "same" if change.slower == 1 else f"about {change.slower - 1:+.0%}"
    effect = f"saves {gib(change.saves_gib)}, step time {time}; {change.cost}"
    say(console, label, f"{', '.join(change.lines)}: {effect}", style)


def show_gain(console: Console, gain: Gain) -> None:
    say(console, "faster, but changes the training" if gain.alters else "faster with", describe_gain(gain), "bold")


def describe_gain(gain: Gain) -> str:
    """The lines of a gain, and its forecast memory and time."""
    fast, slow = sorted(1 - end for end in gain.relative)
    faster = f"{fast:.0%}" if f"{fast:.0%}" == f"{slow:.0%}" else f"{fast:.0%} to {slow:.0%}"
    memory = f"takes {gib(gain.takes_gib)} instead of {gib(gain.now_gib)}"
    return f"{', '.join(gain.lines)}: {memory}, {faster} less time per row ({seconds_text(*gain.step)} per step); {gain.gain}"


def show_forecast(console: Console, plan: Plan) -> None:
    """Print one line if the plan fits, everything if it does not or if that is unknown; nothing if its memory was not planned."""
    memory = plan.memory
    if memory is not None and memory.fits:
        usable = gib(memory.free_gib - memory.reserve_gib)
        say(console, "memory", f"{gib(memory.peak_gib)} of {usable} at the peak of a step (forecast {basis(memory)})")
    elif memory is not None:
        show_memory(console, plan)
        show_largest(console, memory)
        for change in memory.changes:
            show_change(console, change)


def describe_host(memory: MemoryPlan) -> str:
    """What is offloaded to the host, against what the host has."""
    offloaded = f"{gib(memory.host_gib)} offloaded to host memory"
    if memory.host_free_gib is None:
        return offloaded
    return f"{offloaded}, {gib(memory.host_free_gib)} available" + ("" if memory.host_fits else ": NOT ENOUGH")


def describe_largest(memory: MemoryPlan) -> str:
    """The largest micro-batch, evaluation batch and max_length that fit, each beside the others as planned."""
    train, evaluation, length = memory.largest_train, memory.largest_eval, memory.largest_max_length
    alone = "of this width" if evaluation is None else "beside the planned evaluation batch"
    parts = [f"micro-batch {largest_text(train)}" if train else f"no micro-batch {alone}"]
    if evaluation is not None:
        parts.append(
            f"evaluation batch {largest_text(evaluation)}" if evaluation else "no evaluation batch beside the planned micro-batch"
        )
    if length:
        parts.append(f"max_length {length:,} with {counted(memory.rows, 'row')}")
    return ", ".join(parts)


def describe_time(time: Prediction) -> str:
    """The predicted time of a step, an epoch and the training."""
    parts = {"per step": time.step, "per epoch": time.epoch, "in total": time.total}
    shown = [f"{seconds_text(*ends)} {what}" for what, ends in parts.items() if ends is not None]
    return f"{', '.join(shown)} ({time.basis})"


class PlanProgress(PlanListener):
    """A line on standard error that says what the planner does, if that is a terminal."""

    def on_trial(self, what: str) -> None:
        status_line.show(f"planning: {what}")


class PlanScreen(PlanProgress):
    def __init__(self, console: Console) -> None:
        self.console = console

    def on_memory(self, plan: Plan) -> None:
        show_plan(self.console, plan)
        for warning in plan.data_warnings:  # a run says them when it has read the data
            say(self.console, "data", warning, "bold yellow")
        show_memory(self.console, plan)

    def on_largest_sizes(self, memory: MemoryPlan) -> None:
        show_largest(self.console, memory)

    def on_gain(self, gain: Gain) -> None:
        show_gain(self.console, gain)

    def on_change(self, change: Change) -> None:
        show_change(self.console, change)

    def on_advice_ends(self, reason: str) -> None:
        say(self.console, "advice ends", reason, "yellow")


class RunScreen(PlanProgress):
    """Prints the plan of a run before it starts, and after it what its free memory could have bought."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose

    def on_plan(self, plan: Plan) -> None:
        show_plan(self.console, plan, self.verbose)
        show_forecast(self.console, plan)

    def on_gain(self, gain: Gain) -> None:
        show_gain(self.console, gain)


def show_parallel(console: Console, comparison: Comparison, heading: str = "") -> None:
    """Print one row per way to shard the model."""
    ranks = comparison.ranks
    console.print()
    nodes = f"on {ranks.nodes} nodes" if ranks.nodes > 1 else "on one node"
    label = f"{heading}{counted(ranks.number, 'rank')} {nodes}"
    say(console, label, "ways to shard the model over them")
    columns = ("", "states", "peak", "fits", "rank sends", *(("in node", "node to node") if ranks.nodes > 1 else ()))
    show_sheet(console, Sheet(columns, list(scheme_rows(comparison)), folded=0))
    states = "states: weights, gradients, optimizer state and masters, in closed form"
    peak = "states, buffers and the largest layer: a lower bound, without activations"
    if comparison.tier != "closed form":
        peak = "traced, with activations, temporary tensors and, if weights are sharded, the largest layer gathered"
    say(console, "memory per rank", f"{states}; peak: {peak}")
    say(console, "sent per step", describe_volume(comparison))
    say(console, "formulas", "Patarasuk and Yuan 2009, Rajbhandari et al. 2020, Zhao et al. 2023 (docs/memory.md)")


def scheme_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for scheme in comparison.schemes:
        sent = [scheme.volume.sent]
        if comparison.ranks.nodes > 1:
            sent += [scheme.volume.within, scheme.node_sends_bytes]
        peak = max(scheme.peak_gib, scheme.eval_peak_gib or 0.0)
        states = sum(scheme.states_gib.values())
        volumes = (gib(size / (1 << 30)) for size in sent)
        yield (scheme.name, gib(states), gib(peak), YES_OR_NO[scheme.fits], *volumes)


def describe_volume(comparison: Comparison) -> str:
    """What the columns of sent bytes count."""
    number = comparison.micro_batches
    per_step = f"{counted(number, 'micro-batch')} per rank"
    words = f"bytes that a rank sends around a ring in an optimizer step ({per_step}); it receives as many"
    if comparison.ranks.nodes > 1:
        words += "; in node: the mean part that stays in the node; node to node: what each node sends to the next one"
    return words
