"""Which samples each rank uses in each step, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from hwopt.data.step_batch import Step


@dataclass(frozen=True)
class StepSampler:
    """The steps of a whole run, epoch after epoch, for one rank.

    Ranks take contiguous shares of each step; the last step of an epoch takes what is left, by its own size.
    """

    lengths: np.ndarray  # (samples,) tokens
    counts: np.ndarray  # (samples,) loss-bearing units
    order: Callable[[np.ndarray, int, int, int], Sequence[int] | np.ndarray]
    """(lengths, seed, epoch, rows of a step) -> sample indexes."""
    seed: int
    rows: int
    """Per step, over all ranks."""
    total_steps: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    """The first step to yield: nonzero when a run is resumed."""

    @property
    def steps_per_epoch(self) -> int:
        return ceil(len(self.lengths) / self.rows)

    def __len__(self) -> int:
        return self.total_steps - self.start

    def __iter__(self) -> Iterator[Step]:
        first_epoch, skip = divmod(self.start, self.steps_per_epoch)
        index = self.start
        epoch = first_epoch
        while True:
            order: np.ndarray = np.asarray(self.order(self.lengths, self.seed, epoch, self.rows), np.int64)
            for begin in range(skip * self.rows, len(order), self.rows):
                if index == self.total_steps:
                    return
                whole = order[begin : begin + self.rows]
                share = np.array_split(whole, self.world_size)[self.rank]
                weightless = len(share) == 0
                samples = tuple(int(i) for i in (whole[:1] if weightless else share))
                yield Step(index, epoch, samples, int(self.counts[whole].sum()), weightless)
                index += 1
            epoch, skip = epoch + 1, 0

    def longest(self) -> Step:
        """A made-up step of the longest samples, as many as this rank has in any; it belongs to no epoch."""
        order = np.argsort(-self.lengths, kind="stable")[: ceil(self.rows / self.world_size)]
        return Step(0, 0, tuple(int(i) for i in order), int(self.counts[order].sum()))


@dataclass(frozen=True)
class EvalSampler:
    """Every sample once over all ranks, the longest first: padding stays low, and the first batch is the largest.

    Every rank has as many batches as the others, the last one maybe without weight, for some engines meet in each of them.
    """

    lengths: np.ndarray
    counts: np.ndarray
    rows: int
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return ceil(ceil(len(self.lengths) / self.world_size) / self.rows)

    def __iter__(self) -> Iterator[Step]:
        order = np.argsort(-self.lengths, kind="stable")
        own = order[self.rank :: self.world_size]
        for index in range(len(self)):
            share = own[index * self.rows : (index + 1) * self.rows]
            weightless = len(share) == 0
            samples = tuple(int(i) for i in (order[-1:] if weightless else share))
            yield Step(index, 0, samples, int(self.counts[list(samples)].sum()), weightless)
