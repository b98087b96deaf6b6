"""Playback: a step's allocations and releases, given to torch's caching allocator.

The allocator counts a block that it did not split as a whole, so its peak is above the sum of the tensors, and it reserves more
than it gives out. Both depend on the order of events, and the first step leaves other free blocks than it found. So the step is
played until it needs no more memory than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hwopt.memory.allocator.caching_allocator import Block, CachingAllocator
from hwopt.memory.allocator.gradients import GRADIENTS, added_gradients, late_casts, summed_gradients
from hwopt.memory.trace.timeline import KINDS, Peak, Timeline, largest
from hwopt.planning.memory_plan import SEARCHED

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


PlayedSteps = tuple[Sequence[Timeline], Sequence[Timeline], Timeline | None, Iterable[Sequence[Timeline]]]
"""The arguments of `played_run`."""


def played_run(
    largest: Sequence[Timeline],
    evaluations: Sequence[Timeline],
    pooled: Timeline | None = None,
    steps: Iterable[Sequence[Timeline]] = (),
) -> PlayedRun:
    """Return the memory of a run. hwopt tries the first evaluation batch, the largest, before step 1.

    A later evaluation finds other free blocks: the steps before it have split the large ones for what they keep.
    `largest`: the micro-batches of the largest step. `evaluations`: the batches of an evaluation, in order.
    `pooled`: the largest training step whose passes have a memory pool of their own (`MemorySpec.pooled_tokens`).
    `steps`: the micro-batches of steps of the run. They leave segments that are too small for the tensors of larger ones.
    """
    train = largest[0]
    if not train.cached:
        peaks = highest(each.peak() for each in largest), highest(each.peak() for each in evaluations)
        return PlayedRun(*peaks, max(peak.bytes for peak in peaks))
    allocator = CachingAllocator(train.expandable)
    player = Player(evaluations[0], allocator)
    player.micro_batch("missing" if train.late_state else "exists")
    state: State = "created" if train.late_state else "exists"
    found, evaluated = [], []
    for step in steps:
        player, peak = played_step(player, step, state)
        found.append(peak)
        state = "exists"
    if state == "created":
        player, _ = played_step(player, largest, state)
    player, peak = steady_step(player, largest)
    for batch in evaluations:
        player, eval_peak = played_step(player, [batch])
        evaluated.append(eval_peak)
    steady_step(player, largest)
    peak, eval_peak = highest([*found, peak]), highest(evaluated)
    reserved = allocator.reserved
    if pooled is None:
        return PlayedRun(peak, eval_peak, reserved)
    pool = max(0, reserved_beside_pool(largest, evaluations[0], pooled) - reserved)
    kept = sum(int(pooled.sizes[number]) for number in summed_gradients(pooled))
    parts = eval_peak.parts | {"gradients": eval_peak.parts["gradients"] + kept}
    return PlayedRun(peak, Peak(eval_peak.bytes + kept, parts), reserved + pool, pool)


def highest(peaks: Iterable[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.bytes)


def reserved_beside_pool(largest: Sequence[Timeline], evaluation: Timeline, pooled: Timeline) -> int:
    """Return what is reserved once the passes of `pooled` are captured into a pool of their own, which keeps its memory.

    torch returns the free segments of the common pool before a capture. After it the common pool serves evaluation, the update,
    and the `largest` step if that has other micro-batches, which are too large to be captured.
    """
    own, common = CachingAllocator(pooled.expandable), CachingAllocator(pooled.expandable)
    evaluating = Player(evaluation, common)
    evaluating.micro_batch()
    training = Player(pooled, common, evaluating)
    all_captured = any(micro_batch is pooled for micro_batch in largest)
    if all_captured:
        training.enter()
    else:
        training, _ = steady_step(evaluating, largest)
    captured: dict[int, Block] = {}
    passes = int(pooled.phases[1]) - pooled.before
    sizes = np.ceil(pooled.sizes).astype(np.int64).tolist()
    for place, event in enumerate(pooled.events[pooled.before :].tolist()):
        number = abs(event) - 1
        if number in captured:
            own.release(captured.pop(number))
        elif event > 0 and place < passes and sizes[number]:
            captured[number] = own.allocate(sizes[number])
        elif all_captured and event > 0 and sizes[number]:
            training.live[number] = common.allocate(sizes[number])
        elif all_captured and event < 0 and number in training.live:
            common.release(training.live.pop(number))
    return own.reserved + common.reserved


class Player:
    """Plays one micro-batch."""

    def __init__(self, timeline: Timeline, allocator: CachingAllocator, before: Player | None = None) -> None:
        """`before`: the player of earlier steps, whose storages this one takes over."""
        self.timeline, self.allocator = timeline, allocator
        self.sizes: list[int] = np.ceil(timeline.sizes).astype(np.int64).tolist()
        self.kinds: list[int] = timeline.kinds.tolist()
        self.events: list[int] = timeline.events[timeline.before :].tolist()
        self.state = set(np.flatnonzero(timeline.kinds[: timeline.before] == KINDS.index("optimizer_state")).tolist())
        self.update = int(timeline.phases[1]) - timeline.before
        """Place of the first event of the update in `events`."""
        self.summed = frozenset(summed_gradients(timeline))
        self.added = added_gradients(timeline, self.summed) if self.summed else set()
        if sorted(self.sizes[number] for number in self.summed) != sorted(self.sizes[number] for number in self.added):
            self.summed, self.added = frozenset(), set()  # of an engine, which adds shards of them
        self.copies = self.copies_of_weights() if self.summed else frozenset()
        self.live: dict[int, Block] = {}
        """Storage number -> its block."""
        self.carried: dict[int, Block] = {} if before is None else before.carried
        """What the next micro-batch of the step finds: gradients, which it adds to, and copies of weights."""
        self.left = [] if before is None else [(before.sizes[number], block) for number, block in before.live.items()]
        """(size, block) of each storage of earlier steps that may replace one of this step."""

    def copies_of_weights(self) -> frozenset[int]:
        """Return the storages of the forward pass that live until both passes have ended.

        They are those of `hwopt.training.accumulation.weights_cast_once`, which the micro-batches of a step share. A fused loss
        computes gradients in the forward pass; those of tied embeddings live as long, and are not shared.
        """
        passes, forward = self.events[: self.update], self.events[: int(self.timeline.phases[0]) - self.timeline.before]
        last_allocation = max((place for place, event in enumerate(passes) if event > 0), default=0)
        freed_after = {-event for event in passes[last_allocation:]}
        return frozenset(event - 1 for event in forward if event > 0 and event in freed_after) - self.added

    def with_late_casts(self) -> list[int]:
        """Return the events of a later micro-batch of a step, which finds the copies of the weights in half precision."""
        late = late_casts(self.timeline, self.summed, self.added, self.copies)
        passes, update, moved = self.events[: self.update], self.events[self.update :], set(late)
        rest = [event for event in passes if event not in moved]
        end = max((place for place, event in enumerate(rest, 1) if -event - 1 not in self.copies), default=0)
        return [*rest[:end], *late, *rest[end:], *update]

    def micro_batch(self, state: State = "exists", *, first: bool = True, last: bool = True) -> Peak:
        """Play a micro-batch, of its step the first one, the last one, both or neither. The last one is followed by the update.

        The trace shows a later micro-batch, which adds its gradients to those that exist. The first one keeps its gradients
        instead, in blocks among those of its activations. Without gradients that are added, each is played as a whole step.
        """
        self.enter(has_state=state == "exists")
        self.live |= self.carried
        allocator, live, sizes, kinds, self.carried = self.allocator, self.live, self.sizes, self.kinds, {}
        kept = frozenset() if last else self.copies
        made: defaultdict[int, list[Block]] = defaultdict(list)
        parts = [0] * len(KINDS)
        for number, block in live.items():
            parts[kinds[number]] += block.size
        most, at_most = allocator.allocated, parts.copy()
        for place, event in enumerate(self.events if first or not self.copies else self.with_late_casts()):
            if place == self.update:
                if first:
                    live |= {number: made[sizes[number]].pop() for number in self.summed}
                if not last and self.summed:
                    self.carried = {number: live.pop(number) for number in live.keys() & (self.summed | self.copies)}
                    break
                if state == "created":
                    live |= {number: allocator.allocate(sizes[number]) for number in sorted(self.state) if sizes[number]}
                    parts[KINDS.index("optimizer_state")] += sum(live[number].size for number in self.state if sizes[number])
            number = abs(event) - 1
            if event > 0:
                if sizes[number] and number not in self.summed and number not in live:
                    block = live[number] = allocator.allocate(sizes[number])
                    parts[kinds[number]] += block.size
                    if allocator.allocated > most:
                        most, at_most = allocator.allocated, parts.copy()
            elif number not in kept and (freed := live.pop(number, None)) is not None:
                parts[kinds[number]] -= freed.size
                if first and number in self.added:
                    made[sizes[number]].append(freed)
                    parts[GRADIENTS] += freed.size
                else:
                    allocator.release(freed)
        return Peak(most, dict(zip(KINDS, at_most, strict=True)))

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


def played_step(player: Player, micro_batches: Sequence[Timeline], state: State = "exists") -> tuple[Player, Peak]:
    """Play a step, or an evaluation batch, after what `player` has played, and return its last player and its peak."""
    peaks = []
    for number, micro_batch in enumerate(micro_batches):
        player = Player(micro_batch, player.allocator, player)
        peaks.append(player.micro_batch(state, first=number == 0, last=number == len(micro_batches) - 1))
    return player, highest(peaks)


def steady_step(player: Player, micro_batches: Sequence[Timeline]) -> tuple[Player, Peak]:
    """Play a step until it reserves no more than before. Returns the same as `played_step`."""
    for _ in range(STEPS):
        before = player.allocator.reserved
        player, peak = played_step(player, micro_batches)
        if player.allocator.reserved == before:
            break
    return player, peak


def largest_played(at: Callable[[int], PlayedSteps], budget: float, limit: int = SEARCHED) -> int:
    """Return the largest number from 0 to `limit` whose run fits into `budget` bytes, within 1 %.

    `at`: the arguments of `played_run` for a number.

    A playback takes a fraction of a second, a peak of tensors milliseconds. The latter is a bound, and with the reserved memory
    of the numbers played so far it gives the next one to play.
    """

    def tensors(number: int) -> int:
        train, evaluations, *_ = at(number)
        return max(timeline.peak().bytes for timeline in (*train, *evaluations))

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
