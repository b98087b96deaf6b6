"""Data parallel, ZeRO and FSDP on the terminal, side by side: memory a rank, and what is sent in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from hwopt.report.memory import gib
from hwopt.report.terminal import say, table

if TYPE_CHECKING:
    from hwopt.memory.sharding import Comparison


SOURCES = "Patarasuk and Yuan 2009, Rajbhandari et al. 2020, Zhao et al. 2023 (docs/memory.md)"


def show_parallel(console: Console, comparison: Comparison, heading: str = "") -> None:
    ranks = comparison.ranks
    console.print()
    where = f"on {ranks.nodes} nodes" if ranks.nodes > 1 else "on one node"
    label = f"{heading}{ranks.number} rank{'s' if ranks.number > 1 else ''} {where}"
    say(console, label, "each way to spread the model over them")
    across = ("in node", "node to node") if ranks.nodes > 1 else ()
    console.print(table(("", "states", "peak", "fits", "rank sends", *across), rows(comparison), folded=0))
    say(console, "memory of a rank", describe_memory(comparison))
    say(console, "sent in a step", describe_volume(comparison))
    say(console, "formulas", SOURCES)


def rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for scheme in comparison.schemes:
        sent = [scheme.volume.sent]
        if comparison.ranks.nodes > 1:
            sent += [scheme.volume.within, scheme.node_sends_bytes]
        peak = max(scheme.peak_gib, scheme.eval_peak_gib or 0.0)
        states = sum(scheme.states_gib.values())
        volumes = (gib(size / (1 << 30)) for size in sent)
        yield (scheme.name, gib(states), gib(peak), "yes" if scheme.fits else "no", *volumes)


def describe_memory(comparison: Comparison) -> str:
    states = "states are weights, gradients, optimizer state and masters in closed form"
    if comparison.tier == "closed form":
        return f"{states}; the peak adds buffers and the largest layer: a lower bound, without activations and temporaries"
    return (
        f"{states}; the peak is traced, with activations and temporaries, "
        "and, where weights are spread, with the largest layer whole"
    )


def describe_volume(comparison: Comparison) -> str:
    number = comparison.micro_batches
    words = f"bytes of an optimizer step ({number} micro-batch{'es' if number > 1 else ''} a rank) that a rank sends round a ring"
    words += ", and as many that it receives"
    if comparison.ranks.nodes > 1:
        words += "; in node: those that stay in its node, in the mean; node to node: what each node sends to the next one"
    return words
