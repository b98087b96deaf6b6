"""Measured tier: run an evaluation and steps on real tensors on this machine's device, and read the allocator's statistics.

On CUDA these are `max_memory_allocated` and `max_memory_reserved`; on a CPU, the allocations that torch's profiler reports.
Weights are constant, which does not change their size. Memory outside the allocator (the CUDA context, libraries) is not
included, as in a trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from hwopt.errors import InputError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.device import GIB
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.shapes import Head, Shape, accumulates_gradients
from hwopt.memory.trace.dry_run import dry_run_of, dummy_micro_batch, evaluation_step, train_step
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.parts import write_recipe
from hwopt.planning.plan import Plan

MARK = "hwopt.step"

Work = Callable[[Callable[[], None]], None]
"""Work whose memory is measured. It calls its argument where a part of the work ends and the next one begins."""


class Measured(NamedTuple):
    """Bytes of the allocator: the peaks of a training step and of an evaluation that follow others, and the most reserved."""

    train: int
    eval: int
    reserved: int


def measure(plan: Plan, shape: Shape, head: Head, eval_rows: int | None = None) -> Measured:
    """Return the memory of a run: an evaluation, steps, an evaluation, a step.

    `eval_rows`: of an evaluation batch; by default as many as in training, and 0 for a run without evaluation.
    Raises torch.OutOfMemoryError if the device has less memory.
    """
    device = torch.device(plan.hardware.device_type)

    def work(mark: Callable[[], None]) -> None:
        with dry_run_of(plan, write_recipe(plan.entries, plan.context), head, device, real=True) as run:
            run.engine.init_state()
            release_unused_memory()
            batch = dummy_micro_batch(run, shape, head, training=True, times=2 if accumulates_gradients(plan) else 1).to(device)
            train, evaluate = partial(train_step, run, batch), nothing
            if eval_rows != 0:
                evaluated = dummy_micro_batch(run, Shape(eval_rows or shape.rows, shape.width), head, training=False).to(device)
                evaluate = partial(evaluation_step, run, evaluated)
            evaluate()
            train()  # libraries allocate some memory only once
            gc.collect()
            for step in (train, evaluate, train):
                mark()
                step()

    (_, train, evaluation, _), reserved = cuda_memory(work) if device.type == "cuda" else cpu_memory(work)
    return Measured(train, evaluation, reserved)


def nothing() -> None:
    """The evaluation of a run that has none."""


def with_measurement(plan: Plan, memory: MemoryPlan, lengths: Lengths) -> MemoryPlan:
    """Return `memory` with measured peaks instead of predicted ones; the difference counts as temporary.

    Raises InputError for a device that this machine does not have, torch.OutOfMemoryError if the device has less memory.
    """
    if plan.hardware.source == "described":
        raise InputError(f"--measure: this machine has no {plan.hardware.name}. To measure this machine, add --hardware detected")
    measured = measure(plan, Shape(memory.rows, memory.width), lengths.head, lengths.eval_batch(plan, memory.width))
    peak = measured.train / GIB
    evaluation = "" if memory.eval_peak_gib is None else f", {memory.eval_peak_gib:.3f} GiB evaluation"
    parts = memory.parts | {"temporary": memory.parts["temporary"] + peak - memory.peak_gib}
    return replace(
        memory,
        tier="measured",
        error="steps and evaluations on this device",
        parts=parts,
        peak_gib=peak,
        eval_peak_gib=None if memory.eval_peak_gib is None else measured.eval / GIB,
        reserved_gib=measured.reserved / GIB,
        note=f"predicted ({memory.tier}): {memory.peak_gib:.3f} GiB training{evaluation}",
    )


def cuda_memory(work: Work) -> tuple[list[int], int]:
    """Return the peak of each part of `work`, and the most reserved."""
    release_unused_memory()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier steps of this process would not be counted
    torch.cuda.empty_cache()
    before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    peaks, reserved = [], []

    def mark() -> None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
        reserved.append(torch.cuda.max_memory_reserved() - reserved_before)
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    work(mark)
    mark()
    return peaks, max(reserved)


def cpu_memory(work: Work) -> tuple[list[int], int]:
    """Return the peak of each part of `work`, and the highest of them."""
    from torch.autograd.profiler import profile, record_function

    def mark() -> None:
        with record_function(MARK):
            pass

    gc.collect()  # earlier garbage must not be released during the measurement
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiler:
        work(mark)
    peaks, allocated = [0], 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == MARK:
            peaks.append(allocated)
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            peaks[-1] = max(peaks[-1], allocated)
    return peaks, max(peaks)
