"""build: a plan becomes a run. The only module that makes an Accelerator.

In order: process contexts, Accelerator, data and tokenizer, model and its steps, optimizer, schedule, prepare, loaders.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt import randomness
from hwopt.blame import blaming, entered
from hwopt.data_parallel import DataParallelEngine, first_rank_first, make_equal
from hwopt.engine import Engine
from hwopt.errors import PluginError, shorten
from hwopt.hardware import GIB
from hwopt.loaders import build_loaders
from hwopt.microbatch import StepBatch
from hwopt.model_config import load_config
from hwopt.model_facts import no_search_for_packed_rows
from hwopt.model_files import skeleton_of
from hwopt.plan import BatchSizes, Plan
from hwopt.plugin import Observation
from hwopt.recipe import Recipe, Steps
from hwopt.tasks import Prepared, Task, make_task
from hwopt.tensors import sampled

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hwopt.job import Training
    from hwopt.resume import Checkpoint


@dataclass
class Run:
    """The built thing: what the loop, the events and the evidence look at."""

    plan: Plan
    folder: Path
    task: Task
    device: torch.device
    rank: int
    world_size: int
    accelerator: Accelerator
    prepared: Prepared
    notes: list[str] = field(default_factory=list)
    """What the screen should say before the run starts."""
    step: int = 0
    """Optimizer steps done."""
    whole: bool = True
    """Whether weights and optimizer are between two steps."""
    frozen: Sequence[float] = ()
    """Some of the weights that are not trained, which no checkpoint holds."""
    alone: bool = False
    """Whether the other ranks cannot be asked any more."""
    observation: Observation = field(default_factory=Observation)
    last_step_batch: StepBatch | None = None
    step_batch: StepBatch | None = None
    """Of the step that is being done."""
    warn: Callable[[str], None] = warnings.warn
    say: Callable[[str], None] = lambda message: None
    watch: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Around the steps: what ends a run that hangs."""
    beat: Callable[[], None] = lambda: None
    """Told that the run is alive."""
    ran_out: Callable[[int], None] = lambda rows: None
    """Told the rows that went through where the chosen ones did not."""

    checkpoint: Checkpoint | None = None
    """Where the run goes on."""

    # filled by build(), in this order
    inner_model: Any = None
    skeleton: Any = None
    """The model without its tensors: what is saved while it is trained."""
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    engine: Any = None
    train_loader: Any = None
    eval_loader: Any = None
    loss: Callable[[Any, Tensor], tuple[Tensor, Any]] = field(init=False)
    trained: list[str] = field(default_factory=list)
    """The names of the parameters that the optimizer steps on, in its order."""
    steps_per_epoch: int = 0
    total_steps: int = 0

    @property
    def extras(self) -> Path:
        """Where `final_steps` put files that belong into `final/` beside the model."""
        return self.folder / ".extras"

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def training(self) -> Training:
        return self.plan.training

    @property
    def batch(self) -> BatchSizes:
        return self.plan.batch

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same where a run goes on, or it would not be the same run."""
        train = self.prepared.train
        return {
            "task": self.task.kind,
            "samples": f"{len(train):,} ({train.folder.name})",
            "rows a step": self.batch.step,
            "seed": self.training.seed,
            "order": self.recipe.author_of("order").split(" (")[0],
            "frozen": list(self.frozen),
            "method": self.plan.method,
        }

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights as they are written to disk: without wrappers, in the precision that is trained."""
        weights: dict[str, Tensor] = self.inner_model.state_dict()
        for step in self.recipe.export_steps:
            weights = step(weights, self)
        exported: dict[str, Tensor] = self.engine.exported(weights)
        return exported


def anew(run: Run) -> None:
    """Where nothing has to be settled: a run that begins at its first step."""


@contextmanager
def build(plan: Plan, folder: Path, cache: Path, settle: Callable[[Run], None] = anew) -> Iterator[Run]:
    """The run of `plan`; leaving the block leaves the plugins' process contexts in reverse order.

    `folder` is where the run will write (it is not made here), `cache` holds tokenised data. `settle` is asked, once the ranks
    can talk to each other, where the run goes on: it sets `run.folder`, `run.checkpoint` and `run.step`.
    """
    with ExitStack() as stack:
        for enter in plan.recipe.process:
            stack.enter_context(entered(enter))
        accelerator = make_accelerator(plan)
        stack.callback(forget, accelerator)
        run = prepare_data(plan, folder, cache, accelerator)
        build_model(run)
        build_optimizer(run)
        settle(run)
        build_loaders(run)
        run.engine = make_engine(run)
        for step in plan.recipe.prepared_steps:
            step(run)
        if plan.recipe.collate is None:
            stack.enter_context(no_search_for_packed_rows())
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
    with blaming(", ".join(sorted(map(recipe.named, authors))) or "the core", "recipe.accelerator"):
        accelerator = Accelerator(**{key: made(value) for key, value in options.items()})
    if plan.hardware.memory_limit_gib is not None:
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.hardware.memory_limit_gib * GIB / total), accelerator.device)
    return accelerator


def made(option: Any) -> Any:
    """An option of the Accelerator, made now where it, or an entry of its list, is given as a factory."""
    if isinstance(option, list | Steps):
        return [made(entry) for entry in option]
    return option() if callable(option) else option


def forget(accelerator: Accelerator) -> None:
    """Accelerate keeps its state for the process: without this a second run could not have another precision or engine."""
    from accelerate.state import AcceleratorState

    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare_data(plan: Plan, folder: Path, cache: Path, accelerator: Accelerator) -> Run:
    """Tokenised data (made by the first rank, read by all) and the run around it."""
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
        notes=[*plan.notes, *prepared.notes],
    )


def build_model(run: Run) -> None:
    job, recipe = run.plan.job, run.recipe
    torch.manual_seed(randomness.mix(run.training.seed, randomness.WEIGHTS))
    config = load_config(job.model.name, job.model.config, job.model.revision)
    adopt_model(run, run.task.load_model(job, config, run.prepared, dict(recipe.model_kwargs)))
    run.skeleton = skeleton_of(run.inner_model)
    run.frozen = sampled(parameter for parameter in run.inner_model.parameters() if not parameter.requires_grad)


def adopt_model(run: Run, model: Any) -> None:
    """Take `model` through the recipe's steps, onto the device and under the accelerator's precision.

    An engine of the recipe places and wraps the model itself: it may be more than the device holds.
    """
    recipe = run.recipe
    if run.world_size > 1 and recipe.engine is None:
        make_equal(model.to(run.device))  # before masters and adapters are made of them
    for step in recipe.model_steps:
        model = step(model, run)
        if not isinstance(model, torch.nn.Module):
            who, what = getattr(step, "who", "a plugin"), getattr(step, "what", "recipe.model_steps")
            raise PluginError(f"{who}: {what} returned {shorten(model)} instead of the model")
    model.train()
    run.loss = recipe.loss or run.task.loss
    run.inner_model = run.model = model
    if recipe.engine is None:
        run.inner_model = model.to(run.device)
        # without DistributedDataParallel, which cannot do a step again (hwopt.data_parallel)
        run.model = run.accelerator.prepare_model(run.inner_model, evaluation_mode=True)


def build_optimizer(run: Run) -> None:
    recipe = run.recipe
    run.steps_per_epoch = ceil(len(run.prepared.train) / run.batch.step)
    run.total_steps = run.training.max_steps or ceil(run.training.num_train_epochs * run.steps_per_epoch)
    make_optimizer = recipe.optimizer or torch.optim.AdamW
    groups = parameter_groups(run.inner_model, run.training)
    names = {id(parameter): name for name, parameter in run.inner_model.named_parameters()}
    run.trained = [names[id(parameter)] for group in groups for parameter in group["params"]]
    optimizer = make_optimizer(groups)
    run.scaler = recipe.scaler() if recipe.scaler else run.accelerator.scaler
    for wrap in recipe.optimizer_wraps:
        optimizer = wrap(optimizer, run)
    run.optimizer = optimizer
    run.scheduler = make_scheduler(run)


def parameter_groups(model: Any, training: Training) -> list[dict[str, Any]]:
    """Trainable parameters, biases and norms apart where there is weight decay, which they do not get (as in HF's Trainer)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if not training.weight_decay:
        return [{"params": trained, "weight_decay": 0.0, **settings}]
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": training.weight_decay, **settings}
    plain = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, **settings}
    return [group for group in (decayed, plain) if group["params"]]


def warmup_steps(training: Training, total_steps: int) -> int:
    if training.warmup_steps is not None:
        return training.warmup_steps
    return ceil((training.warmup_ratio or 0.0) * total_steps)


def make_scheduler(run: Run) -> Any:
    """A LambdaLR that the loop steps once per step batch, whether or not the update was skipped."""
    if run.recipe.schedule is not None:
        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, partial(_factor, run.recipe.schedule, run.total_steps))
    from transformers import get_scheduler

    training = run.training
    # torch warns when an update was skipped; here the schedule advances with every step batch on purpose
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    return get_scheduler(training.lr_scheduler_type, run.optimizer, warmup_steps(training, run.total_steps), run.total_steps)


def _factor(schedule: Callable[[int, int], float], total: int, step: int) -> float:
    return schedule(step, total)
