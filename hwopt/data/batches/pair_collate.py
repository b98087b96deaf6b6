"""Make a step batch for an encoder-decoder: inputs and targets are padded each to their own width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hwopt.data.batches.collate import Collate
from hwopt.data.batches.step_batch import Groups, Part


@dataclass(frozen=True)
class PairCollate(Collate):
    """The `collate` of inputs with targets. The decoder needs no mask: no token attends to the padding after it."""

    def target_lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> tuple[int, ...]:
        """Tokens of each sample's target."""
        return tuple(len(sample["decoder_labels"]) for sample in samples)

    def _fill(
        self, samples: Sequence[Mapping[str, np.ndarray]], groups: Groups, parts: Sequence[Part], size: int
    ) -> dict[str, Tensor]:
        buffers = super()._fill([{"input_ids": sample["input_ids"]} for sample in samples], groups, parts, size)
        order = [row for group in groups for row in group]
        width = self.widths.of(max(len(sample["decoder_labels"]) for sample in samples))
        for key, filler in (("decoder_input_ids", self.pad_id), ("decoder_labels", -100)):
            padded = np.full((len(order), width), filler, np.int64)
            for place, row in enumerate(order):
                padded[place, : len(samples[row][key])] = samples[row][key]
            buffers[key] = torch.from_numpy(padded)
        return buffers
