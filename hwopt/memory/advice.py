"""What to change where a plan does not fit: each plugin's offers, a shorter max_length, and all of it together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from hwopt.data.step_batch import Widths
from hwopt.errors import HwoptError
from hwopt.memory.dry_run import Shape
from hwopt.memory.lengths import Lengths, lengths_of, share_cut
from hwopt.memory.planner import from_trace, held_part, highest, plan_memory
from hwopt.memory.tracer import traced
from hwopt.planning.memory_plan import Change, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.plugin import MemoryOption
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry

WORTH_IT_GIB = 0.01

Replan = Callable[[Sequence[str]], Plan]
"""(assignments as `--set` takes them) -> the plan with them."""


def advised(plan: Plan, memory: MemoryPlan, registry: Registry, replan: Replan, cache: Path) -> MemoryPlan:
    """`memory` with the changes that would save some: the least loss of speed first, what alters the training last."""
    advisor = Advisor(plan, memory, registry, replan, cache)
    changes = sorted(advisor.single(), key=lambda change: (change.alters, change.slower, -change.saves_gib))
    together = () if any(change.fits for change in changes) else tuple(advisor.combined(changes))
    return replace(memory, changes=(*changes, *together))


@dataclass
class Advisor:
    plan: Plan
    memory: MemoryPlan
    registry: Registry
    replan: Replan
    cache: Path
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = lengths_of(self.plan, self.cache)

    def single(self) -> Iterator[Change]:
        """One change a plugin: its first offer that fits, or its last one; and a shorter max_length."""
        for name in self.registry.names:
            best: Change | None = None
            with plugin_guard(f"plugin {name!r} of {self.registry.distribution(name)}", "leaner()"):
                offers = list(self.registry.plugin(name).memory_options(self.present(name), self.plan.context))
            for offer in offers:
                best = self.tried(name, offer) or best
                if best is not None and best.fits:
                    break
            if best is not None:
                yield best
        yield from self.shorter()

    def combined(self, changes: Sequence[Change]) -> Iterator[Change]:
        """All that alter nothing at once; if that is not enough, all of them."""
        for chosen in ([change for change in changes if not change.alters], list(changes)):
            then = self.with_assignments([assignment for change in chosen for assignment in change.assignments])
            if len(chosen) > 1 and then is not None:
                change = Change(
                    lines=(f"the {len(chosen)} above together" if chosen == changes else "those that alter nothing, together",),
                    saves_gib=highest(self.memory) - highest(then),
                    fits=then.fits,
                    slower=prod(change.slower for change in chosen),
                    cost="all of it at once",
                    alters=any(change.alters for change in chosen),
                    assignments=tuple(assignment for change in chosen for assignment in change.assignments),
                )
                yield change
                if change.fits:
                    return

    def tried(self, name: str, offer: MemoryOption) -> Change | None:
        """The offer as a change; None where it is not possible here or saves nothing."""
        keys = self.changed(name, offer)
        assignments = tuple(f"plugins.{name}.{key}={value}" for key, value in keys.items()) or (f"plugins.{name}.enabled=true",)
        then = self.with_assignments(assignments, name)
        if then is None or highest(self.memory) - highest(then) < WORTH_IT_GIB:
            return None
        return Change(
            lines=tuple(f"plugins.{name}.{key} = {value}" for key, value in keys.items()) or (f"[plugins.{name}]",),
            saves_gib=highest(self.memory) - highest(then),
            fits=then.fits,
            slower=offer.slower,
            cost=offer.cost,
            alters=self.registry.plugin(name).preserves == "method",
            assignments=assignments,
        )

    def with_assignments(self, assignments: Sequence[str], applied: str | None = None) -> MemoryPlan | None:
        """The memory with these; None where they are refused, `applied` is then skipped, or another tier answers."""
        try:
            plan = self.replan(assignments)
            then = plan_memory(plan, self.cache, None if any("max_length" in text for text in assignments) else self.lengths)
        except HwoptError:
            return None
        skipped = any(entry.name == applied and entry.decision == "skip" for entry in plan.entries)
        return None if skipped or then.tier != self.memory.tier else then

    def present(self, name: str) -> Any:
        """The options in effect of a plugin; None where it is not in effect."""
        return next((entry.options for entry in self.plan.applied() if entry.name == name), None)

    def changed(self, name: str, offer: MemoryOption) -> dict[str, str]:
        """Option -> value in TOML, of those that are not so already."""
        now = self.present(name)
        base = (now or type(offer.options)()).model_dump(mode="json")
        wanted = offer.options.model_dump(mode="json")
        return {key: json.dumps(value) for key, value in wanted.items() if value is not None and value != base[key]}

    def shorter(self) -> Iterator[Change]:
        """A shorter data.max_length, with the share of texts that it would cut."""
        memory, plan = self.memory, self.plan
        target = memory.largest_max_length
        if target is None:
            return
        target = target if 0 < target < memory.width else max(1, memory.width // 2)
        target = target // 8 * 8 or target
        trace = held_part(plan, traced(plan, memory.width, self.lengths.labels, self.cache / "memory"))
        width = Widths(plan.batch.widths, plan.batch.pad_to_multiple_of).of(target)
        then = from_trace(plan, Shape(memory.rows, width), self.lengths, trace, trace.train.at(memory.rows, width))
        share = share_cut(self.lengths, target)
        cost = "cuts texts" if share is None else f"cuts {share:.0%} of the texts"
        saved = highest(memory) - highest(then)
        if saved >= WORTH_IT_GIB:
            yield Change((f"data.max_length = {target}",), saved, then.fits, 1.0, cost, True, (f"data.max_length={target}",))
