"""Evaluation: every sample once, in evaluation mode, by the task's metrics; then early stopping, and generated samples."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hwopt.data.batches.step_batch import StepBatch
from hwopt.data.sources.chat import Conversation
from hwopt.data.stores.token_store import Store
from hwopt.distributed.oom_backoff import QUIET_BATCHES, OomBackoff
from hwopt.errors import InputError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.records.run_files import SAMPLES
from hwopt.saving.best_model import BestModel
from hwopt.system import signals
from hwopt.tasks.generators import Generation, TextGenerator
from hwopt.tasks.metrics import RougeMetrics
from hwopt.tasks.prepared import Trained
from hwopt.text import first_line
from hwopt.training.listener import Row
from hwopt.training.loaders import batches_of, end_workers, evaluation_loader
from hwopt.training.run import Run

NEW_TOKENS = 64  # tokens of a sample


class Evaluation:
    """Evaluates a run. A batch is one step of its own out-of-memory back-off; each rank has its own rung."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.backoff = OomBackoff("Evaluation", run.plan.batch_option("eval"), run.warn, quiet_steps_needed=QUIET_BATCHES)
        if run.engine.meets_in_micro_batches and isinstance(run.task.metrics(run.prepared, run.device), RougeMetrics):
            raise InputError("task.rouge: the engine of this plan cannot generate text while it trains. Remove task.rouge")
        self.details: dict[str, Any] = {}  # `Metrics.details` of the last evaluation

    def due(self) -> bool:
        """Whether to evaluate after this step: every `eval_steps`, else at the end of each epoch, and after the last step."""
        run = self.run
        if run.eval_loader is None:
            return False
        return run.step % (run.training.eval_steps or run.steps_per_epoch) == 0 or run.step == run.total_steps

    def evaluate(self) -> Row | None:
        """Metrics over every evaluation sample; names begin with `eval_`. Returns None if a signal came meanwhile."""
        row = self._evaluate(self.run.eval_loader, "eval", len(self.run.prepared.eval or ()))
        details = self.details
        for name, store in self.run.prepared.more_eval.items():
            further = None if row is None else self._evaluate_store(store, f"eval_{name}")
            row = None if row is None or further is None else row | further
        self.details = details
        return row

    def test(self) -> Row | None:
        """Metrics over every test sample, with the current weights; names begin with `test_`. None if a signal came meanwhile."""
        store = self.run.prepared.test
        assert store is not None
        return self._evaluate_store(store, "test")

    def _evaluate_store(self, store: Store, prefix: str) -> Row | None:
        loader = evaluation_loader(self.run, store)
        try:
            return self._evaluate(loader, prefix, len(store))
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
        """Add every row of `batch` to `metrics` once. Ranks that meet within a batch share one rung and never retry."""
        run = self.run
        forward = Forward(run.inner_model, run.evaluation_loss, metrics, run.heartbeat, run.accelerator.autocast)
        if run.engine.supports_retry:
            add_batch(forward, batch, self.backoff, f"after step {run.step}", run.forward_backward.free)
        else:
            for _ in forward.rows(batch, self.backoff.rung):
                pass


@dataclass(frozen=True)
class Forward:
    """Puts rows through a model in evaluation mode and adds them to metrics."""

    model: Any
    loss: Callable[[Any, torch.Tensor], tuple[torch.Tensor, Any]]
    metrics: Any
    heartbeat: Callable[[], None] = lambda: None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The block in which texts are generated: `generate` calls parts of the model below the forward that Accelerate wraps."""

    def rows(self, batch: StepBatch, rung: int, first_row: int = 0) -> Iterator[int]:
        """Add `batch` micro-batch by micro-batch from `first_row` on; yields the number of rows done."""
        for micro_batch, _ in batch.micro_batches(rung, first_row):
            self.heartbeat()
            outputs = self.model(**micro_batch.inputs)
            if not batch.step.weightless:
                if isinstance(self.metrics, RougeMetrics):
                    with self.autocast():
                        self.metrics.generate(self.model, micro_batch.inputs, micro_batch.targets)
                loss, count = self.loss(outputs, micro_batch.targets)
                self.metrics.update(outputs, micro_batch.targets, loss, count)
            yield micro_batch.end_row


def add_batch(forward: Forward, batch: StepBatch, backoff: OomBackoff, where: str, free: Callable[[], bool] = bool) -> None:
    """Add every row of `batch` once, in smaller micro-batches if memory runs out and there is nothing to `free`."""
    work = partial(forward.rows, batch)
    each_row_once(work, len(batch.lengths), batch.finest_rung, batch.largest_micro_batch, backoff, where, free)


def each_row_once(
    work: Callable[[int, int], Iterator[int]],
    rows: int,
    finest_rung: int,
    largest: Callable[[int], int],
    backoff: OomBackoff,
    where: str,
    free: Callable[[], bool] = bool,
) -> None:
    """Call `work(rung, first row)`, which yields the number of rows done, until all `rows` of a batch are.

    After running out of memory it continues at the first row that is not done, at a finer rung unless `free` freed some.
    `largest`: rung -> tokens of the largest micro-batch. Raises DoesNotFitError if a single row does not fit.
    """
    done = rung = 0
    while done < rows:
        rung = backoff.rung_for(largest)
        try:
            for finished in work(rung, done):
                done = finished
            continue
        except torch.OutOfMemoryError as error:
            oom_message = first_line(error)
        freed = free()
        release_unused_memory()  # after the except block: the exception's frames keep tensors alive
        if not freed:
            backoff.reduce(finest_rung, where, oom_message, rung)
    backoff.batch_succeeded(rung, largest(rung))


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


class EarlyStopping:
    """Counts the evaluations in a row that did not improve the metric for the best model by more than the threshold.

    With `training.early_stopping_patience` of them, the run ends. As in transformers, a smaller improvement still makes the
    weights the best ones. The count is saved with checkpoints.
    """

    def __init__(self, run: Run, best: BestModel) -> None:
        self.run, self.best = run, best
        self.patience = run.training.early_stopping_patience
        self.count = 0

    @property
    def stops(self) -> bool:
        return self.patience is not None and self.count >= self.patience

    def observe(self, value: float) -> None:
        """Compare the metric of an evaluation with the best one before it."""
        best, threshold = self.best.value, self.run.training.early_stopping_threshold
        if best is None or (math.isfinite(value) and not math.isfinite(best)):
            improved = True
        else:
            improved = self.best.sign * value > self.best.sign * best and abs(value - best) > threshold
        self.count = 0 if improved else self.count + 1

    def message(self) -> str:
        threshold = self.run.training.early_stopping_threshold
        by = f" by more than {threshold:g}" if threshold else ""
        return (
            f"Stopping early after step {self.run.step:,} of {self.run.total_steps:,}: {self.best.metric} did not improve{by} in "
            f"{self.count} evaluations. The best weights are those of step {self.best.step:,}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])


class GeneratedSamples:
    """Generates greedily, so that equal weights write equal texts. Every rank generates; the first one shows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.prompts = run.plan.job.data.sample_prompts
        if self.prompts and run.engine.meets_in_micro_batches:
            self.prompts = ()
            run.warn("data.sample_prompts: this engine cannot generate text while it trains; no samples are written")

    def show(self) -> None:
        """Generate a sample for each prompt, show it, and append it to samples.jsonl."""
        for prompt in self.prompts:
            try:
                text = self.generate(prompt)
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                self.prompts = ()
                release_unused_memory()
                self.run.warn(f"data.sample_prompts: generation failed ({first_line(error)}); no more samples are written")
                return
            if self.run.is_main:
                self.run.say(f"sample at step {self.run.step:,}: {prompt!r} -> {text!r}")
                with suppress(OSError), open(self.run.folder / SAMPLES, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": self.run.step, "prompt": prompt, "text": text}) + "\n")

    def generate(self, prompt: str) -> str:
        """What `hwopt predict` writes after `prompt`: a question if the training samples are conversations, else a text."""
        run, tokenizer = self.run, self.run.prepared.tokenizer
        trained = Trained(run.plan.job, run.inner_model.config, tokenizer, (), run.plan.model.max_positions)
        generator = TextGenerator(trained, run.inner_model, Generation(NEW_TOKENS))
        asked = Conversation([{"role": "user", "content": prompt}]) if run.prepared.chat_tokens.chat else prompt
        (encoded,) = generator.encode([asked])
        if isinstance(encoded, str):
            raise ValueError(encoded)
        inputs = {key: tensor.to(run.device) for key, tensor in generator.batch([encoded], 1).items()}
        with torch.no_grad(), evaluating(run), run.accelerator.autocast():
            ((text,),) = generator.predict(inputs)
        return str(text)
