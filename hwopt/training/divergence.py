"""Divergence: skipped updates, non-finite losses and loss spikes, found in the logged numbers.

The host looks at log points only. The engine decides on the device whether an update is made (hwopt.distributed.engine); this
module counts skipped updates, reports them, and compares them with the job's limits: `training.on_nonfinite`,
`nonfinite_limit`, `nonfinite_share` and `loss_spike`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from hwopt.errors import NonFiniteError

if TYPE_CHECKING:
    from hwopt.config.job import Training


RECENT = 20
"""Log points that a loss is held against."""
ENOUGH = 5
"""Before so many of them nothing is called a spike."""
DEVIATIONS = 6.0
LEAST_RISE = 0.25
"""Of the loss that the run began with: late in a training the spread alone may be next to nothing."""
ADVICE = "Lower training.learning_rate, look for broken samples, or train with plugins.precision.dtype = 'bf16' or 'fp32'."


def spike_above(recent: Sequence[float], began: float) -> float:
    """What a loss must exceed to be far above the `recent` ones, of a run whose losses `began` so high.

    Their median, and the greater of 6 standard deviations (estimated from the median of the distances to it, which a few
    outliers do not move) and a quarter of `began`.
    """
    middle = median(recent)
    deviation = 1.4826 * median(abs(loss - middle) for loss in recent)
    return middle + max(DEVIATIONS * deviation, LEAST_RISE * abs(began))


@dataclass
class Course:
    """The recent losses, without those of a spike: one spike is said once, however long it lasts."""

    recent: list[float] = field(default_factory=list)
    began: float | None = None
    """The median of the first log points."""
    above: int = 0
    """Log points in a row that were above; after as many as `recent` holds, that is the run's level."""

    def jumped(self, loss: float) -> bool:
        """Whether a spike begins with `loss`, the next log point's."""
        if self.began is not None and loss > spike_above(self.recent, self.began):
            self.above += 1
            if self.above < RECENT:
                return self.above == 1
            self.recent.clear()
            self.began = None
        self.above = 0
        self.recent = [*self.recent, loss][-RECENT:]
        if self.began is None and len(self.recent) >= ENOUGH:
            self.began = median(self.recent)
        return False


@dataclass
class DivergenceMonitor:
    """Counts of the whole run; `state_dict` has them all as plain numbers."""

    skipped: int = 0
    """Updates left out because a gradient was not finite."""
    in_a_row: int = 0
    """Of them, those up to the last step."""
    lost: int = 0
    """Micro-batches whose loss was not finite."""
    course: Course = field(default_factory=Course)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row, self.lost = state["skipped"], state["in_a_row"], state["lost"]
        self.course = Course(**state["course"])

    def saw(
        self, training: Training, total_steps: int, step: int, norms: Sequence[float], lost: int, loss: float, scale: float | None
    ) -> tuple[list[str], NonFiniteError | None]:
        """Count a log interval that ends with `step`: the gradient's norm of each of its steps, its mean loss, how many
        micro-batches' losses that leaves out, and the loss scale where there is one.

        Returns what is to be said, and the error to end with where the run must not go on.
        """
        said: list[str] = []
        left_out: list[int] = []
        most_in_a_row = 0
        for number, norm in enumerate(norms, step - len(norms) + 1):
            self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
            most_in_a_row = max(most_in_a_row, self.in_a_row)
            if self.in_a_row:
                left_out.append(number)
        self.skipped += len(left_out)
        self.lost += lost
        at = f"{'step' if len(left_out) == 1 else 'steps'} {numbers(left_out)}"
        skip, limit = training.on_nonfinite == "skip", training.nonfinite_limit
        allowed = max(1, int(training.nonfinite_share * total_steps))
        if scale is not None and scale < 1:
            return said, stopped(f"{most_in_a_row} updates in a row were not finite up to step {step}, loss scale {scale:g}.")
        if most_in_a_row > limit:
            return said, stopped(
                f"{most_in_a_row} updates in a row were not finite up to step {left_out[-1]}, training.nonfinite_limit = {limit}."
            )
        if left_out and scale is None:  # with one it is the scaler's way of finding its scale
            if not skip:
                return said, stopped(
                    f"a gradient was not finite at {at}; the update was not made.",
                    " training.on_nonfinite = 'skip' leaves such updates out and goes on.",
                )
            if self.skipped > allowed:
                return said, stopped(
                    f"{self.skipped} of {total_steps:,} updates were not finite up to step {left_out[-1]}, "
                    f"training.nonfinite_share = {training.nonfinite_share:g} allows {allowed}."
                )
            said.append(
                f"a gradient was not finite at {at}: the update was left out ({self.skipped} so far; "
                f"more than {limit} in a row, or more than {allowed} in all, stop the run)"
            )
        if lost and not skip:
            return said, stopped(f"the loss was not finite at or before step {step}.")
        if lost and not (left_out and scale is None):
            said.append(f"the loss of {lost} micro-batch(es) was not finite at or before step {step}; the mean leaves it out")
        if training.loss_spike != "off" and math.isfinite(loss):
            usual = median(self.course.recent) if self.course.recent else loss
            if self.course.jumped(loss):
                spike = f"the loss rose to {loss:.4g} at step {step}; over the log points before its median was {usual:.4g}"
                if training.loss_spike == "stop":
                    return said, stopped(f"{spike}: the run diverged (training.loss_spike = 'stop').")
                said.append(spike)
        return said, None


def stopped(why: str, more: str = "") -> NonFiniteError:
    return NonFiniteError(f"{why} {ADVICE}{more}")


def numbers(found: Sequence[int], most: int = 5) -> str:
    """The first of `found`, and how many more there are."""
    shown = ", ".join(f"{number:,}" for number in found[:most])
    return shown if len(found) <= most else f"{shown} and {len(found) - most:,} more"
