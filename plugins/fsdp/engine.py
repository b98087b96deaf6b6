"""The engine of FSDP: torch's `fully_shard`, put on by Accelerate, under the loop's uneven micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from hwopt.distributed.data_parallel import broadcast_weights
from hwopt.distributed.sharded_engine import ShardedEngine
from hwopt.errors import PluginError
from hwopt.plugin import RunView
from hwopt.saving.tensor_tree import describe

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FsdpEngine(ShardedEngine):
    """Gradients are averaged in the backward pass, and so weighed by the number of ranks; each rank steps on its own shards."""

    def __init__(self, run: RunView, *, reduce: str) -> None:
        """`reduce`: gradients meet after every "micro_batch", or once a "step"."""
        self.once = reduce == "step"
        self.cpu_group = dist.new_group(backend="gloo")
        broadcast_weights(run.inner_model, self.cpu_group)
        run.model = sharded(run)
        super().__init__(run)

    def set_gradient_sync(self, last: bool) -> None:
        if self.once:
            self.run.model.set_requires_gradient_sync(last)

    def backward(self, loss: Tensor, loss_weight: float) -> None:
        super().backward(loss, loss_weight * self.run.world_size)

    @torch.no_grad()
    def local_gradients(self) -> list[Tensor]:
        """Of the shards; a rank may have none of a small parameter."""
        local = [p.grad.to_local() for p in self.parameters if p.grad is not None]
        return [gradient for gradient in local if gradient.numel()]

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        squared = super().norm_of(gradients).square() if gradients else torch.zeros_like(self.norm)
        dist.all_reduce(squared)
        return squared.sqrt()

    def reshard(self) -> None:
        """Free what a forward pass without a backward one has left whole."""
        for module in self.units():
            module.reshard()

    def units(self) -> list[FSDPModule]:
        """What is gathered and freed together, the whole model among it."""
        return [module for module in self.run.inner_model.modules() if isinstance(module, FSDPModule)]

    def unshard(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else super().unshard(value)

    def shard(self, value: Tensor, like: Any) -> Tensor:
        value = super().shard(value, like)
        # every rank has read the file: each takes its own part
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        self.reshard()
        super().restore(snapshot)

    def copy_into(self, made: Any, saved: Any) -> Any:
        if not isinstance(made, DTensor):
            return super().copy_into(made, saved)
        if not isinstance(saved, Tensor) or saved.shape != made.shape:
            raise ValueError(f"there is {describe(saved)} for {describe(made)}")
        return made.copy_(self.shard(saved, made))

    def full_weights(self) -> dict[str, Tensor]:
        self.reshard()
        return self.on_first_rank(dict(self.run.inner_model.named_parameters(remove_duplicate=False)))

    @torch.no_grad()
    def on_first_rank(self, parameters: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copies in the host's memory; the same tensor under all names of a tied parameter. All ranks meet in it."""
        found: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for name, parameter in parameters.items():
            first = names.setdefault(id(parameter), name)
            if first == name:
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                if self.run.is_main:
                    found[name] = value.to("cpu", copy=True).contiguous()
            elif self.run.is_main:
                found[name] = found[first]
        return found

    def unsharded_model(self) -> Any:
        model = super().unsharded_model()
        for module in model.modules():
            if isinstance(module, FSDPModule):  # a class made for the purpose, from the model's own
                module.__class__ = type(module).__bases__[1]
        return model


def sharded(run: RunView) -> Any:
    """The run's model in shards, in place, and its optimizer stepping on them: Accelerate does both."""
    accelerator = run.accelerator
    if not accelerator.is_fsdp2:
        raise PluginError(
            f"plugin 'fsdp': Accelerate makes this {accelerator.distributed_type.value}, not FSDP: it needs a CUDA device and "
            "a process for each of several ranks. Start them with `hwopt run --processes N`, or remove [plugins.fsdp]"
        )
    settings = accelerator.state.fsdp_plugin
    settings.transformer_cls_names_to_wrap = layer_classes(run.inner_model)
    settings.mixed_precision_policy = mixed_precision(accelerator.mixed_precision)
    model, _ = accelerator.prepare(run.inner_model, run.optimizer)
    return model


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Products in half, shards and the sum over the ranks in fp32."""
    if precision not in DTYPES:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def layer_classes(model: Any) -> list[str]:
    """The class names of the layers that are gathered one at a time, as transformers has them for the model.

    Without those that hold the input embedding, which Accelerate shards by itself.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    embedding = model.get_input_embeddings()
    found = {type(module).__name__ for module in model.modules()} & named
    around = {type(module).__name__ for module in model.modules() if any(part is embedding for part in module.modules())}
    if not found - around:
        raise PluginError(
            f"plugin 'fsdp': transformers names no layers of {type(model).__name__} that could be gathered one at a time; "
            "remove [plugins.fsdp]"
        )
    return sorted(found - around)
