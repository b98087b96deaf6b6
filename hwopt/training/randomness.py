"""Derive every random number of a run from the place where it is used. No generator state is saved.

The order of samples depends on (seed, epoch). The generator of dropout is seeded for each micro-batch from (seed, optimizer step,
index of its first sample), not from the rank. For an optimizer that draws numbers (stochastic rounding), it is seeded before the
update from (seed, optimizer step): all ranks make the same update. So a run that is killed and resumed draws the same numbers.
The loop calls `generator.manual_seed`, which takes about 1.4 us; `torch.manual_seed` takes 94 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


MASK = 2**64 - 1

WEIGHTS, ORDER, DROPOUT, SPLIT, UPDATE = range(1, 6)
"""The first number of every `place` in `mix`: the purpose, so that no two purposes share random numbers."""


def mix(seed: int, *place: int) -> int:
    """A 63-bit number that depends on all bits of `seed` and of every part of `place` (splitmix64, Steele et al. 2014)."""
    state = 0
    for part in (seed, *place):
        state = (state ^ (part & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1


def shuffled(lengths: Sequence[int] | np.ndarray, seed: int, epoch: int, rows: int = 1) -> np.ndarray:
    """The default order of an epoch: a permutation of the samples, (samples,) int64."""
    return np.random.default_rng(mix(seed, ORDER, epoch)).permutation(len(lengths))


def reseeder(device: torch.device, seed: int, purpose: int = DROPOUT) -> Callable[..., None]:
    """A function (*place) -> None that seeds torch's generators. For DROPOUT: (optimizer step, index of the first sample)."""
    import torch

    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[device.index or 0])
    setters = [generator.manual_seed for generator in generators]
    base = mix(seed, purpose)

    def reseed(*place: int) -> None:
        number = mix(base, *place)
        for set_seed in setters:
            set_seed(number)

    return reseed
