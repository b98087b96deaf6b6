"""Adds skipped layers to the timeline of a step that ran only some layers of each kind.

The events between two marks are the block of a layer. The block of a skipped layer is the block of a layer with the same kind and
the same kinds of neighbours (`layer_kinds`), with the storages of its own place: what the block uses of the layer
before it becomes what belongs to the layer before the skipped one.

NotRepeated is raised instead of a guess: if a block touches a layer that is not a neighbour, if sizes differ, if a storage would
be freed twice or never, or if two layers of one context ran different blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from hwopt.memory.trace.layer_blocks import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    OWN,
    Marks,
    NotRepeated,
    Step,
    Template,
    TraceBlock,
    block_between,
    releases_common,
)
from hwopt.memory.trace.layer_kinds import Context
from hwopt.memory.trace.timeline import Timeline

Key = tuple[str, int, int] | int
"""A storage: (pass, layer, place among the storages of that block), (OWN, layer, place), or its number if no layer owns it."""


class Extension:
    """Builds the timeline of all layers from the timeline of those that were run."""

    def __init__(
        self, run: Sequence[int], model_of: Mapping[int, int], contexts: Sequence[Context], marks: Marks, timeline: Timeline
    ) -> None:
        """`run`: the layers that were run. `model_of`: layer -> the one whose block it repeats; a run one repeats itself."""
        self.run, self.model_of, self.contexts, self.short, self.marks = run, model_of, contexts, timeline, marks
        self.place = {number: place for place, number in enumerate(run)}  # layer -> its place among those run
        self.segments = self.find_segments()
        blocks = {(which, layer): block for which, layer, block in self.segments if which != OUTSIDE}
        self.made: dict[tuple[str, int], list[int]] = {}
        """(pass, layer) -> the storages that its block allocates, in order."""
        self.identity: dict[int, tuple[str, int, int]] = {}
        """Storage -> (pass or OWN, layer that owns it, place there); not for storages that no layer owns."""
        for (which, layer), block in blocks.items():
            made = [int(event) - 1 for event in timeline.events[block.events.start : block.events.stop] if event > 0]
            self.made[which, layer] = made
            self.identity |= {storage: (which, layer, place) for place, storage in enumerate(made)}
        for layer, storages in self.marks.owned.items():
            for place, storage in enumerate(storages):
                if storage is not None:
                    self.identity.setdefault(storage, (OWN, layer, place))
        self.templates = {key: self.template(block, *key) for key, block in blocks.items()}
        self.check_equal_contexts()
        self.gradients = self.gradients_of_skipped()
        self.final_gradients = {storage for storages in self.marks.gradients.values() for storage in storages}
        self.repeats: dict[int, list[int]] = {}
        """Layer that was run -> the skipped layers that repeat it."""
        for number, source in model_of.items():
            if number != source:
                self.repeats.setdefault(source, []).append(number)
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

    def template(self, block: TraceBlock, which: str = OUTSIDE, layer: int | None = None) -> Template:
        """Return a block with every storage relative to its layer; outside of the layers, storages keep their numbers."""
        short, ends = self.short, [0, *self.short.ends.tolist()]
        events = [int(event) for event in short.events[block.events.start : block.events.stop]]
        operands = (short.operands[ends[number] : ends[number + 1]].tolist() for number in block.operations)
        return Template(
            tuple(self.relative(1 if event > 0 else -1, abs(event) - 1, layer) for event in events),
            tuple(tuple(self.relative(0, storage, layer) for storage in used) for used in operands),
            block.operations,
            () if layer is None else tuple(short.sizes[self.made[which, layer]].tolist()),
            tuple(short.flops[block.operations.start : block.operations.stop].tolist()),
            tuple(short.host_sizes[block.moved.start : block.moved.stop].tolist()),
            block.events.start,
        )

    def relative(self, sign: int, storage: int, layer: int | None) -> Step:
        if layer is None:
            return sign, "", 0, storage
        which, owner, place = self.identity.get(storage, ("", layer, storage))
        offset = self.place[owner] - self.place[layer] if owner in self.place else len(self.place)
        return (sign, which, offset, place) if abs(offset) <= 1 else (sign, "", 0, storage)

    def check_equal_contexts(self) -> None:
        """Raise NotRepeated if two layers of one context ran different blocks, or a block to repeat cannot be moved."""
        first: dict[Any, tuple[int, list[Any]]] = {}
        repeated = {source for number, source in self.model_of.items() if number != source}
        for number in self.run:
            found = [self.templates.get((which, number)) for which in (FORWARD, BACKWARD)]
            source, expected = first.setdefault(self.contexts[number], (number, found))
            if [template and template.content for template in found] != [template and template.content for template in expected]:
                raise NotRepeated(f"layers {source} and {number} run other operations")
            for template in found if number in repeated else ():
                if template is not None:
                    self.check_movable(template, number)
            if number in repeated and self.marks.starts[-1][:2] == (BACKWARD, number):
                raise NotRepeated(f"the backward pass of layer {number} has no end")

    def check_movable(self, template: Template, layer: int) -> None:
        """Raise NotRepeated if the block of `layer` touches a layer that is not a neighbour, or releases what no layer owns."""
        for _, which, _, place in (step for steps in (template.events, *template.operands) for step in steps):
            if which == "" and place in self.identity:
                raise NotRepeated(f"layer {layer} uses a tensor of layer {self.identity[place][1]}, which is not its neighbour")

    def gradients_of_skipped(self) -> dict[Key, int]:
        """Return the key of each gradient of a skipped layer -> the storage that was allocated for it after the backward pass."""
        found: dict[Key, int] = {}
        for number, source in self.model_of.items():
            for ours, theirs in zip(self.marks.gradients.get(number, []), self.marks.gradients.get(source, []), strict=True):
                if number == source or ours is None or theirs is None or ours in self.marks.owned[number]:
                    continue
                which, owner, place = self.identity.get(theirs, ("", source, 0))
                offset = self.place.get(owner, len(self.place) + 1) - self.place[source]
                if which not in (FORWARD, BACKWARD) or abs(offset) > 1 or self.short.sizes[ours] != self.short.sizes[theirs]:
                    raise NotRepeated(f"a gradient of layer {source} is made outside of the layer")
                found[which, number + offset, place] = ours
        return found

    def timeline(self) -> Timeline:
        """Return the timeline of all layers."""
        events: list[int] = []
        operations: list[int] = []
        operands: list[int] = []
        ends: list[int] = []
        moved: list[float] = []
        update = self.short.update
        phases = self.short.phases.copy()
        for part, layer in self.parts():
            for index, (sign, which, offset, place) in enumerate(self.events_of(part, layer), part.first):
                if layer is None:  # phases begin outside of the layers
                    phases[self.short.phases == index] = len(events)
                together = sign < 0 and layer is None
                for number in self.released_together(place) if together else [self.number(layer, which, offset, place)]:
                    self.use(sign, number)
                    events.append(sign * (number + 1))
            for used in part.operands:
                operands += sorted({self.number(layer, which, offset, place) for _, which, offset, place in used})
                ends.append(len(operands))
            if layer is None and self.short.update in part.operations:
                update = len(operations) + self.short.update - part.operations.start
            operations += part.operations
            moved += part.moved
        self.check_releases()
        short = self.short
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
            host_sizes=np.array(moved, np.float64),
            update=update,
            phases=phases,
        )

    def events_of(self, part: Template, layer: int | None) -> Iterator[Step]:
        """Yield the events of a part. A layer releases a common tensor only if it is the last one that uses it."""
        for step in part.events:
            repeated = layer is not None and self.model_of[layer] in self.repeats
            if not repeated or not releases_common(step) or self.last_user(part, step[3]) == layer:
                yield step

    def last_user(self, part: Template, storage: int) -> int:
        """Return the layer that uses a common storage last, in the pass of `part`. Raises NotRepeated if it is not clear."""
        which = next(key for key, template in self.templates.items() if template is part)[0]
        users = [
            number
            for number, source in self.model_of.items()
            if (template := self.templates.get((which, source))) is not None and template.uses(storage)
        ]
        last = (min if which == BACKWARD else max)(users, default=-1)
        if last < 0 or self.templates[which, self.model_of[last]] is not part:
            raise NotRepeated("a tensor that all layers use is released before the last layer")
        return last

    def parts(self) -> Iterator[tuple[Template, int | None]]:
        """Yield each part of the step in order, with its layer; None for a part outside of the layers."""
        layers = sorted(self.model_of)
        passed = OUTSIDE
        for which, _, block in self.segments:
            if which == OUTSIDE:
                yield self.template(block), None
            elif which != passed:
                passed = which
                for number in layers if which == FORWARD else reversed(layers):
                    template = self.templates.get((which, self.model_of[number]))
                    if template is not None:
                        yield template, number

    def released_together(self, storage: int) -> list[int]:
        """Return the numbers of a storage that is released outside of the layers, and of its like in other layers.

        Autocast, for example, releases its copies of all weights behind the last layer. What the next layer released before is
        left out. The neighbour of the first or the last layer may be another one than in the short trace.
        """
        which, owner, place = self.identity.get(storage, (OWN, 0, 0))
        if which == OWN or storage in self.final_gradients:
            return [self.number(None, "", 0, storage)]
        run, last = self.run, len(self.model_of) - 1
        at_ends = [number for number, beside in ((1, run[1]), (last - 1, run[-2])) if beside == owner]
        alike = [number for number in at_ends if self.same_blocks(which, owner, number)]
        numbers = (self.number(layer, which, 0, place) for layer in dict.fromkeys([owner, *self.repeats.get(owner, ()), *alike]))
        return [number for number in numbers if number not in self.freed]

    def same_blocks(self, which: str, one: int, other: int) -> bool:
        """Whether two layers allocate storages of the same sizes in a pass."""
        first, second = (self.templates.get((which, self.model_of[number])) for number in (one, other))
        return first is not None and second is not None and first.sizes == second.sizes

    def number(self, layer: int | None, which: str, offset: int, place: int) -> int:
        """Return the number in the new timeline of the storage that `layer` uses."""
        key: Key
        if which == "":
            known = self.identity.get(place, (OWN, 0, 0))
            key, source = (place if known[0] == OWN else known), place
        else:
            assert layer is not None
            owner = layer + offset
            source = self.source_of(which, owner, place)
            key = source if which == OWN else (which, owner, place)
            key = self.gradients.get(key, key)
        if key not in self.numbers:
            self.numbers[key] = len(self.sources)
            self.sources.append(source)
        elif self.short.sizes[self.sources[self.numbers[key]]] != self.short.sizes[source]:
            raise NotRepeated("a tensor of a repeated layer has another size")
        return self.numbers[key]

    def source_of(self, which: str, layer: int, place: int) -> int:
        """Return the storage in the short trace that stands for one of `layer`."""
        if which == OWN:
            storages: list[int | None] = self.marks.owned.get(layer, [])
        else:
            storages = list(self.made.get((which, self.model_of.get(layer, -1)), ()))
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
