"""Measured tier: the same step on real tensors, on the device that is there, against the allocator's own book.

On CUDA `max_memory_allocated`; on a CPU every allocation of torch's allocator as its profiler reports it. Weights are random,
which changes no size. What lives outside the allocator (the device's context, libraries) is no part of it, here as in a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hwopt.errors import InputError
from hwopt.hardware.device import GIB
from hwopt.memory.dry_run import Shape, evaluation, micro_batch_of, rehearsing, state_first, train_step
from hwopt.memory.tracer import has_several
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import write_recipe

STEP = "hwopt.step"


def measured(plan: Plan, shape: Shape, labels: int, what: str = "train") -> int:
    """Peak bytes of one training step ("train") or evaluation ("eval") with a micro-batch of `shape`, weights and state included.

    Raises torch.OutOfMemoryError where the device has not as much.
    """
    device = torch.device(plan.hardware.device_type)
    book = cuda_peak if device.type == "cuda" else cpu_peak

    def everything(begin: Callable[[], None]) -> None:
        recipe = write_recipe(plan.entries, plan.context)
        with rehearsing(plan, recipe, labels, device, real=True) as run:
            own = recipe.engine is not None  # it keeps earlier gradients and its state in its own way, and makes them in a step
            if not own:
                state_first(run)
            several = has_several(plan)
            times = 2 if own and several else 1
            batch = micro_batch_of(run, shape, training=what == "train", times=times if what == "train" else 1).to(device)
            if own:
                train_step(run, micro_batch_of(run, shape, training=True).to(device), several=False)
            step = (lambda: evaluation(run, batch)) if what == "eval" else (lambda: train_step(run, batch, several and not own))
            step()  # what libraries allocate once
            gc.collect()
            begin()
            step()

    return book(everything)


def with_measured(plan: Plan, memory: MemoryPlan, labels: int) -> MemoryPlan:
    """`memory` with peaks that this device was asked for instead of predicted ones; what they differ by counts as temporary.

    Raises InputError for a device that is not here, torch.OutOfMemoryError where it has not as much.
    """
    if plan.hardware.source == "described":
        raise InputError(f"--measure: {plan.hardware.name} is not here to be measured; add --hardware detected")
    peak = measured(plan, Shape(memory.rows, memory.width), labels) / GIB
    evaluation = measured(plan, Shape(plan.batch.eval, memory.width), labels, "eval") / GIB
    parts = memory.parts | {"temporary": memory.parts["temporary"] + peak - memory.peak_gib}
    return replace(
        memory,
        tier="measured",
        error="one step and one evaluation on this device",
        parts=parts,
        peak_gib=peak,
        eval_peak_gib=evaluation,
        note=f"{memory.tier}, they were {memory.peak_gib:.3f} and {memory.eval_peak_gib or 0:.3f} GiB",
    )


def cuda_peak(work: Callable[[Callable[[], None]], None]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    work(torch.cuda.reset_peak_memory_stats)
    return torch.cuda.max_memory_allocated() - before


def cpu_peak(work: Callable[[Callable[[], None]], None]) -> int:
    from torch.autograd.profiler import profile, record_function

    def mark() -> None:
        with record_function(STEP):
            pass

    gc.collect()  # what is freed in between would count against what is held
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiler:
        work(mark)
    return highest_after(STEP, profiler.kineto_results.events())


def highest_after(mark: str, events: Any) -> int:
    """The most bytes held at once since the event called `mark`, by the allocations and releases in `events`."""
    started = next(event.start_ns() for event in events if event.name() == mark)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for at, change in changes:
        held += change
        if at >= started:
            most = max(most, held)
    return most
