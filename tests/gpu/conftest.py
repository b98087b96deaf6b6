"""Tests that need a CUDA device. Each one names the kind of device on which it is valid:

- `pytest.mark.device("any")`: a real or a pretend card (tests/pretend_cuda): control flow, memory, launches, waits;
- `pytest.mark.device("real")`: a real card: numerics of kernels, speed;
- `pytest.mark.device("pretend")`: a pretend card: counters of its driver.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from pretend_cuda.counters import computing_all, on_pretend_card
from pretend_cuda.zero_weights import large_weights_uninitialized

from hwopt.hardware.device import GIB

INVALID = {
    ("real", True): "needs a real card: numerics of kernels",
    ("pretend", False): "needs a pretend card: counters of its driver",
}
"""(kind of device that a test needs, whether this one is a pretend card) -> why the test is skipped."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are not valid on this machine's device. Raises UsageError for a test that does not name its device."""
    for item in items:
        if "tests/gpu" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("device")
        if marker is None or marker.args not in (("any",), ("real",), ("pretend",)):
            raise pytest.UsageError(f'{item.nodeid}: mark the test with pytest.mark.device("any"), ("real") or ("pretend")')
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False"))
        elif reason := INVALID.get((marker.args[0], on_pretend_card())):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fast_weights() -> Iterator[None]:
    """On a pretend card, leave large weights uninitialized: no kernel reads them."""
    with large_weights_uninitialized() if on_pretend_card() else nullcontext():
        yield


@pytest.fixture
def all_values() -> Iterator[None]:
    """For a test that compares losses, as the check before a split step does: a pretend card computes large tensors too."""
    with computing_all() if on_pretend_card() else nullcontext():
        yield


SMALLER = 0.9
"""CUDA reports less memory than the name of a card says: 14.7 GiB of a T4's 16."""


@pytest.fixture
def memory_limit() -> Callable[[float], str | None]:
    """The argument `memory_limit` of `api.resolve` for so many GiB; None if the card has no more."""
    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return lambda gib: f"{gib}GiB" if total > gib * GIB else None


@pytest.fixture
def limited_to() -> Callable[[float], AbstractContextManager[None]]:
    """Limits the allocator of the process to so many GiB, as on a smaller card."""
    return limit


@contextmanager
def limit(gib: float) -> Iterator[None]:
    """The allocator's limit of the process; the rest of the card is out of reach. Skips the test on a smaller card."""
    total = torch.cuda.get_device_properties(0).total_memory
    if total < SMALLER * gib * GIB:
        pytest.skip(f"needs a card of {gib:g} GiB, found {total / GIB:.1f}")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
