"""Preflight: what can run out of memory does so before step 1, on the longest samples."""

from __future__ import annotations

from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.training.accumulation import Accumulation
from hwopt.training.evaluation import Evaluation
from hwopt.training.run import Run


def preflight(run: Run, accumulation: Accumulation, evaluation: Evaluation) -> None:
    """Evaluate the longest samples; train on them too if the planner chose the batch size. No trace is left but the rung.

    What building the model left in the allocator is freed before: after a quantization most of it has sizes that no step asks
    for, and the device would hold it beside the step's own memory.
    """
    release_unused_memory()
    evaluation.preflight()
    run.model.train()
    if run.plan.chose and run.checkpoint is None:
        try_training(run, accumulation)


def try_training(run: Run, accumulation: Accumulation) -> None:
    """Forward and backward with the longest samples; `on_out_of_memory` gets the rows that fit."""
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
