"""Batches: rows go through a model in batches; a batch that does not fit into the device's memory is halved and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log2
from typing import TypeVar

import torch

from hwopt.distributed.oom_backoff import QUIET_BATCHES, OomBackoff
from hwopt.errors import DoesNotFitError
from hwopt.text import first_line
from hwopt.training.memory_pressure import free_memory

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches:
    """Batches of `rows` rows, and of fewer only while as many rows of their length do not fit."""

    def __init__(self, device: torch.device, rows: int, warn: Callable[[str], None]) -> None:
        self.device, self.rows = device, rows
        self.backoff = OomBackoff("Inference", "--batch-size", warn, quiet_steps_needed=QUIET_BATCHES)

    def run(
        self,
        items: Sequence[Item],
        length: Callable[[Item], int],
        work: Callable[[Sequence[Item]], Sequence[Result]],
    ) -> Iterator[tuple[Sequence[Item], Sequence[Result]]]:
        """(items of a batch, what `work` returns for them), in the order of `items`: longest first.

        `length` returns an item's tokens. `work` must have no effect if it runs out of memory.
        Raises DoesNotFitError if a single row does not fit.
        """
        start = 0
        while start < len(items):
            left, tokens = min(self.rows, len(items) - start), length(items[start])

            def largest(rung: int, left: int = left, tokens: int = tokens) -> int:
                return ceil(left / (1 << rung)) * tokens

            rung = self.backoff.rung_for(largest)
            part = items[start : start + ceil(left / (1 << rung))]
            try:
                results = work(part)
            except torch.OutOfMemoryError as error:
                oom_message = first_line(error)
            else:
                start += len(part)
                self.backoff.batch_succeeded(rung, largest(rung))
                yield part, results
                continue
            free_memory(self.device)  # after the except block: the exception's frames keep tensors alive
            if len(part) == 1:
                raise DoesNotFitError(
                    f"A single row does not fit into the device's memory ({oom_message}). "
                    "Shorten the longest texts, or free memory that other processes use"
                )
            where = f"in a batch of {len(part):,} rows"
            self.backoff.reduce(ceil(log2(left)), where, oom_message, rung)
