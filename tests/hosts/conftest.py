"""Each test of a host is a script: its Accelerator is gone before and after it."""

from collections.abc import Iterator

import pytest
from hosts.scripts import reset


@pytest.fixture(autouse=True)
def own_accelerator() -> Iterator[None]:
    reset()
    yield
    reset()
