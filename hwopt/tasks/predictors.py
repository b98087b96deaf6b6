"""Predictors: classes, label sets, numbers, or tags, for rows of texts or images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwopt.data.stores.images import Content, ImageTransform, channels_of
from hwopt.hardware.detect import cpu_cores
from hwopt.tasks.prepared import Trained

if TYPE_CHECKING:
    import torch

MOST_THREADS = 16


ModelInput = dict[str, Any]  # the inputs of one row by name, before they are batched: lists of numbers, or arrays


class TextPredictor:
    """Turns rows into predictions. Encodes texts as in training; a subclass says what a prediction is."""

    columns: Mapping[str, type]  # name and type of each value of a prediction: str, int, float, or list for strings
    window_batches: ClassVar[int] = 32
    """Batches that are encoded at once: enough rows to batch texts by length, few enough that results appear soon."""
    padding_side: ClassVar[Literal["left", "right"]] = "right"

    def __init__(self, trained: Trained, model: Any) -> None:
        self.trained, self.model, self.labels, self.tokenizer = trained, model, trained.label_names, trained.tokenizer
        self.max_length, self.max_positions = trained.job.data.max_length, trained.max_positions

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The model's inputs for each of the `inputs` of `Task.read_inputs`, or the reason why the row cannot be used.

        Longer rows are truncated to data.max_length as in training, if the job has it.
        """
        if not inputs:
            return []
        options = {"return_attention_mask": False, "return_token_type_ids": self.trained.two_types, "verbose": False}
        cut = {} if self.max_length is None else {"truncation": "longest_first", "max_length": self.max_length}
        found = self.tokenizer(*map(list, zip(*inputs, strict=True)), **options, **cut)
        return [self.checked({key: list(found[key][row]) for key in found}) for row in range(len(inputs))]

    def checked(self, row: ModelInput) -> ModelInput | str:
        """`row`, or the reason why the model cannot use it."""
        length = self.length(row)
        if length == 0:
            return "has no tokens"
        if self.max_positions is not None and length > self.max_positions:
            return f"has {length:,} tokens, more than the model's limit of {self.max_positions:,} (data.max_length truncates)"
        return row

    def length(self, row: ModelInput) -> int:
        """The number of tokens. The rows of a window are batched in this order, the longest first."""
        return len(row["input_ids"])

    def batch(self, rows: Sequence[ModelInput], multiple: int) -> dict[str, torch.Tensor]:
        """The inputs as (rows, width) on the CPU, with the attention mask; the width is a multiple of `multiple`."""
        import torch

        longest = max(map(self.length, rows))
        width = -(-longest // multiple) * multiple if self.padding_side == "right" else longest
        width = longest if self.max_positions is not None and width > self.max_positions else width
        filler = {"input_ids": self.tokenizer.pad_token_id or 0}
        found = {}
        for key in (*rows[0], "attention_mask"):
            values = [torch.tensor(each.get(key, [1] * self.length(each))) for each in rows]
            padded = torch.nn.utils.rnn.pad_sequence(values, True, filler.get(key, 0), self.padding_side)
            found[key] = torch.nn.functional.pad(padded, (0, width - longest), value=filler.get(key, 0))
        return found

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's output, float32 (rows, labels)."""
        logits: torch.Tensor = self.model(**inputs).logits.float()
        return logits

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """The values of `columns` for each row of the inputs, a batch on the model's device."""
        raise NotImplementedError


class ClassPredictor(TextPredictor):
    """The most probable label, with its probability."""

    columns: Mapping[str, type] = {"predicted_label": str, "predicted_probability": float}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        probabilities, numbers = self.logits(inputs).softmax(-1).max(-1)
        return [(self.labels[number], value) for number, value in zip(numbers.tolist(), probabilities.tolist(), strict=True)]


class ImagePredictor(ClassPredictor):
    """Classifies images. Threads decode them: Pillow does not hold Python's lock meanwhile."""

    window_batches: ClassVar[int] = 1  # decoded images are large, and sorting them by length saves nothing

    def encode(self, inputs: Sequence[Content]) -> list[ModelInput | str]:
        """The pixels of each image, or the reason why it cannot be used."""
        transform = ImageTransform(self.tokenizer, channels_of(self.trained.config))

        def pixels(content: Content) -> ModelInput | str:
            try:
                return {"pixel_values": transform(content)}
            except ValueError as error:
                return str(error) if isinstance(content, bytes) else f"{error}: {content}"

        with ThreadPoolExecutor(min(MOST_THREADS, cpu_cores())) as threads:
            return list(threads.map(pixels, inputs))

    def length(self, row: ModelInput) -> int:
        return 1

    def batch(self, rows: Sequence[ModelInput], multiple: int) -> dict[str, torch.Tensor]:
        """pixel_values (rows, channels, height, width)."""
        import torch

        return {"pixel_values": torch.stack([torch.from_numpy(row["pixel_values"]) for row in rows])}


class NumberPredictor(TextPredictor):
    def __init__(self, trained: Trained, model: Any) -> None:
        super().__init__(trained, model)
        self.columns = {f"predicted_{name}": float for name in self.labels}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.logits(inputs).tolist()]


class LabelSetPredictor(TextPredictor):
    """The labels with a probability of at least 0.5, and the probability of every label."""

    def __init__(self, trained: Trained, model: Any) -> None:
        super().__init__(trained, model)
        self.columns = {"predicted_labels": list, **{f"probability_{name}": float for name in self.labels}}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        found = self.logits(inputs).sigmoid().tolist()
        return [([name for name, value in zip(self.labels, row, strict=True) if value >= 0.5], *row) for row in found]
