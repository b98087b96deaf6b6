"""Mutations of what plugins change in data and schedule: batch sizes, order, padding, workers, learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import hwopt_plugins.length_batching
import hwopt_plugins.pack.collate
from hwopt.data.batches.collate import cut_in_order
from hwopt.data.batches.samplers import StepSampler
from mutations import Mutation


def half_of_each_step(patch: pytest.MonkeyPatch) -> None:
    """The sampler yields only the first half of the samples of a step."""
    real = StepSampler.__iter__

    def halved(self: StepSampler) -> Any:
        for step in real(self):
            yield type(step)(step.index, step.epoch, step.samples[: len(step.samples) // 2], step.count)

    patch.setattr(StepSampler, "__iter__", halved)


def no_workers(patch: pytest.MonkeyPatch) -> None:
    """torch's DataLoader ignores `num_workers`."""
    real = torch.utils.data.DataLoader.__init__

    def init(self: Any, *args: Any, num_workers: int = 0, **kwargs: Any) -> None:
        for key in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            kwargs.pop(key, None)
        real(self, *args, **kwargs)

    patch.setattr(torch.utils.data.DataLoader, "__init__", init)


def cut_by_position(lengths: Sequence[int], rows: int, **_: Any) -> Any:
    return cut_in_order(lengths, rows)


def no_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hwopt_plugins.length_batching, "cut_by_length", cut_by_position)


def no_sorting(patch: pytest.MonkeyPatch) -> None:
    """numpy returns the indexes of a sort in the order in which they are."""
    patch.setattr(np, "argsort", lambda values, **_: np.arange(len(values)))


def one_document_per_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hwopt_plugins.pack.collate, "pack_rows", lambda lengths, width: [[index] for index in range(len(lengths))])


def constant_rate(patch: pytest.MonkeyPatch) -> None:
    """torch's scheduler never changes the learning rate."""
    patch.setattr(torch.optim.lr_scheduler.LambdaLR, "get_lr", lambda self: list(self.base_lrs))


def no_warmup(patch: pytest.MonkeyPatch) -> None:
    """transformers makes every schedule a constant one."""
    import transformers
    from transformers.optimization import get_constant_schedule

    patch.setattr(transformers, "get_scheduler", lambda name, optimizer, *_: get_constant_schedule(optimizer))


DATA = (
    Mutation(
        "batch", "steps have half of their rows", half_of_each_step, "expected rows_per_step 8", {"train": 4, "effective": 8}
    ),
    Mutation("dataloader", "the loader starts no workers", no_workers, "expected num_workers 1, found 0", {"num_workers": 1}),
    Mutation("length_batching", "rows are cut in order", no_cut, "with rows at random", {"overhead_tokens": 0}),
    Mutation("group_lengths", "lengths are not sorted", no_sorting, "standard deviation of lengths"),
    Mutation("pack", "each document has a row", one_document_per_row, "0 of them with several documents"),
    Mutation(
        "schedule", "the rate is constant", constant_rate, "the schedule asks for", {"warmup_ratio": 0.5}, job={"max_steps": 4}
    ),
    Mutation("schedule", "no warm-up", no_warmup, "expected warmup True", {"warmup_ratio": 0.5}, job={"max_steps": 4}),
)
