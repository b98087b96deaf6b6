"""Gradients of one step batch, micro-batch by micro-batch; after an out-of-memory error, again in smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hwopt.data.batches.step_batch import MicroBatch, StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.text import first_line
from hwopt.training.evaluation import Evaluation
from hwopt.training.randomness import reseeder
from hwopt.training.run import Run
from hwopt.training.telemetry.telemetry import Telemetry


class Accumulation:
    """Computes a step's gradients. How a step batch is split never changes them (docs/exactness.md)."""

    def __init__(self, run: Run, telemetry: Telemetry, backoff: OomBackoff) -> None:
        self.run, self.telemetry, self.backoff = run, telemetry, backoff
        self.reseed = reseeder(run.device, run.training.seed)

    def accumulate(self, batch: StepBatch, where: str) -> None:
        """Compute the gradients of `batch`, with as small micro-batches as the device's memory requires.

        `where` ("at step 3") is for messages. If it raises, telemetry knows nothing of the step, so that the run can be saved.
        """
        mark = self.telemetry.mark()
        try:
            with self.run.engine.synchronized(self.backoff):
                while True:
                    try:
                        forward_and_backward(
                            self.run, batch, self.backoff.rung, self.reseed, self.telemetry.add_loss, self.telemetry.mark_time
                        )
                        return
                    except torch.OutOfMemoryError as error:
                        if not self.run.engine.supports_retry:
                            raise
                        oom_message = first_line(error)
                    # after the except block: the exception's frames keep tensors alive
                    self.run.engine.zero_grad()
                    self.telemetry.reset_to(mark)
                    freed = self.run.forward_backward.free()
                    release_unused_memory()
                    if not freed:
                        self.backoff.reduce(batch.finest_rung, where, oom_message)
        except BaseException:
            self.telemetry.reset_to(mark)
            raise


def not_timed(part: str) -> None:
    """Takes the name of a part of a step, as `StepTimer.mark` does."""


def forward_and_backward(
    run: Run,
    batch: StepBatch,
    rung: int,
    reseed: Callable[[int, int], None],
    add_loss: Callable[[Tensor, MicroBatch], None],
    mark_time: Callable[[str], None] = not_timed,
) -> None:
    """Accumulate the gradients of `batch`. `mark_time` gets the name of each part of the last micro-batch when it is issued."""
    several = run.batch.accumulation(run.world_size) > 1  # as planned, also if this step has fewer rows
    plain = run.recipe.engine is None and run.recipe.forward_backward is None  # others make copies of their own
    with weights_cast_once(run.inner_model, run.device) if several and plain else nullcontext():
        for number, (micro_batch, last) in enumerate(run.engine.micro_batches(batch, rung)):
            run.heartbeat()
            reseed(run.step, micro_batch.first_sample)
            mark = mark_time if last else not_timed
            mark("micro_batch")
            loss = run.forward_backward(micro_batch, number == 0, last, mark)
            mark("backward")
            add_loss(loss, micro_batch)


MOSTLY_FROZEN = 0.05
"""With fewer trained weights, as a fraction of all, their copies take no memory that checkpointing should save."""


def weights_cast_once(model: Module, device: torch.device) -> AbstractContextManager[Any]:
    """A block for the micro-batches of a step, in which autocast casts each trained weight of `model` once.

    Autocast keeps its copies until its outermost block ends, usually that of a forward pass. Gradients keep their bits. Nothing
    changes with checkpointing, except under adapters: copies that live longer would undo what it saves.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        if sum(size for size, trained in sizes if trained) > MOSTLY_FROZEN * sum(size for size, _ in sizes):
            return nullcontext()
    return torch.autocast(device.type, enabled=False)


def preflight(run: Run, accumulation: Accumulation, evaluation: Evaluation) -> None:
    """Evaluate the longest samples before step 1; train on them too if the planner chose the batch size.

    What can run out of memory does so here; no trace is left but the rung. What building the model left in the allocator is freed
    before: after a quantization most of it has sizes that no step asks for, which the device would hold too.
    """
    release_unused_memory()
    evaluation.preflight()
    run.model.train()
    if not run.plan.chose or run.checkpoint is not None:
        return
    batch = run.train_loader.dataset[run.train_loader.sampler.longest()].to(run.device)
    mark, backoff = accumulation.telemetry.mark(), accumulation.backoff
    rung = backoff.rung
    try:
        accumulation.accumulate(batch, "with the longest samples")
    finally:
        for tried in range(rung + 1, backoff.rung + 1):
            run.listener.on_out_of_memory(run, max(1, run.batch.train >> tried))
    run.engine.zero_grad()
    accumulation.telemetry.reset_to(mark)
