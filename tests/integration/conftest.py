"""What the processes of the integration tests are forked from."""

from __future__ import annotations

import pytest
import torch

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train once in this process: its forks find everything imported."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("warm")
    train_tiny(plan_for(tiny_profile(), tiny_job(folder / "data", max_steps=1)), folder)
