"""Frozen weights in the dtype that autocast computes with, and models back in fp32.

Autocast rounds each weight of a matrix product anyway, so the products of frozen weights stay the same, and the weights take
half of the memory. As in other tools, embeddings and norms are stored in bf16 too, and with them the sums between layers. In
fp16 those sums can overflow, so there embeddings and norms stay in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwopt.plugin import RunView

CAST = "frozen_weights_are_cast"
"""Attribute of a model on which `cast_frozen` was called."""
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def is_norm(module: Any) -> bool:
    """Whether `module` is a normalization layer, by its class name: LayerNorm, LlamaRMSNorm, BatchNorm1d."""
    return "Norm" in type(module).__name__ and next(module.children(), None) is None


def cast_frozen(dtype: str, model: Any, run: RunView | None = None) -> Any:
    """`model`, with its frozen fp32 weights cast to `dtype` ("fp16" or "bf16"). Buffers stay: rotary frequencies need fp32."""
    import torch

    half = getattr(torch, DTYPES[dtype])
    kept = [module for module in model.modules() if is_norm(module) or isinstance(module, torch.nn.Embedding)]
    in_fp32 = {id(p) for module in kept for p in module.parameters()} if dtype == "fp16" else set()
    for p in model.parameters():
        if p.dtype == torch.float32 and not p.requires_grad and id(p) not in in_fp32:
            p.data = p.data.to(half)
    setattr(model, CAST, True)
    return model


def to_fp32(model: Any, masters: Mapping[Any, Any] | None = None) -> Any:
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
