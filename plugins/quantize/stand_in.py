"""A linear layer with packed weights that fake tensors can run, with bitsandbytes' memory: for the memory planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64


class Product(torch.autograd.Function):
    """x W^T with a weight that is made from its bytes, and made once more for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        ctx.x = x if layer.bits == 8 else None  # kept for a gradient of the weight that is never asked for
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, layer.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient @ ctx.layer.dequantize(), None, None


class PackedLinear(torch.nn.Module):
    W_q = True
    """PEFT asks layers that have it to `dequantize` themselves."""

    def __init__(self, layer: torch.nn.Linear, bits: int, double: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits, self.nested, self.compute_dtype = bits, double and bits == 4, dtype
        size = layer.weight.numel()
        self.weight = torch.nn.Parameter(torch.empty(size * bits // 8, dtype=torch.uint8), requires_grad=False)
        scales = layer.out_features if bits == 8 else size // BLOCK
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8 if self.nested else torch.float32))
        self.bias = layer.bias

    def dequantize(self) -> Tensor:
        """The weight, (out_features, in_features)."""
        scales = torch.empty_like(self.get_buffer("scales"), dtype=torch.float32) if self.nested else None
        weight = torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype)
        del scales
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 8:
            self.compute_dtype = x.dtype
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        result: Tensor = Product.apply(x.to(self.compute_dtype), self, bias)
        return result.to(x.dtype)
