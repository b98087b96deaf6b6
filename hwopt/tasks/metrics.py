"""Metrics of an evaluation. What they need stays on the device, and is copied to the host once, at the end.

The loss and the counts of multi-label classification are float64 sums, which count exactly up to 2**53. Metrics of classes keep
the predicted and the true class of each sample, 8 bytes, and scikit-learn computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


class GatheredMetrics(LossMetrics):
    """Metrics that need all predictions and targets at once. They stay on the device until `gathered` copies them."""

    dtype: ClassVar[torch.dtype] = torch.int32

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self._pairs = [torch.empty(2, 0, dtype=self.dtype, device=device)]

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch. Does not wait for the device."""
        pair = self._pair(outputs, targets).to(self.dtype)
        super().update(outputs, targets, summed_loss, count)
        self._pairs.append(pair)

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """The predictions and the targets of a micro-batch: (2, values)."""
        raise NotImplementedError

    def gathered(self) -> NDArray[np.generic]:
        """The predictions and the targets of all micro-batches of all ranks: (2, values). Called on all ranks."""
        found: NDArray[np.generic] = joined_over_ranks(torch.cat(self._pairs, dim=1)).cpu().numpy()
        return found


def joined_over_ranks(part: torch.Tensor) -> torch.Tensor:
    """The parts (2, values of the rank) of all ranks in one tensor, in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return part
    sizes = [torch.zeros(1, dtype=torch.long, device=part.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([part.shape[1]], device=part.device))
    numbers = [int(size) for size in sizes]
    padded = part.new_zeros(part.shape[0], max(numbers))
    padded[:, : part.shape[1]] = part
    gathered = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(gathered, padded)
    return torch.cat([each[:, :number] for each, number in zip(gathered, numbers, strict=True)], dim=1)


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


class ClassMetrics(GatheredMetrics):
    """loss, accuracy, f1 (macro over the classes that occur), and for two labels f1_binary for label 1.

    `details` has the metrics of each class, and the confusion matrix of up to MAX_MATRIX_LABELS labels.
    """

    def __init__(self, labels: int, device: torch.device | str, names: Sequence[str] | None = None) -> None:
        """`names`: the name of each label in `details`; default: its number."""
        super().__init__(device)
        self.labels = labels
        self.names = [str(number) for number in range(labels)] if names is None else list(names)

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([outputs.logits.argmax(-1), targets])  # (2, batch)

    def compute(self) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        predicted, actual = self.gathered()
        values = super().compute()
        if not len(actual):
            return values | dict.fromkeys(("accuracy", "f1", *(["f1_binary"] if self.labels == 2 else [])), math.nan)
        values["accuracy"] = float(accuracy_score(actual, predicted))
        values["f1"] = float(f1_score(actual, predicted, average="macro", zero_division=0))
        if self.labels == 2:
            values["f1_binary"] = float(f1_score(actual, predicted, labels=[1], average="macro", zero_division=0))
        return values

    def details(self) -> dict[str, Any]:
        """classes: label, precision, recall, f1, support of each; confusion_matrix: a row of counts for each true label."""
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        predicted, actual = self.gathered()
        if not len(actual):
            return {}
        numbers = range(self.labels)
        each = precision_recall_fscore_support(actual, predicted, labels=numbers, zero_division=0)
        keys = ("label", "precision", "recall", "f1", "support")
        rows = zip(self.names, *(column.tolist() for column in each), strict=True)
        found: dict[str, Any] = {"classes": [dict(zip(keys, row, strict=True)) for row in rows]}
        if self.labels <= MAX_MATRIX_LABELS:
            counts = confusion_matrix(actual, predicted, labels=numbers).tolist()
            found["confusion_matrix"] = {"labels": self.names, "rows": counts}
        return found


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
