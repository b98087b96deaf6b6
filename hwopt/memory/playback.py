"""Playback: a step's allocations and releases, given to torch's caching allocator.

The allocator counts a block that it did not split as a whole, so its peak is above the sum of the tensors, and it reserves more
than it gives out. Both depend on the order of events, and the first step leaves other free blocks than it found. So the step is
played until it needs no more memory than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from hwopt.memory.caching_allocator import Block, CachingAllocator, OutOfDeviceMemory
from hwopt.memory.timeline import KINDS, LIMIT, Peak, Scaled, Timeline, largest

STEPS = 3
"""Most steps that are played. The second step reserves more than the first in few models, the third in none seen."""


@dataclass(frozen=True)
class Played:
    """What the allocator counts in a step after the first: `max_memory_allocated` and `max_memory_reserved`."""

    peak: Peak
    reserved: int


def played(timeline: Timeline, limit: float = inf) -> Played:
    """Return the memory of a step that follows others, if the allocator can reserve `limit` bytes.

    A step that fits only because the allocator releases its free segments again in every step counts as too large for `limit`:
    the result is then that of an unlimited device. On a CPU nothing is reserved in advance.
    """
    if not timeline.cached:
        peak = timeline.peak()
        return Played(peak, peak.bytes)
    found = repeated(timeline, CachingAllocator(timeline.expandable))
    assert found is not None, "a device without limit never runs out of memory"
    if found.peak.bytes <= limit < found.reserved:
        return repeated(timeline, CachingAllocator(timeline.expandable, limit)) or found
    return found


def repeated(timeline: Timeline, allocator: CachingAllocator) -> Played | None:
    """Return the memory of the first step that reserves no more than the steps before; None if it does not fit."""
    player = Player(timeline, allocator)
    try:
        for _ in range(STEPS):
            before = allocator.most_reserved, allocator.retries
            peak = player.step()
            if before == (allocator.most_reserved, allocator.retries):
                break
    except OutOfDeviceMemory:
        return None
    return None if allocator.retries > before[1] else Played(peak, allocator.most_reserved)


class Player:
    """Plays one step again and again."""

    def __init__(self, timeline: Timeline, allocator: CachingAllocator) -> None:
        self.timeline, self.allocator = timeline, allocator
        self.sizes: list[int] = np.ceil(timeline.sizes).astype(np.int64).tolist()
        self.events: list[int] = timeline.events[timeline.before :].tolist()
        self.live: dict[int, Block] = {}
        """Storage number -> its block."""

    def step(self) -> Peak:
        """Play one step and return the peak of what is allocated."""
        self.enter()
        allocator, live, sizes = self.allocator, self.live, self.sizes
        held = np.zeros(len(sizes))
        for number, block in live.items():
            held[number] = block.size
        most, at = allocator.allocated, 0
        for place, event in enumerate(self.events):
            if event > 0:
                if size := sizes[event - 1]:
                    block = live[event - 1] = allocator.allocate(size)
                    held[event - 1] = block.size
                    if allocator.allocated > most:
                        most, at = allocator.allocated, place + 1
            elif (freed := live.pop(-event - 1, None)) is not None:
                allocator.release(freed)
        events = self.timeline.events[: self.timeline.before + at]
        numbers = np.abs(events) - 1
        by_kind = np.bincount(self.timeline.kinds[numbers], weights=np.sign(events) * held[numbers], minlength=len(KINDS))
        return Peak(most, {kind: int(value) for kind, value in zip(KINDS, by_kind, strict=True)})

    def enter(self) -> None:
        """Allocate the storages that exist before the step. Blocks of the previous step with the same size replace them."""
        left: defaultdict[int, list[Block]] = defaultdict(list)
        missing = []
        taken = {number: block for number, block in self.live.items() if number < self.timeline.before}
        for number in self.live.keys() - taken.keys():
            left[self.sizes[number]].append(self.live[number])
        for number in range(self.timeline.before):
            if number not in taken and (size := self.sizes[number]):
                if left[size]:
                    taken[number] = left[size].pop(0)
                else:
                    missing.append(number)
        for blocks in left.values():
            for block in blocks:
                self.allocator.release(block)
        for number in missing:
            taken[number] = self.allocator.allocate(self.sizes[number])
        self.live = taken


def max_rows(scaled: Scaled, width: int, budget: float) -> int:
    """Return the most rows of `width` tokens for which the allocator reserves at most `budget` bytes; 0 if one is too many."""
    return largest_played(lambda rows: scaled.at(rows, width), budget)


def max_width(scaled: Scaled, rows: int, budget: float, limit: int = LIMIT) -> int:
    """Return the largest width, in tokens, for which the allocator reserves at most `budget` bytes; 0 if one is too many."""
    return largest_played(lambda width: scaled.at(rows, width), budget, limit)


def largest_played(at: Callable[[int], Timeline], budget: float, limit: int = LIMIT) -> int:
    """Return the largest number from 0 to `limit` whose timeline fits into `budget` bytes, within 1 %.

    A playback takes a fraction of a second, a peak of tensors milliseconds. The latter is a bound, and with the reserved memory
    of the numbers played so far it gives the next one to play.
    """

    def most(tensors: float) -> int:
        return largest(lambda number: at(number).peak().bytes <= tensors, limit)

    low, high = 0, most(budget) + 1
    number, share = high - 1, 1.0
    while high - low > max(1, low // 100):
        found = played(at(number), budget)
        if found.reserved <= budget:
            low = number
        else:
            high, share = number, min(share, at(number).peak().bytes / found.reserved)
        guess = most(budget * share)
        number = guess if low < guess < high else (low + high) // 2
    return low
