"""The session fixture that prepares the test process for forks."""

import pytest

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train once in this process, so that its forks have all modules imported."""
    folder = tmp_path_factory.mktemp("warm")
    train_tiny(plan_for(tiny_profile(), tiny_job(folder / "data", max_steps=1)), folder)
