"""Suggests changes that save memory: the options that plugins offer, a shorter max_length, and all of them combined."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from hwopt.data.batches.step_batch import Widths
from hwopt.errors import HwoptError
from hwopt.memory.forecast.lengths import Lengths, lengths_of, truncated_fraction
from hwopt.memory.forecast.planner import from_trace, highest_gib, on_one_device, plan_memory
from hwopt.memory.trace.dry_run import Shape
from hwopt.memory.trace.tracer import trace_plan
from hwopt.planning.alternatives import current_options, scales_of
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan
from hwopt.planning.plan import Plan, Replan
from hwopt.plugin import Choice
from hwopt.plugin.registry import Registry

MIN_SAVING_GIB = 0.01


class PlanListener:
    """Hears what the planner does and finds, as it comes. Every hook does nothing by default."""

    def on_trial(self, what: str) -> None:
        """The planner begins to predict something, which takes seconds. `what` names it."""

    def on_plan(self, plan: Plan) -> None:
        """The plan that a run will train is made, with its memory if that was planned. The run comes next."""

    def on_memory(self, plan: Plan) -> None:
        """The memory of the plan is known, without the largest sizes. If it does not fit, changes follow."""

    def on_largest_sizes(self, memory: MemoryPlan) -> None:
        """The largest sizes that fit are known; None where the tier cannot tell."""

    def on_change(self, change: Change) -> None:
        """A change that saves memory was found."""

    def on_gain(self, gain: Gain) -> None:
        """A change that uses free memory to be faster was found."""


def with_changes(
    plan: Plan, memory: MemoryPlan, registry: Registry, replan: Replan, cache: Path, listener: PlanListener | None = None
) -> MemoryPlan:
    """Return `memory` with the changes that save memory, those with the least loss of speed first.

    Changes that alter the training come last. `listener` hears of each change as it is found, in about this order.
    """
    listener = listener or PlanListener()
    advisor = Advisor(plan, memory, registry, replan, cache, listener)
    changes = []
    for change in advisor.single_changes():
        listener.on_change(change)
        changes.append(change)
    changes.sort(key=lambda change: (change.alters, change.slower, -change.saves_gib))
    combined = []
    for change in () if any(change.fits for change in changes) else advisor.combined_changes(changes):
        listener.on_change(change)
        combined.append(change)
    return replace(memory, changes=(*changes, *combined))


@dataclass(frozen=True)
class Offer:
    """A choice of a plugin, and its step time relative to now."""

    choice: Choice
    slower: float


@dataclass
class Advisor:
    """Evaluates changes of one plan."""

    plan: Plan
    memory: MemoryPlan
    registry: Registry
    replan: Replan
    cache: Path
    listener: PlanListener
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = lengths_of(self.plan, self.cache)

    def single_changes(self) -> Iterator[Change]:
        """Yield one change per plugin, its first offer that fits or the one that saves most, and a shorter max_length.

        Those that alter the training come last, and before them the slower ones.
        """
        offers = {name: self.offers_of(name) for name in self.registry.names}
        order = {name: (found[0].choice.alters, found[0].slower) for name, found in offers.items() if found}
        order[""] = (True, 1.0)  # a shorter max_length
        for name in sorted(order, key=lambda name: (*order[name], name)):
            yield from self.best_offer(name, offers[name]) if name else self.shorter_max_length()

    def offers_of(self, name: str) -> list[Offer]:
        """Return the choices of a plugin that need less memory than the present one."""
        scales = scales_of(name, self.plan, self.registry)
        return [Offer(choice, scale.slower(choice)) for scale in scales for choice in scale.with_less_memory]

    def best_offer(self, name: str, offers: Sequence[Offer]) -> Iterator[Change]:
        """Yield the first offer of a plugin that fits, else the one that saves most."""
        found: list[Change] = []
        for offer in offers:
            if (change := self.evaluate_offer(name, offer)) is not None:
                found.append(change)
                if change.fits:
                    yield change
                    return
        if found:
            yield max(found, key=lambda change: change.saves_gib)

    def combined_changes(self, changes: Sequence[Change]) -> Iterator[Change]:
        """Yield all changes that do not alter the training, combined; if that does not fit, all changes."""
        for chosen in ([change for change in changes if not change.alters], list(changes)):
            if len(chosen) < 2:
                continue
            self.listener.on_trial(f"{len(chosen)} changes combined")
            changed = self.with_assignments([assignment for change in chosen for assignment in change.assignments])
            if changed is not None:
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

    def evaluate_offer(self, name: str, offer: Offer) -> Change | None:
        """Return the offer as a change; None if it is not possible here or saves nothing."""
        lines, assignments = self.lines_and_assignments(name, offer.choice)
        self.listener.on_trial(", ".join(assignments))
        changed = self.with_assignments(assignments, name)
        if changed is None or highest_gib(self.memory) - highest_gib(changed) < MIN_SAVING_GIB:
            return None
        return Change(
            lines=lines,
            saves_gib=highest_gib(self.memory) - highest_gib(changed),
            fits=changed.fits,
            slower=offer.slower,
            cost=offer.choice.note,
            alters=offer.choice.alters,
            assignments=assignments,
        )

    def with_assignments(self, assignments: Sequence[str], applied: str | None = None) -> MemoryPlan | None:
        """Return the memory with these assignments.

        None if they are rejected, if the plugin `applied` is skipped with them, or if another tier answers.
        """
        try:
            plan = self.replan(assignments)
            lengths = None if any("max_length" in text for text in assignments) else self.lengths
            changed = plan_memory(plan, self.cache, lengths)
        except HwoptError:
            return None
        skipped = any(entry.name == applied and entry.decision == "skip" for entry in plan.entries)
        return None if skipped or changed.tier != self.memory.tier else changed

    def lines_and_assignments(self, name: str, choice: Choice) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what `choice` changes as lines of a profile and as arguments of `--set`."""
        now = current_options(name, self.plan)
        base = (now or self.registry.plugin(name).Options()).model_dump(mode="json")
        changes = {key: value for key, value in choice.changes.items() if value != base.get(key)}
        given = {key: json.dumps(value) for key, value in changes.items()}
        lines = tuple(f"plugins.{name}.{key} = {value}" for key, value in given.items())
        if now is None:
            given = {"enabled": "true", **given}
        assignments = tuple(f"plugins.{name}.{key}={value}" for key, value in given.items())
        return lines or (f"[plugins.{name}]",), assignments

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
