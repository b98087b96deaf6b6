"""Predicts the memory of a plan with the best tier that can answer, and the largest sizes that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hwopt.distributed.data_parallel import BUCKET_BYTES
from hwopt.errors import InputError
from hwopt.hardware.device import GIB, Hardware
from hwopt.memory.allocator.playback import PlayedSteps, largest_played, played_run
from hwopt.memory.forecast.communication import on_device
from hwopt.memory.forecast.lengths import Lengths, largest_micro_batch, lengths_of
from hwopt.memory.forecast.roofline import predict_time
from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace.timeline import KINDS
from hwopt.memory.trace.tracer import Trace, trace_plan
from hwopt.memory.trace.tracing_process import NotTraceable
from hwopt.planning.memory_plan import CLOSED_FORM, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import left_out
from hwopt.tasks.registry import make_task

CONTEXT_GIB = {"Turing": 0.14, "Volta": 0.4, "Ampere": 0.4, "Ada": 0.4}
"""Memory of CUDA's context and loaded kernels, outside torch's allocator, by architecture, with lazy loading.

Turing: 140.9 MiB in 79 runs on a T4 (the archive of benchmarks/published_memory). Volta, Ampere and Ada: "around 400MB" with lazy
loading (pytorch#109888)."""
UNKNOWN_CONTEXT_GIB = 0.5
"""The same for other devices, an estimate; on a CPU, memory of libraries."""
FORECAST_ERROR = 0.03
"""Fraction of the free memory that is kept back for what the forecast misses: its largest error on published runs."""

ERRORS = {
    CLOSED_FORM: "a lower bound: activations and temporaries are not included",
    "traced": "against exact published runs on GPUs off by 0.1 % in the median, by 5 % at most; reserved memory by 7 % at most",
}
"""The error that each tier states (measurements in docs/memory.md)."""

MOST_LENGTH = 1 << 17
EVENTS = 60_000
"""Allocations and releases of the steps of a run that are played: some tenths of a second."""
HOST_FRACTION = 0.85
"""Fraction of the host's memory for offloaded parts; data, libraries and the system use the rest. An estimate."""


def reserve_gib(hardware: Hardware) -> float:
    """Return the memory that tensors cannot use. A memory limit applies to the allocator, which excludes the context."""
    context = 0.0 if hardware.memory_limit_gib is not None else context_gib(hardware)
    return context + FORECAST_ERROR * hardware.free_memory_gib


def context_gib(hardware: Hardware) -> float:
    """Return the memory of CUDA's context, which nvidia-smi counts and torch's allocator does not."""
    return CONTEXT_GIB.get(hardware.architecture, UNKNOWN_CONTEXT_GIB)


def plan_memory(plan: Plan, cache: Path, lengths: Lengths | None = None) -> MemoryPlan:
    """Return the memory of `plan`, traced if fake tensors can run its recipe, else in closed form.

    It has no largest sizes (see `with_largest_sizes`). Raises InputError if there are more ranks than samples.
    """
    lengths = lengths or lengths_of(plan, cache)
    if lengths.train is not None and plan.world_size > (samples := len(lengths.train)):
        raise InputError(f"{plan.world_size:,} ranks for {samples:,} training samples. Use {samples:,} ranks or fewer")
    shape = largest_micro_batch(plan, lengths.longest)
    try:
        return traced_memory(plan, shape, lengths, device_trace(plan, shape.width, lengths.head, cache))
    except NotTraceable as error:
        return replace(closed_form(plan, lengths), note=f"the recipe could not be traced: {error}")


def closed_form(plan: Plan, lengths: Lengths) -> MemoryPlan:
    """Return a lower bound of the memory of `plan`, without activations."""
    parts = dict.fromkeys(KINDS, 0.0) | on_device(plan.memory_spec)
    return memory_of(plan, largest_micro_batch(plan, lengths.longest), lengths, CLOSED_FORM, parts)


def with_largest_sizes(plan: Plan, memory: MemoryPlan, cache: Path, lengths: Lengths | None = None) -> MemoryPlan:
    """Return `memory`, the result of `plan_memory`, with the largest sizes that fit. Takes seconds, with the trace in the cache.

    A closed form has none.
    """
    lengths = lengths or lengths_of(plan, cache)
    try:
        trace = device_trace(plan, memory.width, lengths.head, cache)
    except NotTraceable:
        return memory
    budget = (memory.free_gib - memory.reserve_gib) * GIB - bucket_bytes(plan) - waiting_bytes(plan, memory.rows)
    rows, width = memory.rows, memory.width
    run = partial(run_at, plan, lengths, trace)
    longest = None
    if not trace.fixed_width and plan.context.task.inputs != "images":
        most = plan.model.max_positions or MOST_LENGTH
        longest = largest_played(lambda width: run(rows, width), budget, most)
    return replace(
        memory,
        largest_train=largest_played(lambda rows: run(rows, width), budget),
        largest_eval=None if lengths.eval_rows == 0 else largest_played(lambda most: run(rows, width, most), budget),
        largest_max_length=longest,
    )


def run_at(plan: Plan, lengths: Lengths, trace: Trace, rows: int, width: int, eval_rows: int | None = None) -> PlayedSteps:
    """Return the arguments of `played_run` for these sizes. `eval_rows`: of an evaluation batch, if not those of the plan."""
    largest = [trace.train.at(*shape) for shape in lengths.largest_step(plan, rows, width)]
    most = 0 if trace.fixed_width else EVENTS // len(trace.train.base.events)
    steps = ([trace.train.at(*shape) for shape in shapes] for shapes in lengths.steps(plan, rows, width, most))
    tokens = plan.memory_spec.pooled_tokens
    pooled = None if tokens is None else max(largest, key=lambda step: step.peak().bytes)
    if tokens and rows * width > tokens:
        shape = lengths.largest_within(plan, rows, width, tokens)
        pooled = shape and trace.train.at(*shape)
    known = [] if trace.fixed_width or eval_rows is not None else lengths.evaluations(plan, width)
    evaluations = known or [Shape(lengths.eval_batch(plan, width) if eval_rows is None else eval_rows, width)]
    return largest, [trace.eval.at(*shape) for shape in evaluations], pooled, steps


def device_trace(plan: Plan, width: int, head: Head, cache: Path | None) -> Trace:
    """Return the part of the plan's trace that is on one device. Raises NotTraceable."""
    fractions = dict(plan.memory_spec.held)
    update_fraction = fractions.pop("update", None)
    found = trace_plan(plan, width, head, cache and cache / "memory")
    train = found.train.with_fractions(fractions, update_fraction)
    return replace(found, train=train, eval=found.eval.with_fractions(fractions))


def traced_memory(plan: Plan, shape: Shape, lengths: Lengths, trace: Trace) -> MemoryPlan:
    """Return the memory of a plan from its `trace`, without the largest sizes. `shape`: of the largest micro-batch."""
    buckets = bucket_bytes(plan)
    waiting = waiting_bytes(plan, shape.rows)
    steps = run_at(plan, lengths, trace, shape.rows, shape.width)
    run = played_run(*steps)
    parts = run.train.parts | {"temporary": run.train.parts["temporary"] + buckets + waiting}
    return replace(
        memory_of(plan, shape, lengths, "traced", parts, max(each.host_bytes() for each in steps[0])),
        peak_gib=(run.train.bytes + buckets + waiting) / GIB,
        eval_peak_gib=None if lengths.eval_rows == 0 else (run.eval.bytes + buckets) / GIB,
        reserved_gib=(run.reserved + buckets + waiting) / GIB,
        pool_gib=run.pool / GIB,
        time=predict_time(plan, trace.train, lengths.train, shape.width),
    )


def memory_of(
    plan: Plan, shape: Shape, lengths: Lengths, tier: str, parts: Mapping[str, float], offloaded_activations: float = 0.0
) -> MemoryPlan:
    """Return what both tiers say of a plan. `parts`: bytes by kind at the peak."""
    hardware, spec = plan.hardware, plan.memory_spec
    reserve = reserve_gib(hardware)
    here = hardware.source == "detected" and hardware.device_type != "cpu"
    offloaded = (spec.host + offloaded_activations) * min(plan.world_size, max(1, hardware.count))
    return MemoryPlan(
        tier=tier,
        error=ERRORS[tier],
        rows=shape.rows,
        width=shape.width,
        width_source=lengths.source,
        parts={kind: size / GIB for kind, size in parts.items()} | {"reserve": reserve},
        peak_gib=sum(parts.values()) / GIB,
        reserve_gib=reserve,
        free_gib=hardware.free_memory_gib,
        unpacked_gib={name: number * spec.frozen_bytes / GIB for name, number in spec.unpacked.items()},
        host_gib=offloaded / GIB,
        host_free_gib=HOST_FRACTION * hardware.cpu_memory_gib if here else None,
    )


def bucket_bytes(plan: Plan) -> int:
    """Return the buffers that reduce gradients: a bucket and the library's copy of it, or the engine's own."""
    data_parallel = plan.world_size > 1 and plan.recipe.engine is None
    return int(plan.memory_spec.buffers) + (2 * BUCKET_BYTES if data_parallel else 0)


def waiting_bytes(plan: Plan, rows: int) -> int:
    """Return the images of a step that wait on the device while the first `rows` are trained: a step is copied as a whole.

    Those of texts are too small to count.
    """
    if plan.context.task.inputs != "images":
        return 0
    task = make_task(plan.job)
    sample = task.placeholder(plan.job, task.load_config(plan.job), 1)
    more = max(0, -(-plan.batch.step // plan.world_size) - rows)
    return more * sum(int(value.nbytes) for value in sample.values())


def pool_that_yields(plan: Plan) -> bool:
    """Whether a plugin that the user did not name keeps a pool (`MemorySpec.pooled_tokens`). It goes if that does not fit."""
    if plan.memory_spec.pooled_tokens is None:
        return False
    author = plan.recipe.author_of("forward_backward")
    entry = next(each for each in plan.entries if each.author == author)
    return entry.plugin.relations.yields and entry.name not in plan.profile.chosen


def fitted(plan: Plan, cache: Path, lengths: Lengths | None) -> tuple[Plan, MemoryPlan]:
    """Return `plan` and its memory; if that does not fit, without the plugin that keeps a pool, unless the user named it."""
    memory = plan_memory(plan, cache, lengths)
    if memory.margin_gib >= 0 or not memory.pool_gib or not pool_that_yields(plan):
        return plan, memory
    budget = memory.free_gib - memory.reserve_gib
    why = f"its memory pool does not fit: {memory.highest_gib:.2f} of {budget:.2f} GiB, {memory.pool_gib:.2f} less without it"
    plan = left_out(plan, {"forward_backward": why})
    return plan, plan_memory(plan, cache, lengths)
