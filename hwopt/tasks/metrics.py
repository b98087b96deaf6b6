"""Metrics as float64 sums that stay on the device, are added over the ranks, and are copied to the host once.

Float64 counts exactly up to 2**53. The counts use index_add_: torch.bincount, as in torchmetrics, is a host sync in every update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

LOSS, COUNT = 0, 1
MAX_MATRIX_LABELS = 200
"""With more labels there is no confusion matrix, only the metrics of each class."""


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

    def details(self) -> dict[str, Any]:
        """Results that are not one number, as JSON types, by name; {} if there are none. Called on all ranks."""
        return {}

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


class GeneratedMetrics(TokenMetrics):
    """Metrics that also need generated texts. An evaluation calls `generate` before each `update`."""

    def generate(self, model: Any, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> None:
        """Generate texts for a micro-batch, and keep what the next `update` adds."""
        raise NotImplementedError


class ClassMetrics(LossMetrics):
    """loss, accuracy, f1 (macro over the classes that occur, as in scikit-learn), and for two labels f1_binary for label 1.

    `details` has the metrics of each class, and the confusion matrix of up to MAX_MATRIX_LABELS labels.
    """

    def __init__(self, labels: int, device: torch.device | str, names: Sequence[str] | None = None) -> None:
        """`names`: the name of each label in `details`; default: its number."""
        self.has_matrix = labels <= MAX_MATRIX_LABELS
        super().__init__(device, extra=3 * labels + labels * labels * self.has_matrix)
        self.labels = labels
        self.names = [str(number) for number in range(labels)] if names is None else list(names)

    def details(self) -> dict[str, Any]:
        """classes: label, precision, recall, f1, support of each; confusion_matrix: a row of counts for each true label."""
        sums = over_ranks(self._sums).tolist()
        found: dict[str, Any] = {"classes": class_rows(self.names, *self._per_class(sums))}
        if self.has_matrix:
            cells, n = [int(value) for value in sums[2 + 3 * self.labels :]], self.labels
            rows = [cells[row * n : (row + 1) * n] for row in range(n)]
            found["confusion_matrix"] = {"labels": self.names, "rows": rows}
        return found

    def _count(self, outputs: Any, targets: torch.Tensor, extra: torch.Tensor) -> None:
        predictions = outputs.logits.argmax(-1)  # (batch,)
        correct = (predictions == targets).double()
        one = torch.ones_like(correct)
        hits, predicted, actual = extra[: 3 * self.labels].view(3, self.labels)
        hits.index_add_(0, targets, correct)
        predicted.index_add_(0, predictions, one)
        actual.index_add_(0, targets, one)
        if self.has_matrix:
            extra[3 * self.labels :].index_add_(0, targets * self.labels + predictions, one)

    def _per_class(self, sums: list[float]) -> tuple[list[float], list[float], list[float]]:
        """(correct predictions, predictions, samples) of each class."""
        n = self.labels
        return sums[2 : 2 + n], sums[2 + n : 2 + 2 * n], sums[2 + 2 * n : 2 + 3 * n]

    def _values(self, sums: list[float]) -> dict[str, float]:
        hits, predicted, actual = self._per_class(sums)
        samples = sum(actual)
        # F1 = 2 tp / (2 tp + fp + fn); None for a class that neither occurs nor is predicted
        f1 = [2 * h / (p + a) if p + a else None for h, p, a in zip(hits, predicted, actual, strict=True)]
        present = [score for score in f1 if score is not None]
        values = {
            **super()._values(sums),
            "accuracy": sum(hits) / samples if samples else math.nan,
            "f1": sum(present) / len(present) if present else math.nan,
        }
        return {**values, "f1_binary": f1[1] or 0.0} if self.labels == 2 else values


class LabelSetMetrics(LossMetrics):
    """loss, f1_micro, f1_macro, as in scikit-learn, and exact_match: the share of samples with exactly the right labels.

    A label is predicted if its probability is at least 0.5. `details` has the metrics of each label.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        super().__init__(device, extra=2 + 3 * len(names))
        self.names = names

    def details(self) -> dict[str, Any]:
        """classes: label, precision, recall, f1, support of each."""
        return {"classes": class_rows(self.names, *self._per_label(over_ranks(self._sums).tolist()))}

    def _count(self, outputs: Any, targets: torch.Tensor, extra: torch.Tensor) -> None:
        predictions, actual = outputs.logits >= 0, targets >= 0.5  # (batch, labels)
        extra[0] += (predictions == actual).all(-1).sum()
        extra[1] += len(targets)
        extra[2:] += torch.cat([part.sum(0) for part in (predictions & actual, predictions, actual)])

    def _per_label(self, sums: list[float]) -> tuple[list[float], list[float], list[float]]:
        """(correct predictions, predictions, samples) of each label."""
        n = len(self.names)
        return sums[4 : 4 + n], sums[4 + n : 4 + 2 * n], sums[4 + 2 * n :]

    def _values(self, sums: list[float]) -> dict[str, float]:
        exact, samples = sums[2:4]
        hits, predicted, actual = self._per_label(sums)
        each = [f1_score(*counts) for counts in zip(hits, predicted, actual, strict=True)]
        return {
            **super()._values(sums),
            "f1_micro": f1_score(sum(hits), sum(predicted), sum(actual)) if samples else math.nan,
            "f1_macro": sum(each) / len(each) if samples else math.nan,
            "exact_match": exact / samples if samples else math.nan,
        }


def f1_score(hits: float, predicted: float, actual: float) -> float:
    """F1 from the numbers of correct predictions, predictions and labels; 0 without any."""
    return 2 * hits / (predicted + actual) if predicted + actual else 0.0


def class_rows(
    names: Sequence[str], hits: Sequence[float], predicted: Sequence[float], actual: Sequence[float]
) -> list[dict[str, Any]]:
    """Label, precision, recall, f1 and support of each class. A precision or recall without a sample is 0, as in scikit-learn."""
    return [
        {
            "label": name,
            "precision": hit / guesses if guesses else 0.0,
            "recall": hit / own if own else 0.0,
            "f1": f1_score(hit, guesses, own),
            "support": int(own),
        }
        for name, hit, guesses, own in zip(names, hits, predicted, actual, strict=True)
    ]
