"""What a run says about itself: one row a log point, in Hugging Face's names.

The loop only adds to counters; the device is asked at log points, by a copy that does not block and is read one step later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.errors import NonFiniteError
from hwopt.training.divergence import DivergenceMonitor

if TYPE_CHECKING:
    from hwopt.data.step_batch import MicroBatch, StepBatch
    from hwopt.training.run import Run
from hwopt.hardware.monitor import gpu_utilization_reader, peak_memory_gib
from hwopt.training.listener import Row

FOLD = 256
"""Tensors that a `Pile` holds apart."""


@dataclass
class Counts:
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    wait: float = 0.0
    """Seconds that the loop waited for data."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Counts:
        """Raises ValueError for what are no numbers."""
        return cls(int(state["steps"]), int(state["samples"]), int(state["tokens"]), float(state["wait"]))


class Pile:
    """Single numbers of the device in their order; `fold` now and then, so that a long interval holds few tensors."""

    def __init__(self) -> None:
        self.folded: list[Tensor] = []
        self.fresh: list[Tensor] = []

    def fold(self) -> None:
        if len(self.fresh) >= FOLD:
            self.folded.append(torch.stack(self.fresh))
            self.fresh = []

    def values(self, device: torch.device) -> Tensor:
        parts = [*self.folded, *([torch.stack(self.fresh)] if self.fresh else [])]
        return torch.cat([part.double() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64, device=device)


@dataclass
class Interval:
    """What has happened since the last log point. Nothing of it is computed before the next one."""

    counts: Counts = field(default_factory=Counts)
    norms: Pile = field(default_factory=Pile)
    """Of each step's gradient."""
    losses: Pile = field(default_factory=Pile)
    """What each micro-batch adds to its step's mean loss."""
    weights: list[float] = field(default_factory=list)
    """The part of its step that each micro-batch is."""


@dataclass
class Snapshot:
    """Device values of a log point on their way to the host."""

    row: Row
    steps: int
    values: Tensor
    """Sum of the finite losses, the weight of the others, their number; the norm of each step; maybe the loss scale."""
    ready: Any


@dataclass
class Telemetry:
    """Counts between two log points, and the totals of the run."""

    run: Run
    interval: Interval = field(default_factory=Interval)
    total: Counts = field(default_factory=Counts)
    loss_total: float = 0.0
    """Mean losses of the log intervals, each times its steps, which `loss_steps` counts."""
    loss_steps: float = 0.0
    watch: DivergenceMonitor = field(default_factory=DivergenceMonitor)
    pending: Snapshot | None = None
    steps_here: int = 0
    """Of this process."""

    def __post_init__(self) -> None:
        self.started = self.logged = time.perf_counter()
        self.said: list[str] = []
        self.lost: NonFiniteError | None = None
        self.monitor = gpu_utilization_reader(self.run.device)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)

    @property
    def seconds(self) -> float:
        """Since the run has begun; while nobody trained it, no time has passed."""
        return time.perf_counter() - self.started

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is not training's: evaluations, saves, the watched first step. Speeds leave it out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.logged += time.perf_counter() - began

    def waited(self, seconds: float) -> None:
        self.interval.counts.wait += seconds

    def heard(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Keep the summed `loss` of a micro-batch; whether it is finite is asked at the log point."""
        if micro_batch.loss_weight:
            self.interval.losses.fresh.append(loss * micro_batch.loss_weight)
            self.interval.weights.append(micro_batch.count * micro_batch.loss_weight)

    def mark(self) -> int:
        return len(self.interval.losses.fresh)

    def back_to(self, mark: int) -> None:
        """Forget the micro-batches since `mark`, of a step that is begun again."""
        losses, weights = self.interval.losses.fresh, self.interval.weights
        del weights[len(weights) - (len(losses) - mark) :], losses[mark:]

    def stepped(self, batch: StepBatch) -> Row | None:
        """Count a step; at a log point start a row, and return the one that has arrived meanwhile."""
        self.steps_here += 1
        interval, counts = self.interval, self.interval.counts
        counts.steps += 1
        counts.samples += batch.rows
        counts.tokens += batch.tokens
        interval.norms.fresh.append(self.run.engine.norm)
        interval.norms.fold()
        interval.losses.fold()
        row = self.flush() if self.arrived() else None
        if self.at_log_point():
            row = self.flush() or row  # a slow device: wait for the old row before a new one starts
            self.start_row()
        return row

    def at_log_point(self) -> bool:
        return self.run.step % self.run.training.logging_steps == 0 or self.run.step == self.run.total_steps

    def arrived(self) -> bool:
        """Whether the row on its way can be had without waiting; several ranks wait, or they would not end in the same step."""
        if self.pending is None:
            return False
        return self.pending.ready is None or self.run.world_size > 1 or bool(self.pending.ready.query())

    def sums(self) -> Tensor:
        """Sum of the finite losses, weight of the others in steps, and their number; over all ranks.

        Where the other ranks are gone, this one's stand for theirs.
        """
        device = self.run.device
        losses = self.interval.losses.values(device)
        weights = torch.tensor(self.interval.weights, dtype=torch.float64)
        if device.type == "cuda":
            weights = weights.pin_memory().to(device, non_blocking=True)
        finite = torch.isfinite(losses)
        parts = (torch.where(finite, losses, 0.0), torch.where(finite, 0.0, weights), ~finite)
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        if self.run.peers_lost:
            return sums * self.run.world_size
        if self.run.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def start_row(self) -> None:
        run, counts, now = self.run, self.interval.counts, time.perf_counter()
        seconds = max(now - self.logged, 1e-9)
        scale, world = run.engine.loss_scale(), run.world_size
        scales = [] if scale is None else [scale.double().reshape(1)]
        values = torch.cat([self.sums(), self.interval.norms.values(run.device), *scales])
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
        }
        if self.monitor is not None:
            row["gpu_utilization"] = self.monitor()
        ready = None
        if run.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self.pending = Snapshot(row, counts.steps, values, ready)
        for name in ("steps", "samples", "tokens", "wait"):
            setattr(self.total, name, getattr(self.total, name) + getattr(counts, name))
        self.interval = Interval()
        self.logged = now

    def flush(self) -> Row | None:
        """Wait for the row on its way, if there is one; call `judge` once it is shown."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        if pending.ready is not None:
            pending.ready.synchronize()
        loss_sum, weightless, lost, *rest = pending.values.tolist()
        norms, scale = rest[: pending.steps], rest[pending.steps] if len(rest) > pending.steps else None
        row, steps = pending.row, pending.steps - weightless
        loss = loss_sum / steps if steps > 1e-6 else math.nan
        if steps > 1e-6:
            self.loss_total += loss_sum
            self.loss_steps += steps
        row |= {"loss": loss, "grad_norm": norms[-1]}
        run = self.run
        self.said, self.lost = self.watch.saw(run.training, run.total_steps, int(row["step"]), norms, int(lost), loss, scale)
        if self.watch.skipped:
            row["skipped_updates"] = self.watch.skipped
        if self.watch.lost:
            row["nonfinite_losses"] = self.watch.lost
        if scale is not None:
            row["loss_scale"] = scale
        return row

    def made_up(self) -> Row | None:
        """The row of a log point at which the other ranks were gone, from what this one knows; None where it is on its way."""
        if not self.interval.counts.steps or not self.at_log_point():
            return None
        self.start_row()
        return self.flush()

    def judge(self) -> None:
        """Say what the last row means. Raises NonFiniteError where it means that the run must stop."""
        for line in self.said:
            self.run.warn(line)
        self.said = []
        if self.lost is not None:
            raise self.lost

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to log the same, as plain numbers. All ranks call it, none with a row on its way."""
        assert self.pending is None, "flush() and judge() come first"
        interval = self.interval
        return {
            "watch": self.watch.state_dict(),
            "total": asdict(self.total),
            "loss_total": self.loss_total,
            "loss_steps": self.loss_steps,
            "seconds": self.seconds,
            "interval": {
                "counts": asdict(interval.counts),
                "sums": self.sums().tolist(),
                "norms": interval.norms.values(self.run.device).tolist(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The sums of all ranks go on in the first one."""
        self.watch.load_state_dict(state["watch"])
        self.total = Counts.of(state["total"])
        self.loss_total, self.loss_steps = state["loss_total"], state["loss_steps"]
        self.started = time.perf_counter() - state["seconds"]
        interval = state["interval"]
        self.interval = Interval(Counts.of(interval["counts"]))
        self.interval.norms.folded.append(torch.tensor(interval["norms"], dtype=torch.float64, device=self.run.device))
        if self.run.is_main:
            loss_sum, weight, lost = interval["sums"]
            sums = [loss_sum, *[math.nan] * int(lost)]
            self.interval.losses.folded.append(torch.tensor(sums, dtype=torch.float64, device=self.run.device))
            self.interval.weights += [0.0, *[weight / lost] * int(lost)] if lost else [0.0]

    def mean_loss(self) -> float:
        return self.loss_total / self.loss_steps if self.loss_steps else math.nan
