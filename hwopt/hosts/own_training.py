"""`hwopt.train(profile, model=module, …)`: a user's own module, dataset, collator and loss in hwopt's loop, in a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hwopt.errors import HwoptError, InputError
from hwopt.hosts.additivity import class_name
from hwopt.hosts.forecast import KNOWN_HEADS, Fit, job_with
from hwopt.hosts.limits import OWN_PARTS_LACK, refuse_half_weights, refuse_prepared
from hwopt.hosts.own_parts import OwnTask
from hwopt.hosts.script_plan import Script, plan_for, task_of
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.planner import plan_memory
from hwopt.model.adapters import casts_outside_autocast
from hwopt.planning.plan import Plan
from hwopt.runs.execute import execute
from hwopt.runs.folder import Target
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import rank_and_world
from hwopt.text import listing
from hwopt.training.listener import Listener, Listeners, Summary


def train_own(
    profile: str = "auto",
    *,
    model: torch.nn.Module,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None = None,
    additive: str | None = None,
    rows: int = 32,
    training: Mapping[str, Any] | None = None,
    plugins: Mapping[str, Any] | None = None,
    strict: bool = False,
    target: Target | None = None,
    listener: Listener | None = None,
) -> Summary:
    """Train `model` on the rows of `train_dataset` with the plan of `profile`. Returns the summary (Hugging Face's names).

    `collate_fn` (default: torch's) makes a dict of tensors with an entry for each row. `loss(outputs, batch)` is a scalar;
    without it, `model` returns an object or a dict with `loss`. `additive` says how the loss of a batch adds up from its
    rows: "rows" (a mean over rows), "labels" (a mean over labels that are not -100) or "sum". `metrics`: name ->
    function of (outputs, batch) that returns a value for each row. `rows`: of an optimizer step over all ranks.
    `training`: keys of [training] of a job. `plugins`: plugin -> its options, or False to leave it out.
    Raises InputError for a loss that `additive` does not describe, and as `hwopt.resolve` and `hwopt.execute` do.
    """
    refuse_prepared(model)
    if rows < 1:
        raise InputError(f"rows = {rows}: expected the rows of an optimizer step, at least 1")
    if metrics and eval_dataset is None:
        raise InputError("metrics are those of an evaluation: pass eval_dataset too")
    world = rank_and_world(os.environ)[1]
    if additive == "labels" and world > 1:
        raise InputError('additive = "labels" needs the labels of the other ranks, which one rank does not know: use one rank')
    script = Script(rows, rows, dict(training or {}), lacks=OWN_PARTS_LACK, world_size=world)
    found = plan_for(model, profile, script, plugins or {}, strict)
    refuse_half_weights(model, found.plan)
    task = OwnTask(model, train_dataset, eval_dataset, collate_fn, loss, metrics, additive, found.plan.training.seed)
    (target := target or Target()).require_usable()
    name = f"{type(model).__name__}-{found.plan.profile.name}"
    # a model without a name: no license of a base model is looked up
    unnamed = found.plan.job.model.model_copy(update={"name": None, "config": {"model_type": type(model).__name__}})
    job = found.plan.job.model_copy(update={"model": unnamed})
    plan = replace(found.plan, job=job, notes=(*found.lines(), memory_line(found.plan, task)))
    with casts_outside_autocast(model, plan.hardware.device_type):
        return execute(
            plan,
            target.folder(name),
            Listeners(Notes(), *([listener] if listener else [])),
            resume=target.checkpoint or bool(target.resume),
            fresh=target.fresh,
            next_folder=target.next_folder(name),
            task=task,
        )


class Notes(Listener):
    def on_start(self, run: Any) -> None:
        for note in run.plan.notes:
            run.say(note)


def memory_line(plan: Plan, task: OwnTask) -> str:
    """The memory that the forecast knows for `plan`, or why it knows none."""
    config = getattr(task.model, "config", None)
    if task.own_loss is not None or not hasattr(config, "model_type") or not class_name(task.model).endswith(KNOWN_HEADS):
        return f"memory: UNKNOWN: of models of transformers with their own loss, it knows {listing(KNOWN_HEADS)}"
    store = task.train_store
    lengths = Lengths(store.lengths, int(store.lengths.max()), getattr(config, "num_labels", None) or 2, "the longest row")
    try:
        memory = plan_memory(replace(plan, job=job_with(config, task_of(task.model)).job), cache_folder(), lengths)
    except HwoptError as error:
        return f"memory: UNKNOWN: {error}"
    return f"memory: {Fit(memory.fits, f'{memory.highest_gib:.2f} GiB, {memory.rows} x {memory.width} tokens, {memory.tier}')}"
