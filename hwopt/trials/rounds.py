"""The rounds of a bench as pure functions: in which order variants are measured, when one is clear, and whether losses agree.

Speeds drift with temperature, clocks and other programs. So each round measures every variant once, the order rotates, and only
ratios within a round are compared. A second copy of the baseline shows how far two equal variants differ: the noise floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

MeasuredEffect = Literal["bits", "rounding", "method"]

LEAST_ROUNDS = 3
TOLERANCE = 0.02
"""Largest relative difference of a loss with a plugin that preserves all but rounding; that of the plugins' contract test."""


@dataclass(frozen=True)
class Ratios:
    """The speed of a variant over that of its reference, one value per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def clear(self, floor: Ratios | None) -> bool:
        """Whether every round lies on the same side of 1, further away than any round of `floor`, two copies of the baseline.

        If a variant equals its reference, its distances and those of the copies are alike: after three rounds this happens in
        about one of 80 benches (1/4 for the same side, 1/20 for the order of the six distances), after five in one of 4,000.
        """
        if len(self.values) < LEAST_ROUNDS or floor is None or len(floor.values) < LEAST_ROUNDS:
            return False
        logs = [math.log(value) for value in self.values]
        one_side = min(logs) > 0 or max(logs) < 0
        return one_side and min(map(abs, logs)) > floor.distance

    @property
    def distance(self) -> float:
        """The largest distance from 1, as a logarithm."""
        return max(abs(math.log(value)) for value in self.values)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """`names` in the order of round `number`, counted from 0: the first one moves to the end in each round."""
    start = number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratios | None:
    """The ratio of two speeds by round, of the rounds that both have; None without one."""
    common = sorted(ours.keys() & theirs.keys())
    return Ratios(tuple(ours[number] / theirs[number] for number in common)) if common else None


def steps_for(rows: int, rows_per_step: int, least: int) -> int:
    """The optimizer steps that train at least `rows` rows, and at least `least` steps."""
    return max(least, -(-rows // rows_per_step))


@dataclass(frozen=True)
class Parity:
    """Whether the losses of two variants agree as far as `effect` promises; `agrees` is None if it promises nothing."""

    agrees: bool | None
    text: str


def parity(effect: MeasuredEffect, ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Parity | None:
    """Compares the losses of two variants, step by step; None without a common step."""
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return None
    pairs = [(ours[step], theirs[step]) for step in steps]
    finite = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(finite) < len(pairs):
        same = all((a is None) == (b is None) for a, b in pairs)
        return Parity(None if effect == "method" else same, f"{len(pairs) - len(finite)} of {len(pairs)} losses not finite")
    largest = max(abs(a - b) / max(abs(b), 1e-12) for a, b in finite)
    apart = f"up to {largest:.2g} apart" if largest else "equal"
    match effect:
        case "method":
            mean, before = (sum(each[index] for each in finite) / len(finite) for index in (0, 1))
            return Parity(None, f"another method: mean loss {mean:.4g}, {before:.4g} without")
        case "bits":
            return Parity(largest == 0.0, apart)
        case _:
            return Parity(largest <= TOLERANCE, apart)


def strongest(effects: Sequence[MeasuredEffect]) -> MeasuredEffect:
    """The effect that changes most; "bits" for none."""
    order: Sequence[MeasuredEffect] = ("bits", "rounding", "method")
    return max(effects, key=order.index, default="bits")
