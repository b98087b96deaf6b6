"""BatchSizes: the rows of a run, from the keys that plugins write into `recipe.batch`. Keys and defaults stand here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

KEYS = (
    "train",
    "eval",
    "eval_tokens",
    "gradient_accumulation_steps",
    "effective",
    "widths",
    "pad_to_multiple_of",
    "row_multiple",
)
TRAIN_ROWS = 8
"""Rows of a micro-batch without a plugin."""
ROUNDING = 0.1
"""Part of a row: sizes this close below a whole number of rows become it. CUDA reports 7.78 of 8 GiB and 23.70 of 24."""


@dataclass(frozen=True)
class BatchSizes:
    """Rows per micro-batch (`train`) and per optimizer step over all ranks (`step`), and what limits an evaluation batch.

    Ask `eval_rows` for the rows of an evaluation batch: `eval` is the most, whatever else limits them.
    """

    train: int
    eval: int
    step: int
    eval_tokens: int | None = None
    widths: tuple[int, ...] = ()
    """Fixed widths that micro-batches are padded to; empty: padded to the longest row."""
    pad_to_multiple_of: int = 1

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per optimizer step on each rank."""
        return ceil(self.step / (self.train * world_size))

    def eval_rows(self, width: int = 1) -> int:
        """The most rows of an evaluation batch on one rank that is padded to `width` tokens; without it of any."""
        return self.eval if self.eval_tokens is None else max(1, min(self.eval, self.eval_tokens // width))

    def evaluating(self, rows: int) -> BatchSizes:
        """These sizes with up to `rows` rows in an evaluation batch, however long."""
        return replace(self, eval=rows, eval_tokens=None)

    @classmethod
    def of(cls, settings: Mapping[str, Any], world_size: int = 1, memory: float = 1.0) -> BatchSizes:
        """The sizes of `settings`, with the keys KEYS, where `memory` is the fraction of the memory that they were chosen for.

        Less memory lowers the rows of a micro-batch and of an evaluation batch, and not those of a step.
        """
        train = int(settings.get("train", TRAIN_ROWS))
        evaluation = int(settings.get("eval", 2 * train))
        step = int(settings.get("effective", train * int(settings.get("gradient_accumulation_steps", 1))))
        tokens = settings.get("eval_tokens")
        if memory < 1:
            train, evaluation = (max(1, int(rows * memory + ROUNDING)) for rows in (train, evaluation))
            tokens = tokens and int(tokens * memory)
        return cls(
            train=min(train, ceil(step / world_size)),
            eval=evaluation,
            step=step,
            eval_tokens=tokens,
            widths=tuple(settings.get("widths", ())),
            pad_to_multiple_of=int(settings.get("pad_to_multiple_of", 1)),
        )
