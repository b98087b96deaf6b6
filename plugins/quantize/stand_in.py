"""PackedLinear: a linear layer that allocates the same memory as one of bitsandbytes, and runs on the planner's fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64
OUTLIER = 6.0


class PackedProduct(torch.autograd.Function):
    """x W^T. Forward unpacks the weight, and backward unpacks it again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        if layer.bits == 4:
            with torch.autocast(x.device.type, enabled=False):
                return functional.linear(x, layer.dequantize(x.dtype), bias)
        ctx.x = x  # bitsandbytes saves it for the gradient of the weight, which is never needed
        if layer.on_host and layer.training:  # bitsandbytes has no int8 training kernel for CPUs
            return functional.linear(x, layer.dequantize(x.dtype), bias)
        return int8_product(x, layer, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.to(ctx.dtype) @ ctx.layer.dequantize(ctx.dtype), None, None


def int8_product(x: Tensor, layer: PackedLinear, bias: Tensor | None) -> Tensor:
    """x W^T in int8: quantized rows, int32 products, then scaling; several operators on a CPU, one on a GPU."""
    half = x.to(torch.float16)
    outliers = half.abs() >= OUTLIER
    largest = half.abs().amax(-1, keepdim=True).float()
    rows = torch.round(half * (127.0 / largest)).to(torch.int8) if layer.on_host else torch.empty_like(half, dtype=torch.int8)
    del half, outliers
    shape = (*rows.shape[:-1], layer.out_features)
    product = torch.empty(shape, dtype=torch.int32)
    if layer.on_host:
        scaled = product * (largest * layer.get_buffer("scales")) * 6.2e-5
        if bias is not None:
            scaled += bias
    else:
        scaled = torch.empty(shape, dtype=torch.float16)
    return scaled.to(x.dtype)


class PackedLinear(torch.nn.Module):
    W_q = True
    """PEFT calls `dequantize` on layers with this attribute."""

    def __init__(self, layer: torch.nn.Linear, bits: int, double: bool, dtype: torch.dtype, on_host: bool) -> None:
        """`dtype`: the dtype of products with 4-bit weights. `on_host`: allocate as on a CPU, which has other kernels."""
        super().__init__()
        self.on_host = on_host
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits, self.nested, self.compute_dtype = bits, double and bits == 4, dtype
        size = layer.weight.numel()
        self.weight = torch.nn.Parameter(torch.empty(size * bits // 8, dtype=torch.uint8), requires_grad=False)
        scales = layer.out_features if bits == 8 else size // BLOCK
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8 if self.nested else torch.float32))
        self.bias = layer.bias

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The unpacked weight, (out_features, in_features)."""
        scales = torch.empty_like(self.get_buffer("scales"), dtype=torch.float32) if self.nested else None
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype or self.compute_dtype)
        del scales
        return weight

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if self.bits == 8 else self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        result: Tensor = PackedProduct.apply(x.to(dtype), self, bias)
        return result if self.bits == 8 else result.to(x.dtype)
