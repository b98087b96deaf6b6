"""ShardedEngine: the base of engines that shard the model over the ranks (ZeRO, FSDP)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.data.batches.step_batch import MicroBatch, StepBatch
from hwopt.distributed.engine import Engine


class ShardedEngine(Engine):
    """An engine that shards the model over the ranks. The ranks communicate inside every micro-batch."""

    supports_retry = False
    whole_gradients = False
    meets_in_micro_batches = True
    cpu_group: dist.ProcessGroup
    """A gloo group of all ranks. The subclass creates it."""

    def micro_batches(self, batch: StepBatch, rung: int) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of `batch`, the same number on every rank.

        A rank that has fewer than another one repeats its smallest micro-batch with loss weight 0.
        """
        local = [micro_batch for micro_batch, _ in batch.micro_batches(rung)]
        smallest = min(local, key=lambda micro_batch: micro_batch.targets.numel())
        local += [replace(smallest, loss_weight=0.0)] * (self.all_reduce_max(len(local)) - len(local))
        return ((micro_batch, number == len(local)) for number, micro_batch in enumerate(local, start=1))

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Name -> unsharded parameter in host memory, trained ones in fp32. Only the first rank has them. All ranks call it.

        All names of a tied parameter share a copy.
        """
        copies: dict[str, Tensor] = {}
        first_names: dict[int, str] = {}
        for name, parameter in self.run.inner_model.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            value = self.unshard(parameter) if first == name else None
            if self.run.is_main:
                copies[name] = copies[first] if value is None else value.to("cpu", copy=True).contiguous()
        return copies

    def exported(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        full = self.full_weights()
        return {name: full.get(name, value) for name, value in weights.items()}

    def unsharded_model(self) -> Any:
        """The model with plain parameters: in host memory on the first rank, on the meta device on the others."""
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
