"""Counted launches, waits and matrix products of a step, for every shipped profile, against a bare PyTorch loop with clipping.

The counters are exact, so these limits are no measurements of time.
"""

from __future__ import annotations

from typing import Any

import pytest
from pretend_cuda.profile_runs import CASES, measure

pytestmark = [pytest.mark.device("pretend"), pytest.mark.integration]

MOST_LAUNCHES = 1.02
"""Launches of a step, relative to the bare loop: telemetry, randomness and the check for finite gradients."""
ZERO = [name for name in CASES if name.endswith("_zero")]
"""DeepSpeed's own step waits, and moves gradients and weights in buckets."""


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    return {}


@pytest.mark.parametrize("profile", CASES)
def test_a_step_waits_no_more_than_a_bare_loop(profile: str) -> None:
    found = measure(profile)
    own, bare, trainer = found["own"], found["bare"], found["trainer"]
    assert own["waits"] <= trainer["waits"]
    assert profile in ZERO or own["waits"] <= bare["waits"]
    assert profile in ZERO or own["launches"] <= MOST_LAUNCHES * bare["launches"]
    assert own["products"] <= MOST_LAUNCHES * bare["products"]
    assert [name for name, (status, _) in found["evidence"].items() if status == "inactive"] == []
