"""Suggests changes that save memory: the options that plugins offer, a shorter max_length, and all of them combined."""

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
from hwopt.memory.lengths import Lengths, lengths_of, truncated_fraction
from hwopt.memory.planner import from_trace, highest_gib, on_one_device, plan_memory
from hwopt.memory.tracer import trace_plan
from hwopt.planning.memory_plan import Change, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.plugin import MemoryOption
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry

MIN_SAVING_GIB = 0.01

Replan = Callable[[Sequence[str]], Plan]
"""Resolves the plan with further `--set` assignments."""


def with_changes(plan: Plan, memory: MemoryPlan, registry: Registry, replan: Replan, cache: Path) -> MemoryPlan:
    """Return `memory` with the changes that save memory, those with the least loss of speed first.

    Changes that alter the training come last.
    """
    advisor = Advisor(plan, memory, registry, replan, cache)
    changes = sorted(advisor.single_changes(), key=lambda change: (change.alters, change.slower, -change.saves_gib))
    combined = () if any(change.fits for change in changes) else tuple(advisor.combined_changes(changes))
    return replace(memory, changes=(*changes, *combined))


@dataclass
class Advisor:
    """Evaluates changes of one plan."""

    plan: Plan
    memory: MemoryPlan
    registry: Registry
    replan: Replan
    cache: Path
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = lengths_of(self.plan, self.cache)

    def single_changes(self) -> Iterator[Change]:
        """Yield one change per plugin, its first offer that fits or its last one, and a shorter max_length."""
        for name in self.registry.names:
            best: Change | None = None
            with plugin_guard(f"plugin {name!r} of {self.registry.distribution(name)}", "memory_options()"):
                offers = list(self.registry.plugin(name).memory_options(self.current_options(name), self.plan.context))
            for offer in offers:
                best = self.evaluate_offer(name, offer) or best
                if best is not None and best.fits:
                    break
            if best is not None:
                yield best
        yield from self.shorter_max_length()

    def combined_changes(self, changes: Sequence[Change]) -> Iterator[Change]:
        """Yield all changes that do not alter the training, combined; if that does not fit, all changes."""
        for chosen in ([change for change in changes if not change.alters], list(changes)):
            changed = self.with_assignments([assignment for change in chosen for assignment in change.assignments])
            if len(chosen) > 1 and changed is not None:
                change = Change(
                    lines=(
                        f"the {len(chosen)} above combined"
                        if chosen == changes
                        else "those above that do not alter the training, combined",
                    ),
                    saves_gib=highest_gib(self.memory) - highest_gib(changed),
                    fits=changed.fits,
                    slower=prod(change.slower for change in chosen),
                    cost="all of their costs",
                    alters=any(change.alters for change in chosen),
                    assignments=tuple(assignment for change in chosen for assignment in change.assignments),
                )
                yield change
                if change.fits:
                    return

    def evaluate_offer(self, name: str, offer: MemoryOption) -> Change | None:
        """Return the offer as a change; None if it is not possible here or saves nothing."""
        keys = self.changed_options(name, offer)
        assignments = tuple(f"plugins.{name}.{key}={value}" for key, value in keys.items()) or (f"plugins.{name}.enabled=true",)
        changed = self.with_assignments(assignments, name)
        if changed is None or highest_gib(self.memory) - highest_gib(changed) < MIN_SAVING_GIB:
            return None
        return Change(
            lines=tuple(f"plugins.{name}.{key} = {value}" for key, value in keys.items()) or (f"[plugins.{name}]",),
            saves_gib=highest_gib(self.memory) - highest_gib(changed),
            fits=changed.fits,
            slower=offer.slower,
            cost=offer.cost,
            alters=self.registry.plugin(name)(offer.options).effect == "method",
            assignments=assignments,
        )

    def with_assignments(self, assignments: Sequence[str], applied: str | None = None) -> MemoryPlan | None:
        """Return the memory with these assignments.

        None if they are rejected, if the plugin `applied` is skipped with them, or if another tier answers.
        """
        try:
            plan = self.replan(assignments)
            lengths = None if any("max_length" in text for text in assignments) else self.lengths
            changed = plan_memory(plan, self.cache, lengths, with_largest=False)
        except HwoptError:
            return None
        skipped = any(entry.name == applied and entry.decision == "skip" for entry in plan.entries)
        return None if skipped or changed.tier != self.memory.tier else changed

    def current_options(self, name: str) -> Any:
        """Return the options of an applied plugin; None if it is not applied."""
        return next((entry.options for entry in self.plan.applied() if entry.name == name), None)

    def changed_options(self, name: str, offer: MemoryOption) -> dict[str, str]:
        """Return the options that the offer changes, with their values as TOML."""
        now = self.current_options(name)
        base = (now or type(offer.options)()).model_dump(mode="json")
        wanted = offer.options.model_dump(mode="json")
        return {key: json.dumps(value) for key, value in wanted.items() if value is not None and value != base[key]}

    def shorter_max_length(self) -> Iterator[Change]:
        """Yield a shorter data.max_length, with the fraction of texts that it truncates."""
        memory, plan = self.memory, self.plan
        target = memory.largest_max_length
        if target is None:
            return
        target = target if 0 < target < memory.width else max(1, memory.width // 2)
        target = target // 8 * 8 or target
        trace = on_one_device(plan, trace_plan(plan, memory.width, self.lengths.labels, self.cache / "memory"))
        width = Widths(plan.batch.widths, plan.batch.pad_to_multiple_of).of(target)
        changed = from_trace(plan, Shape(memory.rows, width), self.lengths, trace, trace.train.at(memory.rows, width))
        fraction = truncated_fraction(self.lengths, target)
        cost = "truncates texts" if fraction is None else f"truncates {fraction:.0%} of the texts"
        saved = highest_gib(memory) - highest_gib(changed)
        if saved >= MIN_SAVING_GIB:
            yield Change((f"data.max_length = {target}",), saved, changed.fits, 1.0, cost, True, (f"data.max_length={target}",))
