"""InBackwardEngine: the engine of one device that updates each parameter inside the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.errors import PluginError

if TYPE_CHECKING:
    from hwopt.data.batches.step_batch import MicroBatch, StepBatch
    from hwopt.plugin import RunView


def call(method: WeakMethod[Any], number: int, parameter: Tensor) -> None:
    """Call `method`, which exists as long as its engine."""
    if (update := method()) is not None:
        update(number, parameter)


class InBackwardEngine(Engine):
    """Hooks run when a gradient is complete: they call the optimizer for this parameter, and free the gradient."""

    supports_retry = False
    whole_gradients = False
    accumulates = False

    def __init__(self, run: RunView, *, clip: bool) -> None:
        run.inner_model = run.inner_model.to(run.device)
        run.model = run.accelerator.prepare_model(run.inner_model, evaluation_mode=True)
        super().__init__(run)
        if not clip:
            self.max_norm = 0.0
        self.in_step = False
        """Whether a backward pass updates the weights; otherwise it only frees the gradients."""
        self.updated = 0
        """Number of parameters that the last backward pass updated."""
        self.missed: list[str] = []
        """The names of those that were only updated after it."""
        self.groups = [group for group in run.optimizer.param_groups for _ in group["params"]]
        """The group of each parameter."""
        self.norms: dict[int, Tensor] = {}
        """Number of a parameter -> norm of its gradient in this step."""
        # Python's garbage collector does not see the hooks of a parameter: a strong reference would keep the model forever
        update = WeakMethod(self.update_one)
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(call, update, number))

    def init_state(self, force: bool = False) -> None:
        # one parameter at a time: the gradients of all would need the memory that this engine saves
        every = self.parameters
        for parameter in every:
            self.parameters = [parameter]
            super().init_state(force)
        self.parameters = every

    def micro_batches(self, batch: StepBatch, rung: int) -> Iterator[tuple[MicroBatch, bool]]:
        """The one micro-batch of `batch`. Raises PluginError for several: the first one would already change the weights."""
        if len(batch.sizes) > 1 or rung:
            raise PluginError(
                f"plugin 'optimizer_in_backward': a step has {max(len(batch.sizes), 2**rung)} micro-batches, expected 1"
            )
        return batch.micro_batches()

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        self.updated = 0
        self.norms.clear()
        detached = loss.detach().float()
        torch.ne(detached - detached, 0, out=self.found_inf)  # inf - inf and nan - nan are nan, and nan != 0
        super().backward(loss, loss_weight, last)

    def update_one(self, number: int, parameter: Tensor) -> None:
        """Update `parameter`, the only one with a gradient, unless a gradient of this step was not finite. Free its gradient."""
        if self.in_step and parameter.grad is not None:
            norm = self.norms[number] = self.norm_of([parameter.grad])
            torch.maximum(self.found_inf, (norm - norm).ne(0).float(), out=self.found_inf)
            if self.max_norm:
                parameter.grad.mul_(torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))
            with self.only(number):
                self._step()
            self.updated += 1
        parameter.grad = None

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Show the optimizer this parameter only: it would look at all of them for each update."""
        groups, group = self.optimizer.param_groups, self.groups[number]
        every = group["params"]
        self.optimizer.param_groups, group["params"] = [group], [self.parameters[number]]
        try:
            yield
        finally:
            self.optimizer.param_groups, group["params"] = groups, every

    def update(self) -> None:
        """Update what still has a gradient, one that was not computed by a backward pass, and step the schedule."""
        self.in_step, in_backward = True, self.updated
        self.missed = [name for name, parameter in zip(self.names, self.parameters, strict=True) if parameter.grad is not None]
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.update_one(number, parameter)
        self.in_step, self.updated = False, in_backward
        if self.norms:
            self.norm = torch.linalg.vector_norm(torch.stack([norm for _, norm in sorted(self.norms.items())]))
        self.scheduler.step()
        self.zero_grad()
