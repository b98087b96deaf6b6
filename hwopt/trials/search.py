"""Search: the fastest setting of a plan, in few trials. It measures through a callable, and asks the planner through another.

A setting is a choice for each axis: micro-batch, workers, prefetch, checkpointing, compilation, attention kernel. There are some
thousands of settings, so the search moves from the start to better neighbours. It never tries a setting that

* the planner says does not fit, or that is the plan of a trial;
* the roofline predicts to be slower at both ends of its range;
* needs as much memory as one that ran out of memory, or has a choice that crashed;
* prepares step batches faster although the loop does not wait for them.

The first trial is the start. The second is a jump to the setting that the roofline predicts to be fastest, if there is one. Each
further trial is the move with the largest expected gain:

* another choice of one axis, with the predicted gain; for the input, with the measured part of the time that waits for data;
* along sizes (micro-batch, workers), with half the gain of the last move in that direction, in larger steps if it was large;
* an exchange: a larger size of one axis that fits only with a smaller one of another axis;
* all changes together that were faster, but not clearly.

A move that missed halves the expected gain of its direction, so that no axis takes all trials. The search ends at the plateau,
when no move is expected to gain anything, or after 12 trials: then only moves with small expected gains are left. On simulated
surfaces it takes 10.7 trials in the mean and ends within 3 % of the best setting on 95 of 100 (tests/trials/test_search.py).

Noise: a trial has windows (see hwopt.report.throughput). A candidate replaces the current setting only if it is 1 % faster and
the 95 % interval of the ratio is above 1. Two processes with one setting differ by more than windows of one process, so a gain
below 2 % must also hold against a repetition of the current setting, which is one trial more.

While the loop waits for data, the wait hides what other axes gain. Then the time without the wait is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hwopt.report.throughput import Ratio, Unit, Window, rate_ratio
from hwopt.trials.candidates import SLOWER, Axis, Candidates, Failure, Forecast, Setting
from hwopt.trials.moves import WAITS, Move, Moves

TRIALS = 12
SMALL, CLOSE = 1.01, 1.02
"""A smaller ratio is not adopted; a smaller one than CLOSE must hold against a repetition of the current setting."""
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
    def computing(self) -> tuple[Window, ...]:
        """The windows without the wait for data, which is taken as equal in all of them."""
        return tuple(replace(window, seconds=window.seconds * (1 - self.data_wait)) for window in self.windows)

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
    repeated: bool = False
    """Whether the current setting was measured again."""


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
    adopted: list[Trial] = field(default_factory=list)
    """The start, and the trials that were adopted, in order."""

    def __post_init__(self) -> None:
        self.candidates = Candidates(self.axes, self.forecast)
        self.moves = Moves(self.candidates)

    def run(self) -> Ending:
        """Search, and return why the search ended. `best` and `trials` have what was found, also after an exception.

        If the start fails, only its trial is there.
        """
        if not self.tries(self.start):
            return "plateau"
        jump = self.candidates.predicted_best()
        if self.left and self.candidates.is_worth(jump, self.start) and not self.tries(jump):
            self.moves.miss_jump(jump)
        while self.left:
            move = self.moves.best(self.current.setting, self.current.measurement.data_wait)
            if move is None:
                return "plateau"
            self.follow(move)
        return "limit"

    @property
    def start(self) -> Setting:
        return self.candidates.start

    @property
    def left(self) -> int:
        """The number of trials that are left."""
        return self.limit - len(self.trials)

    @property
    def current(self) -> Trial:
        """The trial of the setting that is changed next."""
        return self.adopted[-1]

    @property
    def winner(self) -> Trial:
        """The last trial that was adopted and is clearly faster than the start; else the first trial."""
        return next((trial for trial in reversed(self.adopted) if clearly_faster(trial.ratio)), self.trials[0])

    @property
    def best(self) -> Setting:
        return self.winner.setting if self.trials else self.start

    def follow(self, move: Move) -> None:
        """Try a move, and remember what it gained."""
        before, number = self.current, len(self.trials)
        adopted = self.tries(move.setting)
        ratio = self.trials[number].measurement.over(before.measurement)
        if adopted:
            self.moves.gain(move.direction, 1 - 1 / ratio.value if ratio else 0.0)
        else:
            self.moves.miss(move, before.setting, ratio.value if ratio else None)

    def tries(self, setting: Setting) -> bool:
        """Measure `setting`. Returns whether it was adopted."""
        trial = self.record(setting)
        failure = trial.measurement.failure
        self.candidates.record(setting, self.current.setting if self.adopted else setting, failure)
        if failure is None and (len(self.trials) == 1 or self.is_faster(trial.measurement)):
            self.adopted.append(trial)
            return True
        return False

    def is_faster(self, candidate: Measurement) -> bool:
        """Whether `candidate` is clearly faster than the current setting, and if the gain is small, also than a repetition of it.

        If the loop waits for data, which hides the gain, the time without the wait counts.
        """
        now = self.current.measurement
        ratio = candidate.over(now)
        if ratio is None:
            return False
        if max(candidate.data_wait, now.data_wait) >= WAITS and ratio.value >= 1 / SLOWER:
            hidden = rate_ratio(candidate.computing, now.computing, candidate.unit)
            if hidden is not None and hidden.value >= CLOSE and clearly_faster(hidden):
                return True
        if ratio.value < SMALL or not clearly_faster(ratio):
            return False
        return ratio.value >= CLOSE or self.is_faster_than_repetition(candidate)

    def is_faster_than_repetition(self, candidate: Measurement) -> bool:
        """Whether `candidate` is clearly faster than a repetition of the current setting; True if no trial is left for it."""
        again = next((trial for trial in self.trials if trial.setting == self.current.setting and trial.repeated), None)
        if again is None and self.left:
            again = self.record(self.current.setting, repeated=True)
        return again is None or clearly_faster(candidate.over(again.measurement))

    def record(self, setting: Setting, repeated: bool = False) -> Trial:
        """Measure `setting`, and add the trial."""
        measurement = self.measure(setting)
        start = self.trials[0].measurement if self.trials else measurement
        trial = Trial(len(self.trials) + 1, setting, measurement, measurement.over(start), repeated)
        self.trials.append(trial)
        self.on_trial(trial)
        return trial


def clearly_faster(ratio: Ratio | None) -> bool:
    """Whether the ratio is above 1 by more than its noise."""
    if ratio is None or ratio.value <= 1:
        return False
    return ratio.clear if ratio.low is not None else ratio.value >= UNKNOWN_NOISE_GAIN
