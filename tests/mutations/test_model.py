"""Evidence of the plugins that change the model turns inactive if the library does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutations import Mutation, check
from mutations.model import MODEL

# bitsandbytes prefers rows of a multiple of 64 elements; the tiny decoder has 32
pytestmark = pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned for fast kernel:UserWarning")


@pytest.mark.parametrize("mutation", MODEL, ids=str)
def test_evidence_of_an_optimization_without_effect_is_inactive(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mutation, tmp_path, monkeypatch)
