"""Which settings are worth a trial: what the planner forecasts of them, and what the trials ruled out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import ne
from typing import Literal

SLOWER = 1.02
"""A setting that the forecast makes slower by more is not tried."""
LEAST_GAIN = 0.02
"""The part of the time that a change must promise."""
SMALLER_COST = 0.03
"""What a smaller size costs beyond the forecast, as a part of the time: a roofline does not know that small micro-batches use a
device badly."""

Setting = tuple[int, ...]
"""The index of a choice for each axis."""
Failure = Literal["out of memory", "time limit", "crash"]


@dataclass(frozen=True)
class Axis:
    """A setting with several choices."""

    choices: int
    start: int
    ordered: bool = False
    """Whether the choices are sizes, the smallest first."""
    input: bool = False
    """Whether it only changes when step batches are ready."""


@dataclass(frozen=True)
class Forecast:
    """What the planner says of a setting."""

    plan: str
    """Equal for settings with which a run would do the same."""
    fits: bool | None
    """None if it is not known."""
    peak_gib: float | None = None
    seconds: tuple[float, float] | None = None
    """Of a step: the fast and the slow end; None for a device whose speed is not known."""


class Candidates:
    """The settings of `axes`, and what is known of each."""

    def __init__(self, axes: Sequence[Axis], forecast: Callable[[Setting], Forecast | None]) -> None:
        self.axes, self.forecast = axes, forecast
        self.start: Setting = tuple(axis.start for axis in axes)
        self.sizes = [number for number, axis in enumerate(axes) if axis.ordered and not axis.input]
        """The axes of sizes that may change the memory."""
        self.forecasts: dict[Setting, Forecast | None] = {}
        self.measured: set[str] = set()
        """The plans that were measured."""
        self.broken: set[tuple[int, int]] = set()
        """(axis, choice) that crashed, or were too slow for the time limit."""
        self.least_oom_gib: float | None = None

    def plan(self, setting: Setting) -> Forecast | None:
        """The forecast of `setting`; None if it is no plan, or another training."""
        if setting not in self.forecasts:
            self.forecasts[setting] = self.forecast(setting)
        return self.forecasts[setting]

    def is_possible(self, setting: Setting) -> bool:
        """Whether `setting` can run, as far as it is known, and is no plan that was measured."""
        plan = self.plan(setting)
        if plan is None or plan.fits is False or plan.plan in self.measured or not self.broken.isdisjoint(enumerate(setting)):
            return False
        return plan.peak_gib is None or self.least_oom_gib is None or plan.peak_gib < self.least_oom_gib

    def is_worth(self, setting: Setting, beside: Setting) -> bool:
        """Whether `setting` is possible, and not predicted to be slower than `beside` at both ends of the forecast."""
        return self.is_possible(setting) and min(self.relative_seconds(setting, beside) or (1.0,)) <= SLOWER

    def relative_seconds(self, setting: Setting, to: Setting) -> tuple[float, float] | None:
        """The predicted time of a step with `setting` relative to that with `to`, at both ends; None without a forecast."""
        ours, theirs = self.plan(setting), self.plan(to)
        if ours is None or theirs is None or ours.seconds is None or theirs.seconds is None:
            return None
        return ours.seconds[0] / theirs.seconds[0], ours.seconds[1] / theirs.seconds[1]

    def predicted_gain(self, setting: Setting, to: Setting) -> float:
        """The part of the time that `setting` saves by the forecast; 0 without one."""
        time = self.relative_seconds(setting, to)
        return 1 - sum(time) / 2 if time else 0.0

    def smaller_cost(self, setting: Setting, than: Setting) -> float:
        """What the smaller sizes of `setting` cost beyond the forecast, as a part of the time."""
        lost = (max(0, old - new) for axis, new, old in zip(self.axes, setting, than, strict=True) if axis.ordered)
        return SMALLER_COST * sum(lost)

    def record(self, setting: Setting, beside: Setting, failure: Failure | None) -> None:
        """Remember that `setting` was measured, and what its failure rules out.

        Out of memory: all that needs as much. A crash: the one choice in which it differs from `beside`, and larger sizes.
        """
        plan = self.plan(setting)
        if plan is not None:
            self.measured.add(plan.plan)
        changed = [(number, choice) for number, choice in enumerate(setting) if choice != beside[number]]
        if failure == "out of memory" and plan is not None and plan.peak_gib is not None:
            self.least_oom_gib = min(plan.peak_gib, self.least_oom_gib or plan.peak_gib)
        elif failure is not None and len(changed) == 1:
            (number, choice) = changed[0]
            larger = self.axes[number].ordered and choice > beside[number]
            self.broken |= {(number, other) for other in range(choice, self.axes[number].choices if larger else choice + 1)}

    def predicted_best(self) -> Setting:
        """The setting that is predicted to be fastest at the worse end of the forecast; the start without a forecast.

        Of each two axes of which one has sizes, all pairs of choices are compared, until no pair is better. Each change must
        promise LEAST_GAIN.
        """
        found, plan = self.start, self.plan(self.start)
        for _ in self.axes if plan is not None and plan.seconds is not None else ():
            times = {
                setting: max(time) + LEAST_GAIN * sum(map(ne, setting, found)) + self.smaller_cost(setting, found)
                for setting in self.pairs(found)
                if (time := self.relative_seconds(setting, found)) and self.is_possible(setting)
            }
            nearest = min(times, key=lambda setting: times[setting], default=found)
            if times.get(nearest, 1.0) >= 1:
                break
            found = nearest
        return found

    def pairs(self, setting: Setting) -> Iterator[Setting]:
        """`setting` with other choices of one axis, and of one axis and an axis of sizes."""
        axes = [number for number, axis in enumerate(self.axes) if not axis.input]
        for one, sizes in product(axes, self.sizes):
            for choice, size in product(range(self.axes[one].choices), range(self.axes[sizes].choices)):
                yield with_choice(with_choice(setting, one, choice), sizes, size)

    def exchanged(self, setting: Setting, less: int, more: int) -> Iterator[Setting]:
        """For each smaller size of the axis `less`, the largest size of the axis `more` that fits only with it."""
        for choice in range(setting[less]):
            smaller = with_choice(setting, less, choice)
            for size in range(self.axes[more].choices - 1, setting[more], -1):
                if self.is_possible(found := with_choice(smaller, more, size)):
                    alone = self.plan(with_choice(setting, more, size))
                    if alone is None or alone.fits is False:
                        yield found
                    break


def with_choice(setting: Setting, axis: int, choice: int) -> Setting:
    return (*setting[:axis], choice, *setting[axis + 1 :])
