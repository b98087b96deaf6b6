"""Batches: rows go through a model in batches; a batch that does not fit into the device's memory is halved and repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from hwopt.errors import DoesNotFitError
from hwopt.text import first_line
from hwopt.training.memory_pressure import free_memory

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches:
    """The batch size of an inference; it stays halved for the following batches."""

    def __init__(self, device: torch.device, rows: int, warn: Callable[[str], None]) -> None:
        self.device, self.rows, self.warn = device, rows, warn

    def run(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]
    ) -> Iterator[tuple[Sequence[Item], Sequence[Result]]]:
        """(items of a batch, what `work` returns for them), in the order of `items`.

        `work` must have no effect if it runs out of memory. Raises DoesNotFitError if a single row does not fit.
        """
        start = 0
        while start < len(items):
            part = items[start : start + self.rows]
            try:
                results = work(part)
            except torch.OutOfMemoryError as error:
                oom_message = first_line(error)
            else:
                start += len(part)
                yield part, results
                continue
            free_memory(self.device)  # after the except block: the exception's frames keep tensors alive
            self.halve(len(part), oom_message)

    def halve(self, rows: int, oom_message: str) -> None:
        """Halve the batch size after a batch of `rows` rows did not fit."""
        if rows == 1:
            raise DoesNotFitError(
                f"A single row does not fit into the device's memory ({oom_message}). Shorten the longest texts, or free memory "
                "that other processes use"
            )
        self.rows = rows // 2
        self.warn(f"A batch of {rows:,} rows does not fit into the device's memory: continuing with {self.rows:,}. {oom_message}")
