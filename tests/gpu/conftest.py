"""Tests that need a CUDA device. Each one names the kind of device on which it is valid:

- `pytest.mark.device("any")`: a real or a pretend card (tests/pretend_cuda): control flow, memory, launches, waits;
- `pytest.mark.device("real")`: a real card: numerics of kernels, speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from pretend_cuda.counters import on_pretend_card

from hwopt.hardware.device import GIB


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are not valid on this machine's device. Raises UsageError for a test that does not name its device."""
    for item in items:
        if "tests/gpu" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("device")
        if marker is None or marker.args not in (("any",), ("real",)):
            raise pytest.UsageError(f'{item.nodeid}: mark the test with pytest.mark.device("any") or pytest.mark.device("real")')
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False"))
        elif marker.args == ("real",) and on_pretend_card():
            item.add_marker(pytest.mark.skip(reason="needs a real card: numerics of kernels"))


@pytest.fixture
def limited_to() -> Callable[[float], AbstractContextManager[None]]:
    """Limits the allocator of the process to so many GiB, as on a smaller card."""
    return limit


@contextmanager
def limit(gib: float) -> Iterator[None]:
    """The allocator's limit of the process; the rest of the card is out of reach."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
