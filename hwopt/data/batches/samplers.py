"""Samplers: the samples that each rank uses in each step, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from hwopt.data.batches.step_batch import Step
from hwopt.data.mixture import Mixture


@dataclass(frozen=True)
class StepSampler:
    """The training steps of a whole run for one rank.

    Each rank gets a contiguous share of each step. The last step of an epoch has the remaining samples and may be smaller.
    """

    lengths: np.ndarray  # (samples,) tokens
    counts: np.ndarray  # (samples,) labels that the loss counts, or their weights
    order: Callable[[np.ndarray, int, int, int], Sequence[int] | np.ndarray]
    """(lengths, seed, epoch, rows per step) -> sample indexes of the epoch."""
    seed: int
    rows: int  # per step, over all ranks
    total_steps: int
    rank: int = 0
    world_size: int = 1
    start: int = 0  # the first step to yield; above 0 in a resumed run
    mixture: Mixture | None = None  # draws the samples of each epoch, before `order` orders them

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch, the smaller last one included."""
        return ceil(len(self.lengths) / self.rows)

    def __len__(self) -> int:
        return self.total_steps - self.start

    def __iter__(self) -> Iterator[Step]:
        order = np.array([], np.int64)
        for index in range(self.start, self.total_steps):
            epoch, place = divmod(index, self.steps_per_epoch)
            if place == 0 or index == self.start:
                order = self.epoch_order(epoch)
            step = order[place * self.rows : (place + 1) * self.rows]
            share = np.array_split(step, self.world_size)[self.rank]
            weightless = len(share) == 0
            samples = tuple(int(i) for i in (step[:1] if weightless else share))
            yield Step(index, epoch, samples, self.counts[step].sum().item(), weightless)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """The samples of an epoch in their order, (samples,) int64."""
        if self.mixture is None:
            return np.asarray(self.order(self.lengths, self.seed, epoch, self.rows), np.int64)
        drawn: np.ndarray = self.mixture.drawn(self.seed, epoch)
        return drawn[np.asarray(self.order(self.lengths[drawn], self.seed, epoch, self.rows), np.int64)]

    def longest(self) -> Step:
        """A step with the longest samples and this rank's largest number of rows, to try before training; part of no epoch."""
        order = np.argsort(-self.lengths, kind="stable")[: ceil(self.rows / self.world_size)]
        return Step(0, 0, tuple(int(i) for i in order), self.counts[order].sum().item())


def eval_batches(
    lengths: Sequence[int] | np.ndarray, rows: Callable[[int], int], width: Callable[[int], int] = int, world_size: int = 1
) -> Iterator[slice]:
    """The parts of `lengths` (tokens, longest first) that all ranks evaluate together, with `rows` and `width` as in EvalSampler.

    No part has more tokens than the first, so a run that evaluates the first before training needs no more memory later.
    """
    start, most = 0, 0
    while start < len(lengths):
        tokens = max(1, width(int(lengths[start])))
        most = most or rows(tokens) * tokens
        stop = start + max(1, min(rows(tokens), most // tokens)) * world_size
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class EvalSampler:
    """Every sample once over all ranks, longest first: this keeps padding low and makes the first batch the largest.

    All ranks have the same number of batches, because some engines synchronise in each batch; the last one may be weightless.
    """

    lengths: np.ndarray
    counts: np.ndarray
    rows: Callable[[int], int]  # width of a batch -> its most rows on one rank
    width: Callable[[int], int] = int  # tokens of the longest sample of a batch -> the width that it is padded to
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return sum(1 for _ in eval_batches(-np.sort(-self.lengths), self.rows, self.width, self.world_size))

    def __iter__(self) -> Iterator[Step]:
        order = np.argsort(-self.lengths, kind="stable")
        for index, place in enumerate(eval_batches(self.lengths[order], self.rows, self.width, self.world_size)):
            share = order[place][self.rank :: self.world_size]
            weightless = len(share) == 0
            samples = tuple(int(i) for i in (order[-1:] if weightless else share))
            yield Step(index, 0, samples, int(self.counts[list(samples)].sum()), weightless)
