"""MemoryPlan: what the memory planner found for a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """Seconds, from the fast end to the slow end."""

    step: tuple[float, float]
    epoch: tuple[float, float] | None
    total: tuple[float, float] | None
    """None where the data was not read."""
    basis: str = "predicted, roofline"


@dataclass(frozen=True)
class Change:
    """Lines of the profile or job that save memory."""

    lines: tuple[str, ...]
    """`key = value`, or a table that is new."""
    saves_gib: float
    fits: bool
    slower: float
    """Time of a step against now, about."""
    cost: str
    alters: bool
    """Whether it also changes what is trained."""
    assignments: tuple[str, ...]
    """The same as `--set` takes it."""


@dataclass(frozen=True)
class MemoryPlan:
    """The answer. Memory in GiB; `parts` at the highest point of a training step, and the reserve."""

    tier: str
    error: str
    rows: int
    width: int
    width_source: str
    parts: dict[str, float]
    peak_gib: float
    """Of the allocator, in a training step: the sum of the parts but the reserve."""
    eval_peak_gib: float | None
    reserve_gib: float
    free_gib: float
    largest_train: int | None
    """Rows of a micro-batch of this width; None where the tier cannot tell. So are the others."""
    largest_eval: int | None
    largest_max_length: int | None
    time: Prediction | None = None
    changes: tuple[Change, ...] = ()
    note: str = ""
    host_gib: float = 0.0
    """What is offloaded to the host's memory, of all ranks on this machine."""
    host_free_gib: float | None = None
    """What the host has for it; None for a card that is not in this machine."""

    @property
    def host_fits(self) -> bool:
        return self.host_free_gib is None or self.host_gib <= self.host_free_gib

    @property
    def margin_gib(self) -> float:
        return self.free_gib - self.reserve_gib - max(self.peak_gib, self.eval_peak_gib or 0.0)

    @property
    def fits(self) -> bool:
        return self.margin_gib >= 0 and self.host_fits

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "margin_gib": self.margin_gib, "host_fits": self.host_fits}
