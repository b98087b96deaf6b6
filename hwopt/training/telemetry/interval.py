"""What happened since the last log point: counters on the host, losses and norms on the device, computed only at the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
