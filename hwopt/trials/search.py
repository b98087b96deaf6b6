"""Search: the fastest setting of a plan, in few trials. It measures through a callable, and asks the planner through another.

A setting is a choice for each axis: micro-batch, workers, prefetch, checkpointing, compilation, attention kernel. This is a
coordinate search in the order of the forecast; docs/tune.md has its rules, docs/decisions/0018-search-of-tune.md its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import ne
from typing import Literal

from hwopt.records.throughput import RateRatio, Unit, Window, rate, rate_ratio

TRIALS = 12
WAITS = 0.02  # below this part of the time the loop does not wait for data: a faster input gains nothing
LARGER = 0.2  # the part of the time that a micro-batch of twice as many rows is expected to gain, beside the forecast
UNKNOWN_NOISE_GAIN = 1.05  # the least ratio that counts as faster if a trial has too few windows to know its noise

Ending = Literal["plateau", "limit", "interrupted"]
Failure = Literal["out of memory", "time limit", "crash"]
Setting = tuple[int, ...]  # the index of a choice for each axis


@dataclass(frozen=True)
class Axis:
    """A setting with several choices."""

    choices: int
    start: int
    ordered: bool = False  # whether the choices are ordered by the memory that they need, the smallest first
    input: bool = False  # whether it only changes when step batches are ready
    parallel: bool = False  # whether step batches are ready faster in proportion to the size, as with data workers
    values: tuple[float, ...] = ()  # the sizes, if they are numbers

    @property
    def is_size(self) -> bool:
        """Whether the choices are numbers of rows."""
        return self.ordered and not self.input and bool(self.values)


@dataclass(frozen=True)
class Forecast:
    """What the planner says of a setting."""

    plan: str  # equal for settings with which a run would do the same
    fits: bool | None  # None if it is not known
    peak_gib: float | None = None
    seconds: tuple[float, float] | None = None
    """Of a step: the fast and the slow end; None for a device whose speed is not known."""


@dataclass(frozen=True)
class Measurement:
    """What a trial measured; without windows if it failed."""

    windows: tuple[Window, ...] = ()
    data_wait: float = 0.0  # the part of the time in which the loop waited for data
    failure: Failure | None = None
    unit: Unit = "samples"
    peak_gib: float | None = None
    message: str = ""  # why it failed

    @property
    def seconds(self) -> float:
        """The time of a sample, or of a real token if they are the unit."""
        units = rate(self.windows, self.unit)
        assert units, "it did not fail"
        return 1 / units


@dataclass(frozen=True)
class Trial:
    number: int
    setting: Setting
    measurement: Measurement
    ratio: RateRatio | None  # of its speed to that of the start; None for a failure


@dataclass
class Search:
    """The state of a search; `run` searches."""

    axes: Sequence[Axis]
    forecast: Callable[[Setting], Forecast | None]  # None: no plan, or another training
    measure: Callable[[Setting], Measurement]
    limit: int = TRIALS
    on_trial: Callable[[Trial], None] = lambda trial: None
    trials: list[Trial] = field(default_factory=list)
    plans: dict[Setting, Forecast | None] = field(default_factory=dict)

    def run(self) -> Ending:
        """Search, and return why the search ended. `best` and `trials` have what was found, also after an exception."""
        if self.tries(self.start).measurement.failure is not None:
            return "plateau"
        while len(self.trials) < self.limit:
            setting = self.next()
            if setting is None:
                return "plateau"
            self.tries(setting)
        return "limit"

    @property
    def start(self) -> Setting:
        return tuple(axis.start for axis in self.axes)

    @property
    def good(self) -> list[Trial]:
        """The trials that did not fail."""
        return [trial for trial in self.trials if trial.measurement.failure is None]

    @property
    def winner(self) -> Trial:
        """The fastest trial of those that are clearly faster than the start; else the first one."""
        faster = [trial for trial in self.good if clearly_faster(trial.ratio)]
        return min(faster, key=lambda trial: trial.measurement.seconds, default=self.trials[0])

    @property
    def best(self) -> Setting:
        return self.winner.setting if self.trials else self.start

    def tries(self, setting: Setting) -> Trial:
        measurement = self.measure(setting)
        start = self.trials[0].measurement if self.trials else measurement
        ratio = rate_ratio(measurement.windows, start.windows, measurement.unit)
        trial = Trial(len(self.trials) + 1, setting, measurement, ratio)
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def next(self) -> Setting | None:
        """The change of the fastest trial that is expected to gain most, those of the input first; None if none is left."""
        fastest = min(self.good, key=lambda trial: trial.measurement.seconds)
        measured = {each.plan for trial in self.trials if (each := self.plan(trial.setting)) is not None}
        expected = []
        for axis, setting in self.neighbours(fastest):
            seconds, plan = self.relative_seconds(setting, fastest.setting), self.plan(setting)
            if plan is not None and plan.plan not in measured and self.fits(setting):
                gain = self.doublings(setting, fastest.setting) * LARGER
                expected.append((not axis.input, math.log(math.prod(seconds)) / 2 - gain, setting))
        return min(expected)[-1] if expected else None

    def neighbours(self, trial: Trial) -> Iterator[tuple[Axis, Setting]]:
        """The settings that differ from that of `trial` in one axis, and in the rows that fit with it."""
        here = trial.setting
        for number, axis in enumerate(self.axes):
            if axis.input:
                choices = faster_inputs(axis, here[number], trial.measurement.data_wait)
                yield from ((axis, with_choice(here, number, choice)) for choice in choices)
            elif axis.is_size:
                yield from ((axis, with_choice(here, number, size)) for size in self.sizes(trial, number))
            else:
                tried = {each.setting[number] for each in self.trials}
                for choice in set(range(axis.choices)) - tried:
                    setting = with_choice(here, number, choice)
                    yield axis, self.with_rows(setting, more=axis.ordered and choice < here[number])

    def sizes(self, trial: Trial, number: int) -> Iterator[int]:
        """The sizes to try beside `trial`: the largest that fits, or halfway back from what was slower; if none was, one less."""
        here = trial.setting[number]
        beside = {each.setting[number] for each in self.trials if sum(map(ne, each.setting, trial.setting)) <= 1} - {here}
        slower = min((size for size in beside if size > here), default=None)
        larger = range(here + 1, self.axes[number].choices if slower is None else slower)
        fitting = [size for size in larger if slower is not None or self.fits(with_choice(trial.setting, number, size))]
        if fitting:
            yield fitting[-1] if slower is None else (here + slower) // 2
        elif here and slower is None and not beside:
            yield here - 1

    def with_rows(self, setting: Setting, more: bool) -> Setting:
        """`setting` with the most rows that fit: any number if it may need `more` rows than its own, else at most its own."""
        number = next((number for number, axis in enumerate(self.axes) if axis.is_size), None)
        if number is None:
            return setting
        largest = self.axes[number].choices - 1 if more else setting[number]
        resized = (with_choice(setting, number, size) for size in range(largest, -1, -1))
        return next(filter(self.fits, resized), setting)

    def plan(self, setting: Setting) -> Forecast | None:
        """The forecast of `setting`; None if it is not a plan, or another training."""
        if setting not in self.plans:
            self.plans[setting] = self.forecast(setting)
        return self.plans[setting]

    def fits(self, setting: Setting) -> bool:
        """Whether `setting` is a plan that may fit, by the forecast and by the trials that ran out of memory."""
        plan = self.plan(setting)
        failed = [trial.setting for trial in self.trials if trial.measurement.failure == "out of memory"]
        return plan is not None and plan.fits is not False and not any(self.needs_as_much(setting, each) for each in failed)

    def needs_as_much(self, setting: Setting, failed: Setting) -> bool:
        """Whether `setting` needs the memory of `failed`, by the forecast, or because none of its sizes is smaller."""
        ours, theirs = self.plan(setting), self.plan(failed)
        if ours is not None and theirs is not None and ours.peak_gib is not None and theirs.peak_gib is not None:
            return ours.peak_gib >= theirs.peak_gib
        sizes = [number for number, axis in enumerate(self.axes) if axis.ordered and not axis.input]
        return all(setting[number] >= failed[number] for number in sizes)

    def relative_seconds(self, setting: Setting, to: Setting) -> tuple[float, float]:
        """The predicted time of a step with `setting` relative to that with `to`, at both ends; 1 without a forecast."""
        ours, theirs = self.plan(setting), self.plan(to)
        if ours is None or theirs is None or ours.seconds is None or theirs.seconds is None:
            return 1.0, 1.0
        return ours.seconds[0] / theirs.seconds[0], ours.seconds[1] / theirs.seconds[1]

    def doublings(self, setting: Setting, of: Setting) -> float:
        """How often the sizes of `of` are doubled in `setting`; a size without a number counts by its place."""
        axes = [each for each in zip(self.axes, setting, of, strict=True) if each[0].ordered and not each[0].input]
        return sum(math.log2(axis.values[new] / axis.values[old]) if axis.values else new - old for axis, new, old in axes)


def faster_inputs(axis: Axis, here: int, wait: float) -> Iterator[int]:
    """The next choice with which step batches should be ready in time, if the loop waits for this part of its time."""
    larger = range(here + 1, axis.choices)
    if wait < WAITS or not larger:
        return
    workers = axis.values if axis.parallel else ()
    enough = [choice for choice in larger if workers and workers[choice] >= (workers[here] or wait) / (1 - wait)]
    yield enough[0] if enough else larger[-1]


def with_choice(setting: Setting, axis: int, choice: int) -> Setting:
    return (*setting[:axis], choice, *setting[axis + 1 :])


def clearly_faster(ratio: RateRatio | None) -> bool:
    """Whether the ratio is above 1 by more than its noise."""
    if ratio is None or ratio.value <= 1:
        return False
    return ratio.clear if ratio.low is not None else ratio.value >= UNKNOWN_NOISE_GAIN
