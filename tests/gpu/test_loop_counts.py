"""Counted launches, waits and matrix products of a step, for every shipped profile, against a bare PyTorch loop with clipping.

The counters are exact. Without length-aware micro-batches, whose number depends on the card, both loops do the same work.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from pretend_cuda.profile_cases import CASES, MAY_BE_INACTIVE
from programs import program

pytestmark = [pytest.mark.device("pretend"), pytest.mark.integration]

CUDA: Any = program("cuda")
ROWS = os.environ.get("PRETEND_ROWS")
"""A file that receives what the tests measure, for `benchmarks/cuda.py --json`."""
MOST_LAUNCHES = 1.02
"""Launches of a step, relative to the bare loop. hwopt's are 0.97 to 0.99 of them with autocast, and fewer with O2."""


def measure(profile: str) -> dict[str, Any]:
    """A row of docs/cuda.md."""
    row: dict[str, Any] = CUDA.measured_row(profile, Path(ROWS) if ROWS else None)
    return row


def inactive(found: dict[str, Any]) -> set[str]:
    """The plugins without evidence."""
    return {name for name, (status, _) in found["evidence"].items() if status == "inactive"}


@pytest.mark.parametrize("profile", [name for name in CASES if not name.endswith("_zero")])
def test_step_waits_and_launches_no_more_than_a_bare_loop(profile: str) -> None:
    found = measure(profile)
    own, bare = found.get("uncut", found["own"]), found["bare"]
    assert own["waits"] <= bare["waits"]
    assert found["own"]["waits"] <= bare["waits"]
    assert own["launches"] <= MOST_LAUNCHES * bare["launches"]
    assert own["products"] <= bare["products"]
    assert own["waits"] < found["trainer"]["waits"]
    assert inactive(found) <= MAY_BE_INACTIVE


@pytest.mark.parametrize("profile", [name for name in CASES if name.endswith("_zero")])
def test_step_with_zero_computes_no_more_than_a_bare_loop(profile: str) -> None:
    """DeepSpeed waits for the norm and the overflow, and moves gradients and weights in buckets: only its products compare."""
    found = measure(profile)
    assert found["uncut"]["products"] <= found["bare"]["products"]
    assert inactive(found) <= MAY_BE_INACTIVE
