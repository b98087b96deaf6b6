"""Lists of parameters with a short form, which runs by default, and a long one, which `tox -e soak` adds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings


def named(found: Mapping[str, Any], short: Collection[str]) -> list[Any]:
    """The values of `found` as parameters with their names as ids; those that `short` does not name are marked `soak`."""
    assert set(short) <= set(found), set(short) - set(found)
    return [pytest.param(value, id=name, marks=() if name in short else pytest.mark.soak) for name, value in found.items()]


def covering(found: Iterable[tuple[Any, ...]], laws: Iterable[tuple[Any, ...]] | None = None) -> list[Any]:
    """`found` as parameters: by default those that run show each value of each column of `laws` (of `found` itself) once."""
    found = list(found)
    seen: set[tuple[int, Any]] = set()
    parameters = []
    for values, law in zip(found, found if laws is None else laws, strict=True):
        new = set(enumerate(law)) - seen
        seen |= new
        parameters.append(pytest.param(*values, marks=() if new else pytest.mark.soak))
    return parameters


def runs_by_default(parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The values of those parameters that are not marked `soak`."""
    return [parameter.values for parameter in parameters if not parameter.marks]


def examples(short: int) -> int:
    """`short` examples of hypothesis by default, twenty times as many under `--hypothesis-profile=soak`."""
    return short if settings.default.max_examples < 100 else 20 * short
