"""Playback: a step's allocations and releases, given to torch's caching allocator.

The allocator counts a block that it did not split as a whole, so its peak is above the sum of the tensors, and it reserves more
than it gives out. Both depend on the order of events, and the first step leaves other free blocks than it found. So the step is
played until it needs no more memory than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hwopt.memory.allocator.caching_allocator import Block, CachingAllocator
from hwopt.memory.trace.timeline import KINDS, LIMIT, Peak, Timeline, largest

STEPS = 3
"""Most steps that are played. The second step reserves more than the first in few models, the third in none seen."""


State = Literal["exists", "missing", "created"]
"""Whether the optimizer's state exists before a step, does not exist, or is created in its update."""


@dataclass(frozen=True)
class PlayedRun:
    """What the allocator counts in a run that tries an evaluation, trains, evaluates and trains on.

    The peaks are torch's `max_memory_allocated` in a step that follows others of its kind.
    """

    train: Peak
    eval: Peak
    reserved: int
    """`max_memory_reserved`. On a CPU nothing is reserved in advance."""
    pool: int = 0
    """The part of `reserved` that the run does not need without the memory pool of its graphs."""


PlayedSteps = tuple[Timeline, Timeline, Timeline | None, Iterable[Timeline]]
"""The arguments of `played_run`."""


def played_run(
    train: Timeline, evaluation: Timeline, pooled: Timeline | None = None, earlier: Iterable[Timeline] = ()
) -> PlayedRun:
    """Return the memory of a run. hwopt tries the largest evaluation batch before step 1.

    A later evaluation finds other free blocks: the steps before it have split the large ones for what they keep.
    `pooled`: the largest training step whose passes have a memory pool of their own (`MemorySpec.pooled_tokens`).
    `earlier`: smaller training steps before `train`, the largest one, which cannot use the segments of their large tensors.
    """
    if not train.cached:
        peaks = train.peak(), evaluation.peak()
        return PlayedRun(*peaks, max(peak.bytes for peak in peaks))
    allocator = CachingAllocator(train.expandable)
    tried = Player(evaluation, allocator)
    tried.step("missing" if train.late_state else "exists")
    training = tried
    state: State = "created" if train.late_state else "exists"
    for step in earlier:
        training = Player(step, allocator, training)
        training.step(state)
        state = "exists"
    training = Player(train, allocator, training)
    if state == "created":
        training.step(state)
    peak = training.steady_step()
    evaluating = Player(evaluation, allocator, training)
    eval_peak = evaluating.step()
    Player(train, allocator, evaluating).steady_step()
    reserved = allocator.reserved
    if pooled is None:
        return PlayedRun(peak, eval_peak, reserved)
    pool = max(0, reserved_beside_pool(train, evaluation, pooled) - reserved)
    kept = sum(int(pooled.sizes[number]) for number in summed_gradients(pooled))
    parts = eval_peak.parts | {"gradients": eval_peak.parts["gradients"] + kept}
    return PlayedRun(peak, Peak(eval_peak.bytes + kept, parts), reserved + pool, pool)


def summed_gradients(step: Timeline) -> list[int]:
    """Return the storages of the gradients that the micro-batches of a step add to; none if it has one micro-batch.

    Graphs hold their addresses, so they stay allocated between the steps.
    """
    first = step.events[step.before : step.phases[0]]
    numbers = first[first > 0] - 1
    return [int(number) for number in numbers[step.kinds[numbers] == KINDS.index("gradients")]]


def reserved_beside_pool(train: Timeline, evaluation: Timeline, pooled: Timeline) -> int:
    """Return what is reserved once the passes of `pooled` are captured into a pool of their own, which keeps its memory.

    torch returns the free segments of the common pool before a capture. After it the common pool serves evaluation, the update,
    and `train` if that is another step, which is too large to be captured.
    """
    own, common = CachingAllocator(pooled.expandable), CachingAllocator(train.expandable)
    evaluating = Player(evaluation, common)
    evaluating.step()
    training = Player(train, common, evaluating)
    if train is pooled:
        training.enter()
    else:
        training.steady_step()
    captured: dict[int, Block] = {}
    passes = int(pooled.phases[1]) - pooled.before
    sizes = np.ceil(pooled.sizes).astype(np.int64).tolist()
    for place, event in enumerate(pooled.events[pooled.before :].tolist()):
        number = abs(event) - 1
        if number in captured:
            own.release(captured.pop(number))
        elif event > 0 and place < passes and sizes[number]:
            captured[number] = own.allocate(sizes[number])
        elif train is pooled and event > 0 and sizes[number]:
            training.live[number] = common.allocate(sizes[number])
        elif train is pooled and event < 0 and number in training.live:
            common.release(training.live.pop(number))
    return own.reserved + common.reserved


def added_gradients(step: Timeline, summed: Collection[int]) -> set[int]:
    """Return the storages that the backward pass of `step` adds to the gradients `summed`."""
    passes = int(step.ends[step.update - 1]) if step.update else 0
    places = np.flatnonzero(np.isin(step.operands[:passes], list(summed)))
    found = set()
    for operation in np.unique(np.searchsorted(step.ends, places, side="right")).tolist():
        begin = int(step.ends[operation - 1]) if operation else 0
        operands = set(step.operands[begin : int(step.ends[operation])].tolist())
        other = operands - set(summed)
        if len(operands) == 2 and len(other) == 1:
            found |= {number for number in other if number >= step.before}
    return found


class Player:
    """Plays one step again and again."""

    def __init__(self, timeline: Timeline, allocator: CachingAllocator, before: Player | None = None) -> None:
        """`before`: the player of earlier steps, whose storages this one takes over."""
        self.timeline, self.allocator = timeline, allocator
        self.sizes: list[int] = np.ceil(timeline.sizes).astype(np.int64).tolist()
        self.events: list[int] = timeline.events[timeline.before :].tolist()
        self.state = set(np.flatnonzero(timeline.kinds[: timeline.before] == KINDS.index("optimizer_state")).tolist())
        self.update = int(timeline.phases[1]) - timeline.before
        """Place of the first event of the update in `events`."""
        self.summed = frozenset(summed_gradients(timeline))
        self.added = added_gradients(timeline, self.summed) if self.summed else set()
        if sorted(self.sizes[number] for number in self.summed) != sorted(self.sizes[number] for number in self.added):
            self.summed, self.added = frozenset(), set()  # of an engine, which adds shards of them
        self.live: dict[int, Block] = {}
        """Storage number -> its block."""
        self.left = [] if before is None else [(before.sizes[number], block) for number, block in before.live.items()]
        """(size, block) of each storage of earlier steps that may replace one of this step."""

    def steady_step(self) -> Peak:
        """Play steps until one reserves no more than the one before, and return its peak."""
        for _ in range(STEPS):
            before = self.allocator.reserved
            peak = self.step()
            if self.allocator.reserved == before:
                break
        return peak

    def step(self, state: State = "exists") -> Peak:
        """Play one step and return the peak of what is allocated."""
        made = self.first_micro_batch(has_state=state == "exists") if self.summed else {}
        self.enter(has_state=state == "exists")
        allocator, live, sizes = self.allocator, self.live, self.sizes
        held = np.zeros(len(sizes))
        for number, block in live.items():
            held[number] = block.size
        most, at = allocator.allocated, 0
        for place, event in enumerate(self.events):
            if state == "created" and place == self.update:
                live |= {number: allocator.allocate(sizes[number]) for number in sorted(self.state) if sizes[number]}
            if event > 0:
                if size := sizes[event - 1]:
                    own = made.get(size) if event - 1 in self.summed else None
                    block = live[event - 1] = own.pop(0) if own else allocator.allocate(size)
                    held[event - 1] = block.size
                    if allocator.allocated > most:
                        most, at = allocator.allocated, place + 1
            elif (freed := live.pop(-event - 1, None)) is not None:
                allocator.release(freed)
        events = self.timeline.events[: self.timeline.before + at]
        numbers = np.abs(events) - 1
        by_kind = np.bincount(self.timeline.kinds[numbers], weights=np.sign(events) * held[numbers], minlength=len(KINDS))
        return Peak(most, {kind: int(value) for kind, value in zip(KINDS, by_kind, strict=True)})

    def first_micro_batch(self, has_state: bool) -> dict[int, list[Block]]:
        """Play both passes of a step's first micro-batch, and return the blocks of its gradients by size.

        The trace is that of a later one, which adds to gradients that exist. The first one keeps what it would add. These blocks
        lie between those of its activations, where the later ones need them.
        """
        self.enter(has_state)
        made: defaultdict[int, list[Block]] = defaultdict(list)
        for event in self.events[: self.update]:
            number = abs(event) - 1
            if event > 0:
                if number not in self.summed and self.sizes[number]:
                    self.live[number] = self.allocator.allocate(self.sizes[number])
            elif (block := self.live.pop(number, None)) is not None:
                if number in self.added:
                    made[self.sizes[number]].append(block)
                else:
                    self.allocator.release(block)
        return made

    def enter(self, has_state: bool = True) -> None:
        """Allocate the storages that exist before the step. Blocks that earlier steps left replace storages of the same size."""
        exists = set(range(self.timeline.before)) - (set() if has_state else self.state)
        taken = {number: block for number, block in self.live.items() if number < self.timeline.before}
        self.left += [(self.sizes[number], self.live[number]) for number in self.live.keys() - taken.keys()]
        left: defaultdict[int, list[Block]] = defaultdict(list)
        for size, block in self.left:
            left[size].append(block)
        missing = []
        for number in sorted(exists):
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
        self.live, self.left = taken, []


def largest_played(at: Callable[[int], PlayedSteps], budget: float, limit: int = LIMIT) -> int:
    """Return the largest number from 0 to `limit` whose run fits into `budget` bytes, within 1 %.

    `at`: the arguments of `played_run` for a number.

    A playback takes a fraction of a second, a peak of tensors milliseconds. The latter is a bound, and with the reserved memory
    of the numbers played so far it gives the next one to play.
    """

    def tensors(number: int) -> int:
        return max(timeline.peak().bytes for timeline in at(number)[:2])

    def most(budget: float) -> int:
        return largest(lambda number: tensors(number) <= budget, limit)

    low, high = 0, most(budget) + 1
    number, share = high - 1, 1.0
    while high - low > max(1, low // 100):
        reserved = played_run(*at(number)).reserved
        if reserved <= budget:
            low = number
        else:
            high, share = number, min(share, tensors(number) / reserved)
        guess = most(budget * share)
        number = guess if low < guess < high else (low + high) // 2
    return low
