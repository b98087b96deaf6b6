"""What happened since the last log point, and how well the run uses its device (docs/utilization.md).

No part of it waits for the device: losses and norms stay there until the next log point.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hwopt.hardware.monitor import Sampler, gpu_reader
from hwopt.training.run import Run
from hwopt.training.telemetry.step_timer import StepTimer
from hwopt.training.telemetry.verdict import Verdict, verdict_of

ENOUGH_SECONDS = 10.0  # training that a verdict needs: in less, the first steps and their allocations count too much
PEAKS = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32"}
"""The profiler's name of a dtype -> its name in the profile's [card.dense_tflops]."""


@dataclass
class Counts:
    steps: int = 0
    samples: int = 0
    tokens: int = 0  # real tokens: padding does not count
    wait: float = 0.0  # seconds that the loop waited for data

    def add(self, other: Counts) -> None:
        self.steps += other.steps
        self.samples += other.samples
        self.tokens += other.tokens
        self.wait += other.wait


def joined(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    """All `scalars`, (count,) float64 on `device`."""
    return torch.stack(list(scalars)).double() if scalars else torch.zeros(0, dtype=torch.float64, device=device)


@dataclass
class Interval:
    counts: Counts = field(default_factory=Counts)
    norms: list[Tensor] = field(default_factory=list)  # the gradient norm of each step
    losses: list[Tensor] = field(default_factory=list)  # what each micro-batch adds to its step's mean loss
    weights: list[float] = field(default_factory=list)  # the part of its step that each micro-batch is
    unmeasured: Counts = field(default_factory=Counts)  # the part of `counts` whose time does not count: steps under the profiler
    unmeasured_seconds: float = 0.0

    def measured(self, seconds: float) -> tuple[Counts, float]:
        """The counts and the time of the steps without those under the profiler; of all steps if each was profiled."""
        counts, left = self.counts, self.unmeasured
        if counts.steps <= left.steps:
            return counts, max(seconds, 1e-9)
        rest = Counts(counts.steps - left.steps, counts.samples - left.samples, counts.tokens - left.tokens, counts.wait)
        return rest, max(seconds - self.unmeasured_seconds, 1e-9)


class UseMeter:
    def __init__(self, run: Run) -> None:
        self.run, self.memory_pressure = run, MemoryPressure(run.device)
        self.sampler = Sampler(gpu_reader(run.device), self.worker_ids)
        self.timer = StepTimer(run.device)
        self.timed, self.times = 0, dict[str, float]()  # number of timed steps, and their means
        self.counts, self.seconds = Counts(), 0.0
        """Of the whole run in this process, without profiled steps, evaluations and saves."""
        self.spoken: str = "compute-bound"
        """The limit that the user was told last; a run that computes all the time needs no message."""
        self.changed: tuple[str, float] = ("", 0.0)  # a limit that differs from `spoken`, and for how many seconds

    def running(self) -> AbstractContextManager[None]:
        return self.sampler.running()

    def worker_ids(self) -> list[int]:
        workers = getattr(getattr(self.run.train_loader, "_iterator", None), "_workers", ())
        return [worker.pid for worker in workers if worker.pid is not None]

    def window(self, counts: Counts, seconds: float) -> dict[str, Any]:
        """The figures of a log interval of `seconds`, in which `counts` were trained."""
        self.counts.add(counts)
        self.seconds += seconds
        return self.figures(counts, seconds, self.sampler.take() | self.mean_times())

    def whole(self) -> dict[str, Any]:
        """The figures of the whole run in this process."""
        self.mean_times()
        return self.figures(self.counts, self.seconds, self.sampler.total.to_dict() | self.times)

    def mean_times(self) -> dict[str, float]:
        """The means of the steps that were timed since the last call. Adds them to those of the run."""
        taken = self.timer.take()
        means = {name: sum(times[name] for times in taken) / len(taken) for name in (taken[0] if taken else ())}
        self.timed += len(taken)
        for name, mean in means.items():
            before = self.times.get(name, 0.0)
            self.times[name] = before + (mean - before) * len(taken) / self.timed
        return means

    def figures(self, counts: Counts, seconds: float, sampled: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"data_wait_share": counts.wait / max(seconds, 1e-9)} | sampled
        if (reached := self.mfu(counts.tokens / max(seconds, 1e-9))) is not None:
            found["mfu"] = reached
        if "power_watts" in found and counts.samples:
            found["joules_per_sample"] = found["power_watts"] * seconds / counts.samples
        return found

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization of this rank's GPU: arithmetic for real tokens / dense peak with fp32 accumulation.

        None for an unknown card or model. Without the part of attention that grows with the length. The backward pass computes
        the gradients of inputs, and those of the weights that are trained.
        """
        plan, dtypes = self.run.plan, self.run.observation.matmul_dtypes
        card = plan.context.card
        if card is None or not dtypes or not plan.model.flops_per_token:
            return None
        precision = PEAKS.get(max(dtypes, key=lambda dtype: dtypes[dtype]), "")
        if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
            precision = "tf32"
        peak = getattr(card.dense_tflops, precision, None)
        if not peak:
            return None
        parameters = [(p.numel(), p.requires_grad) for p in self.run.inner_model.parameters()]
        trained = sum(number for number, requires_grad in parameters if requires_grad) / max(1, sum(n for n, _ in parameters))
        return float(tokens_per_second * plan.model.flops_per_token * (2 + trained) / (peak * 1e12))

    def verdict(self) -> Verdict | None:
        """The verdict on the run so far; None if it trained for less than ENOUGH_SECONDS."""
        return verdict_of(self.judged(self.whole()), self.run) if self.seconds >= ENOUGH_SECONDS else None

    def judged(self, figures: dict[str, Any]) -> dict[str, Any]:
        """`figures` with the facts that only a verdict needs."""
        pressure = self.memory_pressure
        share = pressure.short / max(1, pressure.log_points)
        return figures | {"cuda": self.run.device.type == "cuda", "spilled_share": share, "spill_signs": sorted(pressure.seen)}

    def new_verdict(self, figures: dict[str, Any], seconds: float) -> Verdict | None:
        """The verdict on a log interval, if it has differed from the last one told for ENOUGH_SECONDS; else None."""
        found = verdict_of(self.judged(figures), self.run)
        before, held = self.changed
        held = held + seconds if found.limit == before else seconds
        self.changed = (found.limit, held)
        if found.limit == self.spoken or held < ENOUGH_SECONDS:
            return None
        self.spoken = found.limit
        return found


class MemoryPressure:
    """Looks for memory pressure at log points; two signs in a row count as running out of memory.

    Signs: the allocator had to free its cache and retry, which is slow; on Windows and WSL the driver moved memory to the host,
    which is slower still. There the driver refuses nothing: torch then holds more than the card has (microsoft/WSL#11050: 30 GiB
    on a card of 16 GiB; MakazhanAlpamys/Soup#649). What other programs hold there is not known: neither CUDA nor NVML says how
    much of it the driver may move away.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.retries = 0 if device.type != "cuda" else torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        self.signs = 0
        self.seen: set[str] = set()  # the signs so far, in words
        self.log_points = self.short = 0  # log points so far, and those with a sign
        self.may_spill = platform.system() == "Windows" or "microsoft" in platform.release().lower()

    def message(self) -> str | None:
        """What to tell the user after two signs in a row, else None."""
        if self.device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.judge(stats.get("num_alloc_retries", 0), stats.get("reserved_bytes.all.current", 0), total)

    def judge(self, retries: int, reserved: int, total: int) -> str | None:
        """`message` for the allocator's retries so far, its reserved bytes and the device's bytes."""
        spills = self.may_spill and reserved > total
        sign = "the driver moved memory to the host" if spills else "the allocator had to free its cache"
        short = spills or retries > self.retries
        if short:
            self.seen.add(sign)
        self.log_points, self.short = self.log_points + 1, self.short + short
        self.signs = self.signs + 1 if short else 0
        self.retries = retries
        if self.signs < 2:
            return None
        self.signs = 0
        return f"{sign} at two log points in a row"
