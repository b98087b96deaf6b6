from __future__ import annotations

from collections.abc import Iterator

import pytest

from hwopt.model.remote_code import is_trusted, trust_only, trusted_models


@pytest.fixture(autouse=True)
def no_trust_afterwards() -> Iterator[None]:
    yield
    trust_only(())


def test_trust_replaces_earlier_trust() -> None:
    trust_only(["b/model", "a/model"])
    assert trusted_models() == ["a/model", "b/model"]
    assert is_trusted("a/model")
    trust_only(["c/model"])
    assert trusted_models() == ["c/model"]
    assert not is_trusted("a/model")
