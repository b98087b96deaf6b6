"""The shapes of a plan's micro-batches: rows and tokens, as the recipe cuts samples and lays them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hwopt.data.batches.collate import Collate, cut_in_order
from hwopt.data.batches.step_batch import Step, StepBatch, Widths
from hwopt.planning.plan import Plan
from hwopt.tasks.registry import make_task

FEW_TOKENS = 1 << 16


@dataclass(frozen=True)
class Shape:
    """The shape of a micro-batch: rows, and tokens of the longest row."""

    rows: int
    width: int
    target: int | None = None
    """Tokens of the longest target of an encoder-decoder; None: as `Head.target` says."""


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


def padded_shapes(plan: Plan, lengths: Sequence[int], targets: Sequence[int] | None, most_rows: int) -> list[Shape]:
    """Return the shape of each micro-batch into which the recipe cuts samples of these `lengths`. `targets`: tokens of theirs."""
    widths, cut = widths_of(plan), plan.recipe.cut or cut_in_order
    padded = [widths.of(length) for length in lengths]
    found = []
    for group in cut(padded, most_rows):
        target = None if targets is None else widths.of(max(targets[place] for place in group))
        found.append(Shape(len(group), max(padded[place] for place in group), target))
    return found


def padded_sizes(plan: Plan, lengths: Sequence[int], most_rows: int) -> list[tuple[int, int]]:
    """Return (rows, width) of each micro-batch into which the recipe cuts samples of these `lengths`."""
    return [(shape.rows, shape.width) for shape in padded_shapes(plan, lengths, None, most_rows)]


def micro_batch_sizes(plan: Plan, lengths: Sequence[int], most_rows: int) -> list[tuple[int, int]]:
    """Return the same after the recipe's collate, which may lay them out in other rows."""
    if plan.recipe.collate is None:
        return padded_sizes(plan, lengths, most_rows)
    task = make_task(plan.job)
    config = task.load_config(plan.job)
    samples = [task.placeholder(plan.job, config, length, 1) for length in lengths]
    collate = plan.recipe.collate(Collate(plan.recipe.cut or cut_in_order, most_rows, 0, widths=widths_of(plan)))
    batch: StepBatch = collate(Step(0, 0, tuple(range(len(samples))), len(samples)), samples, [1] * len(samples))
    return batch.sizes


def largest_size(plan: Plan, rows: int, width: int) -> tuple[int, int]:
    """Return the (rows, width) that the recipe's collate makes of `rows` samples of `width` tokens.

    It is asked for FEW_TOKENS at most; more rows are in proportion.
    """
    if plan.recipe.collate is None:
        return rows, width
    few = min(rows, max(8, FEW_TOKENS // width))
    laid_out, wide = max(micro_batch_sizes(plan, [width] * few, few), key=math.prod)
    return laid_out * rows // few, wide


def accumulates_gradients(plan: Plan) -> bool:
    """Whether a step has several micro-batches, so that gradients of the first are in memory while the next one runs."""
    return plan.batch.accumulation(plan.world_size) > 1
