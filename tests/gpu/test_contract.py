"""Plugins that apply on CUDA only: elsewhere the contract test checks just their decision, recipe and memory."""

from pathlib import Path

import pytest
from plugin_cases import cases

from hwopt.testing import check_contract_of, entry_of, plan_for, tiny_job, tiny_profile

pytestmark = pytest.mark.device("any")


@pytest.mark.parametrize("name", ["tf32", "allocator", "cuda_graphs"])
def test_cuda_plugin_trains_and_is_active(name: str, tmp_path: Path) -> None:
    entry = entry_of(name, plan_for(tiny_profile(**{name: cases(name).options}), tiny_job(tmp_path / "here")))
    if entry.decision == "skip":
        pytest.skip(entry.reason)
    assert check_contract_of(name, tmp_path, cases(name).options).not_checked == ()
