"""Metrics of an evaluation. What they need stays on the device, and is copied to the host once, at the end.

The loss is a float64 sum, which counts exactly up to 2**53. Other metrics keep the predicted and the
true values of each sample, such as two numbers of 4 bytes, and scikit-learn computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from hwopt.errors import InputError
from hwopt.tasks.prepared import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOSS, COUNT = 0, 1
MAX_MATRIX_LABELS = 200  # with more labels there is no confusion matrix, only the metrics of each class


class LossMetrics:
    """The mean loss, in nats per label. Base of all metrics: sums on the device, over all micro-batches and ranks."""

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
        self._part = torch.zeros_like(self._sums)

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch: the model's outputs, the targets, and the result of `Task.loss`. Must not wait for the device.

        Adds in one operation: if memory runs out before it, the micro-batch can be evaluated again.
        """
        self._part.zero_()
        self._part[LOSS] += summed_loss.detach()
        self._part[COUNT] += count
        self._sums += self._part

    def compute(self) -> dict[str, float]:
        """The values by name without "eval_"; nan if nothing was evaluated. Called on all ranks; copies to the host once."""
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
        return np.concatenate(over_ranks(torch.cat(self._columns, dim=1).cpu().numpy()), axis=1)


class TokenMetrics(LossMetrics):
    """loss and perplexity."""

    def compute(self) -> dict[str, float]:
        return with_perplexity(super().compute())


def with_perplexity(values: dict[str, float]) -> dict[str, float]:
    loss = values["loss"]
    return values | {"perplexity": math.exp(loss) if loss < 709 else loss if math.isnan(loss) else math.inf}


class ClassMetrics(GatheredMetrics):
    """loss, accuracy, f1 (macro over the classes that occur), and for two labels f1_binary for label 1.

    `details` has the metrics of each class, and the confusion matrix of up to MAX_MATRIX_LABELS labels.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        """`names`: the name of each label number."""
        super().__init__(device)
        self.names = list(names)

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([outputs.logits.argmax(-1), targets])  # (2, batch)

    def compute(self) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        predicted, actual = self.gathered()
        values = super().compute()
        if not len(actual):
            return values | dict.fromkeys(("accuracy", "f1", *(["f1_binary"] if len(self.names) == 2 else [])), math.nan)
        values["accuracy"] = float(accuracy_score(actual, predicted))
        values["f1"] = float(f1_score(actual, predicted, average="macro", zero_division=0))
        if len(self.names) == 2:
            values["f1_binary"] = float(f1_score(actual, predicted, labels=[1], average="macro", zero_division=0))
        return values

    def details(self) -> dict[str, Any]:
        """classes: label, precision, recall, f1, support of each; confusion_matrix: a row of counts for each true label."""
        from sklearn.metrics import confusion_matrix

        predicted, actual = self.gathered()
        if not len(actual):
            return {}
        found: dict[str, Any] = {"classes": class_rows(self.names, actual, predicted, range(len(self.names)))}
        if len(self.names) <= MAX_MATRIX_LABELS:
            counts = confusion_matrix(actual, predicted, labels=range(len(self.names))).tolist()
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
        predicted, actual = self._samples()
        return {"classes": class_rows(self.names, actual, predicted, self.numbers)} if len(actual) else {}


def class_rows(names: Sequence[str], actual: Any, predicted: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Label, precision, recall, f1 and support of each class. A precision or recall without a sample is 0."""
    from sklearn.metrics import precision_recall_fscore_support

    each = precision_recall_fscore_support(actual, predicted, labels=numbers, zero_division=0)
    keys = ("label", "precision", "recall", "f1", "support")
    return [dict(zip(keys, row, strict=True)) for row in zip(names, *(column.tolist() for column in each), strict=True)]


REGRESSION_METRICS = ("mse", "mae", "r2", "pearson", "spearman")


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
        values = {name: float(np.mean([each[name] for each in targets])) for name in REGRESSION_METRICS}
        return super().compute() | values

    def details(self) -> dict[str, Any]:
        """targets: the metrics of each target, if there are several. Called on all ranks."""
        if len(self.names) < 2:
            return {}
        pairs = zip(self.names, self._of_targets(), strict=True)
        return {"targets": [{"target": name, **{key: finite(value) for key, value in each.items()}} for name, each in pairs]}

    def _of_targets(self) -> list[dict[str, float]]:
        found = self.gathered().astype(np.float64).reshape(2, -1, len(self.names))
        return [metrics_of(found[0, :, target], found[1, :, target]) for target in range(len(self.names))]


def finite(value: float) -> float | None:
    """`value`; None instead of nan, which JSON lacks."""
    return value if math.isfinite(value) else None


def metrics_of(predictions: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of one target. All are nan without samples and for predictions that are not finite."""
    from scipy import stats
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    found = dict.fromkeys(REGRESSION_METRICS, math.nan)
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


ROUGE = ("rouge1", "rouge2", "rougeL")


class RougeMetrics(GatheredMetrics):
    """loss, perplexity, and the mean F-measure of ROUGE-1, ROUGE-2 and ROUGE-L over the samples, from 0 to 1.

    The texts are generated greedily.
    """

    dtype: ClassVar[torch.dtype] = torch.float64
    rows: ClassVar[int] = len(ROUGE)

    def __init__(self, device: torch.device | str, tokenizer: Any, max_new_tokens: int) -> None:
        """`max_new_tokens`: of a generated text. Raises InputError without rouge_score."""
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise InputError("task.rouge needs the package rouge_score: pip install 'hwopt[rouge]'") from error
        super().__init__(device)
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.scorer = RougeScorer(list(ROUGE))
        self._scores = self._columns[0]

    def generate(self, model: Any, inputs: dict[str, Any], targets: torch.Tensor) -> None:
        """Generate a text for each row and keep its scores for the `update` that follows. Waits for the device."""
        given = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
        written = model.generate(
            **given,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        references = torch.where(targets == IGNORED, self.tokenizer.pad_token_id, targets)
        texts, expected = (self.tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (written, references))
        scores = [self.scorer.score(reference, text) for text, reference in zip(texts, expected, strict=True)]
        self._scores = torch.tensor(
            [[each[name].fmeasure for each in scores] for name in ROUGE], dtype=self.dtype, device=targets.device
        )

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._scores

    def compute(self) -> dict[str, float]:
        means = torch.from_numpy(self.gathered()).mean(1).tolist()
        return with_perplexity(super().compute()) | dict(zip(ROUGE, means, strict=True))
