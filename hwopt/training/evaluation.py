"""Evaluation: every sample once, in the model's evaluation mode, by the task's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hwopt.data.step_batch import StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.system import signals
from hwopt.text import first_line
from hwopt.training.listener import Row
from hwopt.training.loaders import fetched
from hwopt.training.memory_pressure import free_memory
from hwopt.training.run import Run


def evaluates_now(run: Run) -> bool:
    """At `eval_steps`, else at the end of each epoch; always after the last step."""
    if run.eval_loader is None:
        return False
    return run.step % (run.training.eval_steps or run.steps_per_epoch) == 0 or run.step == run.total_steps


@torch.no_grad()
def evaluate(run: Run, backoff: OomBackoff) -> Row | None:
    """Metrics over every eval sample once, summed on the device, read in one transfer at the end; names begin with `eval_`.

    None where a signal has come meanwhile.
    """
    started = time.perf_counter()
    metrics = run.task.metrics(run.prepared, run.device)
    batches = fetched(run.eval_loader)
    with evaluating(run):
        while evaluate_next(run, batches, metrics, backoff):
            if run.engine.all_reduce_max(signals.received() or 0):
                return None
    found = {f"eval_{name}": value for name, value in metrics.compute().items()}
    seconds = time.perf_counter() - started
    speed = {"eval_runtime": seconds, "eval_samples_per_second": len(run.prepared.eval or ()) / seconds}
    return {"step": run.step, "epoch": round(run.epoch, 4)} | found | speed


def evaluate_next(run: Run, batches: Iterator[StepBatch], metrics: Any, backoff: OomBackoff) -> bool:
    """Evaluate one of the batches, of which each rank has as many; False where none is left. A rank that fails ends all."""
    with run.engine.synchronized(backoff):
        batch = next(batches, None)
        if batch is not None:
            evaluate_batch(run, batch.to(run.device), metrics, backoff)
    return batch is not None


def evaluate_batch(run: Run, batch: StepBatch, metrics: Any, backoff: OomBackoff) -> None:
    """Add every row of `batch` to `metrics` once; what was added before the memory ran out is not added again."""
    done = 0
    while done < len(batch.lengths):
        try:
            for rows in evaluated_rows(run, batch, metrics, backoff.rung, done):
                done = rows
            continue
        except torch.OutOfMemoryError as error:
            if not run.engine.supports_retry:
                raise
            oom_message = first_line(error)
        free_memory(run)
        backoff.reduce(batch.floor, f"after step {run.step}", oom_message)


def evaluated_rows(run: Run, batch: StepBatch, metrics: Any, rung: int, first_row: int) -> Iterator[int]:
    """Evaluate micro-batch by micro-batch from `first_row` on; yields the number of rows done."""
    for micro_batch, _ in batch.micro_batches(rung, first_row):
        run.heartbeat()
        outputs = run.inner_model(**micro_batch.inputs)
        if not batch.step.weightless:
            loss, count = run.loss(outputs, micro_batch.targets)
            metrics.update(outputs, micro_batch.targets, loss, count)
        yield micro_batch.end_row


@torch.no_grad()
def try_evaluation(run: Run, backoff: OomBackoff) -> None:
    """Evaluate the batch of the longest samples, and forget it."""
    if run.eval_loader is None:
        return
    with run.engine.synchronized(backoff), evaluating(run):
        longest = next(iter(run.eval_loader.sampler))
        batch = run.eval_loader.dataset[longest].to(run.device)
        evaluate_batch(run, batch, run.task.metrics(run.prepared, run.device), backoff)


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """The model in evaluation mode, and back in training mode."""
    run.inner_model.eval()
    for event in run.recipe.events["evaluating"]:
        event(run)
    try:
        yield
    finally:
        for event in run.recipe.events["evaluated"]:
            event(run)
        run.inner_model.train()
