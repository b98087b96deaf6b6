"""Rows with labels for each task that labels samples or tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hwopt.testing import WORDS

LABELLED: dict[str, dict[str, Any]] = {
    "regression": {"label": ["score", "other"]},
    "multi-label-classification": {"label": "labels"},
    "token-classification": {"text": "tokens", "label": "tags"},
}


def write_rows(path: Path, number: int) -> Path:
    """`path`, a JSONL file with columns for every task of LABELLED."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            words = draw.choices(WORDS, k=draw.randint(2, 24))
            row = {"text": " ".join(words), "tokens": words, "tags": ["B-X" if len(word) > 3 else "O" for word in words]}
            numbers = {"score": len(words) / 24, "other": draw.random()}
            file.write(json.dumps(row | numbers | {"labels": sorted({word[0] for word in words if word[0] in "rgb"})}) + "\n")
    return path
