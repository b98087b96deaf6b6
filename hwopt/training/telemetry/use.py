"""UseMeter: how well a run uses its device. No part of it waits for the device. docs/utilization.md explains the figures."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from hwopt.hardware.monitor import gpu_reader
from hwopt.hardware.sampler import Sampler
from hwopt.training.memory_pressure import MemoryPressure
from hwopt.training.telemetry.interval import Counts
from hwopt.training.telemetry.step_timer import StepTimer, StepTimes
from hwopt.training.telemetry.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from hwopt.training.run import Run

ENOUGH_SECONDS = 10.0  # training that a verdict needs: in less, the first steps and their allocations count too much
PEAKS = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32"}
"""The profiler's name of a dtype -> its name in the profile's [card.dense_tflops]."""


class UseMeter:
    def __init__(self, run: Run, memory_pressure: MemoryPressure) -> None:
        self.run, self.memory_pressure = run, memory_pressure
        self.sampler = Sampler(gpu_reader(run.device), self.worker_ids)
        self.timer = StepTimer(run.device)
        self.timed, self.times = 0, dict[str, float]()  # number of timed steps, and their means
        self.counts, self.seconds = Counts(), 0.0
        """Of the whole run in this process, without profiled steps, evaluations and saves."""
        self.spoken: str = "compute-bound"
        """The limit that the user was told last; a run that computes all the time needs no message."""
        self.changed: tuple[str, float] = ("", 0.0)  # a limit that differs from `spoken`, and for how many seconds

    def running(self) -> AbstractContextManager[None]:
        """Sample until the end of the block."""
        return self.sampler.running()

    def worker_ids(self) -> list[int]:
        """The process ids of the workers that load the training data."""
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
        means = StepTimes.mean(taken)
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
        signs = {"spilled_share": pressure.share, "spill_signs": sorted(pressure.seen)}
        return figures | {"cuda": self.run.device.type == "cuda"} | signs

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
