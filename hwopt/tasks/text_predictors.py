"""Predictors of a text or a pair of texts: a class, a set of classes, or numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.tasks.prediction import ModelInput, TokenPredictor, Trained

if TYPE_CHECKING:
    import torch


class TextPredictor(TokenPredictor):
    """Encodes texts as in training. A subclass says what a prediction is."""

    columns: Mapping[str, type]

    def __init__(self, trained: Trained, model: Any, types: bool) -> None:
        """`types`: the model takes token_type_ids."""
        self.model, self.labels, self.tokenizer = model, trained.label_names, trained.tokenizer
        self.max_length, self.max_positions = trained.job.data.max_length, trained.max_positions
        self.options = {"return_attention_mask": False, "return_token_type_ids": types, "verbose": False}

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each row as in training: longer rows are truncated to data.max_length, if the job has it."""
        if not inputs:
            return []
        cut = {} if self.max_length is None else {"truncation": "longest_first", "max_length": self.max_length}
        found = self.tokenizer(*map(list, zip(*inputs, strict=True)), **self.options, **cut)
        return [checked_length({key: list(found[key][row]) for key in found}, self.max_positions) for row in range(len(inputs))]

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's output, float32 (rows, labels)."""
        logits: torch.Tensor = self.model(**inputs).logits.float()
        return logits


class ClassPredictor(TextPredictor):
    """The most probable label, with its probability."""

    columns: Mapping[str, type] = {"predicted_label": str, "predicted_probability": float}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(label, probability) of each row."""
        probabilities, numbers = self.logits(inputs).softmax(-1).max(-1)
        return [(self.labels[number], value) for number, value in zip(numbers.tolist(), probabilities.tolist(), strict=True)]


class NumberPredictor(TextPredictor):
    """The predicted number of each target."""

    def __init__(self, trained: Trained, model: Any, types: bool) -> None:
        super().__init__(trained, model, types)
        self.columns = {f"predicted_{name}": float for name in self.labels}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """The targets of each row."""
        return [tuple(row) for row in self.logits(inputs).tolist()]


class LabelSetPredictor(TextPredictor):
    """The labels with a probability of at least `threshold`, and the probability of every label."""

    threshold: ClassVar[float] = 0.5

    def __init__(self, trained: Trained, model: Any, types: bool) -> None:
        super().__init__(trained, model, types)
        self.columns = {"predicted_labels": list, **{f"probability_{name}": float for name in self.labels}}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(labels, the probability of each label of the model) of each row."""
        found = self.logits(inputs).sigmoid().tolist()
        return [([name for name, value in zip(self.labels, row, strict=True) if value >= self.threshold], *row) for row in found]


def checked_length(row: ModelInput, max_positions: int | None) -> ModelInput | str:
    """`row`, or the reason why the model cannot use it."""
    length = len(row["input_ids"])
    if length == 0:
        return "has no tokens"
    if max_positions is not None and length > max_positions:
        return f"has {length:,} tokens, more than the model's limit of {max_positions:,} (data.max_length truncates)"
    return row
