"""The gradients of a traced micro-batch: which storages hold them, what is added to them, and when they are cast to fp32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from hwopt.memory.trace.timeline import KINDS, Timeline

GRADIENTS = KINDS.index("gradients")


def summed_gradients(step: Timeline) -> list[int]:
    """Return the storages of the gradients that the micro-batches of a step add to; none if it has one micro-batch.

    Graphs hold their addresses, so they stay allocated between the steps.
    """
    first = step.events[step.before : step.phases[2]]  # not those that a fused loss makes in the forward pass
    numbers = first[first > 0] - 1
    return [int(number) for number in numbers[step.kinds[numbers] == GRADIENTS]]


def operations_with(step: Timeline, numbers: Collection[int]) -> Iterator[set[int]]:
    """Yield the storages of each operation of the passes that uses one of the storages `numbers`."""
    passes = int(step.ends[step.update - 1]) if step.update else 0
    places = np.flatnonzero(np.isin(step.operands[:passes], list(numbers)))
    for operation in np.unique(np.searchsorted(step.ends, places, side="right")).tolist():
        begin = int(step.ends[operation - 1]) if operation else 0
        yield set(step.operands[begin : int(step.ends[operation])].tolist())


def added_gradients(step: Timeline, summed: Collection[int]) -> set[int]:
    """Return the storages that the backward pass of `step` adds to the gradients `summed`."""
    found = set()
    for operands in operations_with(step, summed):
        other = operands - set(summed)
        if len(operands) == 2 and len(other) == 1:
            found |= {number for number in other if number >= step.before}
    return found


def late_casts(step: Timeline, summed: Collection[int], added: Collection[int], copies: Collection[int]) -> list[int]:
    """Return the events of the casts of gradients to fp32, as a later micro-batch of a step makes them.

    Autocast casts the weights in the first one, which keeps the `copies`, and autograd computes first what was called last. So
    each gradient in half precision waits for its cast until the end of the backward pass. The result is added to what the same
    weight got elsewhere in the micro-batch, as tied embeddings do, which then waits too.
    """
    kept = {float(step.sizes[number]) for number in copies}
    used = defaultdict[int, list[int]](list)  # number of `added` -> the other storage of its operations, in order
    for operands in operations_with(step, added):
        for number in operands & set(added) if len(operands) == 2 else ():
            used[number] += operands - {number}
    events = []
    for number in sorted(used):
        half, *others = used[number]
        if half >= step.before and step.sizes[number] == 2 * step.sizes[half] and step.sizes[half] in kept:
            elsewhere = [other for other in others if other not in summed][:1]
            events += [number + 1, *(-each - 1 for each in (half, number, *elsewhere))]
    return events
