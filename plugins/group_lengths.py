"""Length grouping over the epoch: samples of similar length share an optimizer step, and the steps are shuffled.

Almost no padding is left, but a step contains samples of one length only. The grouping of Hugging Face's Trainer sorts
mega-batches, so its loss oscillates (transformers#20810). Here the lengths of consecutive steps are independent.

Source: bucketing, Khomenko et al. 2016 (arXiv:1708.05604).
Hardware: any.
Cost: one sort per epoch.
Numerical effect: a different order of the samples, and so a different training curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, ClassVar

from pydantic import Field

from hwopt import plugin as hw


def grouped(lengths: Sequence[int] | Any, seed: int, epoch: int, rows: int, noise: float = 0.1) -> Any:
    """The sample indexes of an epoch, (samples,) int64: shuffled groups of `rows` samples of similar length.

    `noise`: each length is multiplied by a random factor in 1 ± `noise` before sorting, so that groups change between epochs.
    If `rows` does not divide the number of samples, a random group is smaller and comes last.
    """
    import numpy as np

    generator = np.random.default_rng([seed, epoch])
    number = len(lengths)
    jitter = 1 + noise * generator.uniform(-1, 1, number)
    order = np.argsort(np.asarray(lengths) * jitter, kind="stable")
    full_groups, rest = divmod(number, rows)
    start = int(generator.integers(full_groups + 1)) * rows
    last, order = order[start : start + rest], np.delete(order, slice(start, start + rest))
    groups = order.reshape(full_groups, rows)[generator.permutation(full_groups)]
    return np.concatenate([groups.ravel(), last])


class GroupLengths(hw.Plugin):
    name = "group_lengths"
    stage = hw.Stage.DATA
    effect = "method"
    aliases: ClassVar[Mapping[str, str]] = {"group_by_length": "enabled = true"}

    class Options(hw.PluginOptions):
        noise: float = Field(default=0.1, ge=0, le=1)
        """Random change of each length before sorting, as a fraction of the length."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if context.task.inputs == "images":
            return hw.Decision.skip("images of one size need no padding")
        return hw.Decision.apply(
            f"samples with lengths within about {self.options.noise:.0%} share a step; steps in random order"
        )

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.order = partial(grouped, noise=self.options.noise)

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        import numpy as np

        lengths, samples = run.train_loader.sampler.lengths, run.last_step_batch.step.samples
        within, overall = float(np.std([int(lengths[index]) for index in samples])), float(np.std(lengths))
        seen = f"standard deviation of lengths: {within:.1f} tokens in the last step, {overall:.1f} tokens in the data"
        if overall == 0 or len(samples) in (1, len(lengths)):
            return hw.Evidence.unknown(f"nothing to group: {seen}")
        left_out = (len(samples) + 1) * (run.world_size - 1)  # other ranks have the other samples of the group
        least = 0 if run.train_loader.sampler.mixture else least_noise(np.asarray(lengths), np.array(samples), left_out)
        return hw.Evidence.of(within < 0.75 * overall, seen, noise_percent=range(least, 101))

    def expects(self) -> Mapping[str, Any]:
        return {"noise_percent": ceil(100 * self.options.noise)}


def least_noise(lengths: Any, samples: Any, left_out: int) -> int:
    """The noise in percent from which on `samples` can be a group of `grouped`, but for `left_out` of its samples.

    A group is whole: a sample whose length, whatever its noise, is between those of the shortest and the longest one is in it.
    """
    own = lengths[samples]

    def missing(percent: int) -> int:
        low, high = own.min() * (100 + percent), own.max() * (100 - percent)
        between = [(low < each * (100 - percent)) & (each * (100 + percent) < high) for each in (lengths, own)]
        return int(between[0].sum() - between[1].sum())

    return bisect_left(range(100), True, key=lambda percent: missing(percent) <= left_out)
