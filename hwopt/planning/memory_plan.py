"""MemoryPlan: the memory planner's result for a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

SEARCHED = 1 << 20
"""The largest number of rows or tokens that the planner tries."""
CLOSED_FORM = "closed form"
"""The tier that answers if a step cannot be traced."""


@dataclass(frozen=True)
class Prediction:
    """Seconds, from the fast end to the slow end."""

    step: tuple[float, float]
    epoch: tuple[float, float] | None
    total: tuple[float, float] | None
    """None if the data was not read."""
    basis: str = "estimated from the card's peak speeds"
    rows: int = 1
    """Rows of the step."""


@dataclass(frozen=True)
class Change:
    """Lines to change in the profile or job that save memory."""

    lines: tuple[str, ...]
    """`key = value`, or a new table."""
    saves_gib: float
    fits: bool | None
    """Whether the plan then fits; None if only a lower bound is known."""
    slower: float
    """Approximate time of a step relative to now."""
    cost: str
    alters: bool
    """Whether it also changes the training method."""
    assignments: tuple[str, ...]
    """The same as arguments of `--set`."""


@dataclass(frozen=True)
class Gain:
    """Lines to change in the profile or job that use free memory and are predicted to be faster."""

    lines: tuple[str, ...]
    """`key = value`."""
    now_gib: float
    takes_gib: float
    """The most that the allocator takes from the device with the change."""
    step: tuple[float, float]
    """Seconds of a step with the change, fast and slow end."""
    relative: tuple[float, float]
    """Time of a row relative to now, at the two ends of the forecast."""
    gain: str
    alters: bool
    """Whether it also changes the training."""
    assignments: tuple[str, ...]
    """The same as arguments of `--set`."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory in GiB: `parts` at the peak of a training step, the reserve, and the largest sizes that fit."""

    tier: str
    error: str
    rows: int
    width: int
    width_source: str
    parts: dict[str, float]
    peak_gib: float
    """Peak of the allocator in a training step: the sum of the parts without the reserve."""
    eval_peak_gib: float | None = None
    reserve_gib: float
    free_gib: float
    largest_train: int | None = None
    """Rows of a micro-batch of this width; None if the tier cannot tell. The same holds for the other sizes."""
    largest_eval: int | None = None
    largest_max_length: int | None = None
    time: Prediction | None = None
    changes: tuple[Change, ...] = ()
    gains: tuple[Gain, ...] = ()
    note: str = ""
    reserved_gib: float | None = None
    """Most that torch's caching allocator reserves in training and evaluation: the peak, and free blocks that it cannot use for
    it. None if the tier cannot tell."""
    pool_gib: float = 0.0
    """The part of `reserved_gib` that graphs keep for themselves."""
    host_gib: float = 0.0
    """Host memory for offloading, over all ranks of this machine."""
    host_free_gib: float | None = None
    """Free host memory; None for a card that is not in this machine."""
    unpacked_gib: dict[str, float] = field(default_factory=dict)
    """The part of the weights that a plugin packs elsewhere, and cannot pack in this model, by name."""

    @property
    def host_fits(self) -> bool:
        return self.host_free_gib is None or self.host_gib <= self.host_free_gib

    @property
    def highest_gib(self) -> float:
        """The most that the allocator takes from the device, as far as the tier can tell."""
        return max(self.peak_gib, self.eval_peak_gib or 0.0, self.reserved_gib or 0.0)

    @property
    def margin_gib(self) -> float:
        return self.free_gib - self.reserve_gib - self.highest_gib

    @property
    def lower_bound(self) -> bool:
        """Whether the peak is only a lower bound, because the step could not be traced."""
        return self.tier == CLOSED_FORM

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None if a lower bound fits, which does not tell."""
        if self.margin_gib < 0 or not self.host_fits:
            return False
        return None if self.lower_bound else True

    @property
    def fits_without_pool(self) -> bool:
        """Whether only the pool of the graphs is too much."""
        return replace(self, reserved_gib=(self.reserved_gib or 0.0) - self.pool_gib, pool_gib=0.0).fits is True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits, "margin_gib": self.margin_gib, "host_fits": self.host_fits}
