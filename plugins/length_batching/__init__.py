"""Length batching: splits each step batch into micro-batches of similar length, so that less padding is computed.

The samples of one optimizer step are sorted by length and split into micro-batches. Dynamic programming finds the split points
with the least time, under a token budget. On a CUDA device the time is the larger of the device's, for rows x width (the longest
row) of each micro-batch, and the host's, for the launches of each micro-batch. So a model that is bound by the host is not split.
The samples of a step and the order of the steps do not change.

Source: padding, Krell et al. 2021 (arXiv:2107.02027); optimal partition of a sorted list by dynamic programming.
Hardware: any.
Cost: 1 to 2 ms per step of 128 rows, in the data workers.
Numerical effect: rounding; with dropout, different masks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from hwopt import plugin as hw
from hwopt.plugin.price import price_of
from hwopt_plugins.length_batching.cut import cut_by_length

CPU_OVERHEAD = 256
"""Cost of one more micro-batch on a CPU where it was not measured. A CPU is host and device: weights pass its caches again."""


def mean_padded_tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """The mean of `padded_tokens` over 16 random orders of the rows."""
    shuffled, choice, total = list(lengths), random.Random(0), 0
    for _ in range(16):
        choice.shuffle(shuffled)
        total += padded_tokens(shuffled, groups)
    return total / 16


def padded_tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """The number of tokens that a model computes if each group is padded to its longest row."""
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


class LengthBatching(hw.Plugin):
    name = "length_batching"
    stage = hw.Stage.DATA
    effect = "rounding"
    relations = hw.Relations(after=("cuda_graphs",))  # which tells if micro-batches are to have few shapes

    class Options(hw.PluginOptions):
        tokens: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
        """Maximum rows x width of a micro-batch; "auto": batch.train x the longest row of the step."""
        overhead_tokens: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
        """Cost of one more micro-batch, in tokens; "auto": from the card and the model."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if context.task.inputs == "images":
            return hw.Decision.skip("images of one size need no padding")
        if context.task.encoder_decoder:
            return hw.Decision.skip(
                "samples of an encoder-decoder have two lengths; group_lengths, of hwopt's loop, groups by both"
            )
        budget = "batch.train x the longest row" if self.options.tokens == "auto" else f"{self.options.tokens}"
        overhead, _, text = self.price(context)
        fixed = self.options.overhead_tokens == "auto" and context.hardware.device_type == "cpu"
        options = self.options.changed(overhead_tokens=overhead) if fixed else None
        return hw.Decision.apply(f"micro-batches by length, at most {budget} tokens each; {text}", options)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        tokens = None if self.options.tokens == "auto" else self.options.tokens
        overhead, host, _ = self.price(context)
        multiple = recipe.batch.get("row_multiple")
        if multiple and self.options.overhead_tokens == "auto":  # a graph costs the host one launch
            overhead, host = price_of(context).graph_tokens, 0
        recipe.cut = partial(cut_by_length, tokens=tokens, overhead_tokens=overhead, host_tokens=host, multiple=multiple or 1)

    def price(self, context: hw.Context) -> tuple[int, int, str]:
        """(`overhead_tokens`, `host_tokens` of `cut_by_length` on this machine, the reason)."""
        overhead, layer = self.options.overhead_tokens, context.hardware.layer
        if overhead == "auto" and layer is not None:
            return layer.micro_batch_tokens, 0, f"one more costs as much as {layer.micro_batch_tokens} tokens, measured here"
        if overhead == "auto" and context.hardware.device_type == "cpu":
            overhead = CPU_OVERHEAD
        if overhead != "auto":
            return overhead, 0, f"cost of one more: {overhead} tokens"
        price = price_of(context)
        text = (
            f"one more costs {price.host_tokens} tokens of host time ({price.host_seconds * 1e3:.1f} ms for its "
            f"launches) and {price.overhead_tokens} of device time ({price.device_seconds * 1e3:.1f} ms), the longer of the two "
            f"counts; {price.token_seconds * 1e6:.2f} us a token on {price.basis}"
        )
        return price.overhead_tokens, price.host_tokens, text

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """Off or on: which is faster on a CPU depends on the CPU."""
        return [hw.Scale(choices=(hw.OFF, hw.Choice(changes={})), present=int(options is not None), ordered=False, tune=True)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        step = run.last_step_batch
        lengths, rows = [step.widths.of(length) for length in step.lengths], [count for count, _ in step.sizes]
        ends = list(accumulate(rows, initial=0))
        groups = [range(*bounds) for bounds in pairwise(ends)]
        by_length = padded_tokens(lengths, groups)
        best = padded_tokens(sorted(lengths, reverse=True), groups)
        at_random = mean_padded_tokens(lengths, groups)
        seen = f"{by_length} tokens in micro-batches of {', '.join(map(str, rows[:8]))}{', …' if len(rows) > 8 else ''} rows; "
        seen += f"with rows at random about {at_random:.0f} ({at_random / by_length:.2f}x)"
        if at_random <= best:
            return hw.Evidence.unknown(f"this step has no padding that one more micro-batch is worth: {seen}")
        longer = sum(
            max(lengths[row] for row in after) > min(lengths[row] for row in before) for before, after in pairwise(groups)
        )
        if longer < step.cuts:
            return hw.Evidence.active(seen)
        return hw.Evidence.inactive(f"{seen}; {longer} of {len(rows)} micro-batches have longer rows than the one before")
