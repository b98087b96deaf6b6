"""How a step is split, padded or packed does not change the training, for each task that labels samples or tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, WORDS, apart, plan_for, tiny_job, tiny_profile, train_tiny

TASKS: dict[str, dict[str, Any]] = {
    "regression": {"label": ["score", "other"]},
    "multi-label-classification": {"label": "labels"},
    "token-classification": {"text": "tokens", "label": "tags"},
}


def write_rows(path: Path, number: int) -> Path:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            words = draw.choices(WORDS, k=draw.randint(2, 24))
            row = {"text": " ".join(words), "tokens": words, "tags": ["B-X" if len(word) > 3 else "O" for word in words]}
            numbers = {"score": len(words) / 24, "other": draw.random()}
            file.write(json.dumps(row | numbers | {"labels": sorted({word[0] for word in words if word[0] in "rgb"})}) + "\n")
    return path


def train(folder: Path, kind: str, weights: str | None, **plugins: Any) -> dict[str, Any]:
    folder.mkdir()
    data = {"train": str(write_rows(folder / "rows.jsonl", 24)), "eval": None, "eval_fraction": 0.2, **TASKS[kind]}
    job = tiny_job(folder, kind, config=TINY_BERT, data=data, max_steps=4)
    if weights is not None:
        table = job.job.task.model_copy(update={"class_weights": weights})
        job = type(job)(job.job.model_copy(update={"task": table}), job.document)
    recorder = train_tiny(plan_for(tiny_profile(**plugins), job), folder)
    assert recorder.warnings == []
    seen = {entry.name: evidence.status for entry, evidence in recorder.found}
    assert all(seen[name] == "active" for name in plugins if name != "batch")
    return load_file(folder / "run" / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("regression", None),
        ("multi-label-classification", None),
        ("token-classification", None),
        ("token-classification", "balanced"),
    ],
)
def test_split_and_packing_do_not_change_the_training(kind: str, weights: str | None, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind, weights, batch={"train": 8, "gradient_accumulation_steps": 1})
    pieces = train(tmp_path / "pieces", kind, weights, batch={"train": 3, "effective": 8})
    assert apart(pieces, whole) < 1e-5
    cut = train(tmp_path / "cut", kind, weights, batch={"train": 4, "effective": 8}, length_batching={})
    assert apart(cut, whole) < 1e-5
    packed = train(tmp_path / "packed", kind, weights, batch={"train": 4, "effective": 8}, pack={})
    assert apart(packed, whole) < 1e-5
