"""What tasks share for predictions: the trained model's parts, the options of generation, and the interface of a predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from hwopt.config.job import Job

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ModelInput = dict[str, Any]
"""The inputs of one row by name, before they are batched: lists of numbers, or arrays."""
WINDOW_BATCHES = 32
"""Batches that are encoded at once: enough rows to batch texts by length, few enough that results appear soon."""


@dataclass(frozen=True)
class Trained:
    """What prediction and evaluation need beside the model itself."""

    job: Job
    config: PretrainedConfig
    tokenizer: Any
    label_names: tuple[str, ...]
    """The name of each label number; empty if labels are tokens."""
    max_positions: int | None
    """The model's longest input in tokens; None for no limit."""


@dataclass(frozen=True)
class Generation:
    """How text is generated, in the words of transformers' GenerationConfig."""

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    """Of the random numbers that sampling draws."""


class Predictor(Protocol):
    """Turns rows into predictions with a trained model."""

    @property
    def columns(self) -> Mapping[str, type]:
        """Name and type of each value of a prediction: str, int, float, or list for strings."""
        ...

    window_batches: ClassVar[int]
    """Batches that are encoded at once."""

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The model's inputs for each of the `inputs` of `Task.read_inputs`, or the reason why the row cannot be used."""

    def length(self, row: ModelInput) -> int:
        """The size of a row; the rows of a window are batched in its order, the largest first."""

    def batch(self, rows: Sequence[ModelInput], multiple: int) -> dict[str, torch.Tensor]:
        """The inputs of a batch on the CPU. `multiple`: texts are padded to a multiple of it."""

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """The values of `columns` for each row of the inputs, a batch on the model's device."""


class TokenPredictor:
    """Batches rows of tokens: pads them to the longest, and adds an attention mask. `input_ids` gives the length of a row."""

    window_batches: ClassVar[int] = WINDOW_BATCHES
    padding_side: ClassVar[Literal["left", "right"]] = "right"
    tokenizer: Any
    max_positions: int | None

    def length(self, row: ModelInput) -> int:
        """The number of tokens."""
        return len(row["input_ids"])

    def batch(self, rows: Sequence[ModelInput], multiple: int) -> dict[str, torch.Tensor]:
        """The inputs as (rows, width), with the attention mask."""
        import torch

        longest = max(map(self.length, rows))
        width = -(-longest // multiple) * multiple if self.padding_side == "right" else longest
        width = longest if self.max_positions is not None and width > self.max_positions else width
        filler = {"input_ids": self.tokenizer.pad_token_id or 0}
        found = {}
        for key in (*rows[0], "attention_mask"):
            values = [each.get(key, [1] * self.length(each)) for each in rows]
            padding = [[filler.get(key, 0)] * (width - len(row)) for row in values]
            left = self.padding_side == "left"
            found[key] = torch.tensor([extra + row if left else row + extra for row, extra in zip(values, padding, strict=True)])
        return found
