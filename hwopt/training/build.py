"""build: a plan becomes a run. The only module that makes an Accelerator.

In order: process contexts, Accelerator, data and tokenizer, model and its steps, optimizer, schedule, prepare, loaders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwopt.distributed.data_parallel import DataParallelEngine, broadcast_weights, first_rank_first
from hwopt.distributed.engine import Engine
from hwopt.errors import PluginError
from hwopt.hardware.device import GIB
from hwopt.model.attention_mask import skip_packed_row_search
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
from hwopt.plugin.guard import guarded_context, plugin_guard
from hwopt.plugin.recipe import Steps
from hwopt.saving.model_files import skeleton_of
from hwopt.saving.tensor_tree import fingerprint
from hwopt.tasks.registry import make_task
from hwopt.text import truncate
from hwopt.training import randomness
from hwopt.training.listener import Listener
from hwopt.training.loaders import build_loaders
from hwopt.training.optimizer import build_optimizer
from hwopt.training.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator


def new_run(run: Run) -> None:
    """The default `claim_folder`: the run starts at its first step, in the folder that was given."""


@contextmanager
def build(
    plan: Plan,
    folder: Path,
    cache: Path,
    claim_folder: Callable[[Run], None] = new_run,
    listener: Listener | None = None,
) -> Iterator[Run]:
    """Build the run of `plan`. Leaving the block leaves the plugins' process contexts in reverse order.

    `folder` is where the run will write (it is not made here); `cache` holds tokenised data. `claim_folder` is called once the
    ranks can communicate: it sets `run.folder`, `run.checkpoint` and `run.progress`.
    """
    with ExitStack() as stack:
        for enter in plan.recipe.process:
            stack.enter_context(guarded_context(enter))
        accelerator = make_accelerator(plan)
        stack.callback(forget, accelerator)
        run = prepare_data(plan, folder, cache, accelerator, listener or Listener())
        build_model(run)
        build_optimizer(run)
        claim_folder(run)
        build_loaders(run)
        run.engine = make_engine(run)
        for step in plan.recipe.prepared_steps:
            step(run)
        if plan.recipe.collate is None:
            stack.enter_context(skip_packed_row_search())
        yield run
        accelerator.free_memory()  # engines are taken down while their ranks can still be reached
        accelerator.end_training()


def make_engine(run: Run) -> Engine:
    chosen = run.recipe.engine or (Engine if run.world_size == 1 else DataParallelEngine)
    engine: Engine = chosen(run)
    return engine


def make_accelerator(plan: Plan) -> Accelerator:
    from accelerate import Accelerator

    options = {"cpu": plan.hardware.device_type == "cpu", "mixed_precision": "no"} | dict(plan.recipe.accelerator)
    if plan.hardware.device_type == "cpu":  # where DeepSpeed is installed, libraries import it, and it says that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    recipe = plan.recipe
    authors = {recipe.author_of(f"accelerator[{key!r}]") for key in recipe.accelerator} - {"the core"}
    with plugin_guard(", ".join(sorted(map(recipe.named, authors))) or "the core", "recipe.accelerator"):
        accelerator = Accelerator(**{key: made(value) for key, value in options.items()})
    if plan.hardware.memory_limit_gib is not None:
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.hardware.memory_limit_gib * GIB / total), accelerator.device)
    return accelerator


def made(option: Any) -> Any:
    """The value of an Accelerator option: factories, also those in a list, are called."""
    if isinstance(option, list | Steps):
        return [made(entry) for entry in option]
    return option() if callable(option) else option


def forget(accelerator: Accelerator) -> None:
    """Reset Accelerate's process-wide state, so that a second run can have another precision or engine."""
    from accelerate.state import AcceleratorState

    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare_data(plan: Plan, folder: Path, cache: Path, accelerator: Accelerator, listener: Listener) -> Run:
    """Tokenise the data on the first rank, open it on all ranks, and return the run around it."""
    task = make_task(plan.job)
    model = plan.job.model
    config = load_config(model.name, model.config, model.revision)
    with first_rank_first(accelerator.process_index, accelerator.num_processes):
        prepared = task.prepare(plan.job, config, cache, plan.training.seed, max_positions=plan.model.max_positions)
    return Run(
        plan=plan,
        folder=folder,
        task=task,
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        accelerator=accelerator,
        prepared=prepared,
        listener=listener,
    )


def build_model(run: Run) -> None:
    job, recipe = run.plan.job, run.recipe
    torch.manual_seed(randomness.mix(run.training.seed, randomness.WEIGHTS))
    config = load_config(job.model.name, job.model.config, job.model.revision)
    adopt_model(run, run.task.load_model(job, config, run.prepared, dict(recipe.model_kwargs)))
    run.skeleton = skeleton_of(run.inner_model)
    run.frozen_fingerprint = fingerprint(parameter for parameter in run.inner_model.parameters() if not parameter.requires_grad)


def adopt_model(run: Run, model: Any) -> None:
    """Apply the recipe's steps to `model`, move it to the device and put it under the accelerator's precision.

    An engine of the recipe places and wraps the model itself, because the model may be larger than the device's memory.
    """
    recipe = run.recipe
    if run.world_size > 1 and recipe.engine is None:
        broadcast_weights(model.to(run.device))  # before masters and adapters are made of them
    for step in recipe.model_steps:
        model = step(model, run)
        if not isinstance(model, torch.nn.Module):
            who, what = getattr(step, "who", "a plugin"), getattr(step, "what", "recipe.model_steps")
            raise PluginError(f"{who}: {what} returned {truncate(model)} instead of the model")
    model.train()
    run.inner_model = run.model = model
    if recipe.engine is None:
        run.inner_model = model.to(run.device)
        # without DistributedDataParallel, which cannot do a step again (hwopt.data_parallel)
        run.model = run.accelerator.prepare_model(run.inner_model, evaluation_mode=True)
