"""Metrics of regression, by scikit-learn and scipy. A rank correlation needs all predictions at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hwopt.tasks.metrics import GatheredMetrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRICS = ("mse", "mae", "r2", "pearson", "spearman")


class RegressionMetrics(GatheredMetrics):
    """loss, mse, mae, r2, pearson and spearman; with several targets the mean over them.

    A value that is not defined, such as the correlation of a constant, is nan. `details` has the metrics of each target.
    """

    dtype = torch.float32

    def __init__(self, device: torch.device | str, names: Sequence[str]) -> None:
        super().__init__(device)
        self.names = names

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([outputs.logits.detach().float(), targets.float()]).flatten(1)  # (2, batch x targets)

    def compute(self) -> dict[str, float]:
        targets = self._of_targets()
        values = {name: float(np.mean([each[name] for each in targets])) for name in METRICS}
        return super().compute() | values

    def details(self) -> dict[str, Any]:
        """targets: the metrics of each target, if there are several. Called on all ranks."""
        if len(self.names) < 2:
            return {}
        pairs = zip(self.names, self._of_targets(), strict=True)
        return {"targets": [{"target": name, **{key: finite(value) for key, value in each.items()}} for name, each in pairs]}

    def _of_targets(self) -> list[dict[str, float]]:
        """The metrics of each target."""
        found = self.gathered().astype(np.float64).reshape(2, -1, len(self.names))
        return [metrics_of(found[0, :, target], found[1, :, target]) for target in range(len(self.names))]


def finite(value: float) -> float | None:
    """`value`; None instead of nan, which JSON lacks."""
    return value if math.isfinite(value) else None


def metrics_of(predictions: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of one target. All are nan without samples and for predictions that are not finite."""
    from scipy import stats
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    found = dict.fromkeys(METRICS, math.nan)
    if len(targets) == 0 or not np.isfinite(predictions).all():
        return found
    found["mse"] = float(mean_squared_error(targets, predictions))
    found["mae"] = float(mean_absolute_error(targets, predictions))
    if np.ptp(targets) > 0:
        found["r2"] = float(r2_score(targets, predictions))
        if np.ptp(predictions) > 0:
            found["pearson"] = float(stats.pearsonr(predictions, targets).statistic)
            found["spearman"] = float(stats.spearmanr(predictions, targets).statistic)
    return found
