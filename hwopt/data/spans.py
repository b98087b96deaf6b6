"""Spans of a text: pairs of the first character and the one after the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the longest common start of two texts, or of two lists of tokens."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def connected(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in their order, those that touch joined, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def without(spans: Sequence[tuple[int, int]], cut: tuple[int, int]) -> list[tuple[int, int]]:
    """The spans without what lies in `cut`."""
    parts = [part for start, end in spans for part in ((start, min(end, cut[0])), (max(start, cut[1]), end))]
    return [(start, end) for start, end in parts if end > start]
