"""Step batches: all samples that one optimizer step uses on one rank, split into micro-batches in the workers.

The split never changes the result, only the cost: the loss of every micro-batch is summed and divided by the label count of the
whole step over all ranks, which the sampler knows. A worker sends one flat buffer per key in 0.25 ms, nested tensors in 10 ms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Groups = Sequence[Sequence[int]]
LABELS = ("labels", "row_labels", "decoder_labels")  # buffers of targets; a step batch has one of them


@dataclass(frozen=True)
class Step:
    """What the sampler yields: the samples that this rank uses in one optimizer step."""

    index: int  # number of the optimizer step in the run, from 0
    epoch: int
    samples: tuple[int, ...]
    count: float  # labels (samples or tokens) that the loss of the step counts, or the sum of their weights, over ALL ranks
    weightless: bool = False
    """This rank has no sample in the step; it processes a placeholder, with weight 0, to stay in sync with the others."""


@dataclass(frozen=True)
class Widths:
    """Widths that micro-batches are padded to: the next larger one of a fixed list, else a multiple of a number."""

    fixed: tuple[int, ...] = ()
    multiple: int = 1

    def of(self, length: int) -> int:
        """The width of a micro-batch whose longest row has `length` tokens."""
        index = bisect_left(self.fixed, length)
        return self.fixed[index] if index < len(self.fixed) else ceil(length / self.multiple) * self.multiple


class Part(NamedTuple):
    """The place of one micro-batch of the first rung in the flat buffers of its step batch."""

    start: int  # offset of its first token
    first_row: int
    rows: int
    width: int


@dataclass(frozen=True)
class MicroBatch:
    """The part of a step batch that goes through the model at once."""

    inputs: dict[str, Tensor]  # keyword arguments of the model's forward: input_ids (rows, width) and, if needed, others
    targets: Tensor  # (rows, ...) labels of samples, or (rows, width) labels of tokens with -100 at positions without a label
    count: float  # labels that its loss counts, or the sum of their weights
    end_row: int  # the row of the step batch after its last row
    loss_weight: float  # factor from its summed loss to its share of the step's mean loss
    first_sample: int  # index of its first sample, which seeds its dropout


@dataclass(frozen=True)
class StepBatch:
    """A buffer per key, and the place of each micro-batch in the buffers.

    A buffer of one dimension is flat: (tokens with padding,) or (rows,). A buffer of more dimensions has an entry for each row:
    "pixel_values" (rows, channels, height, width), and of an encoder-decoder "decoder_input_ids" and "decoder_labels"
    (rows, longest target). Workers split for the first rung of the out-of-memory back-off; finer rungs are views made on demand.
    """

    step: Step
    buffers: Mapping[str, Tensor]
    parts: tuple[Part, ...]
    lengths: tuple[int, ...]  # tokens of each row without padding, in the order of the buffers, as are `samples` and `units`
    samples: tuple[int, ...]
    units: tuple[float, ...]  # labels of each row that the loss counts, or the sum of their weights
    widths: Widths = Widths()
    target_lengths: tuple[int, ...] = ()  # tokens of each row's target without padding, for an encoder-decoder
    samples_per_row: tuple[int, ...] = ()
    """Number of samples in each row, if rows hold several; `samples` then has the first sample of each row."""
    per_sample: frozenset[str] = frozenset({"row_labels"})  # buffers with an entry for each sample
    arguments: Callable[[dict[str, Tensor], int, int], dict[str, Tensor]] | None = None
    """(pieces of the buffers, first row, width) -> the arguments of forward; None: the pieces are the arguments."""
    pinned: bool = False  # whether the buffers came to the CUDA device from pinned memory
    cuts: ClassVar[int] = 1  # all rows are cut into micro-batches at once

    @property
    def rows(self) -> int:
        """Number of samples; a packed row counts all its samples."""
        return 0 if self.step.weightless else sum(self.samples_per_row) if self.samples_per_row else len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens without padding, those of targets included."""
        return 0 if self.step.weightless else sum(self.lengths) + sum(self.target_lengths)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(rows, width) of every micro-batch of the first rung."""
        return [(part.rows, part.width) for part in self.parts]

    @property
    def finest_rung(self) -> int:
        """The first rung at which every micro-batch is a single row."""
        return max(ceil(log2(part.rows)) for part in self.parts)

    def largest_micro_batch(self, rung: int) -> int:
        """Tokens of the largest micro-batch at `rung`, with padding."""
        return max(ceil(part.rows / (1 << rung)) * part.width for part in self.parts)

    def pin_memory(self) -> StepBatch:
        """This batch with its buffers in pinned memory; called by the DataLoader."""
        return replace(self, buffers={key: buffer.pin_memory() for key, buffer in self.buffers.items()})

    def to(self, device: torch.device) -> StepBatch:
        """This batch with its buffers on `device`; copies from pinned memory do not block."""
        pinned = device.type == "cuda" and all(buffer.is_pinned() for buffer in self.buffers.values())
        buffers = {key: buffer.to(device, non_blocking=True) for key, buffer in self.buffers.items()}
        return replace(self, buffers=buffers, pinned=pinned)

    def micro_batches(self, rung: int = 0, first_row: int = 0) -> Iterator[tuple[MicroBatch, bool]]:
        """(micro-batch, whether it is the last one of the step), from row `first_row` on.

        At `rung` r, each micro-batch of the first rung is split into up to 2**r equal ones.
        """
        share = 0.0 if self.step.weightless else 1.0 / (self.step.count or 1)
        for part in self.parts:
            rows = ceil(part.rows / 2**rung)
            for begin in range(max(0, first_row - part.first_row), part.rows, rows):
                end = min(begin + rows, part.rows)
                yield self._micro_batch(part, begin, end, share), part.first_row + end == len(self.lengths)

    def _micro_batch(self, part: Part, begin: int, end: int, share: float) -> MicroBatch:
        """Rows `begin` to `end` of `part`, trimmed to the longest of these rows."""
        first, last = part.first_row + begin, part.first_row + end
        longest = max(self.lengths[first:last])
        width = part.width if end - begin == part.rows else self.widths.of(longest)
        # with fixed widths there is always a mask, so that a compiled model sees one kind of input
        padded = bool(self.widths.fixed) or min(self.lengths[first:last]) < width
        inside = slice(first, last)
        if self.samples_per_row:
            inside = slice(sum(self.samples_per_row[:first]), sum(self.samples_per_row[:last]))
        inputs: dict[str, Tensor] = {}
        for key, buffer in self.buffers.items():
            if key in self.per_sample:
                inputs[key] = buffer[inside]
            elif key.startswith("decoder_"):
                inputs[key] = buffer[first:last, : self.widths.of(max(self.target_lengths[first:last]))]
            elif buffer.ndim > 1:
                inputs[key] = buffer[first:last]
            elif padded or not key.endswith("_mask"):
                rows = buffer[part.start : part.start + part.rows * part.width].view(part.rows, part.width)
                inputs[key] = rows if rows.shape == (end - begin, width) else rows[begin:end, :width]
        if (mask := inputs.pop("prebuilt_mask", None)) is not None:
            inputs["attention_mask"] = mask[:, None, None, :]
        (targets,) = [inputs.pop(key) for key in LABELS if key in inputs]
        if self.arguments is not None:
            inputs = self.arguments(inputs, first, width)
        return MicroBatch(inputs, targets, sum(self.units[first:last]), last, share, self.samples[first])
