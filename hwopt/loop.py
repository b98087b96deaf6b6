"""The loop: train and evaluate, a page read from top to bottom.

What it guarantees (docs/exactness.md): the loss of every micro-batch is summed and divided once by the count of the whole
step over all ranks, so that no cut of a step changes its gradients; the schedule counts step batches; evaluation counts
every sample once. No optimization is known here by name: each stands in the recipe that the run was built from.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hwopt import observe, randomness
from hwopt.build import Run
from hwopt.checkpoint import BestWeights, save_checkpoint, save_final
from hwopt.errors import DoesNotFitError, InputError, WorkerDiedError, listing, nearest
from hwopt.microbatch import StepBatch
from hwopt.telemetry import Listener, Row, Telemetry


def train(run: Run, listener: Listener) -> Row:
    """Train `run` to its last step, keep the best weights, write `final/`. Returns the summary.

    Raises NonFiniteError, DoesNotFitError, WorkerDiedError or StorageError; the run folder stays whole in each case.
    """
    run.warn = partial(listener.warned, run)
    best = best_weights(run)
    telemetry = Telemetry(run)
    listener.started(run)

    # A run must not die of its first evaluation: the longest samples go first.
    with fitting("the first evaluation", "plugins.batch.eval"):
        try_evaluation(run)

    run.model.train()
    reseed = randomness.reseeder(run.device, run.training.seed)
    metrics: Row = {}
    with fitting("training", "plugins.batch.train"):
        for batch in step_batches(run, telemetry):
            if run.step == 0:
                with telemetry.aside(), observe.observing(run):
                    step(run, batch, telemetry, reseed)
                listener.evidence(run, observe.collect(run))
            else:
                step(run, batch, telemetry, reseed)

            if row := telemetry.stepped(batch):
                listener.row(run, row)
            if evaluates_now(run):
                if row := telemetry.flush():
                    listener.row(run, row)
                with telemetry.aside(), fitting("evaluation", "plugins.batch.eval"):
                    metrics = evaluate(run)
                listener.row(run, metrics)
                best.consider(metrics)
            if saves_now(run):
                with telemetry.aside():
                    save_checkpoint(run)

    if row := telemetry.flush():
        listener.row(run, row)
    seconds = time.perf_counter() - telemetry.started
    best.restore()
    save_final(run)
    summary = summarize(run, telemetry, seconds) | metrics | best_of(best)
    listener.finished(run, summary)
    return summary


def step(run: Run, batch: StepBatch, telemetry: Telemetry, reseed: Any) -> None:
    """One optimizer step over all samples of `batch`, whatever micro-batches it is cut into."""
    engine = run.engine
    for micro_batch, last in batch.micro_batches():
        engine.before(last)
        reseed(run.step, micro_batch.first_sample)
        loss, _ = run.loss(run.model(**micro_batch.inputs), micro_batch.targets)
        engine.backward(loss, micro_batch.share)
        telemetry.loss_sum.add_(loss.detach(), alpha=micro_batch.share)
    engine.finish()
    run.last_step_batch = batch
    run.micro_batches_seen += len(batch.parts)
    run.step += 1


@torch.no_grad()
def evaluate(run: Run) -> Row:
    """Metrics over every eval sample once, summed on the device, read in one transfer at the end; names begin with `eval_`."""
    started = time.perf_counter()
    metrics = run.task.metrics(run.prepared, run.device)
    with evaluating(run):
        for batch in fetched(run.eval_loader):
            for micro_batch, _ in batch.to(run.device).micro_batches():
                outputs = run.inner_model(**micro_batch.inputs)
                loss, count = run.loss(outputs, micro_batch.targets)
                metrics.update(outputs, micro_batch.targets, loss, count)
    found = {f"eval_{name}": value for name, value in metrics.compute().items()}
    seconds = time.perf_counter() - started
    speed = {"eval_runtime": seconds, "eval_samples_per_second": len(run.prepared.eval or ()) / seconds}
    return {"step": run.step, "epoch": round(run.epoch, 4)} | found | speed


@torch.no_grad()
def try_evaluation(run: Run) -> None:
    """Evaluate the batch of the longest samples, and forget it."""
    if run.eval_loader is None or not len(run.eval_loader.sampler):
        return
    longest = next(iter(run.eval_loader.sampler))
    with evaluating(run):
        for micro_batch, _ in run.eval_loader.dataset[longest].to(run.device).micro_batches():
            run.loss(run.inner_model(**micro_batch.inputs), micro_batch.targets)


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


def step_batches(run: Run, telemetry: Telemetry) -> Iterator[StepBatch]:
    """The run's step batches on its device, with the time that the loop waited for them."""
    batches = fetched(run.train_loader)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        telemetry.waited(time.perf_counter() - began)
        if batch is None:
            return
        yield batch.to(run.device)


def fetched(loader: Any) -> Iterator[StepBatch]:
    """What `loader` yields. Raises WorkerDiedError where one of its processes is gone; what a worker raises comes as it is."""
    try:
        yield from loader
    except RuntimeError as error:
        if re.search(r"DataLoader worker .*(exited unexpectedly|is killed by signal)", str(error)):
            raise WorkerDiedError(f"a data-loading worker died: {error}. Try plugins.dataloader.workers = 0.") from error
        raise


@contextmanager
def fitting(what: str, key: str) -> Iterator[None]:
    """Out of memory becomes a message with the key to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{what} does not fit into the device's memory ({str(error).splitlines()[0][:200]}). "
            f"Lower {key} (and raise plugins.batch.accumulation as much), lower data.max_length, or add [plugins.checkpointing]."
        ) from error


def evaluates_now(run: Run) -> bool:
    """At `eval_steps`, else at the end of each epoch; always after the last step."""
    if run.eval_loader is None:
        return False
    return run.step % (run.training.eval_steps or run.steps_per_epoch) == 0 or run.step == run.total_steps


def saves_now(run: Run) -> bool:
    return bool(run.training.save_steps) and run.step % (run.training.save_steps or 1) == 0


def best_weights(run: Run) -> BestWeights:
    """Keeps the best of what `training.metric_for_best_model` names, or of the task's own metric."""
    asked = run.training.metric_for_best_model
    name = f"eval_{(asked or run.task.default_metric).removeprefix('eval_')}"
    known = [f"eval_{metric}" for metric in run.task.metrics(run.prepared, run.device).compute()]
    if name not in known:
        raise InputError(
            f"training.metric_for_best_model: there is no metric {asked!r} here.{nearest(name, known)} "
            f"It is one of: {listing(known)}"
        )
    if asked and run.eval_loader is None:
        raise InputError("training.metric_for_best_model needs data.eval or data.eval_fraction")
    greater = run.training.greater_is_better
    return BestWeights(run, name, run.task.greater_is_better(name) if greater is None else greater)


def best_of(best: BestWeights) -> Row:
    return {} if best.value is None else {"best_step": best.step, f"best_{best.metric}": best.value}


def summarize(run: Run, telemetry: Telemetry, seconds: float) -> Row:
    """The totals, in the words of Hugging Face's Trainer."""
    total, world = telemetry.total, run.world_size
    return {
        "step": run.step,
        "epoch": round(run.epoch, 4),
        "train_runtime": seconds,
        "train_loss": telemetry.mean_loss(),
        "train_steps_per_second": total.steps / seconds,
        "train_samples_per_second": total.samples * world / seconds,
        "train_tokens_per_second": total.tokens * world / seconds,
        "data_wait": total.wait / seconds,
    }
