"""RunView: what plugins and engines may read of a run. The class of the run is `hwopt.training.run.Run`, in a higher layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hwopt.config.job_training import Training
from hwopt.plugin.batch_sizes import BatchSizes

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Observation:
    """The operators that ran in the first optimizer step, recorded by torch's profiler. Evidence is based on them."""

    operators: Mapping[str, int] = field(default_factory=dict)
    """Operator name ("aten::_fused_adamw_") -> number of calls."""
    matmul_dtypes: Mapping[str, int] = field(default_factory=dict)
    """dtype of the first operand of matrix multiplications ("c10::BFloat16", "float") -> number of calls."""
    forward_calls: Mapping[str, int] = field(default_factory=dict)
    """Name of a module of `inner_model` -> calls of its forward method, recomputations included.

    Empty if a module is compiled: the hooks that count would make torch compile it again."""
    linear_dtypes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name of a linear layer -> the dtypes of the products in its forward calls, named as in `matmul_dtypes`.

    Empty as `forward_calls` is."""
    attention: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name of a module that computes attention -> the attention kernels and softmax operators in its forward calls.

    Empty as `forward_calls` is."""
    eager_products: Mapping[str, int] = field(default_factory=dict)
    """Name of a compiled module -> matrix products in its forward calls that ran outside of compiled graphs."""
    missing: str = ""
    """Why nothing was recorded."""

    def calls(self, *parts: str) -> int:
        """The number of calls to operators whose name contains one of `parts`."""
        return sum(count for name, count in self.operators.items() if any(part in name for part in parts))


class EngineView(Protocol):
    """The engine of a run, which computes gradients and combines them over ranks."""

    norm: Tensor
    """The norm of the last step's gradient before clipping, a scalar on the device; not finite if the update was skipped."""
    found_inf: Tensor
    """1.0 on the device if the last update was skipped, else 0.0."""
    whole_gradients: bool
    """Whether each rank holds whole gradients between the backward pass and the update."""

    keeps_masters: bool
    """Whether the engine itself converts the weights to half precision and keeps fp32 masters of them."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The tensors that the optimizer updates, in its order: fp32 masters if the weights are half precision."""

    @property
    def names(self) -> Sequence[str]:
        """The names of `parameters` in the model."""

    def gradients(self) -> Sequence[tuple[str, Tensor]]:
        """(name, gradient) of every trained parameter that has one; unscaled in `Events.on_gradients`."""

    def loss_scale(self) -> Tensor | None:
        """The factor by which the loss is multiplied; None without a loss scaler."""


class RecipeView(Protocol):
    """What is read of the recipe while it runs. Steps and factories see the rest when they are called."""

    masters: Any | None

    @property
    def accelerator(self) -> Mapping[str, Any]: ...
    @property
    def events(self) -> Any:
        """What calls the `Events` of all plugins."""


class RunView(Protocol):
    """What plugins may read of a run. Other attributes of the run are not part of the contract."""

    device: torch.device
    rank: int
    world_size: int
    accelerator: Accelerator
    inner_model: Any
    """The model without wrappers."""
    model: Any
    """The model as the loop calls it."""
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: GradScaler | None
    """The gradient scaler of fp16 training, or None."""
    train_loader: Any
    """A DataLoader of torch with the sampler of `hwopt.data`, which has `lengths` and `steps_per_epoch` (None: unknown)."""
    eval_loader: Any
    observation: Observation
    """The operators that ran in the first step."""

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names in the model of the tensors that the optimizer updates, in its order."""

    @property
    def engine(self) -> EngineView:
        """What computes gradients and combines them over ranks. The engine of a plugin can have more attributes."""

    @property
    def forward_backward(self) -> Any:
        """What computes both passes of a micro-batch; None in a loop that is not hwopt's."""

    @property
    def loss(self) -> Callable[[Any, Tensor], tuple[Tensor, Any]]:
        """(outputs, targets) -> (summed loss, count)."""

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""

    @property
    def step_batch(self) -> Any:
        """The StepBatch of the running step, or of the last one; None before the first one."""

    @property
    def last_step_batch(self) -> Any:
        """The StepBatch of the last finished step; None before the first one."""

    @property
    def total_steps(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def recipe(self) -> RecipeView: ...
    @property
    def training(self) -> Training: ...
    @property
    def batch(self) -> BatchSizes: ...
    @property
    def plan(self) -> Any: ...
    @property
    def parts(self) -> Sequence[Any]:
        """The objects of `recipe.events` and `recipe.state`: for evidence."""

    @property
    def extras(self) -> Path:
        """A folder for additional files of `final/`; `final_steps` write to it."""

    def warn(self, message: str) -> None:
        """Show a warning to the user."""

    def say(self, message: str) -> None:
        """Show a note to the user."""


class Events:
    """The events of a run, in order. Each method does nothing by default."""

    def on_step_begin(self, run: RunView) -> None:
        """An optimizer step begins; once per step, also if the step is retried after running out of memory."""

    def on_gradients(self, run: RunView) -> None:
        """The step's gradients are whole and unscaled; before their norm is taken and they are clipped."""

    def on_step_end(self, run: RunView, applied: Tensor) -> None:
        """The optimizer was called. `applied`: a bool tensor on the device, False for a skipped update."""

    def on_evaluate_begin(self, run: RunView) -> None:
        """An evaluation begins; the model is in evaluation mode."""

    def on_evaluate_end(self, run: RunView) -> None:
        """The evaluation ended; the model goes back to training mode."""

    def on_saved(self, run: RunView, folder: Path) -> None:
        """A checkpoint or the best weights are complete on disk; on the first rank only."""


EVENTS = tuple(name for name in vars(Events) if name.startswith("on_"))
