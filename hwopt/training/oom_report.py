"""What is left behind by a run that did not fit: what was held, how long the rows were, and what had been predicted.

`out_of_memory.json` in the run folder, and on CUDA `out_of_memory.pickle`, a snapshot for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.errors import StorageError
from hwopt.hardware.device import GIB
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.system.atomic_folder import write_json

if TYPE_CHECKING:
    from hwopt.training.run import Run


LONGEST = 50
"""Rows whose length is written down."""


def write_report(run: Run, reason: str) -> None:
    """Never hides the error that ends the run: what cannot be written is left out."""
    if not run.folder.is_dir():
        return
    with contextlib.suppress(StorageError):
        write_json(run.folder / "out_of_memory.json", report(run, reason))
    if run.device.type == "cuda":
        with contextlib.suppress(OSError, RuntimeError):
            torch.cuda.memory._dump_snapshot(str(run.folder / "out_of_memory.pickle"))


def report(run: Run, reason: str) -> dict[str, Any]:
    batch, memory = run.progress.batch, run.plan.memory
    found: dict[str, Any] = {
        "reason": reason,
        "rank": run.rank,
        "step": run.step + 1,
        "held_gib": held(run),
        "peak_memory_gib": peak_memory_gib(run.device),
        "predicted_peak_gib": None if memory is None else memory.peak_gib,
        "predicted_for": None if memory is None else {"rows": memory.rows, "width": memory.width, "tier": memory.tier},
    }
    if batch is not None:
        found["micro_batches"] = [{"rows": rows, "width": width} for rows, width in batch.sizes]
        found["longest_rows"] = sorted(batch.lengths, reverse=True)[:LONGEST]
    if run.device.type == "cuda":
        found["device"] = {
            "free_gib": torch.cuda.mem_get_info(run.device)[0] / GIB,
            "allocator": torch.cuda.memory_stats(run.device),
        }
    return found


def held(run: Run) -> dict[str, float]:
    """GiB by kind, of what the run itself holds between two steps."""
    weights = {id(p): p for p in (*run.inner_model.parameters(), *run.inner_model.buffers())}
    stepped = [p for group in run.optimizer.param_groups for p in group["params"]]
    state = [value for values in run.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return {
        "weights": gib(weights.values()),
        "gradients": gib(p.grad for p in (*weights.values(), *stepped) if p.grad is not None),
        "optimizer_state": gib(state),
        "masters": gib(p for p in stepped if id(p) not in weights),
    }


def gib(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GIB
