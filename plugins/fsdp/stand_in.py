"""FsdpStandIn: allocates what FSDP allocates on a device, for the memory planner, whose fake tensors cannot run collectives.

Tensors have their unsharded size here; `Fsdp.memory` computes the part of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.plugin import RunView
from hwopt_plugins.fsdp.engine import DTYPES, layer_classes


class FsdpStandIn(Engine):
    """Each module computes with a gathered copy of its parameters. If that is freed after forward, backward gathers it again."""

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
