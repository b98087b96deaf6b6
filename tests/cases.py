"""Parameter lists with a short form, which runs by default, and a long form for `tox -e soak` or `tox -e integration`."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import settings

DAILY = (pytest.mark.integration, pytest.mark.daily)
"""Marks of a test, or of a parameter, that takes long and goes through the same code as one that runs by default."""


def named(found: Mapping[str, Any], short: Collection[str], long: Any = pytest.mark.soak) -> list[Any]:
    """The values of `found` as parameters with their names as ids. Parameters that `short` does not name are marked `long`."""
    assert set(short) <= set(found), set(short) - set(found)
    return [pytest.param(value, id=name, marks=() if name in short else long) for name, value in found.items()]


def examples(short: int) -> int:
    """`short` examples of hypothesis by default, twenty times as many under `--hypothesis-profile=soak`."""
    return short if settings.default.max_examples < 100 else 20 * short
