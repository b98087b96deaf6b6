"""Surrogate: a Gaussian process that tells, after a few trials, how long a step takes with every setting, and how sure that is.

It models the logarithm of the time in which the loop computes. The forecast of the planner is its mean, if there is one. What a
trial measures moves the time of all settings that are alike: the kernel is a sum over the axes, because a change of one axis has
about the same relative effect beside any choice of the others, and of a small part for what the sum does not explain.

Source: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, chapters 2 and 4; additive kernels: Duvenaud et al.
2011 (arXiv:1112.4394); expected improvement: Jones, Schonlau and Welch 1998, Efficient Global Optimization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwopt.trials.candidates import Axis

Numbers = NDArray[np.float64]

SIZE, SLOPE, INPUT, TOGETHER = 0.35, 0.25, 0.04, 0.03
"""Standard deviations of the logarithm of the time: a smooth effect of a size; its slope over the scale of the size; the effect
of an input size, which takes cores from the model; and that of choices together. Chosen on simulated surfaces (tests/trials).
"""
CHOICES = (0.06, 0.15, 0.3)
"""Of the effect of a choice without a size: the one under which the trials are most likely."""
LENGTH = 2.0
"""Distance on the scale of a size (a factor of four) over which its smooth effect changes."""
CONSTANT = 1.0
"""Standard deviation of the logarithm of the forecast's error that all settings have in common."""
NOISE = 0.01
"""Standard deviation of a trial: processes with one setting differ by about one percent."""


@dataclass(frozen=True)
class Posterior:
    """The posterior distribution of the time of each of a number of settings: normal, in the logarithm."""

    mean: Numbers
    """(settings,) the logarithm of the seconds."""
    deviation: Numbers
    """(settings,) its standard deviation."""

    def expected_improvement(self, incumbent: Numbers) -> Numbers:
        """(settings,) how much lower than `incumbent` the logarithm of the time is expected to be, 0 where it is higher."""
        distance = incumbent - self.mean
        ratio = distance / self.deviation
        density = np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        improvement: Numbers = distance * normal_cdf(ratio) + self.deviation * density
        return improvement


def normal_cdf(ratio: Numbers) -> Numbers:
    """The cumulative distribution function of the standard normal distribution."""
    found: Numbers = (1 + np.vectorize(math.erf, otypes=[np.float64])(ratio / math.sqrt(2))) / 2
    return found


class Surrogate:
    """A Gaussian process over the settings of `axes`."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        self.scales = [axis.scale for axis in axes]

    def posterior(self, settings: NDArray[np.int64], prior: Numbers, measured: NDArray[np.int64], seconds: Numbers) -> Posterior:
        """The posterior of `settings` (settings, axes) after trials with `seconds` (trials,).

        `prior`: (settings,) the logarithm of the forecast of each, up to a constant. `measured`: (trials,) index of each trial's
        setting in `settings`.
        """
        tried = settings[measured]
        error = np.log(seconds) - prior[measured]
        deviation = max(CHOICES, key=lambda deviation: self.log_likelihood(tried, error - error[0], deviation))
        cholesky = self.cholesky(tried, deviation)
        whitened = np.linalg.solve(cholesky, self.kernel(tried, settings, deviation))  # (trials, settings)
        mean = prior + error[0] + whitened.T @ np.linalg.solve(cholesky, error - error[0])
        variance = self.variances(settings, deviation) - (whitened**2).sum(axis=0)
        return Posterior(mean, np.sqrt(np.maximum(variance, 1e-12)))

    def log_likelihood(self, tried: NDArray[np.int64], error: Numbers, choice: float) -> float:
        """The logarithm of the likelihood of the trials, up to a constant, if choices have effects of the deviation `choice`."""
        cholesky = self.cholesky(tried, choice)
        return -float((np.linalg.solve(cholesky, error) ** 2).sum() / 2 + np.log(np.diag(cholesky)).sum())

    def cholesky(self, tried: NDArray[np.int64], choice: float) -> Numbers:
        """The Cholesky factor (trials, trials) of the covariances of the trials."""
        covariances = self.kernel(tried, tried, choice) + NOISE**2 * np.eye(len(tried))
        return np.linalg.cholesky(covariances).astype(np.float64)

    def kernel(self, ours: NDArray[np.int64], theirs: NDArray[np.int64], choice: float) -> Numbers:
        """The covariances (ours, theirs) of the logarithm of the time; `choice`: the deviation of the effect of a choice."""
        total = np.full((len(ours), len(theirs)), CONSTANT**2)
        alike = np.ones_like(total)
        for number, axis in enumerate(self.axes):
            one, other = ours[:, number, None], theirs[None, :, number]
            equal = (one == other).astype(np.float64)
            if axis.input:
                total += INPUT**2 * equal
            elif axis.ordered:
                scale = self.scales[number]
                near = np.exp(-(((scale[one] - scale[other]) / LENGTH) ** 2) / 2)
                total += SIZE**2 * near + SLOPE**2 * scale[one] * scale[other]
                alike *= near
            else:
                total += choice**2 * equal
                alike *= equal
        covariances: Numbers = total + TOGETHER**2 * alike
        return covariances

    def variances(self, settings: NDArray[np.int64], choice: float) -> Numbers:
        """The diagonal of `kernel(settings, settings, choice)`."""
        total = np.full(len(settings), CONSTANT**2 + TOGETHER**2)
        for number, axis in enumerate(self.axes):
            if axis.input:
                total += INPUT**2
            elif axis.ordered:
                total += SIZE**2 + SLOPE**2 * self.scales[number][settings[:, number]] ** 2
            else:
                total += choice**2
        return total
