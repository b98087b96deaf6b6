"""The workspace of CUDA's kernel that sums the columns of a matrix, which computes the gradient of a bias.

Blocks of 32 x 4 threads sum 4 columns a thread. If a thread has many values, several blocks share a column and exchange partial
sums; torch reserves room for those of every thread. So the size is not a power of the number of rows: it grows with it, stays
constant when the card has no more threads, and grows again. Source: torch's aten/src/ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwopt.hardware.device import Hardware

THREADS = 128
"""Threads of a block of the reduction kernel that sums 4 columns a thread."""


class ColumnSum(NamedTuple):
    """A sum over all dimensions of a tensor but the last."""

    columns: int
    rows: int
    """Values of a column."""


def threads_per_multiprocessor(hardware: Hardware) -> int:
    """Return the most resident threads of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""
    fewer = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
    return fewer.get(hardware.compute_capability or (0, 0), 2048)


def workspace_bytes(columns: Any, rows: Any, multiprocessors: int, threads: int) -> NDArray[np.float64]:
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
    found: NDArray[np.float64] = np.where(shares, 4 * columns * shared_by * width * 4, 0.0)
    return found


def largest_power_of_two(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest power of two that is at most each number."""
    powers: NDArray[np.float64] = 2.0 ** np.floor(np.log2(numbers))
    return powers
