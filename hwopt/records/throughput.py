"""The throughput of a run from its log intervals ("windows"), and the ratio of two runs with its noise.

The noise is the 95 % interval of the ratio, from the spread of the windows: linearisation of a ratio of sums (Cochran, Sampling
Techniques, 1977, section 6.4), widened by (1 + r) / (1 - r) for windows that correlate with their neighbour by r > 0 (Bartlett
1946). If both runs have the same samples in each window, the windows are compared one by one: what long and short samples change
then cancels. The interval holds for these two processes; a repeated run may differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

LEAST_WINDOWS = 3  # with fewer windows the noise is unknown
SAME = 1e-6  # largest relative difference of two counts of samples or tokens that were equal before rounding
LARGEST_CORRELATION = 0.9

Unit = Literal["steps", "samples", "tokens"]


@dataclass(frozen=True)
class Window:
    """One log interval. `tokens` are real ones, without padding."""

    step: int  # the last step of the interval
    steps: int
    seconds: float
    samples: float
    tokens: float


@dataclass(frozen=True)
class RateRatio:
    """A rate over another one, and its 95 % interval; None if the noise is unknown."""

    value: float
    low: float | None
    high: float | None
    windows: int  # the number of windows; of the run with fewer ones if they are not paired
    paired: bool

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def windows_of(rows: Sequence[Mapping[str, float | None]], starts: Sequence[int]) -> list[Window]:
    """The windows of the log points `rows` of a run whose processes began after the steps `starts`.

    If others remain, without the first one of each process, whose first step compiles and allocates.
    """
    found: list[Window] = []
    first: list[Window] = []
    before = starts[0] if starts else 0
    for row in rows:
        step, rate = int(row["step"] or 0), row.get("steps_per_second") or 0.0
        steps = step - before
        if steps > 0 and rate > 0:
            seconds = steps / rate
            samples, tokens = ((row.get(f"{unit}_per_second") or 0.0) * seconds for unit in ("samples", "tokens"))
            begins = (not found and not first) or any(before <= start < step for start in starts)
            (first if begins else found).append(Window(step, steps, seconds, samples, tokens))
        before = max(step, before)
    return found or first


def rate(windows: Sequence[Window], unit: Unit) -> float | None:
    """`unit` per second over all `windows`; None without windows."""
    seconds = sum(window.seconds for window in windows)
    return sum(getattr(window, unit) for window in windows) / seconds if seconds else None


def rate_ratio(ours: Sequence[Window], theirs: Sequence[Window], unit: Unit) -> RateRatio | None:
    """The rate of `ours` over that of `theirs`; None if one of them has none."""
    pairs = same_windows(ours, theirs)
    if paired := len(pairs) >= LEAST_WINDOWS:
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    over, under = rate(ours, unit), rate(theirs, unit)
    if not over or not under:
        return None
    count = min(len(ours), len(theirs))
    if count < LEAST_WINDOWS:
        return RateRatio(over / under, None, None, count, paired=False)
    mine, other = influences(ours, unit), influences(theirs, unit)
    if paired:
        variance, freedom = variance_of([a - b for a, b in zip(mine, other, strict=True)]), float(count - 1)
    else:  # Welch-Satterthwaite
        parts = [(variance_of(values), len(values) - 1) for values in (mine, other)]
        variance = sum(part for part, _ in parts)
        freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance else float(count - 1)
    from scipy.special import stdtrit  # the quantiles of Student's t distribution

    spread = math.exp(stdtrit(freedom, 0.975) * math.sqrt(variance))
    value = over / under
    return RateRatio(value, value / spread, value * spread, count, paired)


def same_windows(ours: Sequence[Window], theirs: Sequence[Window]) -> list[tuple[Window, Window]]:
    """The windows of both at the same steps; [] if any two of them have other samples."""
    there = {(window.step, window.steps): window for window in theirs}
    pairs = [(window, there[window.step, window.steps]) for window in ours if (window.step, window.steps) in there]
    same = all(
        math.isclose(a.samples, b.samples, rel_tol=SAME) and math.isclose(a.tokens, b.tokens, rel_tol=SAME) for a, b in pairs
    )
    return pairs if same else []


def influences(windows: Sequence[Window], unit: Unit) -> list[float]:
    """What each window adds to the logarithm of the rate, to first order. Their sum is 0."""
    amount, seconds = (sum(getattr(window, name) for window in windows) for name in (unit, "seconds"))
    return [getattr(window, unit) / amount - window.seconds / seconds for window in windows]


def variance_of(influences: Sequence[float]) -> float:
    """The variance of the sum of `influences`, which correlate with their neighbours."""
    count, squares = len(influences), sum(value * value for value in influences)
    if not squares:
        return 0.0
    neighbours = sum(a * b for a, b in pairwise(influences)) / squares
    correlation = min(max(neighbours, 0.0), LARGEST_CORRELATION)
    return count / (count - 1) * squares * (1 + correlation) / (1 - correlation)
