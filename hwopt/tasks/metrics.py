"""Metrics: sums that stay on the device, are reduced over the ranks by torchmetrics, and come to the host once.

torchmetrics' own F1 counts with torch.bincount, which reads its greatest element back from the device in every update.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torchmetrics

LOSS, COUNT = 0, 1


class _Sums(torchmetrics.Metric):
    """One float64 vector, added over updates and ranks; float64 counts exactly to 2**53."""

    full_state_update = False
    sums: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, part: torch.Tensor) -> None:
        self.sums += part

    def compute(self) -> torch.Tensor:
        return self.sums


class LossMetrics:
    """The mean loss, in nats a label."""

    def __init__(self, device: torch.device | str, extra: int = 0) -> None:
        self._metric = _Sums(2 + extra).to(device)
        self._part = torch.zeros(2 + extra, dtype=torch.float64, device=device)

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        self._part.zero_()
        self._part[LOSS] += summed_loss.detach()
        self._part[COUNT] += count
        self._add(outputs, targets)
        self._metric.update(self._part)

    def compute(self) -> dict[str, float]:
        """nan where nothing was evaluated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns where this rank had nothing to evaluate
            sums = self._metric.compute().tolist()
        return self._named(sums)

    def _add(self, outputs: Any, targets: torch.Tensor) -> None:
        pass

    def _named(self, sums: list[float]) -> dict[str, float]:
        return {"loss": sums[LOSS] / sums[COUNT] if sums[COUNT] else math.nan}


class TokenMetrics(LossMetrics):
    """loss and perplexity."""

    def _named(self, sums: list[float]) -> dict[str, float]:
        loss = super()._named(sums)["loss"]
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf}


class ClassMetrics(LossMetrics):
    """loss, accuracy, f1 (macro over the classes that occur, as in scikit-learn), and for two labels f1_binary of label 1."""

    def __init__(self, labels: int, device: torch.device | str) -> None:
        super().__init__(device, extra=3 * labels)
        self.labels = labels

    def _add(self, outputs: Any, targets: torch.Tensor) -> None:
        found = outputs.logits.argmax(-1)  # (batch,)
        right = (found == targets).double()
        hits, predicted, actual = self._part[2:].view(3, self.labels)
        hits.index_add_(0, targets, right)
        predicted.index_add_(0, found, torch.ones_like(right))
        actual.index_add_(0, targets, torch.ones_like(right))

    def _named(self, sums: list[float]) -> dict[str, float]:
        n = self.labels
        hits, predicted, actual = sums[2 : 2 + n], sums[2 + n : 2 + 2 * n], sums[2 + 2 * n :]
        samples = sum(actual)
        # 2 tp / (2 tp + fp + fn); None for a class that neither occurs nor is predicted
        each = [2 * h / (p + a) if p + a else None for h, p, a in zip(hits, predicted, actual, strict=True)]
        present = [one for one in each if one is not None]
        found = {
            **super()._named(sums),
            "accuracy": sum(hits) / samples if samples else math.nan,
            "f1": sum(present) / len(present) if present else math.nan,
        }
        return {**found, "f1_binary": each[1] or 0.0} if n == 2 else found
