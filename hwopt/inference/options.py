"""InferenceOptions: how a trained model is used, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hwopt.distributed.oom_backoff import QUIET_BATCHES, OomBackoff
from hwopt.tasks.prediction import Generation


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a prediction or an evaluation."""

    assignments: Sequence[str] = ()
    """"data.KEY=VALUE": changes of how the job reads its data."""
    batch_size: int | None = None
    """None: that of the run's evaluation."""
    generation: Generation | None = None
    """For tasks that generate text; None: the defaults."""
    overwrite: bool = False
    """Replace an output file that exists."""
    warn: Callable[[str], None] = lambda message: None
    """Gets messages for the user."""
    progress: Callable[[int, int], None] = lambda done, rows: None
    """Gets the rows that are done, and all rows."""

    def backoff(self) -> OomBackoff:
        """What makes batches smaller that do not fit into the device's memory."""
        advice = "Shorten the longest texts, or free memory that other processes use"
        return OomBackoff("Inference", "--batch-size", self.warn, quiet_steps_needed=QUIET_BATCHES, advice=advice)
