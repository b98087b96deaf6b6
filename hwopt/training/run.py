"""Run: the built objects of one training run, and Progress: how far it is. Plugins see them as `plugin.RunView`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.config.job_training import Training
from hwopt.data.batches.step_batch import StepBatch
from hwopt.distributed.engine import Engine
from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.planning.plan import Plan
from hwopt.plugin import BatchSizes, Observation
from hwopt.plugin.guard import unguarded
from hwopt.plugin.recipe import Recipe
from hwopt.saving.reader import Checkpoint
from hwopt.tasks.base import Task
from hwopt.tasks.next_token import with_router_loss
from hwopt.tasks.prepared import Prepared
from hwopt.training.listener import Listener

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Progress:
    """How far a run is. Checkpoints hold the step; the other fields belong to this process."""

    step: int = 0  # optimizer steps done
    between_steps: bool = True  # False while the optimizer changes the weights: then they cannot be saved
    peers_lost: bool = False  # True once the other ranks do not answer any more
    batch: StepBatch | None = None  # the step batch of the step that runs now, or of the last one
    last_batch: StepBatch | None = None  # the step batch of the last finished step


class PlannedRun:
    """What a run, or the training of a script, takes from its plan and tells its listener."""

    plan: Plan
    rank: int
    listener: Listener

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

    def say(self, message: str) -> None:
        self.listener.on_message(self, message)

    def warn(self, message: str) -> None:
        self.listener.on_warning(self, message)


@dataclass
class Run(PlannedRun):
    """What `build` makes of a plan, and what the loop, the events and the evidence look at."""

    plan: Plan
    folder: Path
    task: Task
    device: torch.device
    rank: int
    world_size: int
    accelerator: Accelerator
    prepared: Prepared
    listener: Listener = field(default_factory=Listener)
    progress: Progress = field(default_factory=Progress)
    checkpoint: Checkpoint | None = None  # the checkpoint that the run resumes from; None for a new run
    observation: Observation = field(default_factory=Observation)  # what torch's profiler recorded of the first step
    frozen_fingerprint: Sequence[float] = ()
    """A few of the weights that are not trained, which no checkpoint holds: they must be equal on resume."""
    steps_per_epoch: int = 0
    total_steps: int = 0

    # build() fills these in this order
    inner_model: Any = None  # the model without wrappers
    skeleton: Any = None  # the model without its tensors: `save_pretrained` is called on it while the model trains
    model: Any = None  # the model as the loop calls it
    optimizer: Any = None
    parameter_names: list[str] = field(default_factory=list)
    """The name in the model of each tensor that the optimizer updates, in the optimizer's order."""
    scheduler: Any = None
    scaler: Any = None
    engine: Engine = field(init=False)
    forward_backward: ForwardBackward = field(init=False)
    train_loader: Any = None
    eval_loader: Any = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @property
    def step_batch(self) -> StepBatch | None:
        """The step batch of the running step, or of the last one, without its tensors."""
        return self.progress.batch

    @property
    def last_step_batch(self) -> StepBatch | None:
        """The step batch of the last finished step, without its tensors."""
        return self.progress.last_batch

    @cached_property
    def loss(self) -> Callable[[Any, Tensor], tuple[Tensor, Any]]:
        """The loss that is trained: (outputs, targets) -> (summed loss, count)."""
        loss = self.recipe.loss or self.task.training_loss(self.prepared, self.device)
        coefficient = self.plan.router_loss
        return partial(with_router_loss, loss, coefficient) if coefficient else loss

    @property
    def evaluation_loss(self) -> Callable[[Any, Tensor], tuple[Tensor, Any]]:
        """The loss of an evaluation, without class weights, label smoothing and load balancing."""
        return self.recipe.loss or self.task.loss

    @cached_property
    def guessed_loss(self) -> float | None:
        """The loss of equal probabilities for all labels; None if it is not known."""
        return self.task.guessed_loss(self.prepared, self.plan.model.vocab_size)

    @property
    def notes(self) -> list[str]:
        """Notes of the data preparation, for the user."""
        return self.prepared.notes

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def parts(self) -> list[Any]:
        """The objects of `recipe.events` and `recipe.state`."""
        return [*self.recipe.events, *map(unguarded, self.recipe.state)]

    @property
    def extras(self) -> Path:
        """The folder for files that belong into `final/` beside the model; `final_steps` write there."""
        return self.folder / ".extras"

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal for a run to resume from a checkpoint: otherwise it would be another run."""
        train = self.prepared.train
        return {
            "task": self.task.kind,
            "samples": f"{len(train):,} ({train.folder.name})",
            "mixture": None if train.mixture is None else train.mixture.fact,
            "rows a step": self.batch.step,
            "seed": self.training.seed,
            "order": self.recipe.author_of("order").split(" (")[0],
            "frozen": list(self.frozen_fingerprint),
            "method": self.plan.method,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights as they are written to disk: without wrappers, in the precision that is trained."""
        weights: dict[str, Tensor] = self.inner_model.state_dict()
        for step in self.recipe.export_steps:
            weights = step(weights, self)
        return self.engine.exported(weights)

    def heartbeat(self) -> None:
        """Tell the watchdog that the run is alive."""
        self.listener.on_heartbeat(self)

    def was_saved(self, folder: Path) -> None:
        """Tell the listener and the plugins that `folder`, a checkpoint or the best weights, is complete on disk."""
        self.listener.on_save(self, folder)
        self.recipe.events.on_saved(self, folder)
