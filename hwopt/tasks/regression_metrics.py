"""Metrics of regression. The predictions stay on the device until the end: a rank correlation needs all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hwopt.tasks.metrics import LossMetrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRICS = ("mse", "mae", "r2", "pearson", "spearman")


class RegressionMetrics(LossMetrics):
    """loss, mse, mae, r2, pearson and spearman, as in scikit-learn and scipy; with several targets the mean over them.

    A value that is not defined, such as the correlation of a constant, is nan. `details` has the metrics of each target.
    """

    def __init__(self, device: torch.device | str, names: Sequence[str]) -> None:
        super().__init__(device)
        self.device, self.names = device, names
        self._parts: list[torch.Tensor] = []  # (2, batch, targets): predictions, targets

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch. Does not wait for the device."""
        part = torch.stack([outputs.logits.detach().float(), targets.float()])
        super().update(outputs, targets, summed_loss, count)
        self._parts.append(part)

    def compute(self) -> dict[str, float]:
        """The values by name; nan if nothing was evaluated. Called on all ranks."""
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
        empty = torch.empty(2, 0, len(self.names), device=self.device)
        found = over_ranks(torch.cat([empty, *self._parts], dim=1)).double().cpu().numpy()
        return [metrics_of(found[0, :, target], found[1, :, target]) for target in range(len(self.names))]


def finite(value: float) -> float | None:
    """`value`; None instead of nan, which JSON lacks."""
    return value if math.isfinite(value) else None


def over_ranks(part: torch.Tensor) -> torch.Tensor:
    """The parts (2, samples of the rank, targets) of all ranks in one tensor."""
    if not (dist.is_available() and dist.is_initialized()):
        return part
    sizes = [torch.zeros(1, dtype=torch.long, device=part.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([part.shape[1]], device=part.device))
    numbers = [int(size) for size in sizes]
    padded = part.new_zeros(part.shape[0], max(numbers), part.shape[2])
    padded[:, : part.shape[1]] = part
    gathered = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(gathered, padded)
    return torch.cat([each[:, :number] for each, number in zip(gathered, numbers, strict=True)], dim=1)


def metrics_of(predictions: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of one target; all are nan without samples."""
    if len(targets) == 0:
        return dict.fromkeys(METRICS, math.nan)
    errors = predictions - targets
    spread = ((targets - targets.mean()) ** 2).sum()
    return {
        "mse": float((errors**2).mean()),
        "mae": float(np.abs(errors).mean()),
        "r2": float(1 - (errors**2).sum() / spread) if spread else math.nan,
        "pearson": correlation(predictions, targets),
        "spearman": correlation(ranks(predictions), ranks(targets)),
    }


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson's correlation; nan if one side is constant."""
    a, b = a - a.mean(), b - b.mean()
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.clip(a @ b / norms, -1, 1)) if norms else math.nan


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of each value from 1; equal values have the mean of their ranks."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[numbers]
