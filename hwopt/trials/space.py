"""The space of `hwopt tune`: what the plugins offer as tunable, the plan of a setting, and what the planner forecasts for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hwopt.config.toml_text import inline
from hwopt.errors import HwoptError, PluginError
from hwopt.memory.advice import changes_of, scales_of
from hwopt.memory.forecast.lengths import Lengths, lengths_of
from hwopt.memory.forecast.planner import plan_memory
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan, Replan
from hwopt.plugin import Scale
from hwopt.plugin.registry import Registry
from hwopt.trials.search import Axis, Forecast, Setting
from hwopt.trials.trial import what_runs


@dataclass(frozen=True)
class Dimension:
    """A scale of a plugin, as an axis of the search."""

    plugin: str
    scale: Scale
    changed: tuple[Mapping[str, Any], ...]  # the options that each choice changes

    @property
    def axis(self) -> Axis:
        scale = self.scale
        sizes = self.sizes if scale.ordered else ()
        return Axis(len(scale.choices), scale.present, scale.ordered, scale.input, scale.parallel, sizes)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The number of each choice; () if a choice is not a number."""
        numbers = [value for choice in self.changed for value in choice.values()]
        if len(numbers) != len(self.changed) or not all(type(each) in (int, float) for each in numbers):
            return ()
        return tuple(float(number) for number in numbers)

    def described(self, choice: int) -> str:
        """The choice for a reader: "batch.train = 32", "checkpointing off"."""
        options = dict(self.changed[choice])
        enabled = options.pop("enabled", True)
        if not enabled or not options:
            return f"{self.plugin} {'on' if enabled else 'off'}"
        key, value = next(iter(options.items()))
        return f"{self.plugin}.{key} = {json.dumps(value)}"


def dimensions_of(plan: Plan, registry: Registry) -> list[Dimension]:
    """What the plugins offer for `plan`, the applied ones first. A broken plugin that is not applied is ignored."""
    applied = [entry.name for entry in plan.applied()]
    found = []
    for name in dict.fromkeys([*applied, *registry.names]):
        try:
            offered = scales_of(name, plan, registry)
        except PluginError:
            if name in applied:
                raise
            continue
        scales = filter(None, map(same_training_scale, offered))
        found += [Dimension(name, scale, tuple(changes_of(name, each, plan) for each in scale.choices)) for scale in scales]
    return found


def same_training_scale(scale: Scale) -> Scale | None:
    """`scale` without the choices that alter the training; None if `hwopt tune` has nothing to measure."""
    kept = tuple(choice for choice in scale.choices if not choice.alters)
    present = scale.choices[scale.present]
    if not scale.tune or len(kept) < 2 or present.alters:
        return None
    return replace(scale, choices=kept, present=kept.index(present))


class Space:
    """The settings around the plan `start`: their assignments, plans and forecasts."""

    def __init__(self, start: Plan, registry: Registry, replan: Replan, cache: Path, on_planning: Callable[[str], None]) -> None:
        self.start, self.replan, self.cache, self.on_planning = start, replan, cache, on_planning
        self.dimensions = dimensions_of(start, registry)
        self.lengths: Lengths = lengths_of(start, cache)
        self.memory: dict[Setting, MemoryPlan | None] = {}

    @property
    def axes(self) -> list[Axis]:
        return [dimension.axis for dimension in self.dimensions]

    def changed(self, setting: Setting) -> Iterator[tuple[Dimension, int]]:
        """The dimensions in which `setting` differs from the start, with its choices."""
        for dimension, choice in zip(self.dimensions, setting, strict=True):
            if choice != dimension.scale.present:
                yield dimension, choice

    def tables(self, setting: Setting) -> dict[str, dict[str, Any]]:
        """Plugin -> the options that `setting` changes, as in a profile."""
        found: dict[str, dict[str, Any]] = {}
        for dimension, choice in self.changed(setting):
            found.setdefault(dimension.plugin, {}).update(dimension.changed[choice])
        return found

    def assignments(self, setting: Setting) -> tuple[str, ...]:
        """The same as arguments of `--set`."""
        options = [(name, *option) for name, table in self.tables(setting).items() for option in table.items()]
        return tuple(f"plugins.{name}.{key}={inline(value).as_string()}" for name, key, value in options)

    def described(self, setting: Setting) -> str:
        """What `setting` changes, for a reader."""
        return ", ".join(dimension.described(choice) for dimension, choice in self.changed(setting)) or "the start"

    def plan(self, setting: Setting) -> Plan | None:
        """The plan of `setting`; None if the plugins refuse it, or if it is another training."""
        try:
            plan = self.replan(self.assignments(setting))
        except HwoptError:
            return None
        return plan if trained(plan) == trained(self.start) else None

    def forecast(self, setting: Setting) -> Forecast | None:
        """What the planner forecasts for `setting`; None if it cannot be used."""
        self.on_planning(self.described(setting))
        plan = self.plan(setting)
        memory = None if plan is None else self.memory_of(setting)
        if plan is None or memory is None:
            return None
        seconds = None if memory.time is None else memory.time.step
        return Forecast(what_runs(plan), memory.fits, None if memory.lower_bound else memory.highest_gib, seconds)

    def memory_of(self, setting: Setting) -> MemoryPlan | None:
        """The memory of `setting`; None if it cannot be planned.

        On a CPU only sizes count: a trace for each kernel takes seconds, has no times, and host memory is seldom short.
        """
        if self.start.hardware.device_type == "cpu":
            setting = tuple(choice if axis.ordered else axis.start for axis, choice in zip(self.axes, setting, strict=True))
        if setting not in self.memory:
            with suppress(HwoptError):
                plan = self.plan(setting)
                self.memory[setting] = None if plan is None else plan_memory(plan, self.cache, self.lengths)
        return self.memory.get(setting)


def trained(plan: Plan) -> Any:
    """What all settings share: rows per optimizer step, hyperparameters, job, and what changes the method."""
    return plan.batch.step, plan.training, plan.job, plan.method
