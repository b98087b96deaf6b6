"""Which settings are worth a trial: all that the axes allow, without those that the planner and the trials rule out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from operator import ge
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SLOWER = 1.5
"""A setting that the forecast makes slower by more is not tried. A roofline does not know that small micro-batches use a device
badly, so it may be wrong about what makes room for larger ones."""
LARGER = 0.05
"""The part of the time that a size of twice as much gains, if there is no forecast of time."""
DOUBT = 0.3
"""The chance that a setting runs which has a choice that may have made a trial fail."""
MOST = 50_000
"""Settings that are looked at. If the axes allow more, only those with up to three changes of the start are."""

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
    parallel: bool = False
    """Whether step batches are ready faster in proportion to the size, as with data workers."""
    values: tuple[float, ...] = ()
    """The sizes, if they are numbers."""

    @property
    def scale(self) -> NDArray[np.float64]:
        """(choices,) the place of each size: its logarithm to base 2, or its index. The places lie around 0."""
        places = np.arange(self.choices, dtype=np.float64)
        if self.values and min(self.values) > 0:
            places = np.log2(np.array(self.values, dtype=np.float64))
        centered: NDArray[np.float64] = places - places.mean()
        return centered


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
        self.settings: list[Setting] = list(self.all())
        self.forecasts: dict[Setting, Forecast | None] = {}
        self.measured: set[str] = set()
        """The plans that were measured."""
        self.least_oom_gib: float | None = None
        """Forecast of the smallest setting that ran out of memory."""
        self.most_fitted_gib = 0.0
        """Forecast of the largest setting that did not."""
        self.oom_sizes: list[Setting] = []
        """The sizes of those without a forecast."""
        self.fit_sizes: list[Setting] = []
        """The sizes of the trials that did not fail."""
        self.worked: set[tuple[int, int]] = set()
        """(axis, choice) of the trials that did not fail."""
        self.failed: list[set[tuple[int, int]]] = []
        """The same of each trial that crashed, or was too slow for the time limit."""

    def all(self) -> Iterator[Setting]:
        """All settings, the start first, then those with few changes."""
        choices = [range(axis.choices) for axis in self.axes]
        count = int(np.prod([axis.choices for axis in self.axes], dtype=np.float64))
        changed = product(*choices) if count <= MOST else near(self.start, choices, 3)
        yield from sorted(changed, key=self.changes)

    def changes(self, setting: Setting) -> int:
        """The number of axes in which `setting` differs from the start."""
        return sum(choice != start for choice, start in zip(setting, self.start, strict=True))

    def sizes(self, setting: Setting) -> Setting:
        """`setting` with the start's choices of all axes that are not sizes: what decides how much memory it needs."""
        sizes = (axis.ordered and not axis.input for axis in self.axes)
        return tuple(new if size else old for size, new, old in zip(sizes, setting, self.start, strict=True))

    def plan(self, setting: Setting) -> Forecast | None:
        """The forecast of `setting`; None if it is not a plan, or another training."""
        if setting not in self.forecasts:
            self.forecasts[setting] = self.forecast(setting)
        return self.forecasts[setting]

    def is_possible(self, setting: Setting, beside: Setting) -> bool:
        """Whether `setting` can run, as far as it is known, is not a plan that was measured, and may be as fast as `beside`.

        The planner is asked about its sizes first: they decide whether most settings fit, and few of them differ.
        """
        if self.is_suspect(setting):
            return False
        if not self.fits(self.sizes(setting)) or not self.fits(setting):
            return False
        plan = self.plan(setting)
        assert plan is not None, "it fits"
        if plan.plan in self.measured:
            return False
        return min(self.relative_seconds(setting, beside) or (1.0,)) <= SLOWER

    def fits(self, setting: Setting) -> bool:
        """Whether `setting` is a plan that may fit, by the forecast and by the trials that ran out of memory."""
        plan = self.plan(setting)
        if plan is None or plan.fits is False:
            return False
        if plan.peak_gib is None:
            return not any(all(map(ge, self.sizes(setting), sizes)) for sizes in self.oom_sizes)
        return self.least_oom_gib is None or plan.peak_gib < self.least_oom_gib

    def is_suspect(self, setting: Setting) -> bool:
        """Whether `setting` has a choice that makes trials fail, or all choices that may have made one fail."""
        blamed, unexplained = self.causes()
        if any(self.implies(setting, cause) for cause in blamed):
            return True
        return any(all(self.implies(setting, cause) for cause in causes) for causes in unexplained)

    def chance(self, setting: Setting) -> float:
        """The chance that `setting` runs, by the trials that failed."""
        _, unexplained = self.causes()
        doubts = sum(any(self.implies(setting, cause) for cause in causes) for causes in unexplained)
        sizes = self.sizes(setting)
        steps = min(
            (sum(max(0, more - size) for size, more in zip(sizes, oom, strict=True)) for oom in self.oom_sizes), default=None
        )
        room = 1.0 if steps is None or self.has_fitted(setting) else 1 - 0.5**steps
        return DOUBT**doubts * room

    def has_fitted(self, setting: Setting) -> bool:
        """Whether a trial with the same sizes or larger ones did not fail."""
        return any(all(map(ge, fitted, self.sizes(setting))) for fitted in self.fit_sizes)

    def causes(self) -> tuple[set[tuple[int, int]], list[set[tuple[int, int]]]]:
        """The choices that explain several failed trials, and for each other one the choices that may be its cause.

        No choice of the input is a cause, nor one that another trial had without a failure, unless all were.
        """
        blamed = set()
        unexplained = [
            {cause for cause in failed - self.worked if not self.axes[cause[0]].input} or failed for failed in self.failed
        ]
        while unexplained:
            cause, count = Counter(chain.from_iterable(unexplained)).most_common(1)[0]
            if count == 1:
                break
            blamed.add(cause)
            unexplained = [causes for causes in unexplained if cause not in causes]
        return blamed, unexplained

    def implies(self, setting: Setting, cause: tuple[int, int]) -> bool:
        """Whether `setting` has the choice that caused a failure, or a larger size than one above the start."""
        axis, choice = cause
        larger = self.axes[axis].ordered and self.start[axis] < choice < setting[axis]
        return setting[axis] == choice or larger

    def relative_seconds(self, setting: Setting, to: Setting) -> tuple[float, float] | None:
        """The predicted time of a step with `setting` relative to that with `to`, at both ends; None without a forecast."""
        ours, theirs = self.plan(setting), self.plan(to)
        if ours is None or theirs is None or ours.seconds is None or theirs.seconds is None:
            return None
        return ours.seconds[0] / theirs.seconds[0], ours.seconds[1] / theirs.seconds[1]

    def record(self, setting: Setting, failure: Failure | None) -> None:
        """Remember that `setting` was measured, and what its failure rules out: out of memory, all that needs as much.

        Without a forecast, that is what has the same sizes or larger ones.
        """
        plan = self.plan(setting)
        peak = None
        if plan is not None:
            self.measured.add(plan.plan)
            peak = plan.peak_gib
        if failure is None:
            self.worked |= set(enumerate(setting))
            self.fit_sizes.append(self.sizes(setting))
            self.most_fitted_gib = max(peak or 0.0, self.most_fitted_gib)
        elif failure == "out of memory" and peak is not None and peak > self.most_fitted_gib:
            self.least_oom_gib = min(peak, self.least_oom_gib or peak)
        elif failure == "out of memory" and not self.has_fitted(setting):
            self.oom_sizes.append(self.sizes(setting))
        else:
            self.failed.append(set(enumerate(setting)))

    def prior(self) -> NDArray[np.float64]:
        """(settings,) the logarithm of the expected seconds relative to those of the start, before any trial.

        Each choice is forecast once, beside the start, because a forecast may take seconds. The effects of several add up.
        """
        found = np.zeros(len(self.settings))
        chosen = np.array(self.settings, np.int64).reshape(len(self.settings), len(self.axes))
        for number, axis in enumerate(self.axes):
            if not axis.input:
                effects = np.array([self.effect(number, choice) for choice in range(axis.choices)])
                found += effects[chosen[:, number]]
        return found

    def effect(self, number: int, choice: int) -> float:
        """The logarithm of the expected time of a choice beside the start, relative to it: the middle of the forecast's ends."""
        time = self.relative_seconds(with_choice(self.start, number, choice), self.start)
        if time is not None:
            return float(np.log(time).mean())
        axis = self.axes[number]
        return -LARGER * float(axis.scale[choice] - axis.scale[axis.start]) if axis.ordered else 0.0


def near(start: Setting, choices: Sequence[range], changes: int) -> Iterator[Setting]:
    """The settings that differ from `start` in up to `changes` axes, each one once."""
    found = {start}
    for _ in range(changes):
        found |= {with_choice(setting, axis, choice) for setting in found for axis, each in enumerate(choices) for choice in each}
    yield from found


def with_choice(setting: Setting, axis: int, choice: int) -> Setting:
    return (*setting[:axis], choice, *setting[axis + 1 :])
