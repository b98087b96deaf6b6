"""ImagePredictor: the most probable label of an image, with its probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hwopt.data.stores.images import ImageTransform
from hwopt.hardware.detect import cpu_cores
from hwopt.tasks.prediction import ModelInput, Trained

if TYPE_CHECKING:
    import torch

MOST_THREADS = 16


class ImagePredictor:
    """Classifies images with a trained model. Threads decode them: Pillow does not hold Python's lock meanwhile."""

    columns: ClassVar[Mapping[str, type]] = {"predicted_label": str, "predicted_probability": float}
    window_batches: ClassVar[int] = 1  # decoded images are large, and sorting them by length saves nothing

    def __init__(self, trained: Trained, model: Any, transform: ImageTransform) -> None:
        self.model, self.labels, self.transform = model, trained.label_names, transform

    def encode(self, inputs: Sequence[bytes | Path]) -> list[ModelInput | str]:
        """The pixels of each image, or the reason why it cannot be used."""
        with ThreadPoolExecutor(min(MOST_THREADS, cpu_cores())) as threads:
            return list(threads.map(self._pixels, inputs))

    def length(self, row: ModelInput) -> int:
        """1: images have one size."""
        return 1

    def batch(self, rows: Sequence[ModelInput], multiple: int) -> dict[str, torch.Tensor]:
        """pixel_values (rows, channels, height, width)."""
        import torch

        return {"pixel_values": torch.from_numpy(np.stack([row["pixel_values"] for row in rows]))}

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(label, probability) of each row."""
        probabilities, numbers = self.model(**inputs).logits.float().softmax(-1).max(-1)
        return [(self.labels[number], value) for number, value in zip(numbers.tolist(), probabilities.tolist(), strict=True)]

    def _pixels(self, content: bytes | Path) -> ModelInput | str:
        try:
            return {"pixel_values": self.transform(content)}
        except ValueError as error:
            return str(error) if isinstance(content, bytes) else f"{error}: {content}"
