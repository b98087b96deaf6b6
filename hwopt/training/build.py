"""Build the run of a plan. This is the only module that creates an Accelerator.

In this order: process contexts, Accelerator, data and tokenizer, model and its steps, optimizer, schedule, prepare, loaders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwopt.distributed.data_parallel import DataParallelEngine, broadcast_weights, first_rank_first
from hwopt.distributed.engine import Engine
from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.errors import InputError, PluginError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.device import GIB
from hwopt.model.frozen import freeze
from hwopt.model.packing import skip_packed_row_search
from hwopt.planning.plan import Plan
from hwopt.plugin.guard import guarded_context, plugin_guard
from hwopt.plugin.recipe import Steps
from hwopt.saving.writer import skeleton_of
from hwopt.system import garbage
from hwopt.tasks.base import Task
from hwopt.tasks.registry import make_task
from hwopt.tensor_tree import fingerprint
from hwopt.text import listing, truncate
from hwopt.training import randomness
from hwopt.training.listener import Listener
from hwopt.training.loaders import build_loaders, end_workers
from hwopt.training.optimizer import build_optimizer
from hwopt.training.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def build(
    plan: Plan,
    folder: Path,
    cache: Path,
    claim_folder: Callable[[Run], None] = lambda run: None,
    listener: Listener | None = None,
    task: Task | None = None,
) -> Iterator[Run]:
    """Build the run of `plan`, with its job's task unless another `task` is given.

    `folder` is the run folder, which is not created here. `cache` has the tokenised data. `claim_folder` is called when the ranks
    can communicate; it sets `run.folder`, `run.checkpoint` and `run.progress`, which are those of a new run by default.
    """
    release_unused_memory()
    with ExitStack() as stack:
        for enter in plan.recipe.process:
            stack.enter_context(guarded_context(enter))
        accelerator = make_accelerator(plan)
        stack.callback(reset_accelerate, accelerator)
        refuse_different_plans(plan)
        if plan.hardware.memory_limit_gib is not None:
            stack.enter_context(limited_memory(accelerator.device, plan.hardware.memory_limit_gib))
        listener = listener or Listener()
        listener.on_stage("reading the data and making tokens")
        run = prepare_data(plan, folder, cache, accelerator, listener, task or make_task(plan.job))
        stack.callback(lambda: end_workers(run.train_loader, run.eval_loader))
        listener.on_stage("loading the model")
        build_model(run)
        listener.on_stage("making the optimizer")
        build_optimizer(run)
        claim_folder(run)
        build_loaders(run)
        run.engine = (plan.recipe.engine or (Engine if run.world_size == 1 else DataParallelEngine))(run)
        run.forward_backward = ForwardBackward(run)
        if plan.recipe.forward_backward is not None:
            run.forward_backward = plan.recipe.forward_backward(run, run.forward_backward)
        for step in plan.recipe.prepared_steps:
            step(run)
        if plan.recipe.collate is None:
            stack.enter_context(skip_packed_row_search())
        garbage.collect_as_usual()
        yield run
        accelerator.free_memory()  # frees the engine while the ranks can still communicate
        accelerator.end_training()


def make_accelerator(plan: Plan) -> Accelerator:
    from accelerate import Accelerator

    options = {"cpu": plan.hardware.device_type == "cpu", "mixed_precision": "no"} | dict(plan.recipe.accelerator)
    if plan.hardware.device_type == "cpu":  # else DeepSpeed, which libraries import, reports a missing GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    recipe = plan.recipe
    authors = {recipe.author_of(f"accelerator[{key!r}]") for key in recipe.accelerator} - {"the core"}
    with plugin_guard(", ".join(sorted(map(recipe.named, authors))) or "the core", "recipe.accelerator"):
        return Accelerator(**{key: option_value(value) for key, value in options.items()})


def refuse_different_plans(plan: Plan) -> None:
    """Raise InputError on every rank if the ranks have resolved different plans, as on nodes with different cards.

    Only plugins that change what is computed must agree, with their options: not micro-batches, workers and the like.
    """
    if plan.world_size == 1:
        return
    from accelerate.utils import gather_object

    method = {
        entry.name: entry.options.model_dump(mode="json")
        for entry in plan.applied()
        if entry.plugin.effect != "bits" and plan.recipe.fields_of(entry.author) != ("batch",)
    } | {"rows a step": plan.batch.step}
    if message := difference(gather_object([(f"{plan.hardware.name} ({plan.hardware.memory_gib:g} GiB)", method)])):
        raise InputError(message)


def difference(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What differs between the plans of the ranks, (card, plugin -> options) each; "" if they agree."""
    card, first = ranks[0]
    for rank, (other_card, other) in enumerate(ranks):
        if other != first:
            plugins = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            return (
                f"The ranks have different plans: rank 0 runs on {card}, rank {rank} on {other_card}, and these plugins differ: "
                f"{listing(plugins)}. Choose a profile that both cards can run, or set the options of these plugins"
            )
    return ""


@contextmanager
def limited_memory(device: torch.device, gib: float) -> Iterator[None]:
    """A block in which torch's allocator takes at most `gib` GiB of the CUDA `device` in this process."""
    # torch wants an index here, and Accelerate's device has none if there is one process
    index = torch.cuda.current_device() if device.index is None else device.index
    before = torch.cuda.get_per_process_memory_fraction(index)
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)


def option_value(option: Any) -> Any:
    """The value of an Accelerator option. Factories are called, also those in a list."""
    if isinstance(option, list | Steps):
        return [option_value(entry) for entry in option]
    return option() if callable(option) else option


def reset_accelerate(accelerator: Accelerator) -> None:
    """Reset Accelerate's state in this process, so that the next run can have another precision or engine."""
    from accelerate.state import AcceleratorState

    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare_data(plan: Plan, folder: Path, cache: Path, accelerator: Accelerator, listener: Listener, task: Task) -> Run:
    """A new Run with the prepared data. The first rank tokenises, the others read its cache."""
    config = task.load_config(plan.job)
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
    """Load the model, apply the recipe's steps, and set the run's `model`, `inner_model`, `skeleton` and fingerprint."""
    job, recipe = run.plan.job, run.recipe
    torch.manual_seed(randomness.mix(run.training.seed, randomness.WEIGHTS))
    adopt_model(run, run.task.load_model(job, run.task.load_config(job), run.prepared, dict(recipe.model_kwargs)))
    run.skeleton = skeleton_of(run.inner_model)
    run.frozen_fingerprint = fingerprint(parameter for parameter in run.inner_model.parameters() if not parameter.requires_grad)


def adopt_model(run: Run, model: Any) -> None:
    """Apply the recipe's steps to `model`, move it to the device and wrap it; an engine of the recipe does both itself."""
    recipe = run.recipe
    if run.plan.router_loss:
        model.config.get_text_config().output_router_logits = True  # the model then returns its load-balancing loss
    if (keys := run.plan.job.model).chooses_weights:
        run.say(freeze(model, keys.freeze, keys.train_only))
    if run.world_size > 1 and recipe.engine is None:
        broadcast_weights(model.to(run.device))  # before the model steps create masters and adapters
    for step in recipe.model_steps:
        model = step(model, run)
        if not isinstance(model, torch.nn.Module):
            who, what = getattr(step, "who", "a plugin"), getattr(step, "what", "recipe.model_steps")
            raise PluginError(f"{who}: {what} returned {truncate(model)} instead of the model")
    model.train()
    run.inner_model = run.model = model
    if recipe.engine is None:
        run.inner_model = model.to(run.device)
        # evaluation_mode: no DistributedDataParallel, which cannot retry a step (hwopt.distributed.data_parallel)
        run.model = run.accelerator.prepare_model(run.inner_model, evaluation_mode=True)
