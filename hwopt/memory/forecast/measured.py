"""Measured tier: run the same step on real tensors on this machine's device, and read the allocator's statistics.

On CUDA these are `max_memory_allocated` and `max_memory_reserved`; on a CPU, the allocations that torch's profiler reports.
Weights are constant, which does not change their size. Memory outside the allocator (the CUDA context, libraries) is not
included, as in a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hwopt.errors import InputError
from hwopt.hardware.device import GIB
from hwopt.memory.trace.dry_run import (
    Head,
    Shape,
    accumulates_gradients,
    dry_run_of,
    dummy_micro_batch,
    evaluation_step,
    make_state,
    train_step,
)
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.parts import write_recipe
from hwopt.planning.plan import Plan

STEP = "hwopt.step"


@dataclass(frozen=True)
class Measured:
    """Bytes of the allocator in a step that follows others."""

    peak: int
    reserved: int
    """On a CPU, the peak."""


def measure(plan: Plan, shape: Shape, head: Head, what: str = "train") -> Measured:
    """Return the memory of a training step ("train") or an evaluation ("eval") of `shape`, with weights and state.

    Raises torch.OutOfMemoryError if the device has less memory.
    """
    device = torch.device(plan.hardware.device_type)
    memory_of = cuda_memory if device.type == "cuda" else cpu_memory

    def run_step(start_measuring: Callable[[], None]) -> None:
        recipe = write_recipe(plan.entries, plan.context)
        with dry_run_of(plan, recipe, head, device, real=True) as run:
            own_engine = recipe.engine is not None  # it creates earlier gradients, and perhaps its state, in a real step
            if not own_engine:
                make_state(run)
            accumulates = accumulates_gradients(plan)
            training = what == "train"
            times = 2 if own_engine and accumulates and training else 1
            batch = dummy_micro_batch(run, shape, head, training=training, times=times).to(device)
            if own_engine:
                run.engine.init_state()  # as a run does before step 1
                train_step(run, dummy_micro_batch(run, shape, head, training=True).to(device), accumulates=False)
            step = (
                (lambda: evaluation_step(run, batch))
                if what == "eval"
                else (lambda: train_step(run, batch, accumulates and not own_engine))
            )
            if device.type == "cuda":
                multiply_once(device)
            step()  # libraries allocate some memory only once
            gc.collect()
            start_measuring()
            step()

    return memory_of(run_step)


def multiply_once(device: torch.device) -> None:
    """Run a product forward and backward: cuBLAS then has a workspace for each thread, as in every step after the first."""
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()


def with_measurement(plan: Plan, memory: MemoryPlan, head: Head) -> MemoryPlan:
    """Return `memory` with measured peaks instead of predicted ones; the difference counts as temporary.

    Raises InputError for a device that this machine does not have, torch.OutOfMemoryError if the device has less memory.
    """
    if plan.hardware.source == "described":
        raise InputError(f"--measure: this machine has no {plan.hardware.name}. To measure this machine, add --hardware detected")
    training = measure(plan, Shape(memory.rows, memory.width), head)
    evaluation = measure(plan, Shape(plan.batch.eval_rows(memory.width), memory.width), head, "eval")
    peak = training.peak / GIB
    parts = memory.parts | {"temporary": memory.parts["temporary"] + peak - memory.peak_gib}
    return replace(
        memory,
        tier="measured",
        error="one step and one evaluation on this device",
        parts=parts,
        peak_gib=peak,
        eval_peak_gib=evaluation.peak / GIB,
        reserved_gib=max(training.reserved, evaluation.reserved) / GIB,
        note=f"predicted ({memory.tier}): {memory.peak_gib:.3f} GiB training, {memory.eval_peak_gib or 0:.3f} GiB evaluation",
    )


def cuda_memory(work: Callable[[Callable[[], None]], None]) -> Measured:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier steps of this process would not be counted
    torch.cuda.empty_cache()
    before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    work(torch.cuda.reset_peak_memory_stats)
    return Measured(torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved_before)


def cpu_memory(work: Callable[[Callable[[], None]], None]) -> Measured:
    from torch.autograd.profiler import profile, record_function

    def mark() -> None:
        with record_function(STEP):
            pass

    gc.collect()  # earlier garbage must not be released during the measurement
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiler:
        work(mark)
    peak = highest_after(STEP, profiler.kineto_results.events())
    return Measured(peak, peak)


def highest_after(mark: str, events: Any) -> int:
    """Return the most bytes allocated at once after the event named `mark`."""
    started = next(event.start_ns() for event in events if event.name() == mark)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    allocated = most = 0
    for at, change in changes:
        allocated += change
        if at >= started:
            most = max(most, allocated)
    return most
