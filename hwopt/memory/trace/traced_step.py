"""Traces one step of a plan's recipe on fake tensors. Runs in the tracing process, because it changes torch for all of it.

A stack of equal layers is not run in full: hwopt.memory.trace.extended_trace adds the layers that were skipped, or says that it
cannot; then every layer is run (docs/decisions/0014-one-layer-of-each-kind.md).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from hwopt.data.batches.step_batch import StepBatch
from hwopt.memory.shapes import Head, Shape, accumulates_gradients
from hwopt.memory.trace import cuda_emulation as card
from hwopt.memory.trace.dry_run import (
    add_earlier_gradients,
    dry_run_of,
    dummy_micro_batch,
    evaluation_step,
    fake_recipe,
    label_storages,
    make_state,
    train_step,
)
from hwopt.memory.trace.layer_blocks import Marks
from hwopt.memory.trace.skipped_layers import SkippedLayers
from hwopt.memory.trace.timeline import Timeline, threads_per_multiprocessor
from hwopt.memory.trace.tracker import MemoryTracker, counts_of_sum
from hwopt.planning.plan import Plan
from hwopt.training.run import Run

StepFunction = Callable[[Shape], Timeline]


@dataclass(frozen=True)
class StepFunctions:
    """Functions that run the recipe on fake tensors of a shape and return the timeline."""

    train: StepFunction
    evaluate: StepFunction
    layers: SkippedLayers

    def timelines(self, name: str, shape: Shape) -> dict[str, Timeline]:
        """Return a training step and an evaluation at `shape`. Raises NotRepeated if layers are skipped that differ."""
        return {f"train.{name}": self.train(shape), f"eval.{name}": self.evaluate(shape)}


@contextlib.contextmanager
def fake_step_functions(plan: Plan, head: Head, *, whole: bool = False) -> Iterator[StepFunctions]:
    """Yield the functions for `plan`. With `whole` every layer is run. Changes torch for the whole process meanwhile."""
    processors = plan.hardware.multiprocessors, threads_per_multiprocessor(plan.hardware)
    tracker = MemoryTracker(card.workspaces(plan.hardware), card.allocation_granularity(plan.hardware), processors)
    with (
        card.emulated(plan.hardware),
        mock.patch.object(torch.nn.Module, "_apply", apply_in_place),
        tracker,
        dry_run_of(plan, fake_recipe(plan), head, torch.device("cpu")) as run,
    ):
        workspaces = [torch.empty(size, dtype=torch.uint8) for size in card.kept_workspaces(plan.hardware)]
        tracker.label(workspaces, "temporary")
        tracker.expandable = card.expandable_segments()
        tracker.late_state = run.engine.has_late_state or plan.memory_spec.late_state
        label_storages(run, tracker)
        make_state(run, tracker)
        whole = whole or run.recipe.engine is not None  # an engine may keep gradients of its own
        layers = SkippedLayers(run.inner_model, run.optimizer, tracker, whole=whole)
        label_phases(run, tracker, layers)

        def train(run: Run, batch: StepBatch) -> None:
            if accumulates_gradients(plan):
                add_earlier_gradients(run, tracker)
            tracker.begin_forward()
            train_step(run, batch)

        def trace(step: Callable[[Run, StepBatch], None], shape: Shape) -> Timeline:
            tracker.counts_of_sum = counts_of_sum()  # not sooner: a process that ran a backward pass cannot be forked
            gc.collect()  # earlier garbage is not part of the step
            tracker.reset()
            with tracker.new_storages_are("activations"), garbage_collection_off():
                batch = dummy_micro_batch(run, shape, head, training=step is not evaluation_step)
                batch = replace(batch, buffers={key: tracker.from_tensor(value) for key, value in batch.buffers.items()})
                tracker.add(batch.buffers.values())
                layers.marks = Marks()
                step(run, batch)
                timeline = tracker.timeline()
            return layers.extended(timeline) if layers else timeline

        gc.collect()
        gc.freeze()  # otherwise every collection scans all modules
        try:
            yield StepFunctions(partial(trace, train), partial(trace, evaluation_step), layers)
        finally:
            gc.unfreeze()


def apply_in_place(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` (called by `to` and `half`) without swapping parameters, which the references to fake tensors forbid."""
    for part in module.modules() if recurse else [module]:
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = function(parameter.data)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable garbage collection: its timing depends on earlier work, and the order of events must not."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def label_phases(run: Any, tracker: MemoryTracker, layers: SkippedLayers) -> None:
    """Label what backward and update allocate as temporary; gradients and state get their own label."""
    backward, finish = run.engine.backward, run.engine.update

    def labelled_backward(*args: Any) -> None:
        tracker.begin_backward()
        with tracker.new_storages_are("temporary"):
            backward(*args)
            if layers:
                layers.after_backward()

    def labelled_finish() -> None:
        tracker.begin_update()
        with tracker.new_storages_are("temporary"):
            finish()

    run.engine.backward, run.engine.update = labelled_backward, labelled_finish
