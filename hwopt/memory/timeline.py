"""Timeline: what one step allocates and frees, in order, and the peak that follows for micro-batches of any size.

A step does the same operations whatever the size of its micro-batch, so the bytes of each storage are a constant, or go with the
rows, with the width, or with its square (a score matrix). A second trace tells which; after that a peak is a sum along the list
of events, and the largest micro-batch that fits is found in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

KINDS = ("weights", "gradients", "optimizer_state", "masters", "activations", "temporary")
"""What a storage is for. Temporary: made in the backward pass or the optimizer's step, gradients apart."""

MOST = 1 << 20
"""Rows or tokens; nobody asks for more."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Peak:
    """The highest point of a timeline."""

    bytes: int
    parts: dict[str, int]
    """Bytes by kind at that point; their sum is `bytes`."""


@dataclass(frozen=True)
class Timeline:
    events: NDArray[np.int64]  # (events,) storage number + 1 where one is allocated, its negative where it is freed
    sizes: Numbers  # (storages,) bytes
    kinds: NDArray[np.int64]  # (storages,) index into KINDS
    operands: NDArray[np.int64]  # (operands of all operations,) storage numbers, read or written
    ends: NDArray[np.int64]  # (operations,) where each one's operands end
    flops: Numbers  # (operations,)
    dtypes: NDArray[np.str_]  # (operations,) of the first operand
    update: int
    """The first operation of the optimizer's update."""
    tf32: bool
    """Whether fp32 products may take TF32."""
    granularity: int
    """The allocator rounds every size up to a multiple of it, in bytes."""

    def peak(self) -> Peak:
        number = np.abs(self.events) - 1
        signed = np.sign(self.events) * (np.ceil(self.sizes / self.granularity) * self.granularity)[number]
        held = np.cumsum(signed)
        at = int(held.argmax())
        by_kind = np.bincount(self.kinds[number[: at + 1]], weights=signed[: at + 1], minlength=len(KINDS))
        return Peak(int(held[at]), {kind: int(value) for kind, value in zip(KINDS, by_kind, strict=True)})

    def moved(self) -> Numbers:
        """Bytes that each operation reads and writes."""
        summed = np.concatenate([[0.0], np.cumsum(self.sizes[self.operands])])
        return np.diff(summed[np.concatenate([[0], self.ends])])

    def spread(self, shares: Mapping[str, float], in_update: float | None = None) -> Timeline:
        """With `shares` of the sizes by kind, and `in_update` of those of all that is used in the optimizer's update only."""
        share = np.array([shares.get(kind, 1.0) for kind in KINDS])[self.kinds]
        if in_update is not None:
            before, there = np.split(self.operands, self.ends[self.update - 1 : self.update])
            storages = np.arange(len(self.sizes))
            share = np.where(np.isin(storages, there) & ~np.isin(storages, before), in_update, share)
        return replace(self, sizes=self.sizes * share)

    def same_program(self, other: Timeline) -> bool:
        """The same operations on the same storages; what autograd frees at once it frees in any order."""
        ours, theirs = (timeline.events[timeline.events > 0] for timeline in (self, other))
        return np.array_equal(ours, theirs) and np.array_equal(self.operands, other.operands)


@dataclass(frozen=True)
class Powers:
    """How values go with rows and width: of each entry, the power of either."""

    of_rows: Numbers
    of_width: Numbers

    @classmethod
    def between(cls, base: Numbers, other: Numbers, rows: float, width: float) -> Powers:
        """The powers that bring `base` nearest to `other`, where rows and width are `rows` and `width` times as many."""
        known = (base > 0) & (other > 0)
        found = np.log(np.divide(other, base, out=np.ones_like(base), where=known), where=known, out=np.zeros_like(base))
        pairs = np.array([(a, b) for a in (0, 1) for b in (0, 1, 2)], np.float64)
        nearest = np.abs(found[:, None] - pairs @ np.log([rows, width])).argmin(axis=1)
        return cls(pairs[nearest, 0], pairs[nearest, 1])

    def factor(self, rows: float, width: float) -> Numbers:
        factor: Numbers = rows**self.of_rows * width**self.of_width
        return factor


@dataclass(frozen=True)
class Scaled:
    """A timeline as a function of rows and width, from traces at two points that differ in both."""

    base: Timeline
    rows: int
    width: int
    sizes: Powers
    flops: Powers

    @classmethod
    def fit(cls, base: Timeline, rows: int, width: int, other: Timeline, other_rows: int, other_width: int) -> Scaled:
        """Raises ValueError where the two did not run the same operations, or the second is no such function of the first."""
        if not base.same_program(other):
            raise ValueError("other sizes run other operations")
        ratios = other_rows / rows, other_width / width
        sizes = Powers.between(base.sizes, other.sizes, *ratios)
        scaled = cls(base, rows, width, sizes, Powers.between(base.flops, other.flops, *ratios))
        if not np.isclose(scaled.at(other_rows, other_width).peak().bytes, other.peak().bytes, rtol=0.01):
            raise ValueError("the sizes do not go with powers of rows and width")
        return scaled

    def at(self, rows: int, width: int) -> Timeline:
        """The timeline of micro-batches of `rows` x `width` tokens."""
        ratios = rows / self.rows, width / self.width
        return replace(
            self.base, sizes=self.base.sizes * self.sizes.factor(*ratios), flops=self.base.flops * self.flops.factor(*ratios)
        )

    def held(self, shares: Mapping[str, float], in_update: float | None = None) -> Scaled:
        """The same where only a part of some kinds (name -> share) lies on the device, and of what only the update uses."""
        return replace(self, base=self.base.spread(shares, in_update))

    def max_rows(self, width: int, budget: float) -> int:
        """The most rows of `width` tokens whose peak is within `budget` bytes; 0 where not even one is."""
        return largest(lambda rows: self.at(rows, width).peak().bytes <= budget)

    def most_width(self, rows: int, budget: float, most: int = MOST) -> int:
        """The longest rows, in tokens, whose peak is within `budget` bytes; 0 where none is."""
        return largest(lambda width: self.at(rows, width).peak().bytes <= budget, most)


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest whole number from 0 to `most` that fits, where all smaller ones do."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
