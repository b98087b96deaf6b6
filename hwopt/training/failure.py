"""Handle a failure in training: save the last complete step, name the option to lower, report the memory in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hwopt.config.aliases import option_for
from hwopt.errors import DoesNotFitError, HwoptError, NonFiniteError, StorageError, WorkerDiedError, worker_death
from hwopt.hardware.device import GIB
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.plugin import RunView
from hwopt.plugin.guard import GuardedOnce
from hwopt.records.run_files import OUT_OF_MEMORY
from hwopt.saving.checkpointer import Checkpointer
from hwopt.system.atomic_folder import write_json
from hwopt.text import first_line
from hwopt.training.run import Run
from hwopt.training.telemetry.telemetry import Telemetry

MAX_ROWS = 50  # number of the longest rows in the report


@contextmanager
def save_on_failure(run: Run, telemetry: Telemetry, checkpoints: Checkpointer) -> Iterator[None]:
    """If the block fails, save the last complete step and log the rows that are still pending."""
    try:
        yield
    except (NonFiniteError, DoesNotFitError, WorkerDiedError, RuntimeError) as error:
        if not isinstance(error, HwoptError) and worker_death(error) is None:
            raise
        all_ranks = isinstance(error, NonFiniteError)
        run.progress.peers_lost = not all_ranks and run.world_size > 1
        for row in (telemetry.flush(), telemetry.estimated_row() if run.progress.peers_lost else None):
            if row is not None:
                run.listener.on_log(run, row)
        checkpoints.emergency_save(all_ranks)
        telemetry.judge()  # a non-finite loss matters more than the error that followed it
        raise


@contextmanager
def report_oom(what: str, option: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a DoesNotFitError that names the `option` to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{what} does not fit into the device's memory ({first_line(error)}). "
            f"Lower {option}, lower data.max_length, or set {option_for('gradient_checkpointing')}."
        ) from error


def last_resorts(run: RunView) -> list[Callable[[], str | None]]:
    """What plugins can do when not even single rows fit; each call returns what it costs, or None if it cannot help."""
    return [
        GuardedOnce(partial(plugin.on_oom, run), f"plugin {plugin.name!r} ({type(plugin).__module__})", "on_oom()")
        for plugin in run.plan.oom_plugins
    ]


def write_report(run: Run, reason: str) -> None:
    """Write `out_of_memory.json`, and on CUDA a snapshot for https://pytorch.org/memory_viz. Skips what cannot be written."""
    if not run.folder.is_dir():
        return
    with suppress(StorageError):
        write_json(run.folder / OUT_OF_MEMORY, report(run, reason))
    if run.device.type == "cuda":
        with suppress(OSError, RuntimeError):
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
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GIB
