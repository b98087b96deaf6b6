"""What the trials tell of the time in which data workers prepare a step batch: how long the loop would wait with other workers.

With n workers step batches are ready n times as fast, and the loop takes as long as the slower of the two. Without workers it
prepares them itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

WAITS = 0.02
"""Below this part of the time the loop does not wait for data: a faster input gains nothing."""
BOUND = 0.1
"""From this part of the time on, the input limits the loop. A shorter wait may be the delay of a queue or a copy."""
ALONE = 0.1
"""The speed of the input without workers, in workers: they prepare while the model computes."""


@dataclass(frozen=True)
class PreparationTime:
    """Seconds of one worker for what the loop takes per unit: known, or at most `most`."""

    known: float | None
    most: float = math.inf
    enough: float = math.inf
    """The largest number of workers that a trial had for which the loop did not wait."""

    @classmethod
    def of(cls, trials: Iterable[tuple[float, float, float]]) -> PreparationTime:
        """`trials`: (workers, seconds, part of them in which the loop waited) of each."""
        known, most, enough = [], math.inf, 0.0
        for workers, seconds, wait in trials:
            if workers == 0:
                known.append(seconds * wait)
            elif wait >= BOUND:
                known.append(seconds * workers)
            elif wait < WAITS:
                most, enough = min(most, seconds * workers), max(enough, workers)
        return cls(min(max(known), most) if known else None, most, enough)

    def target(self, workers: Numbers, seconds: float) -> Numbers:
        """Seconds in which the loop must compute with `workers` (settings,) to take `seconds`; 0 where it cannot."""
        known = self.known or 0.0
        return np.where(workers == 0, np.maximum(seconds - known, 0.0), np.where(self.least(workers) < seconds, seconds, 0.0))

    def least(self, workers: Numbers) -> Numbers:
        """Seconds that the loop takes at least, because the workers prepare a step batch for as long."""
        return np.where(workers == 0, 0.0, (self.known or 0.0) / np.maximum(workers, 1.0))

    def chance(self, workers: Numbers, seconds: float) -> Numbers:
        """The chance that the input is ready in `seconds` if only an upper bound of its time is known."""
        if self.known is not None or math.isinf(self.most):
            return np.ones_like(workers)
        ready = np.where(workers == 0, ALONE, workers) * seconds / self.most
        return np.where(workers >= self.enough, 1.0, np.minimum(ready, 1.0))
