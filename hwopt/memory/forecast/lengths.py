"""The lengths that a plan is made for: those of the job's texts if they can be read, else the longest allowed length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hwopt.config.job import Job
from hwopt.data.batches.samplers import StepSampler
from hwopt.data.batches.step_batch import Widths
from hwopt.data.mixture import Mixture
from hwopt.data.sources.location import MissingFileError
from hwopt.errors import DataError, HwoptError, InputError
from hwopt.memory.shapes import Head, largest_size, micro_batch_sizes, padded_sizes
from hwopt.model.facts import ModelFacts
from hwopt.planning.plan import Plan
from hwopt.saving.best_model import best_metric
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.registry import make_task
from hwopt.training.randomness import shuffled

DEFAULT_LENGTH = 512
"""Tokens, if neither the data nor the job nor the model gives a length."""
DEFAULT_LABELS = 2
MOST_EPOCHS = 3
"""Epochs whose steps are looked at for the largest one."""
TRIED = 4
"""Steps of an epoch with the most tokens that are laid out, and as many with the longest samples."""


@dataclass(frozen=True)
class Lengths:
    """Token counts of the samples, and what else the data decide."""

    train: NDArray[np.int32] | None
    """Tokens of each training sample; None if the data was not read."""
    longest: int
    """Tokens of the longest sample, for training, evaluation or the test."""
    labels: int
    source: str
    """Where `longest` comes from, for the reader of a report."""
    refused: HwoptError | None = None
    """The error with which a run would refuse the data, or a metric that they do not have."""
    eval_rows: int | None = None
    """Rows of the largest part that is evaluated, 0 without one; None if the data was not read."""
    new_tokens: int = 0
    """Tokens that the chat template adds to the vocabulary."""
    target: int | None = None
    """Tokens of the longest target of an encoder-decoder; None without targets, or if the data was not read."""
    warnings: tuple[str, ...] = ()
    """Which data a run would not use, as it says itself."""
    mixture: Mixture | None = None
    """Draws the training samples of each epoch."""

    @property
    def head(self) -> Head:
        return Head(self.labels, self.new_tokens, self.target)

    def eval_batch(self, plan: Plan, width: int) -> int:
        """The rows of the largest evaluation batch on one rank, which is padded to `width` tokens."""
        most = plan.batch.eval_rows(width)
        return most if self.eval_rows is None else min(most, -(-self.eval_rows // plan.world_size))

    def usual_step(self, plan: Plan, rows: int, width: int) -> list[tuple[int, int]]:
        """The different (rows, width) of the micro-batches of a step of random training samples, if they are known.

        With a collate of the recipe it is the first step of the run, because `laid_out` looks at the steps of the run too.
        `rows`, `width`: the most of a micro-batch, before the collate lays it out.
        """
        if self.train is None:
            return []
        share = min(len(self.train), -(-plan.batch.step // plan.world_size))
        if plan.recipe.collate is None:
            drawn = np.random.default_rng(0).choice(self.train, share, replace=False)
        else:
            drawn = self.in_order(plan, 0)[:share]
        return list(dict.fromkeys(micro_batch_sizes(plan, np.minimum(drawn, width).tolist(), rows)))

    def laid_out(self, plan: Plan, rows: int, width: int) -> tuple[int, int]:
        """The (rows, width) of the largest micro-batch of the run, after the recipe's collate. `rows`, `width`: before it.

        A collate that fills rows with several samples makes smaller micro-batches of most steps than of the longest samples.
        The latter count where a run tries them before step 1, and where the steps of the run are not known.
        """
        share = -(-plan.batch.step // plan.world_size)
        widths = Widths(plan.batch.widths, plan.batch.pad_to_multiple_of)
        if plan.recipe.collate is None or self.train is None or rows > share or width > widths.of(self.longest):
            return largest_size(plan, rows, width)
        steps = [-np.sort(-self.train)[:share]] if plan.chose else self.largest_steps(plan, share)
        laid_out = (size for step in steps for size in micro_batch_sizes(plan, np.minimum(step, width).tolist(), rows))
        return max(laid_out, key=math.prod)

    def in_order(self, plan: Plan, epoch: int) -> NDArray[np.int32]:
        """The tokens of each training sample of an epoch, in the order in which the run takes them."""
        assert self.train is not None, "the data was read"
        order, seed = plan.recipe.order or shuffled, plan.training.seed
        sampler = StepSampler(self.train, self.train, order, seed, plan.batch.step, total_steps=0, mixture=self.mixture)
        tokens: NDArray[np.int32] = self.train[sampler.epoch_order(epoch)]
        return tokens

    def largest_steps(self, plan: Plan, share: int) -> list[NDArray[np.int32]]:
        """The tokens of each sample of some steps of the run: those with the most tokens, and those with the longest sample.

        `share`: samples of a step on one rank.
        """
        assert self.train is not None, "the data was read"
        steps: list[NDArray[np.int32]] = []
        per_epoch = math.ceil(len(self.train) / plan.batch.step)
        left = plan.training.max_steps or math.ceil(plan.training.num_train_epochs * per_epoch)
        for epoch in range(min(MOST_EPOCHS, math.ceil(left / per_epoch))):
            samples = self.in_order(plan, epoch)[: (left - epoch * per_epoch) * plan.batch.step]
            starts = np.arange(0, len(samples), share)
            for most in (np.add.reduceat(samples, starts), np.maximum.reduceat(samples, starts)):
                steps += [samples[starts[step] :][:share] for step in np.argsort(-most, kind="stable")[:TRIED]]
        return steps


def lengths_of(plan: Plan, cache: Path) -> Lengths:
    """Return the lengths of the job's data, tokenized as in a run or loaded from `cache`. Raises nothing for bad data."""
    job = plan.job
    try:
        prepared = prepared_data(job, plan.training.seed, plan.model, cache)
    except HwoptError as error:
        elsewhere = isinstance(error, MissingFileError) and plan.hardware.source == "described"  # a plan for another machine
        refused = error if isinstance(error, DataError | InputError) and not elsewhere else None
        why = f"the data could not be read: {error}"
        if plan.context.task.inputs == "images":
            return Lengths(None, 1, DEFAULT_LABELS, why, refused)
        allowed = job.data.max_length or min(plan.model.max_positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
        return Lengths(None, allowed, DEFAULT_LABELS, f"the longest allowed length; {why}", refused)
    stores = prepared.stores
    longest = max(int(store.lengths.max()) for store in stores)
    cut = sum(store.meta.get("cut", 0) for store in stores)
    source = "the longest text" + (f"; {cut:,} longer ones are truncated" if cut else "")
    labels = len(prepared.label_names or ()) or DEFAULT_LABELS
    evaluated = max((len(store) for name, store in prepared.parts.items() if name != "train"), default=0)
    new, warnings = len(prepared.chat_tokens.new), tuple(prepared.warnings)
    target = max(int(store.counts.max()) for store in stores) if plan.context.task.encoder_decoder else None
    problem, mixture = refusal(plan, prepared), prepared.train.mixture
    return Lengths(prepared.train.lengths, longest, labels, source, problem, evaluated, new, target, warnings, mixture)


def refusal(plan: Plan, prepared: Prepared) -> HwoptError | None:
    """The error with which a run refuses its metric for the best weights."""
    try:
        best_metric(plan.training, make_task(plan.job), prepared, "cpu")
    except HwoptError as error:
        return error
    return None


def prepared_data(job: Job, seed: int, model: ModelFacts, cache: Path) -> Prepared:
    """Return the data of `job`, tokenized as in a run or loaded from `cache`."""
    task = make_task(job)
    return task.prepare(job, task.load_config(job), cache, seed, max_positions=model.max_positions)


def mean_length(job: Job, model: ModelFacts, cache: Path) -> float:
    """Return the mean tokens of the training samples that the first epoch draws."""
    store = prepared_data(job, job.training.seed, model, cache).train
    mixture = store.mixture
    return float((store.lengths if mixture is None else store.lengths[mixture.drawn(job.training.seed, 0)]).mean())


def largest_micro_batch(plan: Plan, longest: int) -> tuple[int, int]:
    """Return (rows, width) of the largest micro-batch into which the recipe splits a rank's share of the longest samples."""
    return max(padded_sizes(plan, [longest] * -(-plan.batch.step // plan.world_size), plan.batch.train))
