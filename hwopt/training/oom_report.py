"""Write `out_of_memory.json` for a run that ran out of memory: the memory in use, the row lengths, and the prediction.

On CUDA also `out_of_memory.pickle`, a snapshot for https://pytorch.org/memory_viz.
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


MAX_ROWS = 50  # number of the longest rows in the report


def write_report(run: Run, reason: str) -> None:
    """Write the report into the run folder. Skips a file that cannot be written: the error of the run matters more."""
    if not run.folder.is_dir():
        return
    with contextlib.suppress(StorageError):
        write_json(run.folder / "out_of_memory.json", report(run, reason))
    if run.device.type == "cuda":
        with contextlib.suppress(OSError, RuntimeError):
            torch.cuda.memory._dump_snapshot(str(run.folder / "out_of_memory.pickle"))


def report(run: Run, reason: str) -> dict[str, Any]:
    """The content of `out_of_memory.json`."""
    batch, memory = run.progress.batch, run.plan.memory
    content: dict[str, Any] = {
        "reason": reason,
        "rank": run.rank,
        "step": run.step + 1,
        "held_gib": memory_by_kind(run),
        "peak_memory_gib": peak_memory_gib(run.device),
        "predicted_peak_gib": None if memory is None else memory.peak_gib,
        "predicted_for": None if memory is None else {"rows": memory.rows, "width": memory.width, "tier": memory.tier},
    }
    if batch is not None:
        content["micro_batches"] = [{"rows": rows, "width": width} for rows, width in batch.sizes]
        content["longest_rows"] = sorted(batch.lengths, reverse=True)[:MAX_ROWS]
    if run.device.type == "cuda":
        content["device"] = {
            "free_gib": torch.cuda.mem_get_info(run.device)[0] / GIB,
            "allocator": torch.cuda.memory_stats(run.device),
        }
    return content


def memory_by_kind(run: Run) -> dict[str, float]:
    """GiB of weights, gradients, optimizer state and fp32 masters."""
    weights = {id(p): p for p in (*run.inner_model.parameters(), *run.inner_model.buffers())}
    updated = [p for group in run.optimizer.param_groups for p in group["params"]]
    state = [value for values in run.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return {
        "weights": gib_of(weights.values()),
        "gradients": gib_of(p.grad for p in (*weights.values(), *updated) if p.grad is not None),
        "optimizer_state": gib_of(state),
        "masters": gib_of(p for p in updated if id(p) not in weights),
    }


def gib_of(tensors: Iterable[Tensor]) -> float:
    """GiB of all `tensors` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GIB
