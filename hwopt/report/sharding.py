"""Print data parallelism, ZeRO and FSDP side by side: the memory of a rank, and what it sends per step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from hwopt.report.sheet import YES_OR_NO, Sheet, gib
from hwopt.report.terminal import say, show_sheet

if TYPE_CHECKING:
    from hwopt.memory.forecast.sharding import Comparison


def show_parallel(console: Console, comparison: Comparison, heading: str = "") -> None:
    """Print one row per way to shard the model."""
    ranks = comparison.ranks
    console.print()
    nodes = f"on {ranks.nodes} nodes" if ranks.nodes > 1 else "on one node"
    label = f"{heading}{ranks.number} rank{'s' if ranks.number > 1 else ''} {nodes}"
    say(console, label, "ways to shard the model over them")
    columns = ("", "states", "peak", "fits", "rank sends", *(("in node", "node to node") if ranks.nodes > 1 else ()))
    show_sheet(console, Sheet(columns, list(rows(comparison)), folded=0))
    states = "states: weights, gradients, optimizer state and masters, in closed form"
    peak = "states, buffers and the largest layer: a lower bound, without activations"
    if comparison.tier != "closed form":
        peak = "traced, with activations, temporary tensors and, if weights are sharded, the largest layer gathered"
    say(console, "memory per rank", f"{states}; peak: {peak}")
    say(console, "sent per step", describe_volume(comparison))
    say(console, "formulas", "Patarasuk and Yuan 2009, Rajbhandari et al. 2020, Zhao et al. 2023 (docs/memory.md)")


def rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
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
    per_step = f"{number} micro-batch{'es' if number > 1 else ''} per rank"
    words = f"bytes that a rank sends around a ring in an optimizer step ({per_step}); it receives as many"
    if comparison.ranks.nodes > 1:
        words += "; in node: the mean part that stays in the node; node to node: what each node sends to the next one"
    return words
