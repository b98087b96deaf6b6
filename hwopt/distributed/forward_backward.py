"""Forward and backward pass of one micro-batch; the recipe's slot `forward_backward` may replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hwopt.data.batches.step_batch import MicroBatch
    from hwopt.plugin.run_view import RunView


class ForwardBackward:
    """What the loop calls for each micro-batch."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.engine: Any = run.engine

    def __call__(self, micro_batch: MicroBatch, first: bool, last: bool, mark_time: Callable[[str], None]) -> Tensor:
        """Accumulate the gradients of `micro_batch`. Returns its summed loss, valid until the next call.

        `first` and `last`: its place in the step. Call `mark_time("forward")` when the host has issued the forward pass.
        """
        run = self.run
        loss, _ = run.loss(run.model(**micro_batch.inputs), micro_batch.targets)
        mark_time("forward")
        self.engine.backward(loss, micro_batch.loss_weight, last)
        return loss.detach()

    def free(self) -> bool:
        """Free the device memory that is kept between two calls. Returns whether there was any."""
        return False
