"""Length grouping over the epoch: samples of about equal length share a step, and steps come in random order.

Less padding than cutting each step by length, at the price of another sampling: a step sees one length only. Hugging Face's
grouping sorts whole mega-batches, so that losses come in waves (transformers#20810); here neighbouring steps do not correlate.
Source: Khomenko et al. 2016 on bucketing (arXiv:1708.05604). Hardware: any. Cost: a sort an epoch.
Numerical effect: another order of the samples, and so another training curve; almost no padding
with `length_batching`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage


def grouped(lengths: Sequence[int] | Any, seed: int, epoch: int, rows: int, noise: float = 0.1) -> Any:
    """Every sample once, (samples,) int64: groups of `rows` samples of about equal length, the groups shuffled.

    `noise`: the part of a length by which its place in the sorted order is moved at random, so that groups change with the
    epoch. Where `rows` does not divide the samples, the smaller group is a random one, and comes last.
    """
    import numpy as np

    drawn = np.random.default_rng([seed, epoch])
    number = len(lengths)
    jitter = 1 + noise * drawn.uniform(-1, 1, number)
    order = np.argsort(np.asarray(lengths) * jitter, kind="stable")
    whole, left = divmod(number, rows)
    cut = int(drawn.integers(whole + 1)) * rows
    last, order = order[cut : cut + left], np.delete(order, slice(cut, cut + left))
    groups = order.reshape(whole, rows)[drawn.permutation(whole)]
    return np.concatenate([groups.ravel(), last])


class GroupLengths(Plugin):
    name = "group_lengths"
    stage = Stage.DATA
    preserves = "method"
    aliases: ClassVar[Mapping[str, str]] = {
        "group_by_length": "enabled = true",
    }

    class Options(PluginOptions):
        noise: float = Field(default=0.1, ge=0, le=1, description="How far lengths are mixed, as a part of the length.")

    options: Options

    def probe(self, context: Context) -> Decision:
        return Decision.apply(
            f"samples whose lengths differ by about {self.options.noise:.0%} share a step; steps in random order"
        )

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.order = partial(grouped, noise=self.options.noise)

    def evidence(self, run: RunView) -> Evidence:
        import numpy as np

        sampler = run.train_loader.sampler
        step = [int(sampler.lengths[index]) for index in next(iter(sampler)).samples]
        inside, overall = float(np.std(step)), float(np.std(sampler.lengths))
        seen = f"lengths differ by {inside:.1f} tokens in the first step, by {overall:.1f} in the data (standard deviations)"
        if overall == 0 or len(step) == len(sampler.lengths):
            return Evidence.unknown(f"nothing to group: {seen}")
        return Evidence.active(seen) if inside < 0.75 * overall else Evidence.inactive(seen)
