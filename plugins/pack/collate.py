"""PackedCollate: builds packed step batches in the data workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from hwopt.data.batches.collate import Collate
from hwopt.data.batches.step_batch import Part, Step, StepBatch
from hwopt_plugins.pack import pack_rows

IGNORED = -100
PER_DOCUMENT = frozenset({"row_labels", "document_rows", "document_offsets"})


def arguments_of(pieces: dict[str, Tensor], first_row: int, width: int) -> dict[str, Tensor]:
    """The arguments of forward: `StepBatch.arguments` of packed rows.

    The mask (rows, 1, width, width) lets a token attend only to tokens of its own document. `document_starts` (documents,)
    are the places of the first tokens in the flattened micro-batch.
    """
    if (numbers := pieces.pop("document_numbers", None)) is not None:
        pieces["attention_mask"] = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    if (rows := pieces.pop("document_rows", None)) is not None:
        pieces["document_starts"] = (rows - first_row) * width + pieces.pop("document_offsets")
    return pieces


@dataclass(frozen=True)
class PackedCollate:
    """Like the default Collate, but with several samples per row. A micro-batch has at most as many tokens as without packing."""

    padded: Collate
    width: int | None
    """Most tokens in a row; None: about twice the longest sample of the step, less if a micro-batch has an odd number of rows."""
    flat: bool
    """One row a micro-batch, as long as all of its rows together: the kernel needs no mask."""
    decoder: bool
    after_padding: bool
    """Whether positions start at the id of the padding token plus one, instead of 0."""

    def __call__(self, step: Step, samples: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]) -> StepBatch:
        lengths = [len(sample["input_ids"]) for sample in samples]
        longest = max(lengths)
        tokens = self.padded.max_rows * longest
        about_two = tokens // -(-self.padded.max_rows // 2)
        width = tokens if self.flat else max(self.width or about_two, longest)
        return self.build_batch(step, samples, counts, pack_rows(lengths, width), max(1, tokens // width))

    def one_row(self, samples: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]) -> StepBatch:
        """All `samples` in one row."""
        step = Step(0, 0, tuple(range(len(samples))), max(sum(counts), 1))
        return self.build_batch(step, samples, counts, [list(range(len(samples)))], 1)

    def alone(self, sample: Mapping[str, np.ndarray], count: int) -> StepBatch:
        """The sample in its own row, as without packing."""
        return self.padded(Step(0, 0, (0,), max(count, 1)), [sample], [count])

    def build_batch(
        self,
        step: Step,
        samples: Sequence[Mapping[str, np.ndarray]],
        counts: Sequence[int],
        rows: Sequence[Sequence[int]],
        max_rows: int,
    ) -> StepBatch:
        """The step batch of `rows`, lists of sample indices, with at most `max_rows` rows in a micro-batch."""
        row_lengths = [sum(len(samples[i]["input_ids"]) for i in row) for row in rows]
        parts: list[Part] = []
        start = 0
        for first in range(0, len(rows), max_rows):
            number = min(max_rows, len(rows) - first)
            width = self.padded.widths.of(max(row_lengths[first : first + number]))
            parts.append(Part(start, first, number, width))
            start += number * width
        return StepBatch(
            step,
            {key: torch.from_numpy(array) for key, array in self.buffers(samples, rows, parts, start).items()},
            tuple(parts),
            lengths=tuple(row_lengths),
            samples=tuple(step.samples[row[0]] for row in rows),
            units=tuple(sum(counts[i] for i in row) for row in rows),
            widths=self.padded.widths,
            samples_per_row=tuple(len(row) for row in rows),
            per_sample=PER_DOCUMENT,
            arguments=arguments_of,
        )

    def buffers(
        self, samples: Sequence[Mapping[str, np.ndarray]], rows: Sequence[Sequence[int]], parts: Sequence[Part], size: int
    ) -> dict[str, np.ndarray]:
        """Name -> flat array of `size` tokens over all micro-batches, and arrays with one value per document."""
        per_token = [key for key in samples[0] if key != "row_labels"]
        fillers = {"input_ids": self.padded.pad_id, "labels": IGNORED}
        flat = {key: np.full(size, fillers.get(key, 0), np.int64) for key in per_token}
        # padding is a document of its own at the end of a row, with positions that start again like those of any document
        first_position = self.padded.pad_id + 1 if self.after_padding else 0
        flat["position_ids"] = np.full(size, first_position, np.int64)
        numbers = np.zeros(size, np.int64)
        offsets: list[int] = []
        for part in parts:
            for number in range(part.rows):
                row = rows[part.first_row + number]
                begin = part.start + number * part.width
                starts = [0, *accumulate(len(samples[i]["input_ids"]) for i in row)]
                offsets += starts[:-1]
                for order, (at, end) in enumerate(pairwise([*starts, part.width])):
                    place = slice(begin + at, begin + end)
                    flat["position_ids"][place] = np.arange(end - at) + first_position
                    if order < len(row):
                        numbers[place] = order + 1
                        for key in per_token:
                            flat[key][place] = samples[row[order]][key]
        if not self.decoder:
            flat["document_numbers"] = numbers
        if "row_labels" in samples[0]:
            flat["row_labels"] = np.stack([samples[i]["row_labels"] for row in rows for i in row])
            flat["document_rows"] = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
            flat["document_offsets"] = np.array(offsets, np.int64)
        return flat
