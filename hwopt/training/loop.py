"""The loop: train, evaluate, keep; a page read from top to bottom.

What it guarantees (docs/exactness.md): the loss of every micro-batch is summed and divided once by the count of the whole
step over all ranks, so that no cut of a step changes its gradients; the schedule counts step batches; evaluation counts
every sample once. No optimization is known here by name: each stands in the recipe that the run was built from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hwopt.data.step_batch import StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import DoesNotFitError, HwoptError, NonFiniteError, WorkerDiedError, worker_death
from hwopt.plugin.guard import GuardedOnce
from hwopt.saving.async_writer import Writer
from hwopt.saving.best_model import BestWeights, best_metric
from hwopt.saving.checkpointer import SAVE, Checkpoints
from hwopt.saving.final import save_final
from hwopt.system import signals
from hwopt.text import first_line
from hwopt.training import evidence as observe
from hwopt.training import randomness
from hwopt.training.evaluation import evaluate, evaluates_now, try_evaluation
from hwopt.training.listener import Listener, Row
from hwopt.training.loaders import fetched
from hwopt.training.memory_pressure import MemoryPressure, free_memory
from hwopt.training.run import Run
from hwopt.training.telemetry import Telemetry


def train(run: Run, listener: Listener) -> Row:
    """Train `run` to its last step, keep the best weights, write `final/`. Returns the summary.

    Raises NonFiniteError, DoesNotFitError, WorkerDiedError or StorageError, and at a signal SystemExit or KeyboardInterrupt;
    the run folder stays whole in each case, and has a checkpoint of the last whole step.
    """
    run.warn = partial(listener.warned, run)
    with writing(run) as writer, report_oom("training", "plugins.batch.train"):
        loop = Loop(run, listener, writer)
        restore(loop)
        listener.started(run)
        preflight(loop)
        with signals.patience(partial(heard, run)), save_on_failure(loop):
            with run.watch:
                requested_action = steps(loop)
            if requested_action > SAVE:
                stop(loop, requested_action)
            return finish(loop)


class Loop:
    """What the loop keeps beside the run: the numbers, the ladders, the best weights, the checkpoints."""

    def __init__(self, run: Run, listener: Listener, writer: Writer) -> None:
        self.run, self.listener, self.writer = run, listener, writer
        last_resorts: list[Callable[[], str | None]] = [
            GuardedOnce(partial(plugin.on_oom, run), f"plugin {plugin.name!r} ({type(plugin).__module__})", "on_oom()")
            for plugin in run.plan.oom_plugins
        ]
        self.training = OomBackoff("Training", "plugins.batch.train", run.warn, last_resorts=last_resorts)
        self.evaluation = OomBackoff("Evaluation", "plugins.batch.eval", run.warn)
        self.telemetry = Telemetry(run)
        self.memory_pressure = MemoryPressure(run.device)
        self.reseed = randomness.reseeder(run.device, run.training.seed)
        self.best = BestWeights(run, writer, *best_metric(run))
        parts = {"telemetry": self.telemetry, "training": self.training, "evaluation": self.evaluation}
        self.checkpoints = Checkpoints(run, writer, self.best, parts)


def restore(loop: Loop) -> None:
    """Where the run goes on from a checkpoint, all is as it was then. Nothing is written before: it may be refused."""
    with loop.run.engine.synchronized(loop.training):
        loop.run.engine.make_state()
        loop.checkpoints.require_space()
    loop.checkpoints.resume()


def preflight(loop: Loop) -> None:
    """What can run out of memory does so before step 1: the longest samples are evaluated, and trained where sizes are chosen."""
    run = loop.run
    try_evaluation(run, loop.evaluation)
    run.model.train()
    if run.plan.chose and run.checkpoint is None:
        try_training(run, loop.telemetry, loop.reseed, loop.training)


def steps(loop: Loop) -> int:
    """Every step that is left, with its evaluations and checkpoints. Returns the exit code of a signal, else SAVE or 0."""
    run, telemetry, checkpoints = loop.run, loop.telemetry, loop.checkpoints
    requested_action = 0
    cut_short = run.step and evaluates_now(run) and loop.best.evaluated != run.step  # by the signal that ended the run there
    if cut_short and (requested_action := evaluate_and_keep(loop)):
        return requested_action  # another one; with a step more this evaluation would never be made
    for batch in step_batches(run, telemetry):
        if checkpoints.due(ahead=1):  # before the step, not behind it: less is lost where the one before does not come to its end
            with telemetry.aside():
                loop.writer.wait()
        if telemetry.steps_here == 0:
            with telemetry.aside(), observe.observing(run):
                step(run, batch, telemetry, loop.reseed, loop.training)
            loop.listener.evidence(run, observe.collect(run))
        else:
            step(run, batch, telemetry, loop.reseed, loop.training)

        if row := telemetry.stepped(batch):
            report(loop, row)
            if oom_message := loop.memory_pressure.seen():
                loop.training.on_pressure(batch.floor, f"after step {run.step}", oom_message)
        requested_action = run.engine.all_reduce_max(checkpoints.requested_action())
        if evaluates_now(run) and requested_action <= SAVE:
            requested_action = max(requested_action, evaluate_and_keep(loop))
        if requested_action or checkpoints.due():
            report(loop, telemetry.flush())
            with telemetry.aside():
                checkpoints.save()
        if requested_action > SAVE:
            break
    return requested_action


def report(loop: Loop, row: Row | None) -> None:
    """Show a log point, and what it means. Raises NonFiniteError where it means that the run must stop."""
    if row is not None:
        loop.listener.row(loop.run, row)
        loop.telemetry.judge()


def evaluate_and_keep(loop: Loop) -> int:
    """Evaluate, and keep the weights if they are the best. Returns the exit code of a signal that came first, else 0."""
    run = loop.run
    report(loop, loop.telemetry.flush())
    with loop.telemetry.aside():
        metrics = evaluate(run, loop.evaluation)
        if metrics is None:
            code: int = run.engine.all_reduce_max(signals.received() or 0)
            return code
        loop.best.consider(metrics)
    loop.listener.row(run, metrics)
    return 0


def heard(run: Run, number: int) -> None:
    """Say that a signal has come: the step may take a while.

    Launchers send ranks signals of their own, which are nobody's requested_action.
    """
    if run.world_size == 1:
        signals.acknowledge()


def stop(loop: Loop, code: int) -> None:
    """End the run, saved, because a signal asked for it. All ranks call it, and wait for the one that writes."""
    signals.heed(code)
    loop.checkpoints.save()
    loop.writer.wait()
    loop.run.engine.all_reduce_max(0)
    loop.run.say(f"stopped after step {loop.run.step:,}, saved in {loop.run.folder}; go on with --resume")
    raise signals.ending(code)


def finish(loop: Loop) -> Row:
    """The best weights become `final/`. Returns the summary."""
    run = loop.run
    report(loop, loop.telemetry.flush())
    seconds = loop.telemetry.seconds
    loop.writer.wait()
    if code := run.engine.all_reduce_max(signals.received() or 0):
        stop(loop, code)  # before the weights are those of another step
    loop.best.restore()
    save_final(run, loop.writer)
    loop.checkpoints.prune(best_is_final=True)
    summary = summarize(run, loop.telemetry, seconds) | loop.best.latest | best_of(loop.best)
    loop.listener.finished(run, summary)
    return summary


@contextmanager
def writing(run: Run) -> Iterator[Writer]:
    writer = Writer(run)
    try:
        yield writer
    finally:
        writer.close()


@contextmanager
def save_on_failure(loop: Loop) -> Iterator[None]:
    """What was learnt so far is saved where training cannot go on."""
    try:
        yield
    except (NonFiniteError, DoesNotFitError, WorkerDiedError, RuntimeError) as error:
        if not isinstance(error, HwoptError) and worker_death(error) is None:
            raise
        all_ranks = isinstance(error, NonFiniteError)
        loop.run.peers_lost = not all_ranks and loop.run.world_size > 1
        for row in (loop.telemetry.flush(), loop.telemetry.made_up() if loop.run.peers_lost else None):
            if row is not None:
                loop.listener.row(loop.run, row)
        loop.checkpoints.emergency_save(all_ranks)
        loop.telemetry.judge()  # a loss that is not finite counts more than what came behind it
        raise


def step(run: Run, batch: StepBatch, telemetry: Telemetry, reseed: Any, backoff: OomBackoff) -> None:
    """One optimizer step over all samples of `batch`, whatever micro-batches it is cut into."""
    run.step_batch = batch
    before = telemetry.mark()
    try:
        with run.engine.synchronized(backoff):
            while (oom_message := accumulate(run, batch, telemetry, reseed, backoff.rung)) is not None:
                backoff.reduce(batch.floor, f"at step {run.step + 1}", oom_message)
    except BaseException:
        telemetry.back_to(before)  # the run is saved as of the step before, and makes this one again
        raise
    run.between_steps = False
    run.engine.finish()
    run.step += 1
    run.between_steps = True
    backoff.step_succeeded()
    run.last_step_batch = batch


def try_training(run: Run, telemetry: Telemetry, reseed: Any, backoff: OomBackoff) -> None:
    """Forward and backward with the longest samples, where the plan chose their number; nothing is left of it but the rung."""
    batch = run.train_loader.dataset[run.train_loader.sampler.longest()].to(run.device)
    before = telemetry.mark()
    with run.engine.synchronized(backoff):
        while (oom_message := accumulate(run, batch, telemetry, reseed, backoff.rung)) is not None:
            backoff.reduce(batch.floor, "with the longest samples", oom_message)
            run.ran_out(max(1, run.batch.train >> backoff.rung))
    run.engine.zero_grad()
    telemetry.back_to(before)


def accumulate(run: Run, batch: StepBatch, telemetry: Telemetry, reseed: Any, rung: int) -> str | None:
    """Gradients of the whole step. None, or why the device's memory was not enough; then nothing is left of the attempt."""
    before = telemetry.mark()
    try:
        forward_and_backward(run, batch, telemetry, reseed, rung)
        return None
    except torch.OutOfMemoryError as error:
        if not run.engine.supports_retry:
            raise
        oom_message = first_line(error)
    # behind the except block, whose frames keep the tensors alive
    run.engine.zero_grad()
    telemetry.back_to(before)
    free_memory(run)
    return oom_message


def forward_and_backward(run: Run, batch: StepBatch, telemetry: Telemetry, reseed: Any, rung: int) -> None:
    engine = run.engine
    for micro_batch, last in engine.micro_batches(batch, rung):
        run.heartbeat()
        engine.set_gradient_sync(last)
        reseed(run.step, micro_batch.first_sample)
        loss, _ = run.loss(run.model(**micro_batch.inputs), micro_batch.targets)
        engine.backward(loss, micro_batch.loss_weight)
        telemetry.heard(loss.detach(), micro_batch)


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


@contextmanager
def report_oom(what: str, key: str) -> Iterator[None]:
    """Out of memory becomes a message with the key to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{what} does not fit into the device's memory ({str(error).splitlines()[0][:200]}). "
            f"Lower {key} (and raise plugins.batch.accumulation as much), lower data.max_length, or add [plugins.checkpointing]."
        ) from error


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
