"""Evidence of the plugins that change the process turns inactive if torch does nothing. tests/gpu has those that need CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mutations import Mutation, check, parameters
from mutations.process import COMPILED


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mutation", parameters(COMPILED))
def test_evidence_of_an_optimization_without_effect_is_inactive(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mutation, tmp_path, monkeypatch)
