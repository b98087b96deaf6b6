"""Timeline: what one step allocates and frees, in order, and the peak memory for micro-batches of any size.

A step runs the same operations for every size of micro-batch. So the bytes of each storage are constant, or proportional to the
rows, to the width, or to the width squared (a score matrix), and likewise to the width of the targets. A second trace tells
which. After that a peak is a sum over the events, and the largest micro-batch that fits is found in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwopt.hardware.device import Hardware
from hwopt.planning.memory_plan import SEARCHED

KINDS = ("weights", "gradients", "optimizer_state", "masters", "activations", "temporary")
"""What a storage is for. Temporary: allocated in the backward pass or the optimizer's step, except gradients."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Peak:
    """The point of a timeline at which most memory is allocated."""

    bytes: int
    parts: dict[str, int]
    """Bytes by kind at that point; their sum is `bytes`."""


@dataclass(frozen=True)
class Timeline:
    events: NDArray[np.int64]  # (events,) storage number + 1 for an allocation, its negative for a release
    sizes: Numbers  # (storages,) bytes
    kinds: NDArray[np.int64]  # (storages,) index into KINDS
    operands: NDArray[np.int64]  # (operands of all operations,) storage numbers, read or written
    ends: NDArray[np.int64]  # (operations,) index behind the last operand of each
    flops: Numbers  # (operations,)
    dtypes: NDArray[np.str_]  # (operations,) dtype of the first operand
    update: int
    """Index of the first operation of the optimizer's update."""
    tf32: bool
    """Whether fp32 matrix products may use TF32."""
    granularity: int
    """The allocator rounds every size up to a multiple of this number of bytes."""
    phases: NDArray[np.int64]  # (3,) index of the first event of the backward pass, of the update, and of the forward pass
    before: int = 0
    """Number of storages that exist before the step; the first events allocate them."""
    cached: bool = False
    """Whether the allocator is torch's caching allocator of CUDA."""
    expandable: bool = False
    """Whether the caching allocator has expandable segments."""
    host_sizes: Numbers = field(default_factory=lambda: np.zeros(0))
    """(tensors,) bytes of each tensor that the step keeps in pinned host memory until its backward pass."""
    column_sums: Numbers = field(default_factory=lambda: np.zeros((0, 2)))
    """(storages, 2) columns and rows of the sum whose workspace the storage is; zeros for other storages."""
    processors: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    """(2,) multiprocessors of the card, and threads of each."""
    late_state: bool = False
    """Whether the optimizer creates its state in the first update, and not before step 1."""

    def peak(self) -> Peak:
        """Return the peak of the tensors' rounded sizes, by kind; `playback` adds what the allocator does."""
        number = np.abs(self.events) - 1
        signed = np.sign(self.events) * (np.ceil(self.sizes / self.granularity) * self.granularity)[number]
        allocated = np.cumsum(signed)
        at = int(allocated.argmax())
        by_kind = np.bincount(self.kinds[number[: at + 1]], weights=signed[: at + 1], minlength=len(KINDS))
        return Peak(int(allocated[at]), {kind: int(value) for kind, value in zip(KINDS, by_kind, strict=True)})

    def host_bytes(self) -> float:
        """Return the pinned host memory: torch's allocator rounds each size up to a power of two."""
        sizes = self.host_sizes[self.host_sizes > 0]
        return float((2 ** np.ceil(np.log2(sizes))).sum())

    def bytes_moved(self) -> Numbers:
        """Return the bytes that each operation reads and writes."""
        summed = np.concatenate([[0.0], np.cumsum(self.sizes[self.operands])])
        return np.diff(summed[np.concatenate([[0], self.ends])])

    def with_fractions(self, fractions: Mapping[str, float], update_fraction: float | None = None) -> Timeline:
        """Return the timeline of one rank that holds a fraction of each kind.

        `update_fraction` applies to storages that only the optimizer's update uses.
        """
        share = np.array([fractions.get(kind, 1.0) for kind in KINDS])[self.kinds]
        if update_fraction is not None:
            before, there = np.split(self.operands, self.ends[self.update - 1 : self.update])
            storages = np.arange(len(self.sizes))
            share = np.where(np.isin(storages, there) & ~np.isin(storages, before), update_fraction, share)
        return replace(self, sizes=self.sizes * share)

    def same_program(self, other: Timeline) -> bool:
        """Whether both ran the same operations on the same storages. Releases may differ in order."""
        ours, theirs = (timeline.events[timeline.events > 0] for timeline in (self, other))
        return np.array_equal(ours, theirs) and np.array_equal(self.operands, other.operands)


POWERS = np.array([(rows, width, target) for rows in (0, 1) for width in (0, 1, 2) for target in range(3 - width)], np.float64)
"""Powers of rows, width and width of the targets to which a value may be proportional."""


def fitted_powers(base: Numbers, other: Numbers, ratios: Numbers) -> Numbers:
    """Return the (values, 3) of POWERS that best explain `other`, traced with `ratios` times the sizes."""
    known = (base > 0) & (other > 0)
    found = np.log(np.divide(other, base, out=np.ones_like(base), where=known), where=known, out=np.zeros_like(base))
    powers: Numbers = POWERS[np.abs(found[:, None] - POWERS @ np.log(ratios)).argmin(axis=1)]
    return powers


@dataclass(frozen=True)
class Scaled:
    """A timeline as a function of rows, width and width of the targets, from traces at two points that differ in all."""

    base: Timeline
    shape: Sequence[int]
    """Rows, width, and width of the targets of an encoder-decoder; 1 for other tasks."""
    sizes: Numbers
    """Powers of each storage, of each operation's `flops`, and of the rows of column sums, which determine their workspaces."""
    flops: Numbers
    summed_rows: Numbers

    @classmethod
    def fit(cls, base: Timeline, shape: Sequence[int], other: Timeline, other_shape: Sequence[int]) -> Scaled:
        """Fit the powers to two traces. Raises ValueError if they ran other operations or no powers explain the second."""
        if not base.same_program(other):
            raise ValueError("a second size runs other operations")
        pairs = (base.sizes, other.sizes), (base.flops, other.flops), (base.column_sums[:, 1], other.column_sums[:, 1])
        scaled = cls(base, shape, *(fitted_powers(*pair, np.divide(other_shape, shape)) for pair in pairs))
        if not np.isclose(scaled.at(*other_shape).peak().bytes, other.peak().bytes, rtol=0.01):
            raise ValueError("the sizes are not powers of rows and width")
        return scaled

    def at(self, rows: int, width: int, target: int | None = None) -> Timeline:
        """Return the timeline of a micro-batch of `rows` x `width` tokens, with targets as wide as traced if not of `target`."""
        ratios = np.divide((rows, width, target or self.shape[2]), self.shape)
        sizes = self.base.sizes * np.prod(ratios**self.sizes, axis=1)
        columns, summed = self.base.column_sums.T
        found = columns > 0
        if found.any():
            summed = summed[found] * np.prod(ratios ** self.summed_rows[found], axis=1)
            sizes[found] = workspace_bytes(columns[found], summed, *self.base.processors.tolist())
        return replace(
            self.base,
            sizes=sizes,
            flops=self.base.flops * np.prod(ratios**self.flops, axis=1),
            host_sizes=self.base.host_sizes * ratios[0] * ratios[1],  # activations: (rows, width, hidden size)
        )

    def with_fractions(self, fractions: Mapping[str, float], update_fraction: float | None = None) -> Scaled:
        """Return the same with the base timeline's `with_fractions`."""
        return replace(self, base=self.base.with_fractions(fractions, update_fraction))


def largest(fits: Callable[[int], bool], limit: int = SEARCHED) -> int:
    """Return the largest number from 0 to `limit` that fits, if every smaller one fits (bisection)."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


THREADS = 128
"""Threads of a block of the reduction kernel that sums 4 columns a thread."""


class ColumnSum(NamedTuple):
    """A sum over all dimensions of a tensor but the last, which computes the gradient of a bias.

    CUDA's kernel sums with blocks of 32 x 4 threads, 4 columns a thread. If a thread has many values, several blocks share a
    column and exchange partial sums; torch reserves room for those of every thread. So the size of this workspace is not a power
    of the number of rows: it grows with it, stays constant when the card has no more threads, and grows again.
    Source: torch's aten/src/ATen/native/cuda/Reduce.cuh.
    """

    columns: int
    rows: int
    """Values of a column."""


def threads_per_multiprocessor(hardware: Hardware) -> int:
    """Return the most resident threads of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""
    fewer = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
    return fewer.get(hardware.compute_capability or (0, 0), 2048)


def workspace_bytes(columns: Any, rows: Any, multiprocessors: int, threads: int) -> Numbers:
    """Return the bytes of the workspace for sums of these `columns` and `rows`, as numbers or arrays; 0 for 0 columns.

    `threads`: those of a multiprocessor.
    """
    columns, rows = np.asarray(columns, np.float64), np.maximum(np.asarray(rows, np.float64), 1)
    vectors = np.maximum(columns // 4, 1)
    width = np.minimum(32, largest_power_of_two(vectors))
    height = np.minimum(THREADS // width, largest_power_of_two(rows))
    values = np.ceil(rows / height)
    blocks, wanted = np.ceil(vectors / width), multiprocessors * (threads // (width * height))
    shared_by = np.maximum(np.minimum(np.ceil(wanted / blocks), np.ceil(values / 16)), np.ceil(values / 256))
    shares = (columns > 0) & (columns % 4 == 0) & (values >= 256) & (blocks <= wanted) & (shared_by > 1)
    found: Numbers = np.where(shares, 4 * columns * shared_by * width * 4, 0.0)
    return found


def largest_power_of_two(numbers: Numbers) -> Numbers:
    """Return the largest power of two that is at most each number."""
    powers: Numbers = 2.0 ** np.floor(np.log2(numbers))
    return powers
