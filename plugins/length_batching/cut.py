"""Split the rows of a step batch, sorted by length, into the micro-batches that take the least time."""

from __future__ import annotations

from collections.abc import Sequence

Cuts = list[tuple[int, int]]
"""(first row, row after the last) of each group of rows that are sorted by length; the longest rows first."""


def cut_by_length(
    lengths: Sequence[int], rows: int, *, tokens: int | None, overhead_tokens: int, host_tokens: int = 0, multiple: int = 1
) -> list[list[int]]:
    """Groups of row indexes, longest rows first. Every row is in exactly one group.

    lengths: tokens of each row. tokens: the maximum of rows x width of a group; None means `rows` x the longest row, the size of
    a micro-batch of `rows` unsorted rows. A row that exceeds this budget is a group of its own.
    overhead_tokens: the cost of one more group for the device, in tokens. host_tokens: tokens that the device computes while the
    host prepares a group. The time of a step, which is minimal, is the larger of padded tokens + groups x overhead_tokens and
    groups x host_tokens. It never exceeds the time of groups of `rows` rows in the given order.
    multiple: each group has a multiple of so many rows, except one of the shortest rows, and those where the budget is smaller.
    """
    import numpy as np

    order = np.argsort(np.asarray(lengths), kind="stable")
    widths = np.maximum(np.asarray(lengths)[order], 1).tolist()  # ascending
    if not widths:
        return []
    budget = tokens if tokens is not None else rows * widths[-1]
    cuts = device_cuts(widths, budget, overhead_tokens, multiple)
    if len(cuts) * host_tokens > device_tokens(widths, cuts, overhead_tokens):
        cuts = host_cuts(widths, budget, overhead_tokens, host_tokens, plain_cuts(widths, budget, rows), most=len(cuts))
    return [order[start:end].tolist() for start, end in cuts]


def device_tokens(widths: Sequence[int], cuts: Cuts, overhead: int) -> int:
    """The padded tokens of all groups and the overhead of each."""
    return sum((end - start) * widths[end - 1] + overhead for start, end in cuts)


def first_start(end: int, width: int, budget: int) -> int:
    """The first row of the largest group that ends before row `end` and is `width` wide."""
    return end - max(1, min(end, budget // width))


def device_cuts(widths: Sequence[int], budget: int, overhead: int, multiple: int) -> Cuts:
    """The groups with the fewest `device_tokens`, of a multiple of so many rows each."""
    import numpy as np

    count = len(widths)
    cost = np.zeros(count + 1)  # cost[j]: the minimum for the j shortest rows
    starts = [0] * (count + 1)
    index = np.arange(count + 1)
    for j in range(1, count + 1):
        width = widths[j - 1]
        first = first_start(j, width, budget)
        # the last group of the j shortest rows is first..j-1, or first+1..j-1, …
        allowed = index[first:j]
        if multiple > 1 and (few := allowed[((j - allowed) % multiple == 0) | (allowed == 0)]).size:
            allowed = few
        candidates = cost[allowed] - allowed * width
        best = int(candidates.argmin())
        starts[j] = int(allowed[best])
        cost[j] = candidates[best] + j * width + overhead
    cuts, end = [], count
    while end > 0:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts


def plain_cuts(widths: Sequence[int], budget: int, rows: int) -> Cuts:
    """Groups of `rows` rows, or of fewer if they would exceed the budget."""
    cuts, end = [], len(widths)
    while end > 0:
        start = max(end - rows, first_start(end, widths[end - 1], budget))
        cuts.append((start, end))
        end = start
    return cuts


def host_cuts(widths: Sequence[int], budget: int, overhead: int, host: int, plain: Cuts, most: int) -> Cuts:
    """The groups that take the least time if the host is the slower side of a step in `most` groups.

    The device does not take longer than for the groups `plain`, so that a faster host does not lose either.
    """
    import numpy as np

    count, allowed = len(widths), device_tokens(widths, plain, overhead)
    most = min(most, max(len(plain), allowed // host))  # with more groups the host takes longer than the plain step
    cost = np.full((count + 1, most + 1), np.inf)  # cost[j, k]: the fewest padded tokens of the j shortest rows in k groups
    cost[0, 0] = 0
    starts = np.zeros((count + 1, most + 1), np.int64)
    index, groups = np.arange(count + 1)[:, None], np.arange(most + 1)
    for j in range(1, count + 1):
        width = widths[j - 1]
        first = first_start(j, width, budget)
        candidates = cost[first:j] + (j - index[first:j]) * width  # (first row of the last group, groups before it)
        best = candidates.argmin(axis=0)
        cost[j, 1:] = candidates[best, groups][:-1]
        starts[j, 1:] = first + best[:-1]
    device = cost[count] + groups * overhead
    number = int(np.where(device <= allowed, np.maximum(device, groups * host), np.inf).argmin())
    cuts, end = [], count
    while end > 0:
        start = int(starts[end, number])
        cuts.append((start, end))
        end, number = start, number - 1
    return cuts
