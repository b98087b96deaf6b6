"""Parameter lists with a short form, which runs by default, and a long form for `tox -e soak`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings


def named(found: Mapping[str, Any], short: Collection[str]) -> list[Any]:
    """The values of `found` as parameters with their names as ids. Parameters that `short` does not name are marked `soak`."""
    assert set(short) <= set(found), set(short) - set(found)
    return [pytest.param(value, id=name, marks=() if name in short else pytest.mark.soak) for name, value in found.items()]


def covering(found: Iterable[tuple[Any, ...]], aspects: Iterable[tuple[Any, ...]] | None = None) -> list[Any]:
    """`found` as parameters. The default ones have each value of each column of `aspects` (or of `found`) once."""
    found = list(found)
    seen: set[tuple[int, Any]] = set()
    parameters = []
    for values, aspect in zip(found, found if aspects is None else aspects, strict=True):
        new = set(enumerate(aspect)) - seen
        seen |= new
        parameters.append(pytest.param(*values, marks=() if new else pytest.mark.soak))
    return parameters


def runs_by_default(parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The values of the parameters that are not marked `soak`."""
    return [parameter.values for parameter in parameters if not parameter.marks]


def examples(short: int) -> int:
    """`short` examples of hypothesis by default, twenty times as many under `--hypothesis-profile=soak`."""
    return short if settings.default.max_examples < 100 else 20 * short
