"""Metrics as float64 sums that stay on the device, are added over the ranks, and are copied to the host once.

Float64 counts exactly up to 2**53. The counts use index_add_: torch.bincount, as in torchmetrics, is a host sync in every update.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

LOSS, COUNT = 0, 1


class LossMetrics:
    """The mean loss, in nats per label. A subclass has `extra` more sums."""

    def __init__(self, device: torch.device | str, extra: int = 0) -> None:
        self._sums = torch.zeros(2 + extra, dtype=torch.float64, device=device)  # (2 + extra,): loss, labels, the subclass's sums
        self._part = torch.zeros_like(self._sums)

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch, in one operation: if memory runs out before it, the micro-batch can be evaluated again."""
        self._part.zero_()
        self._part[LOSS] += summed_loss.detach()
        self._part[COUNT] += count
        self._count(outputs, targets, self._part[2:])
        self._sums += self._part

    def compute(self) -> dict[str, float]:
        """The values by name; nan if nothing was evaluated. Called on all ranks."""
        return self._values(over_ranks(self._sums).tolist())

    def _count(self, outputs: Any, targets: torch.Tensor, extra: torch.Tensor) -> None:
        """Write the extra sums of a micro-batch to `extra`, which holds zeros."""

    def _values(self, sums: list[float]) -> dict[str, float]:
        return {"loss": sums[LOSS] / sums[COUNT] if sums[COUNT] else math.nan}


def over_ranks(sums: torch.Tensor) -> torch.Tensor:
    """The sum of `sums` over all ranks, added in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return sums
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums)
    return torch.stack(gathered).sum(dim=0)


class TokenMetrics(LossMetrics):
    """loss and perplexity."""

    def _values(self, sums: list[float]) -> dict[str, float]:
        loss = super()._values(sums)["loss"]
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf}


class ClassMetrics(LossMetrics):
    """loss, accuracy, f1 (macro over the classes that occur, as in scikit-learn), and for two labels f1_binary for label 1."""

    def __init__(self, labels: int, device: torch.device | str) -> None:
        super().__init__(device, extra=3 * labels)
        self.labels = labels

    def _count(self, outputs: Any, targets: torch.Tensor, extra: torch.Tensor) -> None:
        predictions = outputs.logits.argmax(-1)  # (batch,)
        correct = (predictions == targets).double()
        hits, predicted, actual = extra.view(3, self.labels)
        hits.index_add_(0, targets, correct)
        predicted.index_add_(0, predictions, torch.ones_like(correct))
        actual.index_add_(0, targets, torch.ones_like(correct))

    def _values(self, sums: list[float]) -> dict[str, float]:
        n = self.labels
        hits, predicted, actual = sums[2 : 2 + n], sums[2 + n : 2 + 2 * n], sums[2 + 2 * n :]
        samples = sum(actual)
        # F1 = 2 tp / (2 tp + fp + fn); None for a class that neither occurs nor is predicted
        f1 = [2 * h / (p + a) if p + a else None for h, p, a in zip(hits, predicted, actual, strict=True)]
        present = [score for score in f1 if score is not None]
        values = {
            **super()._values(sums),
            "accuracy": sum(hits) / samples if samples else math.nan,
            "f1": sum(present) / len(present) if present else math.nan,
        }
        return {**values, "f1_binary": f1[1] or 0.0} if n == 2 else values
