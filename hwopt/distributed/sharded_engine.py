"""An engine that spreads the model over the ranks, which so meet inside every micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from hwopt.data.step_batch import MicroBatch, StepBatch
from hwopt.distributed.engine import Engine


class ShardedEngine(Engine, ABC):
    """An engine that spreads the model over the ranks, which so meet inside every micro-batch."""

    supports_retry = False
    whole_gradients = False
    meets_in_micro_batches = True
    cpu_group: dist.ProcessGroup
    """Whoever derives from this makes it."""

    def micro_batches(self, batch: StepBatch, rung: int) -> Iterator[tuple[MicroBatch, bool]]:
        """As many as on the rank that has most of them: the smallest one again, without weight."""
        own = [micro_batch for micro_batch, _ in batch.micro_batches(rung)]
        most = torch.tensor(len(own))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.cpu_group)
        smallest = min(own, key=lambda micro_batch: micro_batch.targets.numel())
        own += [replace(smallest, loss_weight=0.0)] * (int(most) - len(own))
        return ((micro_batch, number == len(own)) for number, micro_batch in enumerate(own, start=1))

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter whole, in the host's memory, the trained ones in fp32; empty but on the first rank. All call it."""

    def exported(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.full_weights()
        return {name: found.get(name, value) for name, value in weights.items()}

    def unsharded_model(self) -> Any:
        """The model with plain parameters: in the host's memory on the first rank, without any memory on the others."""
        weights = self.full_weights()
        model = self.run.inner_model
        plain: dict[int, torch.nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                key = id(parameter)
                if key not in plain:
                    value = weights.get(f"{prefix}.{name}" if prefix else name)
                    if value is None:
                        value = torch.empty(self.full_shape(parameter), device="meta")
                    plain[key] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad and value.is_floating_point())
                module._parameters[name] = plain[key]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.cpu()
        return model
