"""The rounds of a bench: when a variant is clear, and whether losses agree."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.trials.rounds import parity, speedup

SPEEDS = st.dictionaries(st.integers(1, 9), st.floats(0.01, 1e6), max_size=9)
FLOOR = (1.01, 0.98, 1.0)
ONES = dict.fromkeys(range(3), 1.0)


@given(SPEEDS, SPEEDS)
def test_speedup_compares_the_same_rounds_only(ours: dict[int, float], theirs: dict[int, float]) -> None:
    found = speedup(ours, theirs)
    common = sorted(ours.keys() & theirs.keys())
    assert (found is None) == (not common)
    if found is not None:
        assert found.rounds == len(common)
        assert found.low <= found.value <= found.high
        assert not found.clear, "there is no noise floor"


@pytest.mark.parametrize(
    ("values", "clear"),
    [
        ((1.1, 1.2, 1.05), True),
        ((0.9, 0.8, 0.95), True),
        ((1.1, 1.2, 0.99), False),  # the rounds disagree
        ((1.1, 1.2, 1.02), False),  # one round is within the noise: 1 / 0.98 is 1.0204
        ((1.1, 1.2, 1.03), True),
        ((1.5, 1.6), False),  # too few rounds
    ],
)
def test_clear_difference_exceeds_the_noise_in_every_round(values: tuple[float, ...], clear: bool) -> None:
    found = speedup(dict(enumerate(values)), ONES, speedup(dict(enumerate(FLOOR)), ONES))
    assert found.clear is clear


def test_equal_variants_are_rarely_clear() -> None:
    draw = random.Random(0)

    def speeds() -> dict[int, float]:
        return {number: math.exp(draw.gauss(0, 0.03)) for number in range(3)}

    wrong = 0
    for _ in range(4000):
        base, copy, ours = speeds(), speeds(), speeds()
        found = speedup(ours, base, speedup(copy, base))
        wrong += found.clear
    assert wrong / 4000 < 0.03  # 1/80 if the ratios were independent; they share the baseline


@pytest.mark.parametrize(
    ("effect", "ours", "expected"),
    [
        ("bits", {1: 2.0, 2: 1.0}, ("equal", True)),
        ("bits", {1: 2.0, 2: 1.0 + 2**-40}, ("up to 9.1e-13 apart", False)),
        ("rounding", {1: 2.02, 2: 1.0}, ("up to 0.01 apart", True)),
        ("rounding", {1: 2.2, 2: 1.0}, ("up to 0.1 apart", False)),
        ("rounding", {1: None, 2: 1.0}, ("1 of 2 losses not finite", False)),
        ("method", {1: 3.0, 2: 1.0}, ("another method: mean loss 2, 1.5 without", None)),
        ("method", {1: None, 2: 1.0}, ("1 of 2 losses not finite", None)),
        ("bits", {3: 1.0}, ("", None)),
    ],
)
def test_parity_is_judged_by_what_the_plugin_preserves(
    effect: str, ours: dict[int, float | None], expected: tuple[str, bool | None]
) -> None:
    assert parity(effect, ours, {1: 2.0, 2: 1.0}) == expected
