"""Length batching: splits each step batch into micro-batches of similar length, so that less padding is computed.

The samples of one optimizer step are sorted by length and split into micro-batches. Dynamic programming finds the split points
that minimize the sum of rows x width (the longest row) plus a fixed cost per micro-batch, under a token budget.
The samples of a step and the order of the steps do not change, so the loss does not oscillate as it does with grouping by
length over the epoch (transformers#20810).

Source: padding, Krell et al. 2021 (arXiv:2107.02027); optimal partition of a sorted list by dynamic programming.
Hardware: any.
Cost: 1 to 2 ms per step of 128 rows, in the data workers.
Numerical effect: rounding; with dropout, different masks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage


def cut_by_length(lengths: Sequence[int], rows: int, *, tokens: int | None, overhead_tokens: int) -> list[list[int]]:
    """Groups of row indexes, longest rows first. Every row is in exactly one group.

    lengths: tokens of each row. tokens: the maximum of rows x width of a group; None means `rows` x the longest row, the size of
    a micro-batch of `rows` unsorted rows. A row that exceeds this budget is a group of its own.
    overhead_tokens: the cost of one more group, in tokens.
    """
    import numpy as np

    order = np.argsort(np.asarray(lengths), kind="stable")
    widths = np.maximum(np.asarray(lengths)[order], 1).tolist()  # ascending
    count = len(widths)
    if count == 0:
        return []
    budget = tokens if tokens is not None else rows * widths[-1]
    cost = np.zeros(count + 1)  # cost[j]: the minimum for the j shortest rows
    starts = [0] * (count + 1)
    index = np.arange(count + 1)
    for j in range(1, count + 1):
        width = widths[j - 1]
        first = j - max(1, min(j, budget // width))
        # the last group of the j shortest rows is first..j-1, or first+1..j-1, …
        candidates = cost[first:j] - index[first:j] * width
        best = int(candidates.argmin())
        starts[j] = first + best
        cost[j] = candidates[best] + j * width + overhead_tokens
    groups, end = [], count
    while end > 0:
        groups.append(order[starts[end] : end].tolist())
        end = starts[end]
    return groups


def padded_tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """The number of tokens that a model computes if each group is padded to its longest row."""
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def padded_width(length: int, widths: Sequence[int], multiple: int) -> int:
    """The smallest of `widths` that is at least `length`; if there is none, the next multiple of `multiple`."""
    return next((width for width in widths if width >= length), -(-length // multiple) * multiple)


class LengthBatching(Plugin):
    name = "length_batching"
    stage = Stage.DATA
    preserves = "rounding"
    former_names = ("cut",)

    class Options(PluginOptions):
        tokens: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
            default="auto",
            description='Maximum rows x width of a micro-batch; "auto": batch.train x the longest row of the step.',
        )
        overhead_tokens: int = Field(default=256, ge=0, description="Cost of one more micro-batch, in tokens.")

    options: Options

    def probe(self, context: Context) -> Decision:
        budget = "batch.train x the longest row" if self.options.tokens == "auto" else f"{self.options.tokens}"
        return Decision.apply(
            f"micro-batches by length, at most {budget} tokens each; cost of one more: {self.options.overhead_tokens} tokens"
        )

    def apply(self, recipe: Recipe, context: Context) -> None:
        tokens = None if self.options.tokens == "auto" else self.options.tokens
        recipe.cut = partial(cut_by_length, tokens=tokens, overhead_tokens=self.options.overhead_tokens)

    def evidence(self, run: RunView) -> Evidence:
        step, rows = run.last_step_batch, run.batch.train
        lengths = [padded_width(length, run.batch.widths, run.batch.pad_to_multiple_of) for length in step.lengths]
        random.Random(0).shuffle(lengths)  # they are in the order of the split
        unsorted_groups = [range(start, min(start + rows, len(lengths))) for start in range(0, len(lengths), rows)]
        unsorted_tokens = padded_tokens(lengths, unsorted_groups)
        computed = sum(count * width for count, width in step.sizes)
        seen = f"{computed} tokens in {len(step.sizes)} micro-batch(es); unsorted micro-batches of {rows} about {unsorted_tokens}"
        seen += f" ({unsorted_tokens / computed:.2f}x)"
        if computed < unsorted_tokens:
            return Evidence.active(seen)
        if len(lengths) <= rows or min(lengths) == max(lengths):
            return Evidence.unknown(f"this step has no padding to save: {seen}")
        return Evidence.inactive(seen)
