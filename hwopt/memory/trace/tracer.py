"""Traced tier: run a step of the plan's recipe on fake tensors. Needs no GPU, weights or data, and counts activations.

The trace runs in a process of its own (hwopt.memory.trace.tracing_process), because emulating a card changes torch for the whole
process. It is cached on disk under a hash of everything that it depends on. Two shapes are traced, and any other follows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hwopt.data.stores.token_store import fingerprint
from hwopt.data.tokenizer_training import planned_config
from hwopt.memory.shapes import Head, Shape, accumulates_gradients, largest_shape, widths_of
from hwopt.memory.trace.timeline import Scaled, Timeline
from hwopt.memory.trace.tracing_process import NotTraceable, TraceRequest, traced
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
from hwopt.tasks.registry import make_task

FORMAT = 23
"""Version of the cache files; increase it with every change of a trace's content."""
UNSEEN = {"batch", "cut", "export_steps", "final_steps", "forward_backward", "loader", "order", "scaler", "schedule", "state"}
UNSEEN |= {"trainer", "training"}
"""Recipe fields on which a trace does not depend, but for what `trace_key` names itself."""
ROWS = 8
"""Rows of the traced micro-batch; the trace is then scaled to any other number."""


@dataclass(frozen=True)
class Trace:
    """A training step and an evaluation as functions of the rows and, unless `fixed_width`, of the widths.

    Those of a training step are what the recipe's collate lays out (`largest_shape`).
    """

    train: Scaled
    eval: Scaled
    fixed_width: bool


def trace_plan(plan: Plan, width: int, head: Head, cache: Path | None = None) -> Trace:
    """Return the trace of `plan` for rows of about `width` tokens, from `cache` if it is there. Raises NotTraceable.

    Training and evaluation are traced at two shapes, and at a third one if the two ran other operations.
    """
    path = None if cache is None else cache / f"{trace_key(plan, width, head)}.npz"
    target = target_width(plan, head)
    shapes = ("base", Shape(ROWS, width)), ("other", second_shape(width, target))
    request = TraceRequest(plan, head, shapes, otherwise=("taller", Shape(7 * ROWS, width)))
    return fit_trace(plan, cached_timelines(path, lambda: traced(request)), width, target)


def cached_timelines(path: Path | None, make: Callable[[], dict[str, Timeline]]) -> dict[str, Timeline]:
    """Load the timelines in `path`, or make them and save them there."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):  # no file, or an incomplete one
            return load(path)
    found = make()
    if path is not None:
        with contextlib.suppress(OSError):  # the cache is optional
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(f".{os.getpid()}.npz")
            arrays: dict[str, Any] = {f"{name}/{key}": each for name, steps in found.items() for key, each in vars(steps).items()}
            np.savez_compressed(staged, **arrays)
            staged.replace(path)
    return found


def trace_key(plan: Plan, width: int, head: Head) -> str:
    """Return the cache key: a hash of everything that a trace depends on."""
    model, training = plan.job.model, plan.training
    config = planned_config(plan.job, load_config(model.name, model.config, model.revision), plan.model.vocab_size)
    decided = [
        [entry.name, entry.distribution, entry.decision, entry.options.model_dump(mode="json")]
        for entry in plan.entries
        if not UNSEEN.issuperset(plan.recipe.fields_of(entry.author))
    ]
    data = plan.job.data
    task = [plan.job.task.kind, len(data.text), data.max_target_length, head, plan.router_loss > 0]
    task += [make_task(plan.job).generated_tokens(plan.job), target_width(plan, head)]
    task += [model.freeze, model.train_only] if model.chooses_weights else []
    job = [*task, width, bool(training.weight_decay), bool(training.max_grad_norm)]
    device = [plan.hardware.device_type, plan.hardware.capability_text, plan.hardware.multiprocessors]
    ranks = 1 if plan.recipe.engine is None else plan.world_size  # an engine's stand-in may hold one rank's shard
    several, recipe = accumulates_gradients(plan), plan.recipe
    keeps_copies = several and recipe.forward_backward is None and recipe.accelerator.get("mixed_precision", "no") != "no"
    widths = None if recipe.collate is None else [plan.batch.widths, plan.batch.pad_to_multiple_of]
    batch = [several, keeps_copies, widths, ranks]
    return fingerprint(
        [FORMAT, ROWS, second_shape(width, target_width(plan, head)), dict(plan.software), decided, job, device, batch],
        config.to_json_string(),
    )


def target_width(plan: Plan, head: Head) -> int:
    """Return the width of the widest targets of an encoder-decoder; 1 for other tasks."""
    return widths_of(plan).of(head.target or plan.job.data.max_target_length) if plan.context.task.encoder_decoder else 1


def second_shape(width: int, target: int) -> Shape:
    """Return the second shape to trace. No two triples of powers (rows, widths) give the same ratio to the first shape.

    Its width is close to the first: some models run other operations above a certain length (a sliding window). T5 runs others
    for targets of 8 than of 16, so shorter targets stay as they are, and the trace is then not scaled in them.
    """
    # kernels of attention pad the width to multiples of 8: both widths must leave the same remainder
    less = max(1, width // 256) * 32 if width >= 64 else -(-width // 16) * 8
    return Shape(7 * ROWS, width - less if width - less >= 4 else width + 16, 4 * target if target >= 16 else None)


def fit_trace(plan: Plan, found: dict[str, Timeline], width: int, target: int) -> Trace:
    """Return the traces as functions of the shape. Raises NotTraceable if they are not."""
    for fixed_width, name, shape in ((False, "other", second_shape(width, target)), (True, "taller", Shape(7 * ROWS, width))):
        sizes = (ROWS, width, target), (shape.rows, shape.width, shape.target or target)
        laid_out = [(*largest_shape(plan, *size[:2])[:2], size[2]) for size in sizes]
        with contextlib.suppress(ValueError, KeyError):
            train, evaluate = (
                Scaled.fit(found[f"{what}.base"], base, found[f"{what}.{name}"], other)
                for what, (base, other) in (("train", laid_out), ("eval", sizes))
            )
            return Trace(train, evaluate, fixed_width)
    raise NotTraceable("the operations of a step change with the number of rows")


def load(path: Path) -> dict[str, Timeline]:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        fields: dict[str, dict[str, Any]] = {}
        for key in arrays.files:
            name, _, attribute = key.partition("/")
            fields.setdefault(name, {})[attribute] = arrays[key]
    return {
        name: Timeline(**{key: value if value.ndim else value.item() for key, value in values.items()})
        for name, values in fields.items()
    }
