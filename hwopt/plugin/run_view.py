"""RunView: what plugins and engines see of a run. The run itself is built above this layer (`hwopt.training.run.Run`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hwopt.config.job import Training
from hwopt.plugin.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class BatchSizes:
    """Rows per micro-batch and per optimizer step. `step` counts the rows of one step over all ranks."""

    train: int
    eval: int
    step: int
    widths: tuple[int, ...] = ()
    """Fixed widths that micro-batches are padded to; empty: the longest row's."""
    pad_to_multiple_of: int = 1

    def accumulation(self, world_size: int) -> int:
        return ceil(self.step / (self.train * world_size))


@dataclass(frozen=True)
class Observation:
    """What really ran in the first optimizer step, recorded by torch's profiler: the raw material of evidence."""

    operators: Mapping[str, int] = field(default_factory=dict)
    """Operator name ("aten::_fused_adamw_") -> number of calls."""
    matmul_dtypes: Mapping[str, int] = field(default_factory=dict)
    """dtype of the first operand of matrix multiplications ("c10::BFloat16", "float") -> number of calls."""

    def calls(self, *parts: str) -> int:
        """The number of calls to operators whose name contains one of `parts`."""
        return sum(count for name, count in self.operators.items() if any(part in name for part in parts))


class EngineView(Protocol):
    """The engine of a run: how gradients are computed and combined."""

    parameters: list[torch.nn.Parameter]
    """The tensors that the optimizer updates, in its order; fp32 masters where the model's weights are half precision."""
    names: list[str]
    """The name in the model of each of `parameters`."""
    norm: Tensor
    """The norm of the last step's gradient before clipping, a scalar on the device; not finite if the update was skipped."""
    found_inf: Tensor
    """1.0 on the device if the last update was skipped, else 0.0."""
    whole_gradients: bool
    """Whether each rank holds whole gradients between the backward pass and the update."""

    def gradients(self) -> Sequence[tuple[str, Tensor]]:
        """(name, gradient) of every trained parameter that has one; unscaled in the event `gradients`."""
        ...

    def loss_scale(self) -> Tensor | None:
        """The factor that the loss is multiplied with; None without a loss scaler."""
        ...


class RunView(Protocol):
    """What plugins may read of a run. Everything else about a run is not part of the contract."""

    device: torch.device
    rank: int
    world_size: int
    accelerator: Any
    inner_model: Any
    """The model without wrappers."""
    model: Any
    """The model as the loop calls it."""
    optimizer: Any
    scheduler: Any
    scaler: Any
    """The gradient scaler of fp16 training, or None."""
    parameter_names: list[str]
    """The name in the model of each tensor that the optimizer updates, in its order."""
    engine: Any
    """An EngineView; engines of plugins have attributes of their own."""
    train_loader: Any
    eval_loader: Any
    observation: Observation
    """What ran in the first step."""

    @property
    def loss(self) -> Callable[[Any, Tensor], tuple[Tensor, Any]]:
        """(outputs, targets) -> (summed loss, count)."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def last_step_batch(self) -> Any:
        """The StepBatch of the last finished step; None before the first one."""
        ...

    @property
    def total_steps(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def training(self) -> Training: ...
    @property
    def batch(self) -> BatchSizes: ...
    @property
    def plan(self) -> Any: ...
    @property
    def extras(self) -> Path:
        """The folder for files that belong into `final/` beside the model; `final_steps` write there."""
        ...

    def warn(self, message: str) -> None:
        """Show a warning to the user."""
        ...

    def say(self, message: str) -> None:
        """Show a note to the user."""
        ...
