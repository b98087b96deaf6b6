"""What a run says about itself: one row a log point, in Hugging Face's names.

The loop only adds to counters; the device is asked at log points, by a copy that does not block and is read one step later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.errors import NonFiniteError
from hwopt.hardware import GIB

if TYPE_CHECKING:
    from hwopt.build import Run
    from hwopt.microbatch import StepBatch

MAX_SKIPS_IN_A_ROW = 50

Row = dict[str, float]


@dataclass
class Counts:
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    wait: float = 0.0
    """Seconds that the loop waited for data."""


@dataclass
class Snapshot:
    """Device values of a log point on their way to the host."""

    row: Row
    values: Tensor
    ready: Any

    def arrived(self) -> bool:
        return self.ready is None or self.ready.query()


@dataclass
class Telemetry:
    """Counts between two log points, and the totals of the run."""

    run: Run
    loss_sum: Tensor = field(init=False)
    counts: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)
    pending: Snapshot | None = None
    logged_steps: int = 0
    logged_loss: float = 0.0
    """Sum over the logged steps."""
    steps_here: int = 0
    """Of this process."""

    def __post_init__(self) -> None:
        self.loss_sum = torch.zeros((), device=self.run.device)
        self.started = self.logged = time.perf_counter()
        self.monitor = gpu_monitor(self.run.device)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)

    @property
    def seconds(self) -> float:
        """Since the run has begun; while nobody trained it, no time has passed."""
        return time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """All ranks call it: the loss since the last log point is that of all of them."""
        loss = self.loss_sum.clone()
        if self.run.world_size > 1:
            torch.distributed.all_reduce(loss)
        return {
            "loss_sum": float(loss),
            "counts": asdict(self.counts),
            "total": asdict(self.total),
            "logged_steps": self.logged_steps,
            "logged_loss": self.logged_loss,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss_sum.fill_(state["loss_sum"] if self.run.is_main else 0.0)
        self.counts, self.total = Counts(**state["counts"]), Counts(**state["total"])
        self.logged_steps, self.logged_loss = int(state["logged_steps"]), float(state["logged_loss"])
        self.started = time.perf_counter() - state["seconds"]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is not training's: evaluations, saves, the watched first step. Speeds leave it out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.logged += time.perf_counter() - began

    def waited(self, seconds: float) -> None:
        self.counts.wait += seconds

    def stepped(self, batch: StepBatch) -> Row | None:
        """Count a step; at a log point start a row, and return the one that has arrived meanwhile."""
        counts = self.counts
        self.steps_here += 1
        counts.steps += 1
        counts.samples += batch.rows
        counts.tokens += batch.tokens
        row = self.arrived() if self.pending else None
        if self.run.step % self.run.training.logging_steps == 0 or self.run.step == self.run.total_steps:
            row = self.flush() or row  # a slow device: wait for the old row before a new one starts
            self.start_row()
        return row

    def arrived(self) -> Row | None:
        return self.flush() if self.pending and self.pending.arrived() else None

    def start_row(self) -> None:
        run, counts, now = self.run, self.counts, time.perf_counter()
        engine = run.engine
        seconds = max(now - self.logged, 1e-9)
        scale, world = engine.loss_scale(), run.world_size
        read = (self.loss_sum, engine.norm, engine.skipped, engine.skipped_in_a_row, *([] if scale is None else [scale]))
        values = torch.stack([value.float() for value in read])
        if world > 1:
            torch.distributed.all_reduce(values[:1])
        on_gpu = run.device.type == "cuda"
        row = {
            "step": run.step,
            "epoch": round(run.epoch, 4),
            "time": round(now - self.started, 3),
            "learning_rate": float(run.scheduler.get_last_lr()[0]),
            "steps_per_second": counts.steps / seconds,
            "samples_per_second": counts.samples * world / seconds,
            "tokens_per_second": counts.tokens * world / seconds,
            "data_wait": counts.wait / seconds,
            "peak_memory_gib": peak_memory_gib(run.device),
            "interval_steps": counts.steps,
        }
        if self.monitor is not None:
            row["gpu_utilization"] = self.monitor()
        ready = None
        if on_gpu:
            values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self.pending = Snapshot(row, values, ready)
        for name in ("steps", "samples", "tokens", "wait"):
            setattr(self.total, name, getattr(self.total, name) + getattr(counts, name))
        self.counts = Counts()
        self.loss_sum.zero_()
        self.logged = now

    def flush(self) -> Row | None:
        """Wait for the row on its way, if there is one; raises NonFiniteError where it says that the run must stop."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        if pending.ready is not None:
            pending.ready.synchronize()
        loss_sum, norm, skipped, in_a_row, *scales = pending.values.tolist()
        scale = scales[0] if scales else None
        row, steps = pending.row, int(pending.row.pop("interval_steps"))
        row |= {"loss": loss_sum / steps, "grad_norm": norm}
        if skipped:
            row["skipped_updates"] = skipped
        if scale is not None:
            row["loss_scale"] = scale
        self.logged_steps += steps
        self.logged_loss += steps * row["loss"]
        self.stop_if_lost(row, skipped, in_a_row, scale)
        return row

    def stop_if_lost(self, row: Row, skipped: float, in_a_row: float, scale: float | None) -> None:
        where = f"at or before step {int(row['step'])}"
        advice = (
            "Lower training.learning_rate, look for broken samples, or train with plugins.precision.dtype = 'bf16' or 'fp32'."
        )
        finite_loss = row["loss"] - row["loss"] == 0
        if scale is None:
            if skipped:
                raise NonFiniteError(f"a gradient was not finite {where}; the update was not made. {advice}")
        elif scale < 1 or in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise NonFiniteError(f"{int(in_a_row)} updates in a row were not finite {where}, loss scale {scale:g}. {advice}")
        if not finite_loss:
            raise NonFiniteError(f"the loss was not finite {where}. {advice}")

    def mean_loss(self) -> float:
        return self.logged_loss / self.logged_steps if self.logged_steps else float("nan")


def peak_memory_gib(device: torch.device) -> float:
    """The allocator's peak on a GPU, the process's resident peak on a CPU; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(psutil.Process().memory_info().rss) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def gpu_monitor(device: torch.device) -> Any:
    """A function that returns the GPU's utilization in percent, or None where nobody can tell."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return None  # containers without the management library, MIG slices
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


class Listener:
    """Whoever wants to hear of a run: the screen, the journal, a tracker. Every hook does nothing by default."""

    def started(self, run: Run) -> None: ...

    def evidence(self, run: Run, found: list[Any]) -> None:
        """After step 1: (plan entry, evidence) of every applied plugin."""

    def row(self, run: Run, row: Row) -> None:
        """A log point, or an evaluation (its keys begin with `eval_`)."""

    def said(self, run: Run, message: str) -> None:
        """What is good to know; `warned`: what somebody should look at."""

    def warned(self, run: Run, message: str) -> None: ...

    def finished(self, run: Run, summary: Row) -> None: ...


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def started(self, run: Run) -> None:
        for listener in self.listeners:
            listener.started(run)

    def evidence(self, run: Run, found: list[Any]) -> None:
        for listener in self.listeners:
            listener.evidence(run, found)

    def row(self, run: Run, row: Row) -> None:
        for listener in self.listeners:
            listener.row(run, row)

    def said(self, run: Run, message: str) -> None:
        for listener in self.listeners:
            listener.said(run, message)

    def warned(self, run: Run, message: str) -> None:
        for listener in self.listeners:
            listener.warned(run, message)

    def finished(self, run: Run, summary: Row) -> None:
        for listener in self.listeners:
            listener.finished(run, summary)
