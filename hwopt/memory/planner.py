"""Whether a plan fits its device: the tier that can answer, the largest sizes that fit, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.distributed.data_parallel import BUCKET_BYTES
from hwopt.errors import InputError
from hwopt.hardware.device import GIB, Hardware
from hwopt.memory import closed_form
from hwopt.memory.dry_run import Shape, spec_of
from hwopt.memory.known_limits import max_rows, remember
from hwopt.memory.lengths import Lengths, largest_micro_batch, lengths_of
from hwopt.memory.roofline import predict
from hwopt.memory.timeline import KINDS, Peak, Timeline
from hwopt.memory.tracer import NotTraceable, Trace, traced, traced_at
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.memory_plan import Change, MemoryPlan
from hwopt.planning.plan import Plan

# The planner's fitted constants, two in all (docs/memory.md). Everything else follows from the traced step.
CONTEXT_GIB = 0.5
"""What a device's context and kernels take outside torch's allocator; on a CPU, the libraries."""
FRAGMENTATION = 0.03
"""The part of the memory that the allocator cannot use, for its blocks have other sizes."""

ERRORS = {
    "closed form": "a lower bound: activations and temporaries are left out",
    "traced": "against a CPU's allocator off by 0.03 % in the median, by 1.3 % under to 9 % over; unvalidated on a GPU",
}
"""What each tier states about itself (docs/memory.md has the measurements)."""

MOST_LENGTH = 1 << 17
HOST_SHARE = 0.85
"""Of the host's memory, for what is offloaded; data, libraries and the system take the rest. A round number."""


def reserve_gib(hardware: Hardware) -> float:
    """What no tensor may use. A limit is one of the allocator, outside of which the context lies."""
    context = 0.0 if hardware.memory_limit_gib is not None else CONTEXT_GIB
    return context + FRAGMENTATION * hardware.free_memory_gib


def plan_memory(plan: Plan, cache: Path, lengths: Lengths | None = None) -> MemoryPlan:
    """The memory of `plan`, traced where fake tensors can run its recipe, else in closed form.

    Raises InputError for more ranks than there are samples.
    """
    lengths = lengths or lengths_of(plan, cache)
    if lengths.train is not None and plan.world_size > len(lengths.train):
        raise InputError(
            f"{plan.world_size:,} ranks for {len(lengths.train):,} training samples: most of them would never have one; "
            f"take {len(lengths.train):,} ranks or fewer"
        )
    rows, width = largest_micro_batch(plan, lengths.longest)
    shape = Shape(rows, width)
    try:
        trace = held_part(plan, traced(plan, width, lengths.labels, cache / "memory"))
        return from_trace(plan, shape, lengths, trace, training_step(plan, shape, trace, lengths.labels, cache / "memory"))
    except NotTraceable as error:
        return from_closed_form(plan, shape, lengths, f"it could not be traced: {error}")


def held_part(plan: Plan, trace: Trace) -> Trace:
    """What of `trace` lies on one device, as the plan's plugins say."""
    shares, in_update = shares_of(plan)
    return replace(trace, train=trace.train.held(shares, in_update), eval=trace.eval.held(shares))


def shares_of(plan: Plan) -> tuple[dict[str, float], float | None]:
    """(kind of memory -> the part of it on one device, the part of what only the update uses), where that is not all."""
    shares = dict(spec_of(plan).held)
    return shares, shares.pop("update", None)


def training_step(plan: Plan, shape: Shape, trace: Trace, labels: int, cache: Path | None) -> Timeline:
    """One of `shape`. A plugin's collate may lay out few rows otherwise than many: with one, that very shape is traced."""
    if plan.recipe.collate is None:
        return trace.train.at(shape.rows, shape.width)
    return traced_at(plan, shape, labels, cache).spread(*shares_of(plan))


def from_trace(plan: Plan, shape: Shape, lengths: Lengths, trace: Trace, step: Timeline) -> MemoryPlan:
    buckets = bucket_bytes(plan)
    peak = with_buckets(step.peak(), buckets)
    eval_peak = trace.eval.at(plan.batch.eval, shape.width).peak().bytes + buckets
    reserve, free = reserve_gib(plan.hardware), plan.hardware.free_memory_gib
    budget = (free - reserve) * GIB - buckets
    most = plan.model.max_positions or MOST_LENGTH
    return MemoryPlan(
        tier="traced",
        error=ERRORS["traced"],
        rows=shape.rows,
        width=shape.width,
        width_source=lengths.source,
        parts=in_gib(peak) | {"reserve": reserve},
        peak_gib=peak.bytes / GIB,
        eval_peak_gib=eval_peak / GIB,
        reserve_gib=reserve,
        free_gib=free,
        largest_train=trace.train.max_rows(shape.width, budget),
        largest_eval=trace.eval.max_rows(shape.width, budget),
        largest_max_length=None
        if trace.one_width
        else min(trace.train.most_width(shape.rows, budget, most), trace.eval.most_width(plan.batch.eval, budget, most)),
        time=predict(plan, trace.train, lengths.train),
        **host_part(plan),
    )


def from_closed_form(plan: Plan, shape: Shape, lengths: Lengths, why: str) -> MemoryPlan:
    parts = dict.fromkeys(KINDS, 0.0) | closed_form.on_device(spec_of(plan))
    reserve = reserve_gib(plan.hardware)
    return MemoryPlan(
        tier="closed form",
        error=ERRORS["closed form"],
        rows=shape.rows,
        width=shape.width,
        width_source=lengths.source,
        parts={kind: size / GIB for kind, size in parts.items()} | {"reserve": reserve},
        peak_gib=sum(parts.values()) / GIB,
        eval_peak_gib=None,
        reserve_gib=reserve,
        free_gib=plan.hardware.free_memory_gib,
        largest_train=None,
        largest_eval=None,
        largest_max_length=None,
        note=why,
        **host_part(plan),
    )


def host_part(plan: Plan) -> dict[str, Any]:
    """What is offloaded, against the host's memory without what the process itself and the system need of it."""
    hardware = plan.hardware
    here = hardware.source == "detected" and hardware.device_type != "cpu"
    offloaded = spec_of(plan).host * min(plan.world_size, max(1, hardware.count)) / GIB
    return {"host_gib": offloaded, "host_free_gib": HOST_SHARE * hardware.cpu_memory_gib if here else None}


def bucket_bytes(plan: Plan) -> int:
    """What several ranks hold at once to reduce gradients, a bucket and what the library makes of it; or an engine's own."""
    own = plan.world_size > 1 and plan.recipe.engine is None
    return int(spec_of(plan).buffers) + (2 * BUCKET_BYTES if own else 0)


def with_buckets(peak: Peak, buckets: int) -> Peak:
    parts = peak.parts | {"temporary": peak.parts["temporary"] + buckets}
    return Peak(peak.bytes + buckets, parts)


def in_gib(peak: Peak) -> dict[str, float]:
    return {kind: size / GIB for kind, size in peak.parts.items()}


def highest(memory: MemoryPlan) -> float:
    return max(memory.peak_gib, memory.eval_peak_gib or 0.0)


def walk(
    plan: Plan, replan: Callable[[dict[str, int]], Plan], cache: Path, before: Mapping[str, Mapping[str, Any]] | None = None
) -> Plan:
    """`plan` with every choice among options (`Decision.choose`, cheapest first) at the first one that fits, and why.

    `replan` resolves with the given option number of each plugin. `before` has the options by plugin that a run was begun with,
    which are taken again. Where none fits, the last one is taken: it needs the least.
    Raises InputError where the recipe cannot be traced, so that nobody can tell.
    """
    taken: dict[str, int] = {}
    reasons: dict[str, str] = {}
    lengths = lengths_of(plan, cache)
    for entry in plan.entries:
        if entry.choices == 1:
            continue
        if (number := number_of(entry, (before or {}).get(entry.name), taken, replan)) is not None:
            taken[entry.name] = number
            plan = replan(taken)
            reasons[entry.name] = f"{entry.reason}: as the run was begun"
            continue
        refused = ""
        for number in range(entry.choices):
            taken[entry.name] = number
            plan = replan(taken)
            tried = max_rows(plan, lengths, cache)
            if tried is not None and plan.batch.train > tried:
                refused = f"; this card ran out with more than {tried} rows before"
                continue
            memory = plan_memory(plan, cache, lengths)
            if memory.tier == "closed form":
                raise InputError(
                    f"{entry.place}: hwopt cannot choose for {entry.author}: {memory.note}. Set its options yourself"
                )
            room = memory.free_gib - memory.reserve_gib
            reasons[entry.name] = f"{entry.reason}: {highest(memory):.2f} of {room:.2f} GiB{refused}"
            if memory.fits:
                break
            refused = f", the one before would need {highest(memory):.2f}"
    entries = tuple(replace(entry, reason=reasons.get(entry.name, entry.reason)) for entry in plan.entries)
    return replace(plan, entries=entries)


def number_of(
    entry: PluginDecision, options: Mapping[str, Any] | None, taken: dict[str, int], replan: Callable[[dict[str, int]], Plan]
) -> int | None:
    """Which of the choices of `entry` has these options; None where none has."""
    for number in range(entry.choices) if options else ():
        plan = replan(taken | {entry.name: number})
        if next(each for each in plan.entries if each.name == entry.name).options.model_dump(mode="json") == options:
            return number
    return None


def held(plan: Plan, cache: Path, rows: int) -> None:
    """Keep what a run of a chosen plan has found out: the rows that went through where the chosen ones did not."""
    remember(plan, lengths_of(plan, cache), cache, rows)


__all__ = ["Change", "MemoryPlan", "held", "highest", "plan_memory", "walk"]
