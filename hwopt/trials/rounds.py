"""The rounds of a bench as pure functions: when a variant is clear, and whether losses agree.

Speeds drift with temperature and clocks: only ratios within a round count. Two copies of the baseline show the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from hwopt.plugin.contract import Effect

LEAST_ROUNDS = 3
TOLERANCE = 0.02
"""Largest relative difference of a loss with a plugin that preserves all but rounding; that of the plugins' contract test."""


@dataclass(frozen=True)
class Speedup:
    """The speed of a variant over that of its reference: the median of the rounds, the lowest and the highest one."""

    value: float
    low: float
    high: float
    rounds: int
    clear: bool = False  # whether it differs from 1 by more than the noise


def speedup(ours: Mapping[int, float], theirs: Mapping[int, float], floor: Speedup | None = None) -> Speedup | None:
    """The ratio of two speeds by round, of the rounds that both have; None without one.

    It is clear if every round lies on the same side of 1, further away than any round of `floor`, two copies of the baseline.
    If a variant equals its reference, its distances and those of the copies are alike: after three rounds this happens in
    about one of 80 benches (1/4 for the same side, 1/20 for the order of the six distances), after five in one of 4,000.
    """
    values = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    if not values:
        return None
    low, high, clear = min(values), max(values), False
    if floor is not None and min(len(values), floor.rounds) >= LEAST_ROUNDS and (low > 1 or high < 1):
        ends, noise = ([abs(math.log(end)) for end in pair] for pair in ((low, high), (floor.low, floor.high)))
        clear = min(ends) > max(noise)
    return Speedup(median(values), low, high, len(values), clear)


def parity(effect: Effect, ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> tuple[str, bool | None]:
    """The losses of two variants, compared step by step, in words; and whether they agree as far as `effect` promises.

    None: it promises nothing, or there is no common step.
    """
    pairs = [(ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return "", None
    finite = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(finite) < len(pairs):
        same = all((a is None) == (b is None) for a, b in pairs)
        return f"{len(pairs) - len(finite)} of {len(pairs)} losses not finite", None if effect == "method" else same
    if effect == "method":
        mean, before = (sum(each[index] for each in finite) / len(finite) for index in (0, 1))
        return f"another method: mean loss {mean:.4g}, {before:.4g} without", None
    largest = max(abs(a - b) / max(abs(b), 1e-12) for a, b in finite)
    text = f"up to {largest:.2g} apart" if largest else "equal"
    return text, largest <= (TOLERANCE if effect == "rounding" else 0.0)
