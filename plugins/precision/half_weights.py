"""Weights in half precision: frozen ones under autocast (O1), all with fp32 masters (O2), and all without (pure).

Autocast rounds each weight of a matrix product anyway, so the products of frozen weights stay the same, and the weights take
half of the memory. As in other tools, embeddings and norms are stored in bf16 too, and with them the sums between layers. In
fp16 those sums can overflow, so there embeddings and norms stay in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hwopt.model.adapters import casting_layers
from hwopt.plugin import Events, RunView

CAST = "frozen_weights_are_cast"
"""Attribute of a model on which `cast_frozen` was called."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def is_norm(module: Any) -> bool:
    """Whether `module` is a normalization layer, by its class name: LayerNorm, LlamaRMSNorm, BatchNorm1d."""
    return "Norm" in type(module).__name__ and next(module.children(), None) is None


def cast_frozen(dtype: str, model: Any, run: RunView | None = None) -> Any:
    """`model`, with its frozen fp32 weights cast to `dtype` ("fp16" or "bf16"). Buffers stay: rotary frequencies need fp32.

    LoRA layers of PEFT no longer cast their inputs to fp32 (`hwopt.model.adapters`).
    """
    kept = [module for module in model.modules() if is_norm(module) or isinstance(module, torch.nn.Embedding)]
    in_fp32 = {id(p) for module in kept for p in module.parameters()} if dtype == "fp16" else set()
    for p in model.parameters():
        if p.dtype == torch.float32 and not p.requires_grad and id(p) not in in_fp32:
            p.data = p.data.to(DTYPES[dtype])
    for layer in casting_layers(model):
        layer.cast_input_dtype_enabled = False
    setattr(model, CAST, True)
    return model


def to_fp32(model: Any, run: RunView | None = None, *, masters: Mapping[Any, Any] | None = None) -> Any:
    """`model` in fp32, with `masters` (parameter -> fp32 parameter) as its weights.

    With frozen half-precision weights it moves to host memory, because twice their size may not fit on the device. A model with
    packed weights stays where it is, and so do its frozen weights: the plugin that packed them unpacks all.
    """
    masters = masters or {}
    parameters = list(model.parameters())
    packed = not all(p.is_floating_point() for p in parameters)
    if not packed and any(not p.requires_grad and p.element_size() < 4 for p in parameters):
        model = model.cpu()
    for p in parameters:
        if p.requires_grad or not packed:
            p.data = (masters[p].data if p in masters else p.data).to(p.device).float()
    return model


class HalfWeights(Events):
    """A model's half-precision weights, and fp32 masters of the trained ones: the loaded values, not rounded."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.masters: dict[Any, Any] = {}  # half parameter -> fp32 parameter, in the order of the model
        self.hooks: list[Any] = []
        self.halves: list[tuple[Any, str, Any]] = []  # module, name, half parameter: set during an evaluation with the masters
        self.autocast: Any = None

    def cast(self, model: Any, run: RunView | None = None) -> Any:
        """`model`, with its weights cast to half precision except norm layers and buffers."""
        for module in model.modules():
            if is_norm(module):
                self.hooks.append(module.register_forward_pre_hook(partial(_cast_inputs, torch.float32)))
                self.hooks.append(module.register_forward_hook(partial(_cast_output, self.dtype)))
                continue
            if isinstance(module, torch.nn.Conv2d):  # not all image models cast their fp32 pixels
                self.hooks.append(module.register_forward_pre_hook(partial(_cast_inputs, self.dtype)))
            for p in module.parameters(recurse=False):  # not buffers: rotary frequencies and counters need full precision
                if p.dtype == torch.float32:
                    if p.requires_grad:
                        self.masters[p] = torch.nn.Parameter(p.data)
                    p.data = p.data.to(self.dtype)
        self.hooks.append(model.register_load_state_dict_pre_hook(self._load_masters))
        return model

    def _load_masters(self, model: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        # checkpoints hold the fp32 masters: load them into the masters too, not only into the rounded half weights
        for name, p in model.named_parameters(remove_duplicate=False):
            if p in self.masters and prefix + name in state_dict:
                self.masters[p].data.copy_(state_dict[prefix + name])

    def swap_in(self, optimizer: Any, run: RunView | None = None) -> Any:
        """`optimizer`, with the half-precision parameters replaced by their masters."""
        for p, master in self.masters.items():
            master.data = master.data.to(p.device)  # the model was moved after `cast`
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(p, p) for p in group["params"]]
        return optimizer

    def collect(self) -> None:
        """Move the half-precision gradients to the masters as fp32, and free the half-precision ones."""
        halves = [p for p in self.masters if p.grad is not None]
        if not halves:
            return
        gradients = [torch.empty_like(self.masters[p]) for p in halves]
        torch._foreach_copy_(gradients, [p.grad for p in halves])
        for p, gradient in zip(halves, gradients, strict=True):
            self.masters[p].grad, p.grad = gradient, None

    def publish(self) -> None:
        """Round the masters into the half-precision weights of the model."""
        torch._foreach_copy_([p.data for p in self.masters], [master.data for master in self.masters.values()])

    def export(self, state_dict: dict[str, Any], run: RunView) -> dict[str, Any]:
        """`state_dict` of the model, with the half-precision weights replaced by the masters."""
        named = run.inner_model.named_parameters(remove_duplicate=False)
        found = {name: self.masters[p].detach() for name, p in named if p in self.masters and name in state_dict}
        return {**state_dict, **found}

    def on_evaluate_begin(self, run: RunView) -> None:
        """Compute with the masters under autocast until its end, for an evaluation with `full_eval = false`."""
        # replace the Parameter objects, not their data: another dtype would remove DDP's hooks from the half parameters
        self.halves = [
            (module, name, p)
            for module in run.inner_model.modules()
            for name, p in module.named_parameters(recurse=False)
            if p in self.masters
        ]
        for module, name, p in self.halves:
            setattr(module, name, self.masters[p])
        self.autocast = torch.autocast(run.device.type, dtype=self.dtype)
        self.autocast.__enter__()

    def on_evaluate_end(self, run: RunView) -> None:
        """Compute with the half-precision weights again."""
        self.autocast.__exit__(None, None, None)
        for module, name, p in self.halves:
            setattr(module, name, p)
        self.halves = []

    def restore(self, model: Any, run: RunView | None = None) -> Any:
        """`model` in fp32, with the masters as its weights and without hooks."""
        for hook in self.hooks:
            hook.remove()
        model = to_fp32(model, masters=self.masters)
        self.masters, self.hooks = {}, []
        return model


def _cast_inputs(dtype: Any, module: Any, inputs: Any) -> Any:
    return tuple(x.to(dtype) if hasattr(x, "is_floating_point") and x.is_floating_point() else x for x in inputs)


def _cast_output(dtype: Any, module: Any, inputs: Any, output: Any) -> Any:
    return output.to(dtype)


def cast_without_masters(model: Any, run: RunView | None = None) -> Any:
    """`model`, with all its parameters cast to bf16, norm layers included; not its buffers.

    Norm layers need no fp32 weights: their kernels and the norms of transformers compute in fp32 inside.
    """
    for p in model.parameters():
        if p.is_floating_point():  # quantized weights are packed bytes
            p.data = p.data.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(partial(_cast_inputs, torch.bfloat16))
    return model
