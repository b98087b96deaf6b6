"""The lengths that a plan is made for: those of the job's texts if they can be read, else the longest allowed length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hwopt.config.job import Job
from hwopt.data.batches.samplers import StepSampler, eval_batches
from hwopt.data.mixture import Mixture
from hwopt.data.sources.location import MissingFileError
from hwopt.errors import DataError, HwoptError, InputError
from hwopt.memory.shapes import Head, Shape, accumulates_gradients, largest_shape, micro_batch_shapes, padded_shapes, widths_of
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
"""Steps of an epoch with the most tokens that are looked at, and as many with the longest samples."""
EVALUATED = 6
"""Batches of an evaluation that are looked at. They are sorted by length, the longest first."""


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
    targets: NDArray[np.int32] | None = None
    """Tokens of the target of each training sample of an encoder-decoder."""
    evaluated: tuple[tuple[NDArray[np.int32], NDArray[np.int32] | None], ...] = ()
    """Tokens of the samples of each part that is evaluated, and of their targets."""

    @property
    def head(self) -> Head:
        return Head(self.labels, self.new_tokens, self.target)

    def eval_batch(self, plan: Plan, width: int) -> int:
        """The rows of the largest evaluation batch on one rank, which is padded to `width` tokens."""
        most = plan.batch.eval_rows(width)
        return most if self.eval_rows is None else min(most, -(-self.eval_rows // plan.world_size))

    def cut_at(self, width: int, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The `tokens` of samples if the longest one had `width`: a text that is cut today may be that much longer."""
        return np.where(tokens < self.longest, np.minimum(tokens, width), np.int32(width))

    def steps(self, plan: Plan, rows: int, width: int, most: int) -> Iterator[list[Shape]]:
        """Yield the different ones of some steps of the run, if known: the first ones, with `most` micro-batches together.

        `rows`, `width`: the most of a micro-batch, before the collate lays it out.
        """
        found: list[list[Shape]] = []
        if self.train is None or not most:
            return
        for samples in self.some_steps(plan):
            targets = None if self.targets is None else self.targets[samples].tolist()
            step = micro_batch_shapes(plan, self.cut_at(width, self.train[samples]).tolist(), rows, targets)
            if step not in found:
                most -= len(step)
                if found and most < 0:
                    return
                found.append(step)
                yield step

    def evaluations(self, plan: Plan, width: int) -> list[Shape]:
        """The first batches of an evaluation on one rank, and the one with the most tokens of targets, if they are known."""
        widths, found = widths_of(plan), []
        for lengths, targets in self.evaluated:
            order = np.argsort(-lengths, kind="stable")
            cut = self.cut_at(width, lengths[order])
            for place in eval_batches(cut, plan.batch.eval_rows, widths.of, plan.world_size):
                samples = order[place][:: plan.world_size]
                target = None if targets is None else widths.of(int(targets[samples].max()))
                found.append(Shape(len(samples), widths.of(int(cut[place.start])), target))
        largest = max(found, key=lambda shape: shape.rows * (shape.target or 0), default=None)
        different = list(dict.fromkeys(found))
        return [shape for number, shape in enumerate(different) if number < EVALUATED or shape == largest]

    def largest_step(self, plan: Plan, rows: int, width: int) -> list[Shape]:
        """The micro-batches of the step of the run with the largest one: with most recipes one or two of `rows` x `width`.

        A cut by length, and a collate that fills rows with several samples, make smaller ones of most steps than of the longest
        samples. The latter count where a run tries them before step 1, and where the steps of the run are not known: a cut by
        length in an epoch that is not looked at may make a larger one.
        """
        share, recipe = -(-plan.batch.step // plan.world_size), plan.recipe
        usual = [largest_shape(plan, rows, width)] * (2 if accumulates_gradients(plan) else 1)
        if self.train is None or rows > share or width > widths_of(plan).of(self.longest):
            return usual
        per_epoch, total = self.numbers_of_steps(plan)
        if recipe.collate is None and (recipe.cut is None or total > MOST_EPOCHS * per_epoch):
            return usual
        samples = list(self.some_steps(plan))
        whole = [step for step in samples if len(step) == share]  # the last of an epoch may have one micro-batch, alone in memory
        lengths = [self.cut_at(width, self.train[step]).tolist() for step in (samples[:1] if plan.chose else whole or samples)]
        steps = (micro_batch_shapes(plan, step, rows) for step in lengths)
        return max(steps, key=lambda step: max(shape.tokens for shape in step))

    def largest_within(self, plan: Plan, rows: int, width: int, tokens: int) -> Shape | None:
        """The largest micro-batch of at most `tokens` tokens. Where all have one width, those of a step may all be larger."""
        steps = [] if self.train is None else [self.train[step] for step in self.some_steps(plan, shortest=True)]
        shapes = [shape for step in steps for shape in micro_batch_shapes(plan, self.cut_at(width, step).tolist(), rows)]
        if len({shape.width for shape in shapes}) != 1:
            return largest_shape(plan, max(1, tokens // width), width)
        return max((shape for shape in shapes if shape.tokens <= tokens), default=None)

    def numbers_of_steps(self, plan: Plan) -> tuple[int, int]:
        """The optimizer steps of an epoch, and of the run."""
        assert self.train is not None, "the data was read"
        per_epoch = math.ceil(len(self.train) / plan.batch.step)
        return per_epoch, plan.training.max_steps or math.ceil(plan.training.num_train_epochs * per_epoch)

    def some_steps(self, plan: Plan, shortest: bool = False) -> Iterator[NDArray[np.int64]]:
        """Yield the samples of some steps of the run on one rank, in its order.

        They are the step that is tried before step 1 if the planner chose the batch size, and of each epoch the first two, the
        last, those with the most tokens and those with the longest samples and targets; with `shortest` those with the least.
        """
        assert self.train is not None, "the data was read"
        share, (per_epoch, left) = -(-plan.batch.step // plan.world_size), self.numbers_of_steps(plan)
        if plan.chose:
            yield np.argsort(-self.train, kind="stable")[:share]
        order, seed = plan.recipe.order or shuffled, plan.training.seed
        sampler = StepSampler(self.train, self.train, order, seed, plan.batch.step, total_steps=0, mixture=self.mixture)
        for epoch in range(min(MOST_EPOCHS, math.ceil(left / per_epoch))):
            samples = sampler.epoch_order(epoch)[: (left - epoch * per_epoch) * plan.batch.step]
            starts, tokens = np.arange(0, len(samples), share), self.train[samples]
            most = [np.add.reduceat(tokens, starts), np.maximum.reduceat(tokens, starts)]
            if self.targets is not None:
                most.append(np.maximum.reduceat(self.targets[samples], starts))
            chosen = {0, min(1, len(starts) - 1), len(starts) - 1}
            chosen |= {int(step) for each in most for step in np.argsort(each if shortest else -each, kind="stable")[:TRIED]}
            for step in sorted(chosen):
                yield samples[starts[step] :][:share]


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
    labels = len(prepared.label_names) or DEFAULT_LABELS
    evaluated = max((len(store) for name, store in prepared.parts.items() if name != "train"), default=0)
    new, warnings = len(prepared.chat_tokens.new), tuple(prepared.warnings)
    pairs, problem, train = plan.context.task.encoder_decoder, refusal(plan, prepared), prepared.train
    target, targets = (max(int(store.counts.max()) for store in stores), train.counts) if pairs else (None, None)
    parts = tuple((part.lengths, part.counts if pairs else None) for name, part in prepared.parts.items() if name != "train")
    known = longest, labels, source, problem, evaluated, new, target, warnings, train.mixture, targets, parts
    return Lengths(train.lengths, *known)


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


def largest_micro_batch(plan: Plan, longest: int) -> Shape:
    """Return the shape of the largest micro-batch into which the recipe splits a rank's share of the longest samples."""
    return max(padded_shapes(plan, [longest] * -(-plan.batch.step // plan.world_size), plan.batch.train))
