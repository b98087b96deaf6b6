"""Gradients of one step batch, micro-batch by micro-batch; after an out-of-memory error, again in smaller ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hwopt.data.batches.step_batch import MicroBatch, StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.text import first_line
from hwopt.training.memory_pressure import free_memory
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

        `where` says in messages what was computed ("at step 3"). Raises DoesNotFitError if single rows do not fit. If it raises,
        telemetry knows nothing of the step, so that the run can be saved as of the step before.
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
                    free_memory(self.run.device)
                    self.backoff.reduce(batch.finest_rung, where, oom_message)
        except BaseException:
            self.telemetry.reset_to(mark)
            raise


def forward_and_backward(
    run: Run,
    batch: StepBatch,
    rung: int,
    reseed: Callable[[int, int], None],
    add_loss: Callable[[Tensor, MicroBatch], None],
    mark_time: Callable[[str], None] = lambda part: None,
) -> None:
    """Accumulate the gradients of `batch`. The summed loss of each micro-batch is divided by the count of the whole step.

    `mark_time` gets the name of each part of the last micro-batch when the host has issued it.
    """
    engine, step = run.engine, run.step
    for micro_batch, last in engine.micro_batches(batch, rung):
        run.heartbeat()
        reseed(step, micro_batch.first_sample)
        if last:
            mark_time("micro_batch")
        loss, _ = run.loss(run.model(**micro_batch.inputs), micro_batch.targets)
        if last:
            mark_time("forward")
        engine.backward(loss, micro_batch.loss_weight, last)
        if last:
            mark_time("backward")
        add_loss(loss.detach(), micro_batch)
