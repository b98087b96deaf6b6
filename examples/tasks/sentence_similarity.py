"""A task of another package: how similar two texts are, from 0 to 1, as the cross-encoders of sentence-transformers learn it.

The binary cross-entropy of the score is trained, and the sigmoid of the model's output is the prediction. Data, tokens and
metrics are those of hwopt's regression.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import text_of
from hwopt.errors import DataError
from hwopt.tasks.metrics import RegressionMetrics
from hwopt.tasks.predictors import NumberPredictor
from hwopt.tasks.recognition import Recognised
from hwopt.tasks.regression import Regression, is_numeric


class SentenceSimilarity(Regression):
    facts = TaskFacts("sentence-similarity", "AutoModelForSequenceClassification")
    pipeline_tag = "text-ranking"
    default_metric = "eval_spearman"

    @classmethod
    def check_job(cls, job: Any) -> None:
        super().check_job(job)
        if len(job.data.text) != 2 or len(job.data.label) != 1:
            raise ValueError("sentence-similarity takes two columns in data.text and one in data.label")

    @classmethod
    def recognise(cls, table: Any, chosen: bool) -> Recognised | str:
        """Two texts beside a column `similarity`."""
        texts = text_of(table, "similarity")
        if len(texts) != 2 or "similarity" not in table.column_names or not is_numeric(table, "similarity"):
            return "needs two texts and a column 'similarity' with numbers"
        return Recognised({"text": texts, "label": "similarity"}, tuple(texts), "column 'similarity' rates two texts", rank=4)

    def read_labels(self, rows: Any, job: Any) -> list[Any]:
        """The score of each row. Raises DataError for a score outside of 0 to 1."""
        labels = super().read_labels(rows, job)
        for row, (score,) in enumerate(labels):
            if not 0 <= score <= 1:
                raise DataError(
                    f"{rows.places.at(row)}: the score {score:g} is not between 0 and 1; divide all scores by the largest"
                )
        return labels

    def head_config(self, prepared: Any) -> dict[str, Any]:
        return super().head_config(prepared) | {"problem_type": "multi_label_classification"}  # pipelines then take the sigmoid

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(binary cross-entropy summed over the samples, number of samples); targets (batch, 1)."""
        return functional.binary_cross_entropy_with_logits(outputs.logits.float(), targets, reduction="sum"), targets.numel()

    def metrics(self, prepared: Any, device: Any) -> RegressionMetrics:
        return ScoreMetrics(device, prepared.label_names)

    def predictor(self, trained: Any, model: Any, generation: Any) -> NumberPredictor:
        return ScorePredictor(trained, model)


class ScoreMetrics(RegressionMetrics):
    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: Any) -> None:
        super().update(SimpleNamespace(logits=outputs.logits.float().sigmoid()), targets, summed_loss, count)


class ScorePredictor(NumberPredictor):
    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().logits(inputs).sigmoid()
