"""Search: the fastest setting of a plan, in few trials. It measures through a callable, and asks the planner through another.

A setting is a choice for each axis: micro-batch, workers, prefetch, checkpointing, compilation, attention kernel. There are some
thousands of settings. This is Bayesian optimization: the first trial is the start, and each further one is the setting with
the largest expected improvement by a Gaussian process (hwopt.trials.surrogate) over all trials so far and the forecast. It never
tries a setting that

* the planner says does not fit, or that is the plan of a trial;
* the roofline predicts to be half as slow again at both ends of its range;
* needs as much memory as one that ran out of memory, or has the choices with which a trial crashed;
* prepares step batches faster although the loop does not wait for them.

The surrogate models the time in which the loop computes. More data workers shorten the wait for data in proportion, and fewer may
cause one (hwopt.trials.preparation_time).

The search ends at the plateau, when no setting is expected to gain anything, or after 12 trials. Its result is the setting that
the surrogate, which weighs all trials, expects to be fastest, if its trial is clearly faster than the start: the 95 % interval of
the ratio is above 1 (see hwopt.records.throughput for the windows of a trial).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hwopt.records.throughput import Ratio, Unit, Window, rate, rate_ratio
from hwopt.trials.candidates import Axis, Candidates, Failure, Forecast, Setting, with_choice
from hwopt.trials.preparation_time import WAITS, PreparationTime
from hwopt.trials.surrogate import Numbers, Posterior, Surrogate

TRIALS = 12
PLATEAU = 0.0015
"""A search ends when no setting is expected to gain as large a part of the time."""
CHANGE = 0.02
"""The part of an expected improvement that each changed axis costs: of equal settings, the one with fewer changes is tried."""
SAME = 0.003
"""Settings whose expected times differ by a smaller part are equally fast."""
NEARLY = 0.9
"""The input is nearly as slow as the loop if it takes this part of the time: it would hide a gain."""
TINY = 1e-12
"""Seconds."""
UNKNOWN_NOISE_GAIN = 1.05
"""The least ratio that counts as faster if a trial has too few windows to know its noise."""

Ending = Literal["plateau", "limit", "interrupted"]


@dataclass(frozen=True)
class Measurement:
    """What a trial measured; without windows if it failed."""

    windows: tuple[Window, ...] = ()
    data_wait: float = 0.0
    """The part of the time in which the loop waited for data."""
    failure: Failure | None = None
    unit: Unit = "samples"

    @property
    def seconds(self) -> float:
        """The time of a sample, or of a real token if they are the unit."""
        units = rate(self.windows, self.unit)
        assert units, "it did not fail"
        return 1 / units

    def over(self, other: Measurement) -> Ratio | None:
        """The ratio of the speeds."""
        return rate_ratio(self.windows, other.windows, self.unit)


@dataclass(frozen=True)
class Trial:
    number: int
    setting: Setting
    measurement: Measurement
    ratio: Ratio | None
    """Of its speed to that of the start; None for a failure."""


@dataclass
class Search:
    """The state of a search; `run` searches."""

    axes: Sequence[Axis]
    forecast: Callable[[Setting], Forecast | None]
    """None: no plan, or another training."""
    measure: Callable[[Setting], Measurement]
    limit: int = TRIALS
    on_trial: Callable[[Trial], None] = lambda trial: None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.candidates = Candidates(self.axes, self.forecast)
        self.surrogate = Surrogate(self.axes)
        self.settings = np.array(self.candidates.settings, np.int64).reshape(len(self.candidates.settings), len(self.axes))
        self.places = {setting: place for place, setting in enumerate(self.candidates.settings)}
        self.prior = np.zeros(len(self.settings))
        self.workers = np.ones(len(self.settings))
        """(settings,) the number of data workers of each."""
        for number, axis in enumerate(self.axes):
            if axis.parallel:
                self.workers = np.array(axis.values or range(axis.choices), np.float64)[self.settings[:, number]]

    def run(self) -> Ending:
        """Search, and return why the search ended. `best` and `trials` have what was found, also after an exception.

        If the start fails, only its trial is there.
        """
        if self.tries(self.start) is not None:
            return "plateau"
        self.prior = self.candidates.prior()
        while len(self.trials) < self.limit:
            setting = self.next()
            if setting is None:
                if (simpler := self.simpler()) is not None:
                    self.tries(simpler)
                return "plateau"
            self.tries(setting)
        return "limit"

    @property
    def start(self) -> Setting:
        return self.candidates.start

    @property
    def good(self) -> list[Trial]:
        """The trials that did not fail."""
        return [trial for trial in self.trials if trial.measurement.failure is None]

    @property
    def winner(self) -> Trial:
        """The trial that is expected to be fastest, of those that are clearly faster than the start; else the first one."""
        if not self.good:
            return self.trials[0]
        expected = self.expected_seconds(self.computing())
        faster = [(seconds, trial) for seconds, trial in zip(expected, self.good, strict=True) if clearly_faster(trial.ratio)]
        least = min((seconds for seconds, _ in faster), default=0.0)
        same = [trial for seconds, trial in faster if seconds <= (1 + SAME) * least]
        return min(same, key=lambda trial: self.candidates.changes(trial.setting), default=self.trials[0])

    @property
    def best(self) -> Setting:
        return self.winner.setting if self.trials else self.start

    def tries(self, setting: Setting) -> Failure | None:
        """Measure `setting`, and return its failure."""
        measurement = self.measure(setting)
        start = self.trials[0].measurement if self.trials else measurement
        trial = Trial(len(self.trials) + 1, setting, measurement, measurement.over(start))
        self.trials.append(trial)
        self.candidates.record(setting, measurement.failure)
        self.on_trial(trial)
        return measurement.failure

    def next(self) -> Setting | None:
        """The possible setting with the largest expected gain; None at the plateau."""
        computing = self.computing()
        expected = self.expected_seconds(computing)
        fastest = self.good[int(expected.argmin())]
        gains = self.expected_gains(computing, fastest, float(expected.min()))
        for place in np.argsort(-gains, kind="stable"):
            setting: Setting = self.candidates.settings[place]
            if gains[place] < PLATEAU:
                return None
            if self.candidates.is_possible(setting, fastest.setting):
                return setting
        return None

    def simpler(self) -> Setting | None:
        """The best setting without the changes that are expected to gain nothing; None if it was measured."""
        best = self.best
        mean = self.computing().mean
        changes = [number for number, choice in enumerate(best) if choice != self.start[number] and not self.axes[number].input]
        found = best
        for number in changes:
            without = with_choice(best, number, self.start[number])
            if without in self.places and mean[self.places[without]] <= mean[self.places[best]] + SAME:
                found = with_choice(found, number, self.start[number])
        return found if found in self.places and self.candidates.is_possible(found, best) else None

    def expected_gains(self, computing: Posterior, fastest: Trial, seconds: float) -> Numbers:
        """(settings,) the part of the time that each is expected to gain on the fastest trial; 0 for what need not be tried.

        `seconds`: the expected time of that trial.
        """
        preparation = self.preparation_time()
        gains = computing.expected_improvement(np.log(np.maximum(preparation.target(self.workers, seconds), TINY)))
        # no setting is faster than its input
        gains = np.minimum(gains, np.log(seconds / np.clip(preparation.least(self.workers), TINY, seconds)))
        gains *= preparation.chance(self.workers, seconds)
        for place in np.flatnonzero(gains >= PLATEAU) if len(self.good) < len(self.trials) else ():
            gains[place] *= self.candidates.chance(self.candidates.settings[place])
        gains *= 1 - CHANGE * (self.settings != fastest.setting).sum(axis=1)
        # a larger input size gains nothing if the loop does not wait, unless the input hides what other axes gain
        waits = fastest.measurement.data_wait >= WAITS
        slow_input = float(preparation.least(self.workers[[self.places[fastest.setting]]])[0]) >= NEARLY * seconds
        for number, axis in enumerate(self.axes):
            if axis.input and not waits and not (axis.parallel and slow_input):
                gains[self.settings[:, number] > fastest.setting[number]] = 0.0
        gains[[self.places[trial.setting] for trial in self.trials]] = 0.0
        return gains

    def computing(self) -> Posterior:
        """What the trials tell of the time in which the loop computes, for all settings."""
        measured = [trial.measurement for trial in self.good]
        seconds = np.array([max(each.seconds * (1 - each.data_wait), TINY) for each in measured])
        return self.surrogate.posterior(self.settings, self.prior, self.places_of_good(), seconds)

    def expected_seconds(self, computing: Posterior) -> Numbers:
        """(trials that did not fail,) the time of each by the surrogate, with the wait that the trial measured."""
        waits = np.array([trial.measurement.data_wait for trial in self.good])
        seconds: Numbers = np.exp(computing.mean[self.places_of_good()]) / (1 - waits)
        return seconds

    def preparation_time(self) -> PreparationTime:
        """What the trials tell of the time in which step batches are prepared."""
        workers = self.workers[self.places_of_good()].tolist()
        measured = [trial.measurement for trial in self.good]
        return PreparationTime.of((n, each.seconds, each.data_wait) for n, each in zip(workers, measured, strict=True))

    def places_of_good(self) -> NDArray[np.int64]:
        """(trials that did not fail,) the index of the setting of each."""
        return np.array([self.places[trial.setting] for trial in self.good])


def clearly_faster(ratio: Ratio | None) -> bool:
    """Whether the ratio is above 1 by more than its noise."""
    if ratio is None or ratio.value <= 1:
        return False
    return ratio.clear if ratio.low is not None else ratio.value >= UNKNOWN_NOISE_GAIN
