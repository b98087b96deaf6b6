"""Metrics of an evaluation. What they need stays on the device, and is copied to the host once, at the end.

The loss is a float64 sum, which counts exactly up to 2**53. Other metrics keep the predicted and the
true values of each sample, such as two numbers of 4 bytes, and scikit-learn computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOSS, COUNT = 0, 1
MAX_MATRIX_LABELS = 200
"""With more labels there is no confusion matrix, only the metrics of each class."""


class LossMetrics:
    """The mean loss, in nats per label."""

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
        self._part = torch.zeros_like(self._sums)

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch, in one operation: if memory runs out before it, the micro-batch can be evaluated again."""
        self._part.zero_()
        self._part[LOSS] += summed_loss.detach()
        self._part[COUNT] += count
        self._sums += self._part

    def compute(self) -> dict[str, float]:
        """The values by name; nan if nothing was evaluated. Called on all ranks."""
        loss, count = (sum(values) for values in zip(*over_ranks(self._sums.tolist()), strict=True))
        return {"loss": loss / count if count else math.nan}

    def details(self) -> dict[str, Any]:
        """Results that are not one number, as JSON types, by name; {} if there are none. Called on all ranks."""
        return {}


def over_ranks(value: Any) -> list[Any]:
    """The `value` of each rank, in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class GatheredMetrics(LossMetrics):
    """Metrics that need all samples at once: a column of `rows` values for each, by default the prediction and the target.

    They stay on the device until `gathered` copies them.
    """

    dtype: ClassVar[torch.dtype] = torch.int32
    rows: ClassVar[int] = 2

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self._columns = [torch.empty(self.rows, 0, dtype=self.dtype, device=device)]

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch. Does not wait for the device."""
        found = self._pair(outputs, targets).to(self.dtype)
        super().update(outputs, targets, summed_loss, count)
        self._columns.append(found)

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """The predictions and the targets of a micro-batch: (2, values)."""
        raise NotImplementedError

    def gathered(self) -> NDArray[np.generic]:
        """The values of all micro-batches of all ranks, in the order of the ranks: (rows, values). Called on all ranks."""
        import numpy as np

        return np.concatenate(over_ranks(torch.cat(self._columns, dim=1).cpu().numpy()), axis=1)


class TokenMetrics(LossMetrics):
    """loss and perplexity."""

    def compute(self) -> dict[str, float]:
        """The values by name."""
        return with_perplexity(super().compute())


def with_perplexity(values: dict[str, float]) -> dict[str, float]:
    """`values` with the perplexity of the loss."""
    loss = values["loss"]
    return values | {"perplexity": math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf}


@runtime_checkable
class GeneratedMetrics(Protocol):
    """Metrics that also need generated texts. An evaluation calls `generate` before each `update`."""

    def generate(self, model: Any, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> None:
        """Generate texts for a micro-batch, and keep what the next `update` adds."""


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
        from sklearn.metrics import confusion_matrix

        predicted, actual = self.gathered()
        if not len(actual):
            return {}
        found: dict[str, Any] = {"classes": class_rows(self.names, actual, predicted, range(self.labels))}
        if self.labels <= MAX_MATRIX_LABELS:
            counts = confusion_matrix(actual, predicted, labels=range(self.labels)).tolist()
            found["confusion_matrix"] = {"labels": self.names, "rows": counts}
        return found


class LabelSetMetrics(GatheredMetrics):
    """loss, f1_micro, f1_macro, and exact_match: the share of samples with exactly the right labels.

    A label is predicted if its probability is at least 0.5. `details` has the metrics of each label.
    """

    dtype = torch.int8

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        super().__init__(device)
        self.names = names
        self.numbers = range(len(names)) if len(names) > 1 else [1]
        """Of the labels, for scikit-learn: with one label a sample has 1 or 0 instead of a row."""

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([outputs.logits >= 0, targets >= 0.5]).flatten(1)  # (2, batch x labels)

    def _samples(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(predicted, actual) labels, (samples, labels), or (samples,) with one label."""
        predicted, actual = self.gathered().reshape(2, -1, *([len(self.names)] if len(self.names) > 1 else []))
        return predicted, actual

    def compute(self) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        predicted, actual = self._samples()
        values = super().compute()
        if not len(actual):
            return values | dict.fromkeys(("f1_micro", "f1_macro", "exact_match"), math.nan)
        for average in ("micro", "macro"):
            score = f1_score(actual, predicted, labels=self.numbers, average=average, zero_division=0)
            values[f"f1_{average}"] = float(score)
        return values | {"exact_match": float(accuracy_score(actual, predicted))}

    def details(self) -> dict[str, Any]:
        """classes: label, precision, recall, f1, support of each."""
        predicted, actual = self._samples()
        return {"classes": class_rows(self.names, actual, predicted, self.numbers)} if len(actual) else {}


def class_rows(names: Sequence[str], actual: Any, predicted: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Label, precision, recall, f1 and support of each class. A precision or recall without a sample is 0."""
    from sklearn.metrics import precision_recall_fscore_support

    each = precision_recall_fscore_support(actual, predicted, labels=numbers, zero_division=0)
    keys = ("label", "precision", "recall", "f1", "support")
    return [dict(zip(keys, row, strict=True)) for row in zip(names, *(column.tolist() for column in each), strict=True)]
