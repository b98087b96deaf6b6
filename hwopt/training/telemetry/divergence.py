"""Skipped updates, non-finite losses and loss spikes, found on the host in the logged numbers, against the job's limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from hwopt.config.aliases import option_for
from hwopt.config.job_training import Training
from hwopt.errors import NonFiniteError
from hwopt.text import listing

RECENT = 20  # log points that a loss is compared with
ENOUGH = 5  # log points needed before a loss can be called a spike
DEVIATIONS = 6.0  # standard deviations over the median that a spike exceeds
WORSE_THAN_A_GUESS = 2.0  # a loss so many times that of equal probabilities is worse than no training
LEAST_RISE = 0.25
"""Least rise of a spike, as a part of the first losses: late in training the standard deviation alone may be close to 0."""


def spike_above(recent: Sequence[float], first_level: float) -> float:
    """The loss that is a spike above the `recent` ones. The deviation is that of the median: a few outliers do not change it."""
    middle = median(recent)
    deviation = 1.4826 * median(abs(loss - middle) for loss in recent)
    return middle + max(DEVIATIONS * deviation, LEAST_RISE * abs(first_level))


@dataclass
class LossHistory:
    """The recent losses without those of a spike. A spike is reported once, however long it lasts."""

    recent: list[float] = field(default_factory=list)
    first_level: float | None = None  # the median loss of the first log points
    above: int = 0  # log points in a row above the limit. After RECENT of them the history starts again at the new level.

    def spike_starts(self, loss: float) -> bool:
        """Add the loss of the next log point. Returns whether a spike starts with it."""
        if self.first_level is not None and loss > spike_above(self.recent, self.first_level):
            self.above += 1
            if self.above < RECENT:
                return self.above == 1
            self.recent.clear()
            self.first_level = None
        self.above = 0
        self.recent = [*self.recent, loss][-RECENT:]
        if self.first_level is None and len(self.recent) >= ENOUGH:
            self.first_level = median(self.recent)
        return False


@dataclass(frozen=True)
class LoggedInterval:
    """What DivergenceMonitor checks of the steps between two log points."""

    step: int  # the last step of the interval
    norms: Sequence[float]  # the gradient norm of each step; not finite if its update was skipped
    loss: float  # the mean of the finite losses
    nonfinite_losses: int = 0  # micro-batches whose loss was not finite
    scale: float | None = None  # the loss scale; None without a loss scaler
    guess: float | None = None  # the loss of equal probabilities for all labels; None in the warm-up, and if the loss has none

    def skipped_steps(self) -> list[int]:
        first = self.step - len(self.norms) + 1
        return [step for step, norm in enumerate(self.norms, first) if not math.isfinite(norm)]


@dataclass
class DivergenceMonitor:
    """Counts skipped updates, non-finite losses and loss spikes of the whole run. Saved with checkpoints."""

    skipped_updates: int = 0  # updates skipped because a gradient was not finite
    in_a_row: int = 0  # skipped updates in a row, up to the last step
    nonfinite_losses: int = 0  # micro-batches whose loss was not finite
    history: LossHistory = field(default_factory=LossHistory)
    worse_than_a_guess: bool = False  # whether a loss was. It is reported once.

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, history=LossHistory(**state["history"]))

    def observe(self, training: Training, total_steps: int, row: LoggedInterval) -> tuple[list[str], NonFiniteError | None]:
        """Count one log interval. Returns the warnings to show, and the error if the run must stop."""
        warnings: list[str] = []
        try:
            warnings += self._check_gradients(training, total_steps, row)
            warnings += self._check_losses(training, row)
            if training.loss_spike != "off":
                warnings += self._check_guess(row)
                warnings += self._check_spike(row, training.loss_spike == "stop")
        except NonFiniteError as error:
            return warnings, error
        return warnings, None

    def _check_gradients(self, training: Training, total_steps: int, row: LoggedInterval) -> Iterator[str]:
        """Count the skipped updates and warn about them. Raises NonFiniteError beyond the job's limits."""
        most_in_a_row = 0
        for norm in row.norms:
            self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
            most_in_a_row = max(most_in_a_row, self.in_a_row)
        skipped = row.skipped_steps()
        self.skipped_updates += len(skipped)
        self.nonfinite_losses += row.nonfinite_losses
        limit, scale = training.nonfinite_limit, row.scale
        if scale is not None and scale < 1:
            raise nonfinite(f"{most_in_a_row} updates in a row were not finite up to step {row.step}, loss scale {scale:g}.")
        if most_in_a_row > limit:
            raise nonfinite(
                f"{most_in_a_row} updates in a row were not finite up to step {skipped[-1]}, training.nonfinite_limit = {limit}."
            )
        if not skipped or scale is not None:  # a loss scaler finds its scale by skipped updates
            return
        at = f"{'step' if len(skipped) == 1 else 'steps'} {listing([f'{step:,}' for step in skipped], 5)}"
        if training.on_nonfinite != "skip":
            raise nonfinite(
                f"a gradient was not finite at {at}; the update was skipped.",
                " To skip such updates and continue, set training.on_nonfinite = 'skip'.",
            )
        allowed = max(1, int(training.nonfinite_fraction * total_steps))
        if self.skipped_updates > allowed:
            raise nonfinite(
                f"{self.skipped_updates} of {total_steps:,} updates were not finite up to step {skipped[-1]}, "
                f"training.nonfinite_fraction = {training.nonfinite_fraction:g} allows {allowed}."
            )
        yield (
            f"a gradient was not finite at {at}: the update was skipped ({self.skipped_updates} so far; "
            f"the run stops after more than {limit} in a row or {allowed} in total)"
        )

    def _check_losses(self, training: Training, row: LoggedInterval) -> Iterator[str]:
        """Warn about non-finite losses. Raises NonFiniteError unless the job skips them."""
        if row.nonfinite_losses and training.on_nonfinite != "skip":
            raise nonfinite(f"the loss was not finite at or before step {row.step}.")
        # without a loss scaler, the warning about skipped updates covers these losses
        if row.nonfinite_losses and not (row.scale is None and row.skipped_steps()):
            yield (
                f"the loss of {row.nonfinite_losses} micro-batch(es) was not finite at or before step {row.step}; "
                "the mean loss excludes them"
            )

    def _check_guess(self, row: LoggedInterval) -> Iterator[str]:
        """Warn about the first loss that is far above that of a guess: no log points before it are needed."""
        if row.guess is not None and not self.worse_than_a_guess and row.loss > WORSE_THAN_A_GUESS * row.guess:
            self.worse_than_a_guess = True
            yield (
                f"the loss is {row.loss:.4g} at step {row.step}; a model that gives every label the same probability has "
                f"{row.guess:.4g}. Lower training.learning_rate, or check that model and tokenizer belong together"
            )

    def _check_spike(self, row: LoggedInterval, stop: bool) -> Iterator[str]:
        """Warn if a loss spike starts. Raises NonFiniteError if the job stops at spikes."""
        usual = median(self.history.recent or [row.loss])
        if math.isfinite(row.loss) and self.history.spike_starts(row.loss):
            spike = f"the loss rose to {row.loss:.4g} at step {row.step}; the median of the log points before is {usual:.4g}"
            if stop:
                raise nonfinite(f"{spike}: the run diverged (training.loss_spike = 'stop').")
            yield spike


def nonfinite(reason: str, hint: str = "") -> NonFiniteError:
    precision = f"train with {option_for('mixed_precision')} = 'bf16' or 'fp32'"
    return NonFiniteError(f"{reason} Lower training.learning_rate, look for broken samples, or {precision}.{hint}")
