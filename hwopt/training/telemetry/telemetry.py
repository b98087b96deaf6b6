"""One row of metrics per log point. Its values are copied to the host without blocking, and read one step later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hwopt.data.batches.step_batch import MicroBatch, StepBatch
from hwopt.errors import NonFiniteError
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.training.listener import Row
from hwopt.training.optimizer import warmup_steps
from hwopt.training.run import Run
from hwopt.training.telemetry.divergence import DivergenceMonitor, LoggedInterval
from hwopt.training.telemetry.use import Counts, Interval, UseMeter, joined
from hwopt.training.telemetry.verdict import Verdict


@dataclass
class Snapshot:
    """The row of a log point, with the values that are being copied from the device to the host."""

    row: Row
    steps: int  # steps since the log point before
    values: Tensor  # float64: the three `sums`, the gradient norm of each step, and the loss scale if there is one
    ready: Any  # CUDA event of the copy; None on other devices


@dataclass
class Telemetry:
    """Counts between two log points and the totals of the run. Saved with checkpoints."""

    run: Run
    use: UseMeter | None = None  # measures how well the device is used; None measures nothing
    interval: Interval = field(default_factory=Interval)
    total: Counts = field(default_factory=Counts)
    loss_total: float = 0.0  # sum over the log intervals of mean loss x steps; `loss_steps` is the sum of the steps
    loss_steps: float = 0.0
    divergence: DivergenceMonitor = field(default_factory=DivergenceMonitor)
    pending: Snapshot | None = None
    steps_here: int = 0  # steps of this process; a resumed run starts at 0

    def __post_init__(self) -> None:
        self.started = self.logged = time.perf_counter()
        self.messages: list[str] = []
        self.stop_error: NonFiniteError | None = None
        self.verdict: Verdict | None = None  # the verdict on the last log interval, if it is a new one
        self.mark_time: Callable[[str], None] = (lambda part: None) if self.use is None else self.use.timer.mark
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)

    @property
    def seconds(self) -> float:
        """Seconds of training since the run started, over all its processes."""
        return time.perf_counter() - self.started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the speeds: evaluations and saves."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.logged += time.perf_counter() - began

    @contextmanager
    def unmeasured(self, batch: StepBatch) -> Iterator[None]:
        """Exclude the step of `batch` and the time of the block from the speeds: the profiler slows the step down."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.interval.unmeasured.add(Counts(1, batch.rows, batch.tokens))
            self.interval.unmeasured_seconds += time.perf_counter() - began

    def waited(self, seconds: float) -> None:
        self.interval.counts.wait += seconds

    def add_loss(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Keep the summed `loss` of a micro-batch on the device; the next log point checks whether it is finite."""
        if micro_batch.loss_weight:
            self.interval.losses.append(loss * micro_batch.loss_weight)
            self.interval.weights.append(micro_batch.count * micro_batch.loss_weight)

    def mark(self) -> int:
        """The position for `reset_to`: the number of losses so far."""
        return len(self.interval.losses)

    def reset_to(self, mark: int) -> None:
        """Forget the micro-batches since `mark`: their step is retried."""
        losses, weights = self.interval.losses, self.interval.weights
        del weights[len(weights) - (len(losses) - mark) :], losses[mark:]

    def stepped(self, batch: StepBatch) -> Row | None:
        """Count a step. At a log point start a new row; returns the previous row once its values have arrived."""
        self.steps_here += 1
        interval, counts = self.interval, self.interval.counts
        counts.steps += 1
        counts.samples += batch.rows
        counts.tokens += batch.tokens
        interval.norms.append(self.run.engine.norm)
        row = self.flush() if self.arrived() else None
        if self.at_log_point():
            row = self.flush() or row  # on a slow device, wait for the previous row
            self.start_row()
        return row

    def at_log_point(self) -> bool:
        return self.run.step % self.run.training.logging_steps == 0 or self.run.step == self.run.total_steps

    def arrived(self) -> bool:
        """Whether the pending row can be read without waiting. Several ranks always wait, so that they stop in the same step."""
        if self.pending is None:
            return False
        return self.pending.ready is None or self.run.world_size > 1 or bool(self.pending.ready.query())

    def sums(self) -> Tensor:
        """(sum of the finite losses, weight of the non-finite ones in steps, their number), (3,) float64 over all ranks.

        If the other ranks are lost, this rank's values stand for theirs.
        """
        device = self.run.device
        losses = joined(self.interval.losses, device)
        weights = torch.tensor(self.interval.weights, dtype=torch.float64)
        if device.type == "cuda":
            weights = weights.pin_memory().to(device, non_blocking=True)
        finite = torch.isfinite(losses)
        parts = (torch.where(finite, losses, 0.0), torch.where(finite, 0.0, weights), ~finite)
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        if self.run.progress.peers_lost:
            return sums * self.run.world_size
        if self.run.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def start_row(self) -> None:
        """Start the row of this log point: compute its values on the device, copy them without waiting, reset the counters."""
        run, counts, now = self.run, self.interval.counts, time.perf_counter()
        measured, seconds = self.interval.measured(now - self.logged)
        scale, world = run.engine.loss_scale(), run.world_size
        schedule = run.scheduler  # which already has the rate of the next update
        scales = [] if scale is None else [scale.double().reshape(1)]
        values = torch.cat([self.sums(), joined(self.interval.norms, run.device), *scales])
        row: Row = {
            "step": run.step,
            "epoch": round(run.epoch, 4),
            "time": round(now - self.started, 3),
            "learning_rate": float(schedule.base_lrs[0] * schedule.lr_lambdas[0](max(schedule.last_epoch - 1, 0))),
            "steps_per_second": measured.steps / seconds,
            "samples_per_second": measured.samples * world / seconds,
            "data_wait": counts.wait / seconds,
            "peak_memory_gib": peak_memory_gib(run.device),
        }
        if run.task.facts.inputs == "tokens":
            row["tokens_per_second"] = measured.tokens * world / seconds
        if self.use is not None:
            row["use"] = use = self.use.window(measured, seconds)
            self.verdict = self.use.new_verdict(use, seconds)
            if "gpu_percent" in use:
                row["gpu_utilization"] = use["gpu_percent"]
        ready = None
        if run.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self.pending = Snapshot(row, counts.steps, values, ready)
        self.total.add(counts)
        self.interval = Interval()
        self.logged = now

    def flush(self) -> Row | None:
        """Wait for the pending row and return it, or None. Call `judge` after it was shown."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        if pending.ready is not None:
            pending.ready.synchronize()
        loss_sum, weightless, nonfinite_losses, *rest = pending.values.tolist()
        norms, scale = rest[: pending.steps], rest[pending.steps] if len(rest) > pending.steps else None
        row, steps = pending.row, pending.steps - weightless
        loss = loss_sum / steps if steps > 1e-6 else math.nan
        if steps > 1e-6:
            self.loss_total += loss_sum
            self.loss_steps += steps
        row |= {"loss": loss, "grad_norm": norms[-1]}
        run = self.run
        guess = run.guessed_loss if row["step"] > warmup_steps(run.training, run.total_steps) else None
        interval = LoggedInterval(int(row["step"]), norms, loss, int(nonfinite_losses), scale, guess)
        self.messages, self.stop_error = self.divergence.observe(run.training, run.total_steps, interval)
        if self.divergence.skipped_updates:
            row["skipped_updates"] = self.divergence.skipped_updates
        if self.divergence.nonfinite_losses:
            row["nonfinite_losses"] = self.divergence.nonfinite_losses
        if scale is not None:
            row["loss_scale"] = scale
        return row

    def estimated_row(self) -> Row | None:
        """The row of a log point at which the other ranks are lost, estimated from this rank; None if this is not a log point."""
        if not self.interval.counts.steps or not self.at_log_point():
            return None
        self.start_row()
        return self.flush()

    def judge(self) -> None:
        """Show the warnings and a new verdict of the last row. Raises NonFiniteError if the run must stop."""
        if self.verdict is not None:
            self.run.say(str(self.verdict))
            self.verdict = None
        for line in self.messages:
            self.run.warn(line)
        self.messages = []
        if self.stop_error is not None:
            raise self.stop_error

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to log the same, as plain numbers. All ranks call it, after `flush`."""
        assert self.pending is None, "flush() and judge() come first"
        interval = self.interval
        return {
            "watch": self.divergence.state_dict(),
            "total": asdict(self.total),
            "loss_total": self.loss_total,
            "loss_steps": self.loss_steps,
            "seconds": self.seconds,
            "interval": {
                "counts": asdict(interval.counts),
                "sums": self.sums().tolist(),
                "norms": joined(interval.norms, self.run.device).tolist(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the first rank continues the sums of all ranks."""
        self.divergence.load_state_dict(state["watch"])
        self.total = Counts(**state["total"])
        self.loss_total, self.loss_steps = state["loss_total"], state["loss_steps"]
        self.started = time.perf_counter() - state["seconds"]
        interval = state["interval"]
        self.interval = Interval(Counts(**interval["counts"]))
        self.interval.norms += torch.tensor(interval["norms"], dtype=torch.float64, device=self.run.device)
        if self.run.is_main:
            loss_sum, weight, count = interval["sums"]
            sums = [loss_sum, *[math.nan] * int(count)]
            self.interval.losses += torch.tensor(sums, dtype=torch.float64, device=self.run.device)
            self.interval.weights += [0.0, *[weight / count] * int(count)] if count else [0.0]

    def mean_loss(self) -> float:
        """The mean loss of all steps of the run; nan without a finite loss."""
        return self.loss_total / self.loss_steps if self.loss_steps else math.nan
