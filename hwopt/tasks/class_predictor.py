"""ClassPredictor: the most probable label of a text or a pair of texts, with its probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwopt.tasks.prediction import ModelInput, Trained

if TYPE_CHECKING:
    import torch


class ClassPredictor:
    """Classifies with a trained model."""

    columns: ClassVar[Mapping[str, type]] = {"predicted_label": str, "predicted_probability": float}
    padding_side: ClassVar[Literal["left", "right"]] = "right"

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
        return [self._checked({key: list(found[key][row]) for key in found}) for row in range(len(inputs))]

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(label, probability) of each row."""
        probabilities, numbers = self.model(**inputs).logits.float().softmax(-1).max(-1)
        return [(self.labels[number], value) for number, value in zip(numbers.tolist(), probabilities.tolist(), strict=True)]

    def _checked(self, row: ModelInput) -> ModelInput | str:
        """`row`, or the reason why it cannot be used."""
        length = len(row["input_ids"])
        if length == 0:
            return "has no tokens"
        if self.max_positions is not None and length > self.max_positions:
            return f"has {length:,} tokens, more than the model's limit of {self.max_positions:,} (data.max_length truncates)"
        return row
