"""Compares the ways to shard a plan over its ranks: memory per rank, and bytes sent per step.

Each scheme is applied to the plan's traced step: a rank holds its shard of what the scheme shards, and the update works on that
shard, so the peak may move. With sharded weights, the largest layer is gathered while it is computed (Zhao et al. 2023,
arXiv:2304.11277). Without a trace, only the states are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hwopt.distributed.data_parallel import BUCKET_BYTES
from hwopt.hardware.device import GIB
from hwopt.memory.allocator.playback import PlayedRun, played_run
from hwopt.memory.forecast.communication import Ranks, Scheme, Volume, schemes_for, sharded, states, volume
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.memory.forecast.planner import run_at
from hwopt.memory.trace.timeline import KINDS, Timeline
from hwopt.memory.trace.tracer import trace_plan
from hwopt.memory.trace.tracing_process import NotTraceable
from hwopt.model.facts import ModelFacts
from hwopt.planning.parts import write_recipe
from hwopt.planning.plan import Plan
from hwopt.plugin import MemorySpec

STATES = ("weights", "gradients", "optimizer_state", "masters")


@dataclass(frozen=True)
class SchemeMemory:
    """Memory per rank and communication of one scheme."""

    name: str
    spread_over: int
    """Number of ranks that together hold one copy of the sharded parts."""
    states_gib: dict[str, float]
    """Closed form: weights, gradients, optimizer state and masters."""
    peak_gib: float
    """Peak of a training step; without a trace, the states and the largest layer: a lower bound."""
    lower_bound: bool
    eval_peak_gib: float | None
    margin_gib: float
    volume: Volume
    node_sends_bytes: float
    """Bytes that all ranks of a node send to the next node in an optimizer step. The node receives as many."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if a lower bound fits, which does not tell."""
        return False if self.margin_gib < 0 else None if self.lower_bound else True

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
    """All schemes for one number of ranks."""

    ranks: Ranks
    micro_batches: int
    """Micro-batches of an optimizer step on one rank."""
    tier: str
    """The tier that predicted the peaks."""
    schemes: tuple[SchemeMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks.number,
            "nodes": self.ranks.nodes,
            "micro_batches": self.micro_batches,
            "tier": self.tier,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }


def compare_schemes(plan: Plan, ranks: Ranks, cache: Path) -> Comparison:
    """Return every scheme for a plan with `plan.memory`. The plan's own sharding plugin is removed first."""
    memory = plan.memory
    assert memory is not None, "the plan was made with memory"
    entries = tuple(entry for entry in plan.entries if entry.author != plan.recipe.author_of("engine"))
    if len(entries) < len(plan.entries):
        plan = replace(plan, entries=entries, recipe=write_recipe(entries, plan.context))
    trace = None
    if not memory.lower_bound:
        with suppress(NotTraceable):
            trace = trace_plan(plan, memory.width, lengths_of(plan, cache).head, cache / "memory")
    steps = None
    if trace is not None:
        steps = run_at(plan, lengths_of(plan, cache), trace, memory.rows, memory.width)[:2]
    spec, micro_batches = plan.memory_spec, plan.batch.accumulation(plan.world_size)
    layer = largest_layer(spec, plan.model)
    rows = []
    for scheme in schemes_for(ranks):
        over = scheme.spread_over(ranks)
        held = sharded(states(spec), scheme.stage, over)
        gathered = (2 * BUCKET_BYTES if ranks.number > 1 else 0) + (layer if scheme.stage == 3 and over > 1 else 0)
        if steps is None:
            peak, evaluation = sum(held.values()) + gathered, None
            highest = peak
        else:
            run = played_per_rank(scheme, ranks, *steps)
            peak, evaluation = run.train.bytes + gathered, (run.eval.bytes + gathered) / GIB
            highest = run.reserved + gathered
        sent = volume(scheme, spec, ranks, micro_batches)
        rows.append(
            SchemeMemory(
                name=scheme.name,
                spread_over=over,
                states_gib={kind: size / GIB for kind, size in held.items()},
                peak_gib=peak / GIB,
                lower_bound=steps is None,
                eval_peak_gib=evaluation,
                margin_gib=memory.free_gib - memory.reserve_gib - highest / GIB,
                volume=sent,
                node_sends_bytes=sent.between * ranks.per_node,
            )
        )
    return Comparison(ranks, micro_batches, "closed form" if trace is None else "traced", tuple(rows))


def largest_layer(spec: MemorySpec, model: ModelFacts) -> float:
    """Return the bytes of weights and gradients of the largest part that is gathered at once: the embedding or a layer."""
    embedding = min(model.vocab_size * model.hidden_size, spec.parameters)
    layer = max(embedding, (spec.parameters - embedding) / max(model.layers, 1))
    return layer * (spec.weights + spec.gradient_bytes * spec.trained) / spec.parameters


def played_per_rank(scheme: Scheme, ranks: Ranks, largest: Sequence[Timeline], evaluations: Sequence[Timeline]) -> PlayedRun:
    """Return the memory of a rank, without the temporarily gathered layer."""
    over = scheme.spread_over(ranks)
    parts = sharded(dict.fromkeys(STATES, 1.0), scheme.stage, over)
    fractions = dict.fromkeys(KINDS, 1.0) | parts
    train = [micro_batch.with_fractions(fractions, 1 / over) for micro_batch in largest]
    return played_run(train, [batch.with_fractions(fractions) for batch in evaluations])
