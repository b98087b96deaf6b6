"""Early stopping, with the meaning of transformers' EarlyStoppingCallback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwopt.saving.best_model import BestModel
from hwopt.training.run import Run


class EarlyStopping:
    """Counts the evaluations in a row that did not improve the metric for the best model by more than the threshold.

    With `training.early_stopping_patience` of them, the run ends. As in transformers, a smaller improvement still makes the
    weights the best ones. The count is saved with checkpoints.
    """

    def __init__(self, run: Run, best: BestModel) -> None:
        self.run, self.best = run, best
        self.patience = run.training.early_stopping_patience
        self.count = 0

    @property
    def stops(self) -> bool:
        return self.patience is not None and self.count >= self.patience

    def observe(self, value: float) -> None:
        """Compare the metric of an evaluation with the best one before it."""
        best, threshold = self.best.value, self.run.training.early_stopping_threshold
        if best is None or (math.isfinite(value) and not math.isfinite(best)):
            improved = True
        else:
            improved = self.best.sign * value > self.best.sign * best and abs(value - best) > threshold
        self.count = 0 if improved else self.count + 1

    def message(self) -> str:
        threshold = self.run.training.early_stopping_threshold
        by = f" by more than {threshold:g}" if threshold else ""
        return (
            f"Stopping early after step {self.run.step:,} of {self.run.total_steps:,}: {self.best.metric} did not improve{by} in "
            f"{self.count} evaluations. The best weights are those of step {self.best.step:,}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
