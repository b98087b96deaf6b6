"""Adds skipped layers to the timeline of a step that ran only some layers of each kind.

The events between two marks are the block of a layer. The block of a skipped layer is the block of a layer with the same kind and
the same kinds of neighbours (`layer_kinds`), with the storages of its own place: what the block uses of the layer
before it becomes what belongs to the layer before the skipped one.

NotRepeated is raised instead of a guess: if a block touches a layer that is not a neighbour, if sizes differ, if a storage would
be freed twice or never, or if two layers of one context ran different blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from hwopt.memory.trace.layer_blocks import BACKWARD, FORWARD, OUTSIDE, OWN, Marks, NotRepeated, TraceBlock, block_between
from hwopt.memory.trace.layer_kinds import Context
from hwopt.memory.trace.timeline import Timeline

Key = tuple[str, int, int] | int
"""A storage of a layer: (pass, layer, place among the storages of that block) or (OWN, layer, place). Else its number."""


class Extension:
    """Builds the timeline of all layers from the timeline of those that were run."""

    def __init__(
        self, run: Sequence[int], model_of: Mapping[int, int], contexts: Sequence[Context], marks: Marks, timeline: Timeline
    ) -> None:
        """`run`: the layers that were run. `model_of`: layer -> the one whose block it repeats; a run one repeats itself."""
        self.run, self.model_of, self.contexts, self.short, self.marks = run, model_of, contexts, timeline, marks
        self.place = {number: place for place, number in enumerate(run)}  # layer -> its place among those run
        self.operands = [part.tolist() for part in np.split(timeline.operands, timeline.ends)]  # of each operation
        self.segments = self.find_segments()
        self.blocks = {(which, layer): block for which, layer, block in self.segments if which != OUTSIDE}
        self.used = {key: {storage for used in self.used_by(block) for storage in used} for key, block in self.blocks.items()}
        """(pass, layer) -> the storages that the operations of its block use."""
        self.made: dict[tuple[str, int], list[int]] = {}
        """(pass, layer) -> the storages that its block allocates, in order."""
        self.owner: dict[int, tuple[str, int, int]] = {}
        """Storage -> (pass or OWN, layer that owns it, place there); not for storages that no layer owns."""
        for (which, layer), block in self.blocks.items():
            made = self.made[which, layer] = [storage for sign, storage in self.events_of(block) if sign > 0]
            self.owner |= {storage: (which, layer, place) for place, storage in enumerate(made)}
        for layer, storages in self.marks.owned.items():
            for place, storage in enumerate(storages):
                if storage is not None:
                    self.owner.setdefault(storage, (OWN, layer, place))
        self.repeats: dict[int, list[int]] = {}
        """Layer that was run -> the skipped layers that repeat it."""
        for number, source in model_of.items():
            if number != source:
                self.repeats.setdefault(source, []).append(number)
        self.check_equal_contexts()
        self.gradients = self.gradients_of_skipped()
        self.final_gradients = {storage for storages in self.marks.gradients.values() for storage in storages}
        self.numbers: dict[Key, int] = {}
        self.sources: list[int] = []
        self.seen: set[int] = set()
        self.freed: set[int] = set()

    def find_segments(self) -> list[tuple[str, int, TraceBlock]]:
        """Return (pass, layer, block) of the whole step in order; OUTSIDE and -1 for a block that belongs to no layer.

        The gradients of skipped layers are left out. Raises NotRepeated unless the layers ran in order, each once.
        """
        starts, run = self.marks.starts, self.run
        order = [(which, number) for which, number, _ in starts if which != OUTSIDE]
        backward = [number for which, number in order if which == BACKWARD]
        if order != [(FORWARD, number) for number in run] + [(BACKWARD, number) for number in backward]:
            raise NotRepeated("the layers do not run one after the other")
        if backward != [number for number in reversed(run) if number in backward]:
            raise NotRepeated("the backward passes of the layers do not run one after the other")
        filled, end = self.marks.filled, (len(self.short.events), len(self.short.ends), len(self.short.host_sizes))
        last = end if filled is None else (filled.events.start, filled.operations.start, filled.moved.start)
        bounds = pairwise([(0, 0, 0), *(position for _, _, position in starts), last])
        names = [(OUTSIDE, -1), *((which, number) for which, number, _ in starts)]
        found = [(which, number, block_between(*both)) for (which, number), both in zip(names, bounds, strict=True)]
        if filled is not None:
            behind = (filled.events.stop, filled.operations.stop, filled.moved.stop)
            found.append((OUTSIDE, -1, block_between(behind, end)))
        return found

    def events_of(self, block: TraceBlock) -> Iterator[tuple[int, int]]:
        """Yield (+1 allocated or -1 released, storage) of each event of a block."""
        for event in self.short.events[block.events.start : block.events.stop].tolist():
            yield (1 if event > 0 else -1), abs(event) - 1

    def used_by(self, block: TraceBlock) -> Iterator[list[int]]:
        """Yield the storages that each operation of a block uses."""
        return (self.operands[number] for number in block.operations)

    def moved(self, storage: int, source: int, layer: int) -> Key:
        """Return what `layer` uses where the block of the layer `source` uses `storage`; a common storage stays the same."""
        which, owner, place = self.owner.get(storage, (OWN, -1, 0))
        offset = self.place[owner] - self.place[source] if owner in self.place else math.inf
        return (which, layer + int(offset), place) if abs(offset) <= 1 else storage

    def content(self, which: str, source: int, layer: int) -> Any:
        """Return what the block of `source` does at the place of `layer`, but for which of the layers releases common tensors."""
        block = self.blocks.get((which, source))
        if block is None:
            return None
        events = [(sign, self.moved(storage, source, layer)) for sign, storage in self.events_of(block)]
        operands = [[self.moved(storage, source, layer) for storage in used] for used in self.used_by(block)]
        sizes, flops = self.short.sizes[self.made[which, source]], self.short.flops[block.operations]
        host_sizes = self.short.host_sizes[block.moved]
        kept = [(sign, key) for sign, key in events if sign > 0 or not isinstance(key, int)]
        return kept, operands, sizes.tolist(), flops.tolist(), host_sizes.tolist()

    def check_equal_contexts(self) -> None:
        """Raise NotRepeated if two layers of one context ran different blocks, or a block to repeat cannot be moved."""
        first: dict[Any, int] = {}
        for number in self.run:
            source = first.setdefault(self.contexts[number], number)
            if any(self.content(which, source, number) != self.content(which, number, number) for which in (FORWARD, BACKWARD)):
                raise NotRepeated(f"layers {source} and {number} run other operations")
            if number in self.repeats:
                self.check_movable(number)
                if self.marks.starts[-1][:2] == (BACKWARD, number):
                    raise NotRepeated(f"the backward pass of layer {number} has no end")

    def check_movable(self, layer: int) -> None:
        """Raise NotRepeated if a block of `layer` uses a tensor of a layer that is not a neighbour."""
        for (which, number), block in self.blocks.items():
            events = {storage for _, storage in self.events_of(block)}
            for storage in events | self.used[which, number] if number == layer else ():
                if storage in self.owner and self.moved(storage, layer, layer) == storage:
                    other = self.owner[storage][1]
                    raise NotRepeated(f"layer {layer} uses a tensor of layer {other}, which is not its neighbour")

    def gradients_of_skipped(self) -> dict[Key, int]:
        """Return the key of each gradient of a skipped layer -> the storage that was allocated for it after the backward pass."""
        found: dict[Key, int] = {}
        for source, repeated in self.repeats.items():
            for number in repeated:
                pairs = zip(self.marks.gradients.get(number, []), self.marks.gradients.get(source, []), strict=True)
                for ours, theirs in pairs:
                    if ours is None or theirs is None or ours in self.marks.owned[number]:
                        continue
                    key = self.moved(theirs, source, number)
                    if isinstance(key, int) or key[0] == OWN or self.short.sizes[ours] != self.short.sizes[theirs]:
                        raise NotRepeated(f"a gradient of layer {source} is made outside of the layer")
                    found[key] = ours
        return found

    def timeline(self) -> Timeline:
        """Return the timeline of all layers."""
        events: list[int] = []
        operations: list[int] = []
        operands: list[int] = []
        ends: list[int] = []
        host_sizes: list[float] = []
        short, update, phases = self.short, self.short.update, self.short.phases.copy()
        for which, source, layer, block in self.parts():
            outside = which == OUTSIDE
            for index, (sign, storage) in enumerate(self.events_of(block), block.events.start):
                if outside:  # phases begin outside of the layers
                    phases[short.phases == index] = len(events)
                key = storage if outside else self.moved(storage, source, layer)
                if sign < 0 and outside:
                    numbers = self.released_together(storage)
                elif sign < 0 and isinstance(key, int) and source in self.repeats and self.last_user(which, source, key) != layer:
                    continue  # a layer releases a common tensor only if it is the last one that uses it
                else:
                    numbers = [self.number(key)]
                for number in numbers:
                    self.use(sign, number)
                    events.append(sign * (number + 1))
            for used in self.used_by(block):
                operands += sorted({self.number(each if outside else self.moved(each, source, layer)) for each in used})
                ends.append(len(operands))
            if outside and short.update in block.operations:
                update = len(operations) + short.update - block.operations.start
            operations += block.operations
            host_sizes += short.host_sizes[block.moved].tolist()
        self.check_releases()
        return replace(
            short,
            events=np.array(events, np.int64),
            sizes=short.sizes[self.sources],
            kinds=short.kinds[self.sources],
            column_sums=short.column_sums[self.sources],
            operands=np.array(operands, np.int64),
            ends=np.array(ends, np.int64),
            flops=short.flops[operations],
            dtypes=short.dtypes[operations],
            host_sizes=np.array(host_sizes, np.float64),
            update=update,
            phases=phases,
        )

    def parts(self) -> Iterator[tuple[str, int, int, TraceBlock]]:
        """Yield (pass, layer that was run, layer, block) of each part in order; OUTSIDE, -1, -1 outside of the layers."""
        layers, passed = sorted(self.model_of), OUTSIDE
        for which, number, block in self.segments:
            if which == OUTSIDE:
                yield which, number, number, block
            elif which != passed:
                passed = which
                for layer in layers if which == FORWARD else reversed(layers):
                    if (found := self.blocks.get((which, self.model_of[layer]))) is not None:
                        yield which, self.model_of[layer], layer, found

    def last_user(self, which: str, source: int, storage: int) -> int:
        """Return the layer that uses a common storage last in a pass. Raises NotRepeated if none of those like `source` does."""
        users = [layer for layer, like in self.model_of.items() if storage in self.used.get((which, like), ())]
        last = (min if which == BACKWARD else max)(users, default=-1)
        if last < 0 or self.model_of[last] != source:
            raise NotRepeated("a tensor that all layers use is released before the last layer")
        return last

    def released_together(self, storage: int) -> list[int]:
        """Return the numbers of a storage that is released outside of the layers, and of its like in other layers.

        Autocast, for example, releases its copies of all weights behind the last layer. What the next layer released before is
        left out. The neighbour of the first or the last layer may be another one than in the short trace.
        """
        which, owner, place = self.owner.get(storage, (OWN, 0, 0))
        if which == OWN or storage in self.final_gradients:
            return [self.number(storage)]
        run, last = self.run, len(self.model_of) - 1
        at_ends = [number for number, beside in ((1, run[1]), (last - 1, run[-2])) if beside == owner]
        alike = [number for number in at_ends if self.same_blocks(which, owner, number)]
        numbers = (self.number((which, layer, place)) for layer in dict.fromkeys([owner, *self.repeats.get(owner, ()), *alike]))
        return [number for number in numbers if number not in self.freed]

    def same_blocks(self, which: str, one: int, other: int) -> bool:
        """Whether two layers allocate storages of the same sizes in a pass."""
        first, second = (self.made.get((which, self.model_of[number])) for number in (one, other))
        return first is not None and second is not None and np.array_equal(self.short.sizes[first], self.short.sizes[second])

    def number(self, key: Key) -> int:
        """Return the number in the new timeline of a storage that a layer, or what is outside of the layers, uses."""
        if isinstance(key, int):
            source, known = key, self.owner.get(key, (OWN, 0, 0))
            key = source if known[0] == OWN else known
        else:
            source = self.source_of(*key)
            key = source if key[0] == OWN else self.gradients.get(key, key)
        if key not in self.numbers:
            self.numbers[key] = len(self.sources)
            self.sources.append(source)
        elif self.short.sizes[self.sources[self.numbers[key]]] != self.short.sizes[source]:
            raise NotRepeated("a tensor of a repeated layer has another size")
        return self.numbers[key]

    def source_of(self, which: str, layer: int, place: int) -> int:
        """Return the storage in the short trace that stands for one of `layer`."""
        if which == OWN:
            storages: Sequence[int | None] = self.marks.owned.get(layer, [])
        else:
            storages = self.made.get((which, self.model_of.get(layer, -1)), ())
        storage = storages[place] if place < len(storages) else None
        if storage is None:
            raise NotRepeated(f"layer {layer} lacks a tensor of the layer that it repeats")
        return storage

    def use(self, sign: int, number: int) -> None:
        """Check that storages are allocated before they are released, and only once."""
        allocated = number in self.seen
        if sign > 0 and allocated:
            raise NotRepeated("a tensor would be allocated twice")
        if sign < 0 and (not allocated or number in self.freed):
            raise NotRepeated("a tensor would be released twice")
        (self.seen if sign > 0 else self.freed).add(number)

    def check_releases(self) -> None:
        """Raise NotRepeated if a storage of a repeated layer lives longer or shorter than that of the layer that was run."""
        released = {-int(event) - 1 for event in self.short.events if event < 0}
        gradients = set(self.gradients.values())
        for key, number in self.numbers.items():
            if (number in self.freed) != (self.sources[number] in released) and key not in gradients:
                raise NotRepeated("a tensor of a repeated layer is not released")
