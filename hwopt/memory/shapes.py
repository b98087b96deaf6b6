"""The shapes of a plan's micro-batches: rows and tokens, as the recipe cuts samples and lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hwopt.data.batches.collate import Collate, cut_in_order
from hwopt.data.batches.step_batch import Step, StepBatch, Widths
from hwopt.planning.plan import Plan
from hwopt.tasks.registry import make_task

FEW_TOKENS = 1 << 16


class Shape(NamedTuple):
    """The shape of a micro-batch: rows, and tokens of the longest row."""

    rows: int
    width: int
    target: int | None = None
    """Tokens of the longest target of an encoder-decoder; None: as `Head.target` says."""

    @property
    def tokens(self) -> int:
        return self.rows * self.width


class Head(NamedTuple):
    """What a job's data decide about the size of its model and of its targets."""

    labels: int
    """Outputs of a classifier."""
    new_tokens: int = 0
    """Tokens that the chat template adds to the vocabulary (`hwopt.tasks.prepared.ChatTokens`)."""
    target: int | None = None
    """Tokens of the longest target of an encoder-decoder; None: the most that the job allows."""


def widths_of(plan: Plan) -> Widths:
    return Widths(plan.batch.widths, plan.batch.pad_to_multiple_of)


def padded_shapes(plan: Plan, lengths: Sequence[int], most_rows: int, targets: Sequence[int] | None = None) -> list[Shape]:
    """Return the shape of each micro-batch into which the recipe cuts samples of these `lengths`. `targets`: tokens of theirs."""
    widths, cut = widths_of(plan), plan.recipe.cut or cut_in_order
    padded = [widths.of(length) for length in lengths]
    found = []
    for group in cut(padded, most_rows):
        target = None if targets is None else widths.of(max(targets[place] for place in group))
        found.append(Shape(len(group), max(padded[place] for place in group), target))
    return found


def micro_batch_shapes(plan: Plan, lengths: Sequence[int], most_rows: int, targets: Sequence[int] | None = None) -> list[Shape]:
    """Return the same after the recipe's collate, which may lay them out in other rows."""
    if plan.recipe.collate is None:
        return padded_shapes(plan, lengths, most_rows, targets)
    task = make_task(plan.job)
    config = task.load_config(plan.job)
    samples = [task.placeholder(plan.job, config, length, 1) for length in lengths]
    collate = plan.recipe.collate(Collate(plan.recipe.cut or cut_in_order, most_rows, 0, widths=widths_of(plan)))
    batch: StepBatch = collate(Step(0, 0, tuple(range(len(samples))), len(samples)), samples, [1] * len(samples))
    return [Shape(*size) for size in batch.sizes]


def largest_shape(plan: Plan, rows: int, width: int) -> Shape:
    """Return the largest shape that the recipe's collate makes of `rows` samples of `width` tokens.

    It is asked for FEW_TOKENS at most; more rows are in proportion.
    """
    if plan.recipe.collate is None:
        return Shape(rows, width)
    few = min(rows, max(8, FEW_TOKENS // width))
    largest = max(micro_batch_shapes(plan, [width] * few, few), key=lambda shape: shape.tokens)
    return largest._replace(rows=largest.rows * rows // few)


def accumulates_gradients(plan: Plan) -> bool:
    """Whether a step has several micro-batches, so that gradients of the first are in memory while the next one runs."""
    return plan.batch.accumulation(plan.world_size) > 1
