"""Parallel: memory a rank and volume a step of each way to spread a plan over its ranks, side by side.

The traced step is the plan's own; of what a scheme spreads each rank holds its part in it, and the update works on that part, so
that the highest point may be another one. Where weights are spread, the largest layer is whole while it is computed (Zhao et al.
2023, arXiv:2304.11277). Without a trace: the states alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hwopt.distributed.data_parallel import BUCKET_BYTES
from hwopt.hardware.device import GIB
from hwopt.memory import closed_form
from hwopt.memory.communication import Ranks, Scheme, Volume, schemes_for, volume
from hwopt.memory.dry_run import spec_of
from hwopt.memory.lengths import lengths_of
from hwopt.memory.timeline import KINDS, Peak, Timeline
from hwopt.memory.tracer import NotTraceable, Trace, traced
from hwopt.model.facts import ModelFacts
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import write_recipe
from hwopt.plugin import MemorySpec

STATES = ("weights", "gradients", "optimizer_state", "masters")


@dataclass(frozen=True)
class Spread:
    """One scheme: memory in GiB, on a rank."""

    name: str
    spread_over: int
    """Ranks that have one of everything between them."""
    states_gib: dict[str, float]
    """Closed form: weights, gradients, optimizer state and masters."""
    peak_gib: float
    """In a training step; the states and the largest layer where nothing was traced."""
    eval_peak_gib: float | None
    margin_gib: float
    volume: Volume
    node_sends_bytes: float
    """What leaves a node for the next one in an optimizer step, of all its ranks; as much comes in."""

    @property
    def fits(self) -> bool:
        return self.margin_gib >= 0

    def to_dict(self) -> dict[str, Any]:
        sent = self.volume
        return {key: value for key, value in asdict(self).items() if key != "volume"} | {
            "fits": self.fits,
            "rank_sends_bytes": sent.sent,
            "rank_sends_within_node_bytes": sent.within,
            "rank_sends_between_nodes_bytes": sent.between,
        }


@dataclass(frozen=True)
class Comparison:
    ranks: Ranks
    micro_batches: int
    """Of an optimizer step, on a rank."""
    tier: str
    """Of the peaks."""
    schemes: tuple[Spread, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks.number,
            "nodes": self.ranks.nodes,
            "micro_batches": self.micro_batches,
            "tier": self.tier,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }


def without_engine(plan: Plan) -> Plan:
    """`plan` without the plugin that brings an engine and spreads by itself, if there is one."""
    entries = tuple(entry for entry in plan.entries if entry.author != plan.recipe.author_of("engine"))
    if len(entries) == len(plan.entries):
        return plan
    return replace(plan, entries=entries, recipe=write_recipe(entries, plan.context))


def compared(plan: Plan, ranks: Ranks, cache: Path) -> Comparison:
    """Every scheme for a plan whose memory is known (`plan.memory`); one that the plan has itself is taken out of it first."""
    memory = plan.memory
    assert memory is not None, "asked for"
    plan = without_engine(plan)
    trace = trace_of(plan, memory, cache)
    steps = None
    if trace is not None:
        steps = trace.train.at(memory.rows, memory.width), trace.eval.at(plan.batch.eval, memory.width)
    spec, micro_batches = spec_of(plan), plan.batch.accumulation(plan.world_size)
    layer = largest_layer(spec, plan.model)
    rows = []
    for scheme in schemes_for(ranks):
        states = closed_form.sharded(closed_form.states(spec), scheme.stage, scheme.spread_over(ranks))
        more = (2 * BUCKET_BYTES if ranks.number > 1 else 0) + (layer if weights_are_spread(scheme, ranks) else 0)
        if steps is None:
            peak, evaluation = sum(states.values()) + more, None
        else:
            train, held = peaks(scheme, ranks, *steps)
            peak, evaluation = train.bytes + more, (held.bytes + more) / GIB
        sent = volume(scheme, spec, ranks, micro_batches)
        rows.append(
            Spread(
                name=scheme.name,
                spread_over=scheme.spread_over(ranks),
                states_gib={kind: size / GIB for kind, size in states.items()},
                peak_gib=peak / GIB,
                eval_peak_gib=evaluation,
                margin_gib=memory.free_gib - memory.reserve_gib - max(peak / GIB, evaluation or 0.0),
                volume=sent,
                node_sends_bytes=sent.between * ranks.per_node,
            )
        )
    return Comparison(ranks, micro_batches, "closed form" if trace is None else "traced", tuple(rows))


def trace_of(plan: Plan, memory: MemoryPlan, cache: Path) -> Trace | None:
    """The one that the planner has made."""
    if memory.tier != "closed form":
        with suppress(NotTraceable):
            return traced(plan, memory.width, lengths_of(plan, cache).labels, cache / "memory")
    return None


def weights_are_spread(scheme: Scheme, ranks: Ranks) -> bool:
    return scheme.stage == 3 and scheme.spread_over(ranks) > 1


def largest_layer(spec: MemorySpec, model: ModelFacts) -> float:
    """Bytes of the weights and gradients of the largest part that is gathered at once: the embedding, or a layer."""
    embedding = min(model.vocab_size * model.hidden_size, spec.parameters)
    layer = max(embedding, (spec.parameters - embedding) / max(model.layers, 1))
    return layer * (spec.weight_bytes + spec.gradient_bytes * spec.trained / spec.parameters)


def peaks(scheme: Scheme, ranks: Ranks, train: Timeline, evaluation: Timeline) -> tuple[Peak, Peak]:
    """(training, evaluation) on a rank, before what is gathered for a moment."""
    over = scheme.spread_over(ranks)
    parts = closed_form.sharded(dict.fromkeys(STATES, 1.0), scheme.stage, over)
    shares = dict.fromkeys(KINDS, 1.0) | parts
    return train.spread(shares, 1 / over).peak(), evaluation.spread(shares).peak()
