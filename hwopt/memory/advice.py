"""Suggests other options of a plan: those that save memory if it does not fit, and those that use free memory to be faster.

The plugins offer choices (`Plugin.alternatives`). Each is planned again: its memory, and for a gain its predicted time, are those
of a plan with it. The forecast compares the same card and model twice, so that most of its error cancels out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from hwopt.errors import HwoptError
from hwopt.memory.forecast.lengths import Lengths, lengths_of
from hwopt.memory.forecast.planner import device_trace, fitted, traced_memory
from hwopt.memory.shapes import Shape, widths_of
from hwopt.memory.trace.tracing_process import spent
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan, Prediction
from hwopt.planning.plan import Plan, Replan
from hwopt.plugin import Choice, PluginOptions, Scale
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry

MIN_SAVING_GIB = 0.01
CPU_SECONDS = 60.0
"""The CPU time of traces after which no more changes are tried. A step of most models takes 1 to 5 seconds."""
MIN_GAIN = 0.02
"""Fraction of the step time below which a gain is not worth a line."""


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

    def on_advice_ends(self, reason: str) -> None:
        """The search for changes ends before all of them were tried."""


@dataclass
class Advisor:
    """Plans one plan again with other options. Each result goes to `listener` as it is found."""

    plan: Plan
    memory: MemoryPlan
    registry: Registry
    replan: Replan
    cache: Path
    listener: PlanListener = field(default_factory=PlanListener)
    lengths: Lengths = field(init=False)
    began: float = field(init=False)  # CPU time that traces had taken before
    ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.lengths, self.began = lengths_of(self.plan, self.cache), spent.seconds

    def with_changes(self) -> MemoryPlan:
        """Return the memory with the changes that save memory, those with the least loss of speed first.

        Changes that alter the training come last, and at the end combinations if no single change is enough.
        """
        changes: list[Change] = []
        for change in self.single_changes():
            self.listener.on_change(change)
            changes.append(change)
        changes.sort(key=lambda change: (change.alters, change.slower, -change.saves_gib))
        combined = [] if any(change.fits for change in changes) else list(self.combined_changes(changes))
        return replace(self.memory, changes=(*changes, *combined))

    def with_gains(self) -> MemoryPlan:
        """Return the memory with what its free rest can buy: for each plugin the first choice that fits and is faster.

        Finds nothing if the plan does not fit for sure, or if its time is not predicted.
        """
        memory = self.memory
        return memory if memory.fits is not True or memory.time is None else replace(memory, gains=tuple(self.gains(memory.time)))

    # Changes that save memory

    def single_changes(self) -> Iterator[Change]:
        """Yield one change per plugin, its first offer that fits or the one that saves most, and a shorter max_length.

        Those that alter the training come last, and before them the slower ones.
        """
        scales = {
            name: [scale for scale in scales_of(name, self.plan, self.registry) if scale.with_less_memory]
            for name in self.registry.names
        }
        nearest = {name: (found[0], found[0].with_less_memory[0]) for name, found in scales.items() if found}
        order = {name: (choice.alters, scale.slower(choice)) for name, (scale, choice) in nearest.items()}
        order[""] = (True, 1.0)  # a shorter max_length
        for name in sorted(order, key=lambda name: (*order[name], name)):
            yield from self.best_offer(name, scales[name]) if name else self.shorter_max_length()

    def best_offer(self, name: str, scales: Sequence[Scale]) -> Iterator[Change]:
        """Yield the offer of the first scale of a plugin that has one that fits, else the offer that saves most."""
        found = list[Change]()
        for scale in scales:
            if (change := self.nearest_that_fits(name, scale)) is not None:
                found.append(change)
                if change.fits:
                    break
        if found:
            yield max(found, key=lambda change: (change.fits is True, change.saves_gib))

    def nearest_that_fits(self, name: str, scale: Scale) -> Change | None:
        """Return the first choice of `scale` that fits, else the last one: each needs less memory than the one before."""
        offers = list(scale.with_less_memory)
        best = None
        while offers and best is None:  # the last choices may be rejected
            best = self.change(name, scale, offers.pop())
        while best is not None and best.fits and offers:
            middle = len(offers) // 2
            change = self.change(name, scale, offers[middle])
            if change is not None and change.fits:
                best, offers = change, offers[:middle]
            else:
                offers = offers[middle + 1 :]
        return best

    def change(self, name: str, scale: Scale, choice: Choice) -> Change | None:
        """Return what `choice` of a plugin changes; None if it is rejected or saves nothing."""
        lines, assignments = self.lines_and_assignments(name, choice)
        changed = self.planned(", ".join(assignments), assignments, applied=name)
        if changed is None or self.saved_gib(changed) < MIN_SAVING_GIB:
            return None
        saved = self.saved_gib(changed)
        return Change(lines, saved, changed.fits, scale.slower(choice), choice.note, choice.alters, assignments)

    def combined_changes(self, changes: Sequence[Change]) -> Iterator[Change]:
        """Yield all changes that do not alter the training, combined; if that does not fit, all changes."""
        for chosen in ([change for change in changes if not change.alters], list(changes)):
            if len(chosen) < 2:
                continue
            assignments = tuple(assignment for change in chosen for assignment in change.assignments)
            changed = self.planned(f"{len(chosen)} changes combined", assignments)
            if changed is None:
                continue
            everything = f"the {len(chosen)} above combined"
            change = Change(
                lines=(everything if chosen == changes else "those above that do not alter the training, combined",),
                saves_gib=self.saved_gib(changed),
                fits=changed.fits,
                slower=prod(change.slower for change in chosen),
                cost="all of their costs",
                alters=any(change.alters for change in chosen),
                assignments=assignments,
            )
            self.listener.on_change(change)
            yield change
            if change.fits:
                return

    def shorter_max_length(self) -> Iterator[Change]:
        """Yield a shorter data.max_length, with the fraction of texts that it truncates."""
        memory, plan = self.memory, self.plan
        target = memory.largest_max_length
        if target is None:
            return
        target = target if 0 < target < memory.width else max(1, memory.width // 2)
        target = target // 8 * 8 or target
        trace = device_trace(plan, memory.width, self.lengths.head, self.cache)
        width = widths_of(plan).of(target)
        changed = traced_memory(plan, Shape(memory.rows, width), self.lengths, trace)
        texts = self.lengths.train
        cost = "truncates texts" if texts is None else f"truncates {float((texts > target).mean()):.0%} of the texts"
        if (saved := self.saved_gib(changed)) >= MIN_SAVING_GIB:
            text = f"data.max_length={target}"
            yield Change((f"data.max_length = {target}",), saved, changed.fits, 1.0, cost, True, (text,))

    def saved_gib(self, changed: MemoryPlan) -> float:
        return self.memory.highest_gib - changed.highest_gib

    # Gains of free memory

    def gains(self, now: Prediction) -> Iterator[Gain]:
        """Yield the first choice of each plugin that fits and is faster, first those that keep the training."""
        offers = {
            name: [choice for scale in scales_of(name, self.plan, self.registry) for choice in scale.with_more_memory]
            for name in self.registry.names
            if current_options(name, self.plan) is not None
        }
        kept: list[Gain] = []
        for alters in (False, True):
            for name, offered in offers.items():
                tried = (
                    self.gain(now, *self.lines_and_assignments(name, choice), choice.note, alters)
                    for choice in offered
                    if choice.alters == alters
                )
                if (gain := next(filter(None, tried), None)) is not None:
                    kept += [] if alters else [gain]
                    yield gain
        if len(kept) > 1:
            assignments = tuple(assignment for gain in kept for assignment in gain.assignments)
            lines = (f"the {len(kept)} above that keep the training, combined",)
            if (combined := self.gain(now, lines, assignments, "all of their gains", False)) is not None:
                yield combined

    def gain(self, now: Prediction, lines: tuple[str, ...], assignments: tuple[str, ...], note: str, alters: bool) -> Gain | None:
        """Return these assignments as a gain; None if they are rejected, do not fit or are not predicted to be faster."""
        changed = self.planned(", ".join(assignments), assignments)
        if changed is None or changed.fits is not True or changed.time is None:
            return None
        relative = relative_time(now, changed.time)
        if max(relative) > 1 - MIN_GAIN:
            return None
        sizes = self.memory.highest_gib, changed.highest_gib
        gain = Gain(lines, *sizes, changed.time.step, relative, note, alters, assignments)
        self.listener.on_gain(gain)
        return gain

    # Both

    def planned(self, what: str, assignments: Sequence[str], applied: str | None = None) -> MemoryPlan | None:
        """Return the memory with these assignments; `what` names them for the listener.

        None if they are rejected, if the plugin `applied` is skipped with them, or if another tier answers.
        """
        if spent.seconds - self.began > CPU_SECONDS:
            if not self.ended:
                reason = (
                    f"tracing this model took {spent.seconds - self.began:.0f} seconds of CPU time; not tried: {what} and more"
                )
                self.listener.on_advice_ends(reason)
            self.ended = True
            return None
        self.listener.on_trial(what)
        try:
            plan = self.replan(assignments)
            lengths = None if any("max_length" in text for text in assignments) else self.lengths
            _, changed = fitted(plan, self.cache, lengths)
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


def relative_time(now: Prediction, changed: Prediction) -> tuple[float, float]:
    """Return the time of a row with the change relative to now: the smaller and the larger of the forecast's two ends."""
    ends = [after / changed.rows / (before / now.rows) for before, after in zip(now.step, changed.step, strict=True)]
    return min(ends), max(ends)


def current_options(name: str, plan: Plan) -> PluginOptions | None:
    """The options of an applied plugin; None if it is not applied."""
    return next((entry.options for entry in plan.applied() if entry.name == name), None)


def scales_of(name: str, plan: Plan, registry: Registry) -> Sequence[Scale]:
    """The scales that the plugin offers for `plan`. Raises PluginError if its hook raises."""
    with plugin_guard(f"plugin {name!r} of {registry.distribution(name)}", "alternatives()"):
        return list(registry.plugin(name).alternatives(current_options(name, plan), plan.context))


def changes_of(name: str, choice: Choice, plan: Plan) -> dict[str, Any]:
    """The changes of `choice`, which also turn on a plugin that is not applied."""
    return {**({} if current_options(name, plan) else {"enabled": True}), **choice.changes}
