"""Evaluation: every sample once, in the model's evaluation mode, by the task's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hwopt.data.batches.step_batch import StepBatch
from hwopt.distributed.oom_backoff import QUIET_BATCHES, OomBackoff
from hwopt.errors import InputError
from hwopt.system import signals
from hwopt.tasks.metrics import GeneratedMetrics
from hwopt.text import first_line
from hwopt.training.listener import Row
from hwopt.training.loaders import batches_of, end_workers, evaluation_loader
from hwopt.training.memory_pressure import free_memory
from hwopt.training.run import Run


class Evaluation:
    """Evaluates a run. Its own out-of-memory back-off never shrinks the training batch.

    A batch is one step of that back-off. Each rank has its own rung: engines that can retry do not
    meet within a batch.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        option = run.plan.batch_option("eval")
        self.backoff = OomBackoff("Evaluation", option, run.warn, quiet_steps_needed=QUIET_BATCHES)
        if run.engine.meets_in_micro_batches and isinstance(run.task.metrics(run.prepared, run.device), GeneratedMetrics):
            raise InputError("task.rouge: the engine of this plan cannot generate text while it trains. Remove task.rouge")
        self.details: dict[str, Any] = {}
        """`Metrics.details` of the last evaluation."""

    def due(self) -> bool:
        """Whether to evaluate after this step: every `eval_steps`, else at the end of each epoch, and after the last step."""
        run = self.run
        if run.eval_loader is None:
            return False
        return run.step % (run.training.eval_steps or run.steps_per_epoch) == 0 or run.step == run.total_steps

    def evaluate(self) -> Row | None:
        """Metrics over every evaluation sample; names begin with `eval_`. Returns None if a signal came meanwhile."""
        return self._evaluate(self.run.eval_loader, "eval", len(self.run.prepared.eval or ()))

    def test(self) -> Row | None:
        """Metrics over every test sample, with the current weights; names begin with `test_`. None if a signal came meanwhile."""
        store = self.run.prepared.test
        assert store is not None
        loader = evaluation_loader(self.run, store)
        try:
            return self._evaluate(loader, "test", len(store))
        finally:
            end_workers(loader)

    @torch.no_grad()
    def _evaluate(self, loader: Any, prefix: str, samples: int) -> Row | None:
        """Metrics over every sample of `loader`, summed on the device and read in one transfer."""
        run, started = self.run, time.perf_counter()
        metrics = run.task.metrics(run.prepared, run.device)
        batches = batches_of(loader)
        with evaluating(run):
            while self._evaluate_next(batches, metrics):
                if run.engine.all_reduce_max(signals.received() or 0):
                    return None
        values = {f"{prefix}_{name}": value for name, value in metrics.compute().items()}
        self.details = metrics.details()
        seconds = time.perf_counter() - started
        speed = {f"{prefix}_runtime": seconds, f"{prefix}_samples_per_second": samples / seconds}
        return {"step": run.step, "epoch": round(run.epoch, 4)} | values | speed

    @torch.no_grad()
    def preflight(self) -> None:
        """Evaluate the batch of the longest samples and forget the result, so that running out of memory happens here."""
        run = self.run
        if run.eval_loader is None:
            return
        with run.engine.synchronized(self.backoff), evaluating(run):
            longest = next(iter(run.eval_loader.sampler))
            batch = run.eval_loader.dataset[longest].to(run.device)
            self._evaluate_batch(batch, run.task.metrics(run.prepared, run.device))

    def _evaluate_next(self, batches: Iterator[StepBatch], metrics: Any) -> bool:
        """Evaluate the next batch; False if none is left. Every rank has as many batches; a rank that fails ends all."""
        with self.run.engine.synchronized(self.backoff):
            batch = next(batches, None)
            if batch is not None:
                self._evaluate_batch(batch.to(self.run.device), metrics)
        return batch is not None

    def _evaluate_batch(self, batch: StepBatch, metrics: Any) -> None:
        """Add every row of `batch` to `metrics` once; after running out of memory, continue at the first row not added."""
        done, rung = 0, 0
        while done < len(batch.lengths):
            rung = self._rung_for(batch)
            try:
                for rows in self._evaluate_rows(batch, metrics, rung, done):
                    done = rows
                continue
            except torch.OutOfMemoryError as error:
                if not self.run.engine.supports_retry:
                    raise
                oom_message = first_line(error)
            free_memory(self.run.device)
            self.backoff.reduce(batch.finest_rung, f"after step {self.run.step}", oom_message, rung)
        if self.run.engine.supports_retry:
            self.backoff.batch_succeeded(rung, batch.largest_micro_batch(rung))

    def _rung_for(self, batch: StepBatch) -> int:
        """The rung for `batch`. Ranks that meet within a batch never retry and share one rung."""
        retries = self.run.engine.supports_retry
        return self.backoff.rung_for(batch.largest_micro_batch) if retries else self.backoff.rung

    def _evaluate_rows(self, batch: StepBatch, metrics: Any, rung: int, first_row: int) -> Iterator[int]:
        """Evaluate micro-batch by micro-batch from `first_row` on; yields the number of rows done."""
        run = self.run
        for micro_batch, _ in batch.micro_batches(rung, first_row):
            run.heartbeat()
            outputs = run.inner_model(**micro_batch.inputs)
            if not batch.step.weightless:
                if isinstance(metrics, GeneratedMetrics):
                    metrics.generate(run.inner_model, micro_batch.inputs, micro_batch.targets)
                loss, count = run.evaluation_loss(outputs, micro_batch.targets)
                metrics.update(outputs, micro_batch.targets, loss, count)
            yield micro_batch.end_row


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """The model in evaluation mode within the block, in training mode afterwards."""
    run.inner_model.eval()
    run.recipe.events.on_evaluate_begin(run)
    try:
        yield
    finally:
        run.recipe.events.on_evaluate_end(run)
        run.inner_model.train()
