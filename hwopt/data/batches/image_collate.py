"""Make a step batch from images of one size: rows are stacked, nothing is padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hwopt.data.batches.collate import Collate
from hwopt.data.batches.step_batch import Part, Step, StepBatch


@dataclass(frozen=True)
class ImageCollate(Collate):
    """The `collate` of images. `cut` sees rows of one length; widths, padding and mask are not used."""

    def __call__(self, step: Step, samples: Sequence[Mapping[str, np.ndarray]], counts: Sequence[float]) -> StepBatch:
        groups = self.groups([1] * len(samples))
        order = [row for group in groups for row in group]
        parts: list[Part] = []
        first = 0
        for group in groups:
            parts.append(Part(first, first, len(group), 1))
            first += len(group)
        buffers = {
            "pixel_values": torch.from_numpy(np.stack([samples[row]["pixel_values"] for row in order])),  # (rows, C, H, W)
            "row_labels": torch.from_numpy(np.array([samples[row]["row_labels"] for row in order], np.int64)),
        }
        return StepBatch(
            step,
            buffers,
            tuple(parts),
            lengths=(1,) * len(order),
            samples=tuple(step.samples[row] for row in order),
            units=tuple(counts[row] for row in order),
        )
