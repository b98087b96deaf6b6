"""StepTimer: times the parts of a few sampled steps, with CUDA events that are read late, or with the host's clock on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

PERIOD = 0.5  # seconds between two sampled steps, at least: the events of a step cost the host about 20 us
UNREAD = 64  # sampled steps that are kept at most; a run may log rarely
SLOWER = 1.15  # a device that needs this much longer than the host for the same part of a step is not waiting for it


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

    def take(self) -> list[dict[str, float]]:
        """The sampled steps whose events the device has passed. Does not wait for the device."""
        found = []
        while self.recorded:
            device, host, forward_done = self.recorded[0]
            if self.cuda and not device["update"].query():
                break
            del self.recorded[0]
            found.append(self.times(device, host, forward_done))
        return found

    def times(self, device: dict[str, Any], host: dict[str, float], forward_done: bool) -> dict[str, float]:
        """The parts of a sampled step. Those of a micro-batch are its last one's; the three shares of the step add up to 1."""

        def elapsed(begin: str, end: str) -> float:
            if self.cuda:
                return float(device[begin].elapsed_time(device[end]))
            return 1000 * (host[end] - host[begin])

        issued = 1000 * (host["backward"] - host["micro_batch"])
        ran, whole = elapsed("micro_batch", "backward"), max(elapsed("step", "update"), 1e-9)
        update = elapsed("backward", "update") / whole
        forward = elapsed("micro_batch", "forward") / max(ran, 1e-9)
        return {
            "host_ms_per_micro_batch": issued,  # to issue forward and backward pass
            "device_ms_per_micro_batch": ran,  # waits for the host included
            # the device waited if it had done the forward pass when the host had issued the backward pass
            "device_waits_share": float(self.cuda and forward_done and ran <= SLOWER * issued),
            "forward_share": (1 - update) * forward,
            "backward_share": (1 - update) * (1 - forward),
            "update_share": update,
        }
