"""What is left behind by a run that did not fit: what was held, how long the rows were, and what had been predicted.

`out_of_memory.json` in the run folder, and on CUDA `out_of_memory.pickle`, a snapshot for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.errors import StorageError
from hwopt.hardware import GIB
from hwopt.storage import write_json
from hwopt.telemetry import peak_memory_gib

if TYPE_CHECKING:
    from hwopt.build import Run

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
    batch, memory = run.step_batch, run.plan.memory
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


class Strain:
    """Signs that memory is short although nothing has failed, asked at log points.

    An allocator that has to free its cache and try again is slow; on Windows and WSL the driver moves what does not fit into the
    host's memory, which is slower still. Two signs in a row count as running out of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.retries = 0
        self.signs = 0
        self.may_spill = platform.system() == "Windows" or "microsoft" in platform.release().lower()

    def seen(self) -> str | None:
        """What to say once there were two signs in a row."""
        if self.device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.judged(int(stats.get("num_alloc_retries", 0)), int(stats.get("reserved_bytes.all.current", 0)), total)

    def judged(self, retries: int, reserved: int, total: int) -> str | None:
        spills = self.may_spill and reserved > total
        sign = "memory spills into the host's" if spills else "the allocator had to free its cache to go on"
        self.signs = self.signs + 1 if spills or retries > self.retries else 0
        self.retries = retries
        if self.signs < 2:
            return None
        self.signs = 0
        return f"{sign} twice in a row"


def free_memory(run: Run) -> None:
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
