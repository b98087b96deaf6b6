from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import Cases, Chosen, Mutation, Part

from hwopt.data.batches.collate import StepDataset
from hwopt.data.batches.step_batch import Step, StepBatch
from hwopt_plugins.group_lengths import grouped, least_noise


def long_tailed(samples: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4, 0.9, samples), 1, 512).astype(int)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(1, 64), st.integers(0, 5), st.floats(0, 1))
def test_every_sample_is_used_once(lengths, rows, epoch, noise):
    assert sorted(grouped(lengths, 0, epoch, rows, noise=noise)) == list(range(len(lengths)))


def test_order_is_fixed_by_seed_and_epoch():
    lengths = long_tailed(500)
    assert (grouped(lengths, 3, 1, 16) == grouped(lengths, 3, 1, 16)).all()
    assert (grouped(lengths, 3, 1, 16) != grouped(lengths, 3, 2, 16)).any()
    assert (grouped(lengths, 3, 1, 16) != grouped(lengths, 4, 1, 16)).any()
    first, second = ({frozenset(grouped(lengths, 3, e, 16)[at : at + 16]) for at in range(0, 496, 16)} for e in (0, 1))
    assert len(first & second) < 3, "noise makes other groups in each epoch"


@given(st.lists(st.integers(1, 60), min_size=9, max_size=60), st.integers(0, 5), st.integers(0, 100))
def test_every_group_fits_its_noise(lengths, epoch, percent):
    order = grouped(lengths, 0, epoch, 8, noise=percent / 100)
    for at in range(0, len(order), 8):
        assert least_noise(np.array(lengths), order[at : at + 8], 0) <= percent


def test_neighbouring_steps_do_not_correlate():
    """Sorted mega-batches would correlate neighbouring steps with about 1."""
    lengths = long_tailed(64 * 400)
    found = []
    for seed in range(5):
        means = lengths[grouped(lengths, seed, 0, 64)].reshape(400, 64).mean(1)
        found.append(np.corrcoef(means[:-1], means[1:])[0, 1])
    assert max(abs(value) for value in found) < 4 / np.sqrt(400)  # four standard deviations of uncorrelated steps


def test_padding_is_reduced():
    lengths = long_tailed(64 * 100)

    def computed(order):
        return sum(max(lengths[order[at : at + 64]]) * 64 for at in range(0, len(order), 64))

    random = np.random.default_rng(0).permutation(len(lengths))
    assert sum(lengths) / computed(grouped(lengths, 0, 0, 64)) > 0.85
    assert sum(lengths) / computed(random) < 0.35


def no_sorting(patch: pytest.MonkeyPatch) -> None:
    """numpy returns the indexes of a sort in the order in which they are."""
    patch.setattr(np, "argsort", lambda values, **_: np.arange(len(values)))


def samples_of_other_steps(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """The chosen rows of a step have other samples than those of its group."""
    real = StepDataset.__getitem__

    def item(self: StepDataset, step: Step) -> StepBatch:
        samples = ((sample + 17) % len(self) if chosen(number) else sample for number, sample in enumerate(step.samples))
        return real(self, replace(step, samples=tuple(samples)))

    patch.setattr(StepDataset, "__getitem__", item)


CASES = Cases(
    mutations=(Mutation("lengths are not sorted", no_sorting, "standard deviation of lengths"),),
    parts=(Part("samples of other groups", samples_of_other_steps),),
)
