"""Forward and backward pass of one micro-batch; the recipe's slot `forward_backward` may wrap it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from hwopt.data.batches.step_batch import MicroBatch
from hwopt.plugin.run_view import RunView

TARGETS = "targets"  # the name of the loss's targets beside those of the arguments of `forward`


class ForwardBackward:
    """What the loop calls for each micro-batch."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.engine: Any = run.engine

    def __call__(self, micro_batch: Any, first: bool, last: bool, mark_time: Callable[[str], None]) -> Tensor:
        """Accumulate the gradients of `micro_batch`. Returns its summed loss, valid until the next call.

        `first` and `last`: its place in the step. Call `mark_time("forward")` when the host has issued the forward pass.
        """
        loss = self.loss(self.tensors(micro_batch))
        mark_time("forward")
        self.engine.backward(loss, micro_batch.loss_weight, last)
        return loss.detach()

    # the parts of a call, for a wrapper that records what the device does

    def tensors(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """What the passes read of `micro_batch`, in the same order for all of a run."""
        return {**micro_batch.inputs, TARGETS: micro_batch.targets}

    def constants(self) -> Hashable:
        """What `compute` reads on the host beside the tensors: what was recorded holds for these values alone."""
        return ()

    def set_weight(self, micro_batch: MicroBatch) -> None:
        """Write the weight of the loss of `micro_batch` into the memory that `compute` reads."""
        self.engine.set_factor(micro_batch.loss_weight, self.engine.factor.dtype)

    def compute(self, tensors: dict[str, Tensor]) -> Tensor:
        """Both passes, as operators of the device alone. Returns the detached loss."""
        loss = self.loss(tensors)
        loss.backward(gradient=self.engine.factor)
        return loss.detach()

    def loss(self, tensors: dict[str, Tensor]) -> Tensor:
        """The summed loss of the model's outputs."""
        arguments = {name: tensor for name, tensor in tensors.items() if name != TARGETS}
        loss: Tensor = self.run.loss(self.run.model(**arguments), tensors[TARGETS])[0]
        return loss

    def free(self) -> bool:
        """Free the device memory that is kept between two calls. Returns whether there was any."""
        return False
