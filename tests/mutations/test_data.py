"""Evidence of the plugins that change data and schedule turns inactive if the library does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutations import Mutation, check
from mutations.data import DATA


@pytest.mark.parametrize("mutation", DATA, ids=str)
def test_evidence_of_an_optimization_without_effect_is_inactive(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mutation, tmp_path, monkeypatch)
