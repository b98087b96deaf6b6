"""Regression: one or several numbers for a text or a pair of texts, by the mean squared error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import EXAMINED, LABELS, SCORES, is_fractional, text_of, unread_numbers, unread_texts
from hwopt.data.sources.number_format import NAMES, Decimal, decimal_of, number_of, numbers_of, wrong_format
from hwopt.data.sources.rows import Rows, holds_text, values_type
from hwopt.data.sources.tables import find_column
from hwopt.errors import DataError
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.predictors import NumberPredictor
from hwopt.tasks.prepared import Named, Prepared, Samples
from hwopt.tasks.recognition import Recognised
from hwopt.text import truncate

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.tasks.metrics import LossMetrics

LARGEST = 3.4e38  # of the numbers that float32 holds, in which targets are stored
LARGE = 10.0
"""A head with random weights starts near 0: targets further away than this train slowly with the usual learning rates."""


class Regression(LabelledTexts):
    """Predict numbers. A target is a column of `data.label`, in its own unit."""

    facts = TaskFacts("regression", "AutoModelForSequenceClassification")
    problem_type = "regression"
    several_labels = True
    predicts = NumberPredictor
    pipeline_tag: ClassVar[str] = "text-classification"
    default_metric: ClassVar[str] = "eval_mse"
    metric_directions: ClassVar[dict[str, bool]] = {
        **dict.fromkeys(("loss", "mse", "mae"), False),
        **dict.fromkeys(("r2", "pearson", "spearman"), True),
    }

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column of fractions beside a text; if the task is chosen, also one of whole numbers."""
        columns = [name for name in table.column_names if is_numeric(table, name)]
        named = [name for name in columns if name.lower() in (*LABELS, *SCORES)]
        found = [name for name in named or columns if chosen or is_fractional(table, name)]
        if not found:
            return unread_numbers(table) or "no column looks like a number to predict; name it in the job with data.label"
        texts = text_of(table, found[0])
        if not texts:
            return "no column looks like a text for regression; name it in the job with data.text"
        rank = 3 if found[0].lower() in LABELS else 1
        why, keys = f"column {found[0]!r} holds measurements", {"text": texts, "label": found[0]}
        if decimal_of(table[found[0]].slice(0, EXAMINED).to_pylist()) == ",":
            why, keys = f"{why} with a decimal comma", {**keys, "decimal": ","}
        return Recognised(keys, tuple(texts), why + unread_texts(table, (*texts, found[0])), rank)

    def read_labels(self, rows: Rows, job: Job) -> list[Any]:
        return list(zip(*(read_numbers(rows, name, job.data.decimal) for name in job.data.label), strict=True))

    def name_labels(self, samples: Samples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        import numpy as np

        notes = []
        for name, values in zip(job.data.label, zip(*samples.labels, strict=True), strict=True):
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            step = float(np.spacing(np.float32(max(map(abs, values)))))
            if deviation == 0:
                held = " in float32" if step >= 1 else ""
                raise DataError(f"{rows.source}: every {name!r} is {mean:g}{held}; regression needs different values")
            if deviation < 100 * step:
                notes.append(f"{name!r} is trained in steps of {step:,.4g}, to which float32 rounds it: subtract {mean:.4g}")
            if max(abs(mean), deviation) > LARGE:
                notes.append(
                    f"{name!r} has mean {mean:,.4g} and standard deviation {deviation:,.4g}: "
                    "training is faster with targets scaled to about -1 to 1"
                )
        return Named(job.data.label, tuple(notes))

    def label_array(self, labels: Sequence[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """The targets, float32 (samples, targets)."""
        import numpy as np

        return np.array(labels, np.float32)

    def label_text(self, prepared: Prepared, label: NDArray[Any]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in zip(prepared.label_names, label.tolist(), strict=True))

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(squared errors summed over samples and targets, number of targets); targets (batch, targets)."""
        return (outputs.logits.float() - targets).square().sum(), targets.numel()

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.metrics import RegressionMetrics

        return RegressionMetrics(device, prepared.label_names)


def is_numeric(table: pa.Table, name: str) -> bool:
    """Whether all values of the column are numbers, in one format; empty cells do not count."""
    return table.column_names.count(name) == 1 and bool(numbers_of(table[name].slice(0, EXAMINED).to_pylist()))


def read_numbers(rows: Rows, name: str, decimal: Decimal) -> list[float]:
    """The number of each row in the column `name`. Rows without one are marked as bad, with 0 here.

    Raises DataError for a column of another type, and for a number in another format than `decimal`.
    """
    import pyarrow as pa

    column = find_column(rows.table, name, rows.source, "data.label")
    kind = values_type(column.type)
    text = holds_text(kind)
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind)
    if not (text or numeric or pa.types.is_null(kind)):
        raise DataError(f"{rows.source}: column {name!r} holds {kind}, not numbers; choose another column with data.label")
    originals = rows.non_strings.get(name, {})
    found = []
    for row, value in enumerate(column.to_pylist()):
        if type(originals.get(row)) in (int, float):  # a number of JSON beside texts
            value = originals[row]
        try:
            number = number_of(value, decimal) if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            if isinstance(value, str) and (advice := wrong_format(value, decimal)):
                what = f"{name!r} is {truncate(value)}, not a number with a decimal {NAMES[decimal]}"
                raise DataError(f"{rows.places.at(row)}: {what}. {advice}") from None
            number = math.nan
        if not abs(number) <= LARGEST:  # nan, too
            what = "too large for float32" if math.isfinite(number) else "not a number"
            reason = "has no value" if value is None or value == "" else f"is {what}: {truncate(value)}"
            rows.mark_bad(row, f"{name!r} {reason}")
            number = 0.0
        found.append(number)
    return found
