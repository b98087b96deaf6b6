"""The lengths that a plan is made for: those of the job's texts where they can be read, else the longest that is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hwopt.data.collate import cut_in_order
from hwopt.data.step_batch import Widths
from hwopt.errors import HwoptError
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
from hwopt.tasks.registry import make_task

LENGTH = 512
"""Tokens, where neither the data nor the job nor the model says anything."""
LABELS = 2


@dataclass(frozen=True)
class Lengths:
    train: NDArray[np.int32] | None
    """Tokens of each training sample; None where the data was not read."""
    longest: int
    """Of a training or evaluation sample."""
    labels: int
    source: str
    """Where `longest` comes from, in words."""


def lengths_of(plan: Plan, cache: Path) -> Lengths:
    """Reads and tokenises the job's data as a run would, or finds it under `cache`; never raises for what the data is like."""
    job, model = plan.job, plan.job.model
    try:
        config = load_config(model.name, model.config, model.revision)
        prepared = make_task(job).prepare(job, config, cache, plan.training.seed, max_positions=plan.model.max_positions)
    except HwoptError as error:
        allowed = job.data.max_length or min(plan.model.max_positions or LENGTH, LENGTH)
        return Lengths(None, allowed, LABELS, f"the most that is allowed; the data was not read: {error}")
    stores = [store for store in (prepared.train, prepared.eval) if store is not None]
    longest = max(int(store.lengths.max()) for store in stores)
    cut = sum(store.meta["cut"] for store in stores)
    source = "the longest text" + (f"; {cut:,} longer ones are cut" if cut else "")
    return Lengths(prepared.train.lengths, longest, len(prepared.label_names or ()) or LABELS, source)


def largest_micro_batch(plan: Plan, longest: int) -> tuple[int, int]:
    """(rows, width) of the largest micro-batch that the recipe's cut makes of a rank's share of the longest samples."""
    width = Widths(plan.batch.widths, plan.batch.pad_to_multiple_of).of(longest)
    share = -(-plan.batch.step // plan.world_size)
    cut = plan.recipe.cut or cut_in_order
    return max(len(group) for group in cut([width] * share, plan.batch.train)), width


def share_cut(lengths: Lengths, max_length: int) -> float | None:
    """The share of training texts that are longer than `max_length`."""
    return None if lengths.train is None else float((lengths.train > max_length).mean())
