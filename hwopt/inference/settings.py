"""What inference repeats of a run (plan.json in the run folder has it), and the options of a prediction or an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hwopt.distributed.oom_backoff import QUIET_BATCHES, OomBackoff
from hwopt.errors import InputError
from hwopt.plugin import BatchSizes, dtype_name
from hwopt.records.run_files import PLAN
from hwopt.tasks.generators import Generation
from hwopt.training.run import Run

KEY = "inference"  # the key of plan.json
HalfDtype = Literal["fp16", "bf16"]
HALF: Mapping[str, HalfDtype] = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class InferenceSettings:
    """The settings with which a run evaluates."""

    dtype: HalfDtype | None = None
    """Of matrix products under autocast; None: the dtype of the weights."""
    attention: str | None = None
    """attn_implementation of transformers; None: its default."""
    batch: BatchSizes = field(default_factory=lambda: BatchSizes.of({}))
    labels: tuple[str, ...] = ()
    """The name of each label number; empty if labels are tokens."""
    chat: bool = False
    """The training samples are conversations."""


def settings_of(run: Run) -> InferenceSettings:
    """The settings of a run that is built."""
    recipe = run.recipe
    computes_in = recipe.accelerator.get("mixed_precision", "no")
    if computes_in == "no":  # half weights are evaluated as their masters under autocast
        computes_in = getattr(recipe.masters, "dtype", "no")
    return InferenceSettings(
        dtype=HALF.get(dtype_name(computes_in)),
        attention=getattr(getattr(run.inner_model, "config", None), "_attn_implementation", None),
        batch=run.batch,
        labels=run.prepared.label_names,
        chat=run.prepared.chat_tokens.chat,
    )


def read_settings(folder: Path) -> InferenceSettings:
    """The settings in plan.json of a run folder. Raises InputError without them."""
    try:
        found = json.loads((folder / PLAN).read_text(encoding="utf-8"))[KEY]
        return InferenceSettings(**found | {"labels": tuple(found["labels"] or ()), "batch": BatchSizes(**found["batch"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: has no readable plan.json, which `hwopt run` wrote. Give the whole run folder") from error


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a prediction or an evaluation."""

    assignments: Sequence[str] = ()
    """"data.KEY=VALUE": changes of how the job reads its data."""
    batch_size: int | None = None
    """None: that of the run's evaluation."""
    generation: Generation | None = None
    """For tasks that generate text; None: the defaults."""
    overwrite: bool = False
    """Replace an output file that exists."""
    warn: Callable[[str], None] = lambda message: None
    """Gets messages for the user."""
    progress: Callable[[int, int], None] = lambda done, rows: None
    """Gets the rows that are done, and all rows."""

    def batch(self, settings: InferenceSettings) -> BatchSizes:
        """The sizes with which a run with these `settings` is evaluated."""
        return settings.batch if self.batch_size is None else settings.batch.evaluating(self.batch_size)

    def backoff(self) -> OomBackoff:
        """What makes batches smaller that do not fit into the device's memory."""
        advice = "Shorten the longest texts, or free memory that other processes use"
        return OomBackoff("Inference", "--batch-size", self.warn, quiet_steps_needed=QUIET_BATCHES, advice=advice)
