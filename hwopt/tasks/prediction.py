"""What tasks share for predictions: the trained model's parts, the options of generation, and the interface of a predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from hwopt.config.job import Job

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ModelInput = dict[str, list[int]]
"""The inputs of one row: input_ids, and further ones of the same length."""


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
    """Turns texts into predictions with a trained model."""

    @property
    def columns(self) -> Mapping[str, type]:
        """Name and type of each value of a prediction: str, int, float, or list for strings."""
        ...

    padding_side: ClassVar[Literal["left", "right"]]

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The model's inputs for each of the `inputs` of `Task.read_inputs`, or the reason why the row cannot be used."""

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """The values of `columns` for each row of the padded `inputs` (rows, width)."""
