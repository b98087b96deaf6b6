"""The training loop, to be read from top to bottom.

Guarantees (docs/exactness.md): the loss of every micro-batch is summed and divided once by the count of the whole step over all
ranks, so the split of a step batch never changes its gradients; the schedule counts step batches; evaluation counts every sample
once. The loop knows no optimization by name: each is in the recipe that the run was built from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import NoReturn

from hwopt.data.batches.step_batch import StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.saving.best_model import BestModel, best_metric
from hwopt.saving.checkpointer import Checkpointer
from hwopt.saving.model_card import model_card
from hwopt.saving.savable_run import Stateful
from hwopt.saving.save_timing import SAVE, require_space_for_run
from hwopt.saving.writer import AsyncWriter, save_final
from hwopt.system import signals
from hwopt.training import evidence
from hwopt.training.accumulation import Accumulation, preflight
from hwopt.training.evaluation import EarlyStopping, Evaluation, GeneratedSamples
from hwopt.training.failure import last_resorts, report_oom, save_on_failure
from hwopt.training.listener import Row, Summary
from hwopt.training.loaders import batches_of
from hwopt.training.randomness import UPDATE, reseeder
from hwopt.training.run import Run
from hwopt.training.telemetry.telemetry import Telemetry
from hwopt.training.telemetry.use import UseMeter


def train(run: Run) -> Summary:
    """Train `run` to its last step, keep the best weights, write `final/`, and return the summary.

    Raises NonFiniteError, DoesNotFitError, WorkerDiedError or StorageError, and at a signal SystemExit or KeyboardInterrupt.
    In each case the run folder stays valid and has a checkpoint of the last complete step.
    """
    writer = AsyncWriter(run)
    try:
        with report_oom("training", run.plan.batch_option("train")):
            return Loop(run, writer).train()
    finally:
        writer.close()


class Loop:
    def __init__(self, run: Run, writer: AsyncWriter) -> None:
        self.run, self.writer = run, writer
        self.use = UseMeter(run)
        self.telemetry = Telemetry(run, self.use)
        option, whole = run.plan.batch_option("train"), bool(run.plan.router_loss)
        self.backoff = OomBackoff("Training", option, run.warn, splits=not whole, last_resorts=last_resorts(run))
        self.accumulation = Accumulation(run, self.telemetry, self.backoff)
        self.reseed_update = reseeder(run.device, run.training.seed, UPDATE)
        self.evaluation = Evaluation(run)
        self.samples = GeneratedSamples(run)
        self.best = BestModel(run, writer, *best_metric(run.training, run.task, run.prepared, run.device))
        self.early_stopping = EarlyStopping(run, self.best)
        self.evidence: evidence.Collected = []  # the evidence after the first step of this process
        parts: dict[str, Stateful] = {
            "early_stopping": self.early_stopping,
            "telemetry": self.telemetry,
            "training": self.backoff,
            "evaluation": self.evaluation.backoff,
        }
        self.checkpoints = Checkpointer(run, writer, self.best, parts)

    def train(self) -> Summary:
        self.restore()
        self.run.listener.on_start(self.run)
        preflight(self.run, self.accumulation, self.evaluation)
        # a signal is answered at once, and obeyed after the step
        with signals.deferred(self.acknowledge), save_on_failure(self.run, self.telemetry, self.checkpoints):
            with self.use.running():
                action = self.steps()
            if action > SAVE:
                self.stop(action)
            return self.write_final()

    def restore(self) -> None:
        """Restore the checkpoint that the run resumes from. Nothing is written before: the checkpoint may not fit this run."""
        with self.run.engine.synchronized(self.backoff):
            self.run.engine.init_state()
            require_space_for_run(self.run)
        self.checkpoints.restore()

    def steps(self) -> int:
        """Do every step that is left, with evaluations and checkpoints. Returns the exit code of a signal, or SAVE or 0."""
        action = 0
        self.run.listener.on_steps_begin(self.run)
        try:
            interrupted = self.run.step and self.evaluation.due() and self.best.evaluated != self.run.step
            if interrupted and (action := self.evaluate()):  # a signal ended the run in this evaluation, and now came another
                return action
            if self.early_stopping.stops:  # a signal came between the decision and the end
                return 0
            for batch in self.batches():
                if self.checkpoints.timing.due(ahead=1):  # wait before the step rather than after it: a crash then loses less
                    with self.telemetry.paused():
                        self.writer.wait()
                self.step(batch)
                del batch  # its memory is free for an evaluation and for the next one
                action = self.after_step()
                if action > SAVE or self.early_stopping.stops:
                    break
        finally:
            self.run.listener.on_steps_end(self.run)
        return action

    def step(self, batch: StepBatch) -> None:
        """One optimizer step over all samples of `batch`; the first and the last one are observed for the evidence."""
        if not self.telemetry.steps_here or self.run.step + 1 == self.run.total_steps:
            self.observed_step(batch)
        else:
            self.use.timer.begin_step()
            self.update(batch)
            self.use.timer.end_step()
        if row := self.telemetry.stepped(batch):
            self.report(row)
            if self.run.engine.accumulates and (pressure := self.use.memory_pressure.message()):
                self.backoff.on_pressure(batch.finest_rung, f"after step {self.run.step}", pressure)

    def observed_step(self, batch: StepBatch) -> None:
        """One optimizer step that torch's profiler records, and the evidence of the plugins after it."""
        with self.telemetry.unmeasured(batch), evidence.observing(self.run):
            self.update(batch)
        found = evidence.collect(self.run)
        if not self.telemetry.steps_here:
            self.evidence = found
            self.run.listener.on_evidence(self.run, found)
        if self.run.step == self.run.total_steps:
            self.run.listener.on_final_evidence(self.run, found)
            for warning in evidence.ceased(self.evidence, found):
                self.run.warn(warning)

    def update(self, batch: StepBatch) -> None:
        """Accumulate the gradients of `batch` and update the weights."""
        run, progress, events = self.run, self.run.progress, self.run.recipe.events
        progress.batch = batch
        events.on_step_begin(run)
        self.accumulation.accumulate(batch, f"at step {run.step + 1}")
        progress.between_steps = False
        self.reseed_update(run.step)
        run.engine.update()
        progress.step += 1
        events.on_step_end(run, run.engine.update_applied())
        progress.between_steps = True
        progress.batch = progress.last_batch = replace(batch, buffers={})
        self.backoff.step_succeeded()

    def after_step(self) -> int:
        """Evaluate and save if it is time. Returns the exit code of a signal that any rank received, or SAVE or 0."""
        action: int = self.run.engine.all_reduce_max(self.checkpoints.timing.requested_action())
        if self.evaluation.due() and action <= SAVE:
            action = max(action, self.evaluate())
        if action or self.checkpoints.timing.due():
            self.report(self.telemetry.flush())
            with self.telemetry.paused():
                self.checkpoints.save()
        return action

    def evaluate(self) -> int:
        """Evaluate, and keep the weights if they are the best so far. Returns the exit code of a signal that came first, or 0."""
        self.report(self.telemetry.flush())
        with self.telemetry.paused():
            metrics = self.evaluation.evaluate()
            if metrics is None:
                return self.signalled()
            self.early_stopping.observe(metrics[self.best.metric])
            self.best.consider(metrics, self.evaluation.details)
            self.samples.show()
        self.run.listener.on_log(self.run, metrics)
        if self.early_stopping.stops:
            self.run.say(self.early_stopping.message())
        return 0

    def report(self, row: Row | None) -> None:
        """Show a log point. Raises NonFiniteError if it means that the run must stop."""
        if row is not None:
            self.run.listener.on_log(self.run, row)
            self.telemetry.judge()

    def acknowledge(self, signal: int) -> None:
        if self.run.world_size == 1:  # launchers send ranks signals of their own, which no user asked for
            signals.announce_stop()

    def signalled(self) -> int:
        """The exit code of a signal that any rank received, or 0. All ranks call it."""
        code: int = self.run.engine.all_reduce_max(signals.received() or 0)
        return code

    def stop(self, code: int) -> NoReturn:
        """Save the run and end it, because a signal asked for it. All ranks call it, and wait for the one that writes."""
        run = self.run
        signals.record_remote_signal(code)
        self.checkpoints.save()
        self.writer.wait()
        run.engine.all_reduce_max(0)
        run.say(f"Stopped after step {run.step:,}, saved in {run.folder}. The same command with --resume continues it")
        raise signals.exception_for(code)

    def write_final(self) -> Summary:
        """Write the best weights to `final/` and return the summary."""
        run = self.run
        self.report(self.telemetry.flush())
        seconds = self.telemetry.seconds
        self.writer.wait()
        if code := self.signalled():
            self.stop(code)  # before the best weights replace those of the last step
        if self.checkpoints.timing.at_end():
            self.checkpoints.save()  # a run with more steps resumes from here
            self.writer.wait()
        self.best.restore()
        if run.eval_loader is None:
            self.samples.show()
        tested = self.test()
        summary = summarize(run, self.telemetry, self.use, seconds, self.best) | tested
        if self.early_stopping.stops:
            summary["early_stopping_count"] = self.early_stopping.count
        save_final(run, self.writer, model_card(run, summary, self.best.metrics) if run.is_main else "")
        self.checkpoints.prune(best_is_final=True)
        run.listener.on_finish(run, summary)
        return summary

    def test(self) -> Summary:
        """Evaluate the test data with the weights of `final/` and return the results; empty without test data."""
        if self.run.prepared.test is None:
            return {}
        row = self.evaluation.test()
        if row is None:  # the signal ends the run once `final/` is written
            self.run.warn("A signal ended the run before the test data was evaluated. Evaluate it with hwopt evaluate")
            return {}
        self.run.listener.on_log(self.run, row)
        details = {f"test_{name}": value for name, value in self.evaluation.details.items()}
        return {name: value for name, value in row.items() if name.startswith("test_")} | details

    def batches(self) -> Iterator[StepBatch]:
        """The run's step batches on its device; telemetry counts the seconds that the loop waits for them."""
        batches = batches_of(self.run.train_loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.telemetry.waited(time.perf_counter() - began)
            if batch is None:
                return
            yield batch.to(self.run.device)


def summarize(run: Run, telemetry: Telemetry, use: UseMeter, seconds: float, best: BestModel) -> Summary:
    """The totals over all ranks, of `seconds` of training, with the last metrics, the best one and the details of the best."""
    total, world = telemetry.total, run.world_size
    totals = {
        "step": run.step,
        "epoch": round(run.epoch, 4),
        "train_runtime": seconds,
        "train_loss": telemetry.mean_loss(),
        "train_steps_per_second": total.steps / seconds,
        "train_samples_per_second": total.samples * world / seconds,
    }
    if run.task.facts.inputs == "tokens":
        totals["train_tokens_per_second"] = total.tokens * world / seconds
    totals |= {"data_wait": total.wait / seconds, "peak_memory_gib": peak_memory_gib(run.device)}
    used, verdict = use.whole(), use.verdict()
    gpu = {"gpu_utilization": used["gpu_percent"]} if "gpu_percent" in used else {}
    judged = {} if verdict is None else {"verdict": asdict(verdict)}
    best_values = {} if best.value is None else {"best_step": best.step, f"best_{best.metric}": best.value}
    details = {} if best.value is None else {f"best_eval_{name}": value for name, value in best.details.items()}
    mixture = run.prepared.train.mixture
    shares = {} if mixture is None else {"mixture": list(mixture.rows())}
    return totals | gpu | shares | best.latest | best_values | details | {"use": used} | judged
