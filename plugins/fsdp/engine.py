"""FsdpEngine: torch's `fully_shard`, applied by Accelerate, driven by hwopt's loop with micro-batches of different sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from hwopt.distributed.data_parallel import broadcast_weights
from hwopt.distributed.engine import Engine, new_cpu_group
from hwopt.distributed.sharded_engine import ShardedEngine
from hwopt.errors import PluginError
from hwopt.plugin import RunView
from hwopt.tensor_tree import describe

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FsdpEngine(ShardedEngine):
    """FSDP averages gradients in the backward pass; each rank updates its own shards.

    The loss is multiplied by the number of ranks, because hwopt divides it by the count of all ranks already.
    """

    def __init__(self, run: RunView, *, reduce: str) -> None:
        """`reduce`: "micro_batch" reduces gradients in every micro-batch, "step" once a step."""
        self.reduce_once = reduce == "step"
        self.cpu_group = new_cpu_group()
        broadcast_weights(run.inner_model, self.cpu_group)
        run.model = shard_model(run)
        super().__init__(run)

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        if self.reduce_once:
            self.run.model.set_requires_gradient_sync(last)
        super().backward(loss, loss_weight * self.run.world_size, last)

    @torch.no_grad()
    def local_gradients(self) -> list[Tensor]:
        """The gradients of this rank's shards; a rank may have no elements of a small parameter."""
        local = [p.grad.to_local() for p in self.parameters if p.grad is not None]
        return [gradient for gradient in local if gradient.numel()]

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        squared = super().norm_of(gradients).square() if gradients else torch.zeros_like(self.norm)
        dist.all_reduce(squared)
        return squared.sqrt()

    def reshard(self) -> None:
        """Free the gathered parameters that a forward pass without a backward pass leaves."""
        for module in self.units():
            module.reshard()

    def units(self) -> list[FSDPModule]:
        """The modules whose parameters are gathered and freed together; the model itself is one."""
        return [module for module in self.run.inner_model.modules() if isinstance(module, FSDPModule)]

    def unshard(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else super().unshard(value)

    def shard(self, value: Tensor, like: Any) -> Tensor:
        value = super().shard(value, like)
        # every rank has read the whole tensor: no communication (src_data_rank=None)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        self.reshard()
        super().restore(snapshot)

    def copy_into(self, target: Any, saved: Any) -> Any:
        if not isinstance(target, DTensor):
            return super().copy_into(target, saved)
        if not isinstance(saved, Tensor) or saved.shape != target.shape:
            raise ValueError(f"it has {describe(saved)}, expected {describe(target)}")
        return target.copy_(self.shard(saved, target))

    def full_weights(self) -> dict[str, Tensor]:
        self.reshard()
        return super().full_weights()

    def unsharded_model(self) -> Any:
        model = super().unsharded_model()
        for module in model.modules():
            if isinstance(module, FSDPModule):  # a class that fully_shard derived from the module's own
                module.__class__ = type(module).__bases__[1]
        return model


def shard_model(run: RunView) -> Any:
    """The run's model, sharded in place by Accelerate, which also makes the optimizer update the shards.

    Raises PluginError if Accelerate does not use FSDP on this device.
    """
    accelerator = run.accelerator
    if not accelerator.is_fsdp2:
        raise PluginError(
            f"plugin 'fsdp': Accelerate uses {accelerator.distributed_type.value} instead of FSDP, which needs CUDA devices and "
            "several processes. Start them with `hwopt run --processes N`, or remove [plugins.fsdp]"
        )
    settings = accelerator.state.fsdp_plugin
    settings.transformer_cls_names_to_wrap = layer_classes(run.inner_model)
    settings.mixed_precision_policy = mixed_precision(accelerator.mixed_precision)
    model, _ = accelerator.prepare(run.inner_model, run.optimizer)
    return model


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """Compute in half precision; keep shards and reduce gradients in fp32."""
    if precision not in DTYPES:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def layer_classes(model: Any) -> list[str]:
    """The class names of the layers that are gathered one at a time: the model's `_no_split_modules` in transformers.

    Excludes modules that contain the input embedding, which Accelerate shards separately. Raises PluginError if none is left.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    embedding = model.get_input_embeddings()
    present = {type(module).__name__ for module in model.modules()} & named
    around_embedding = {
        type(module).__name__ for module in model.modules() if any(part is embedding for part in module.modules())
    }
    if not present - around_embedding:
        raise PluginError(
            f"plugin 'fsdp': transformers does not name the layers of {type(model).__name__}, which FSDP gathers one at a time. "
            "Remove [plugins.fsdp]"
        )
    return sorted(present - around_embedding)


class FsdpStandIn(Engine):
    """Allocates what FSDP allocates on a device, for the memory planner, whose fake tensors cannot run collectives.

    Each module computes with a gathered copy of its parameters. If that is freed after forward, backward gathers it again.
    Tensors have their unsharded size; `Fsdp.memory` computes the part of a rank.
    """

    def __init__(self, run: RunView, reshard_after_forward: bool) -> None:
        super().__init__(run)
        self.dtype = DTYPES.get(run.recipe.accelerator.get("mixed_precision", "no"), torch.float32)
        self.reshard_after_forward = reshard_after_forward
        self.own: dict[torch.nn.Module, dict[str, Any]] = {}  # running module -> its parameters by name
        self.sources: dict[int, Tensor] = {}  # address of a gathered copy -> its parameter
        self.unit, self.trained_unit = largest_unit(run.inner_model)
        for module in run.inner_model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self.gather)
                module.register_forward_hook(self.release)
        run.model = self.forward

    def forward(self, **inputs: Any) -> Any:
        unit_and_next = torch.empty(2 * self.unit, dtype=self.dtype)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            outputs = self.run.inner_model(**inputs)
        del unit_and_next
        return outputs

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        unit_and_next = torch.empty(2 * self.unit, dtype=self.dtype)
        unit_gradients = torch.empty(self.trained_unit, dtype=self.dtype)
        reduced_gradients = torch.empty(self.trained_unit, dtype=torch.float32)
        super().backward(loss, loss_weight, last)
        del unit_and_next, unit_gradients, reduced_gradients

    def gather(self, module: torch.nn.Module, _: Any) -> None:
        """Forward pre-hook: replace the parameters of `module` by gathered copies."""
        self.own[module] = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in self.own[module].items():
            copy: Any = self.gathered_copy(parameter)
            self.sources[copy.untyped_storage()._cdata] = parameter
            module._parameters[name] = copy

    def release(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        """Forward hook: put the parameters of `module` back."""
        for name, parameter in self.own.pop(module).items():
            copy: Any = module._parameters[name]
            del self.sources[copy.untyped_storage()._cdata]
            module._parameters[name] = parameter

    def gathered_copy(self, parameter: Tensor) -> Tensor:
        """A copy of `parameter` in the dtype that the model computes with."""
        return parameter.clone() if parameter.dtype == self.dtype else parameter.to(self.dtype)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd saves for backward: for a view of a copy that is freed, the parameter and the view's shape."""
        parameter = self.sources.get(tensor.untyped_storage()._cdata)
        if parameter is None or not self.reshard_after_forward:
            return tensor
        return parameter, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that `pack` saved; a freed copy is gathered again."""
        if isinstance(saved, Tensor):
            return saved
        parameter, *view = saved
        return self.gathered_copy(parameter.detach()).as_strided(*view)


def largest_unit(model: Any) -> tuple[int, int]:
    """(elements, trained elements) of the largest part that is gathered at once: a layer, the embedding, or the rest."""
    names = layer_classes(model)
    layers = [list(module.parameters()) for module in model.modules() if type(module).__name__ in names]
    units = [*layers, list(model.get_input_embeddings().parameters())]
    inside = {id(p) for unit in units for p in unit}
    units.append([p for p in model.parameters() if id(p) not in inside])
    largest = max(units, key=lambda unit: sum(p.numel() for p in unit))
    return sum(p.numel() for p in largest), sum(p.numel() for p in largest if p.requires_grad)
