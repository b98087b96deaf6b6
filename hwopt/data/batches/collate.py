"""Make a step batch from samples: split them into micro-batches and pad each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hwopt.data.batches.step_batch import Groups, Part, Step, StepBatch, Widths

if TYPE_CHECKING:
    from hwopt.data.stores.token_store import Store


@dataclass(frozen=True)
class Collate:
    """The default `collate`: splits the samples of a step, and pads every micro-batch to its longest row or a fixed width.

    A mask is made only if the model would attend to padding: not for causal models, and not for micro-batches without padding.
    The model uses a prebuilt mask unchanged and does not read its values, which would be a host sync.
    """

    cut: Callable[[Sequence[int], int], Groups]
    max_rows: int  # Rows of a micro-batch in the plan. It is passed to `cut`, which may use more rows if they are short.
    pad_id: int
    mask: Literal["attention_mask", "prebuilt_mask"] | None = "attention_mask"
    """attention_mask: int64 (rows, width); prebuilt_mask: bool (rows, 1, 1, width); None: no mask."""
    widths: Widths = field(default_factory=Widths)

    def __call__(self, step: Step, samples: Sequence[Mapping[str, np.ndarray]], counts: Sequence[float]) -> StepBatch:
        lengths = self.lengths(samples)
        groups = self.groups([self.width(length) for length in lengths])
        order = [row for group in groups for row in group]
        parts: list[Part] = []
        start = first_row = 0
        for group in groups:
            width = self.width(max(lengths[row] for row in group))
            parts.append(Part(start, first_row, len(group), width))
            start, first_row = start + len(group) * width, first_row + len(group)
        return StepBatch(
            step,
            self._fill(samples, groups, parts, start),
            tuple(parts),
            lengths=tuple(lengths[row] for row in order),
            samples=tuple(step.samples[row] for row in order),
            units=tuple(counts[row] for row in order),
            widths=self.widths,
            target_lengths=self.target_lengths([samples[row] for row in order]),
        )

    def lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> list[int]:
        """Tokens of each sample."""
        return [len(sample["input_ids"]) for sample in samples]

    def width(self, length: int) -> int:
        """The width of a micro-batch whose longest row has `length` tokens."""
        return self.widths.of(length)

    def target_lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> tuple[int, ...]:
        """Tokens of each sample's target; () for samples without one."""
        return ()

    def groups(self, widths: Sequence[int]) -> Groups:
        """The rows of each micro-batch, by the width of each row."""
        groups = self.cut(widths, self.max_rows)
        assert sorted(row for group in groups for row in group) == list(range(len(widths))), "cut must use every row once"
        return groups

    def _fill(
        self, samples: Sequence[Mapping[str, np.ndarray]], groups: Groups, parts: Sequence[Part], size: int
    ) -> dict[str, Tensor]:
        filler = {"input_ids": self.pad_id, "labels": -100}
        flat: dict[str, np.ndarray] = {}
        for key in samples[0]:
            if key == "row_labels":
                flat[key] = np.stack([samples[row][key] for group in groups for row in group])  # (rows, ...)
            else:
                flat[key] = np.full(size, filler.get(key, 0), np.int64)
        padded = self.widths.fixed or sum(len(sample["input_ids"]) for sample in samples) < size
        if self.mask and padded:
            flat[self.mask] = np.zeros(size, np.bool_ if self.mask == "prebuilt_mask" else np.int64)
        for group, part in zip(groups, parts, strict=True):
            for number, row in enumerate(group):
                begin = part.start + number * part.width
                for key, value in samples[row].items():
                    if key != "row_labels":
                        flat[key][begin : begin + len(value)] = value
                if self.mask in flat:
                    flat[self.mask][begin : begin + len(samples[row]["input_ids"])] = 1
        return {key: torch.from_numpy(array) for key, array in flat.items()}


@dataclass(frozen=True)
class PairCollate(Collate):
    """The `collate` of inputs with targets, each padded to its own width.

    The decoder needs no mask: no token attends to the padding after it.
    """

    def target_lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> tuple[int, ...]:
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


@dataclass(frozen=True)
class ImageCollate(Collate):
    """The `collate` of images of one size: rows are stacked. `cut` sees rows of one length; nothing is padded."""

    def lengths(self, samples: Sequence[Mapping[str, np.ndarray]]) -> list[int]:
        return [1] * len(samples)

    def width(self, length: int) -> int:
        return length

    def _fill(
        self, samples: Sequence[Mapping[str, np.ndarray]], groups: Groups, parts: Sequence[Part], size: int
    ) -> dict[str, Tensor]:
        order = [row for group in groups for row in group]
        pixels = np.stack([samples[row]["pixel_values"] for row in order])  # (rows, channels, height, width)
        labels = np.array([samples[row]["row_labels"] for row in order], np.int64)
        return {"pixel_values": torch.from_numpy(pixels), "row_labels": torch.from_numpy(labels)}


def cut_in_order(lengths: Sequence[int], rows: int) -> list[range]:
    """The default `cut`: groups of `rows` rows in the order of the samples."""
    return [range(begin, min(begin + rows, len(lengths))) for begin in range(0, len(lengths), rows)]


class StepDataset(torch.utils.data.Dataset[StepBatch]):
    """Makes step batches from stored samples, in the data-loading workers. Has no state.

    `counts`: what the loss counts for each sample; default: its labels.
    """

    def __init__(self, store: Store, collate: Callable[..., StepBatch], counts: np.ndarray | None = None) -> None:
        self.store, self.collate, self.counts = store, collate, counts

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, step: Any) -> StepBatch:
        counts = self.store.counts if self.counts is None else self.counts
        samples = [self.store.row(i, step.epoch) for i in step.samples]
        return self.collate(step, samples, [counts[i].item() for i in step.samples])
