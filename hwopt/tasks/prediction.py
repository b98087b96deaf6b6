"""What tasks share for predictions: the trained model's parts, the options of generation, and the interface of a predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts, task_facts
from hwopt.data.tokenizer import LengthLimit, uses_token_types

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

    @property
    def facts(self) -> TaskFacts:
        """The facts of the job's task."""
        return task_facts(self.job.task.kind)

    @property
    def limit(self) -> LengthLimit:
        """The longest input. Raises InputError if the job's limit exceeds the model's."""
        return LengthLimit(self.job.data.max_length, self.max_positions)

    @property
    def two_types(self) -> bool:
        """Whether the two texts of a pair are marked by token_type_ids."""
        two = len(self.job.data.text) == 2 and "token_type_ids" in self.tokenizer.model_input_names
        return two and uses_token_types(self.config)


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
