"""Make a step batch from images of one size: rows are stacked, nothing is padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hwopt.data.batches.collate import Collate
from hwopt.data.batches.step_batch import Groups, Part


@dataclass(frozen=True)
class ImageCollate(Collate):
    """The `collate` of images. `cut` sees rows of one length; widths, padding and mask are not used."""

    def lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> list[int]:
        """1 for each image."""
        return [1] * len(samples)

    def width(self, length: int) -> int:
        """1: no padding."""
        return length

    def _fill(
        self, samples: Sequence[Mapping[str, np.ndarray]], groups: Groups, parts: Sequence[Part], size: int
    ) -> dict[str, Tensor]:
        order = [row for group in groups for row in group]
        pixels = np.stack([samples[row]["pixel_values"] for row in order])  # (rows, channels, height, width)
        labels = np.array([samples[row]["row_labels"] for row in order], np.int64)
        return {"pixel_values": torch.from_numpy(pixels), "row_labels": torch.from_numpy(labels)}
