"""Evidence of the plugins that change the update turns inactive if the library does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutations import Mutation, check, parameters
from mutations.update import UPDATE


@pytest.mark.parametrize("mutation", parameters(UPDATE))
def test_evidence_of_an_optimization_without_effect_is_inactive(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mutation, tmp_path, monkeypatch)
