"""What inference repeats of a run: precision, attention, batch size and labels. plan.json in the run folder has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hwopt.training.run import Run

KEY = "inference"
"""The key of plan.json."""
HalfDtype = Literal["fp16", "bf16"]
HALF: Mapping[str, HalfDtype] = {"fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class InferenceSettings:
    """The settings with which a run evaluates."""

    dtype: HalfDtype | None = None
    """Of matrix products under autocast; None: the dtype of the weights."""
    attention: str | None = None
    """attn_implementation of transformers; None: its default."""
    batch: int = 8
    """Rows of an evaluation batch."""
    pad_to_multiple_of: int = 1
    labels: tuple[str, ...] | None = None
    """The name of each label number; None if labels are tokens."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON types."""
        return asdict(self)


def settings_of(run: Run) -> InferenceSettings:
    """The settings of a run that is built."""
    recipe = run.recipe
    computes_in = recipe.accelerator.get("mixed_precision", "no")
    if computes_in == "no":  # half weights are evaluated as their masters under autocast
        computes_in = getattr(recipe.masters, "dtype", "no")
    return InferenceSettings(
        dtype=HALF.get(str(computes_in)),
        attention=getattr(getattr(run.inner_model, "config", None), "_attn_implementation", None),
        batch=run.batch.eval,
        pad_to_multiple_of=run.batch.pad_to_multiple_of,
        labels=run.prepared.label_names,
    )


def read_settings(folder: Path) -> InferenceSettings | None:
    """The settings in plan.json of a run folder; None without a readable file, or from a version that did not write them."""
    try:
        found = json.loads((folder / "plan.json").read_text(encoding="utf-8"))[KEY]
        return InferenceSettings(**found | {"labels": None if found["labels"] is None else tuple(found["labels"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
