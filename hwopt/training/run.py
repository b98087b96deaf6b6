"""Run: the built objects that the loop, the events and the evidence look at."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwopt.data.step_batch import StepBatch
from hwopt.planning.plan import Plan
from hwopt.plugin import Observation
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes
from hwopt.tasks.base import Prepared, Task

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hwopt.config.job import Training
    from hwopt.saving.reader import Checkpoint


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
    between_steps: bool = True
    """Whether weights and optimizer are between two steps."""
    frozen_fingerprint: Sequence[float] = ()
    """Some of the weights that are not trained, which no checkpoint holds."""
    peers_lost: bool = False
    """Whether the other ranks cannot be asked any more."""
    observation: Observation = field(default_factory=Observation)
    last_step_batch: StepBatch | None = None
    step_batch: StepBatch | None = None
    """Of the step that is being done."""
    warn: Callable[[str], None] = warnings.warn
    say: Callable[[str], None] = lambda message: None
    watch: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Around the steps: what ends a run that hangs."""
    heartbeat: Callable[[], None] = lambda: None
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
            "frozen": list(self.frozen_fingerprint),
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


def new_run(run: Run) -> None:
    """Where nothing has to be settled: a run that begins at its first step."""
