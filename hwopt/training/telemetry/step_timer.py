"""StepTimer: times the parts of a few sampled steps, with CUDA events that are read late, or with the host's clock on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

import torch

PERIOD = 0.5  # seconds between two sampled steps, at least: the events of a step cost the host about 20 us
UNREAD = 64  # sampled steps that are kept at most; a run may log rarely
SLOWER = 1.15
"""A device that needs this much longer than the host for the same part of a step is not waiting for the host."""


@dataclass(frozen=True)
class StepTimes:
    """The parts of a sampled step. Those of a micro-batch are its last one's."""

    host_ms_per_micro_batch: float  # time in which the host issued forward and backward pass
    device_ms_per_micro_batch: float  # time in which the device ran them, waits for the host included
    device_waits: float
    """1.0 if the device waited for the host: it had done the forward pass when the host had issued the backward pass."""
    forward_share: float
    """Parts of the device's time for the step. The three add up to 1."""
    backward_share: float
    update_share: float

    @classmethod
    def mean(cls, times: list[StepTimes]) -> dict[str, float]:
        """Name -> mean of `times`; empty for none. `device_waits` becomes `device_waits_share`, a part of the sampled steps."""
        if not times:
            return {}
        found = {each.name: sum(getattr(one, each.name) for one in times) / len(times) for each in fields(cls)}
        found["device_waits_share"] = found.pop("device_waits")
        return found


class StepTimer:
    """`mark` is called at fixed places of every step; it does nothing unless the step is sampled."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.next_sample = 0.0
        self.sampling = False
        self.device: dict[str, Any] = {}
        self.host: dict[str, float] = {}
        self.forward_done = False
        self.recorded: list[tuple[dict[str, Any], dict[str, float], bool]] = []  # sampled steps that are not read yet

    def begin_step(self) -> None:
        """A step begins. It is sampled if PERIOD seconds have passed since the last sampled one."""
        now = time.perf_counter()
        self.sampling = now >= self.next_sample and len(self.recorded) < UNREAD
        if self.sampling:
            self.next_sample = now + PERIOD
            self.device, self.host = {}, {}
            self.mark("step")

    def mark(self, part: str) -> None:
        """The host has reached `part` of the step: step, micro_batch, forward, backward, update. Later marks replace earlier."""
        if not self.sampling:
            return
        self.host[part] = time.perf_counter()
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.device[part] = event
            if part == "backward":
                self.forward_done = bool(self.device["forward"].query())

    def end_step(self) -> None:
        if self.sampling:
            self.mark("update")
            if self.host.keys() >= {"step", "micro_batch", "forward", "backward", "update"}:
                self.recorded.append((self.device, self.host, self.forward_done))
            self.sampling = False

    def take(self) -> list[StepTimes]:
        """The sampled steps whose events the device has passed. Does not wait for the device."""
        found: list[StepTimes] = []
        while self.recorded:
            device, host, forward_done = self.recorded[0]
            if self.cuda and not device["update"].query():
                break
            del self.recorded[0]
            found.append(self.times(device, host, forward_done))
        return found

    def times(self, device: dict[str, Any], host: dict[str, float], forward_done: bool) -> StepTimes:
        def elapsed(begin: str, end: str) -> float:
            if self.cuda:
                return float(device[begin].elapsed_time(device[end]))
            return 1000 * (host[end] - host[begin])

        issued = 1000 * (host["backward"] - host["micro_batch"])
        ran, whole = elapsed("micro_batch", "backward"), max(elapsed("step", "update"), 1e-9)
        update = elapsed("backward", "update") / whole
        forward = elapsed("micro_batch", "forward") / max(ran, 1e-9)
        waits = self.cuda and forward_done and ran <= SLOWER * issued
        return StepTimes(issued, ran, float(waits), (1 - update) * forward, (1 - update) * (1 - forward), update)
