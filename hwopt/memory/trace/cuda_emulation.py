"""Makes fake CPU tensors use memory as tensors of a CUDA device do.

Fake CUDA tensors need a CUDA build of torch, and a plan can be made on any machine. These differences matter:

* the operations that autocast computes in fp32 and so copies;
* softmax: from fp16 to fp32 in one kernel, without a copy of its input; its backward multiplies gradient and output first;
* the attention kernel: flash and memory-efficient attention store no score matrix;
* dropout's mask of one byte;
* optimizers that work on all tensors at once;
* `save_on_cpu`, which moves saved tensors to the host. Here they move to the meta device: its tensors take no device memory.

The emulation affects the whole process, so it runs in the tracing process.
Source: torch's aten/src/ATen/autocast_mode.h, aten/src/ATen/native/SoftMax.cpp, cuda/SoftMax.cu, ReduceOps.cpp and transformers
(attention.cpp, cuda/sdp_utils.cpp, cuda/attention_backward.cu), aten/src/ATen/cuda/CublasHandlePool.cpp; its notes on CUDA
semantics, "cuBLAS workspaces".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hwopt.hardware.device import Hardware
from hwopt.memory.trace.timeline import ColumnSum
from hwopt.memory.trace.tracker import Workspace

aten = torch.ops.aten

GRANULARITY = 512  # bytes to which torch's caching allocator rounds sizes up

AUTOCAST_TO_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "rms_norm", "group_norm"),
    *("nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "logsumexp", "cdist", "dist"),
    *("binary_cross_entropy_with_logits", "cosine_similarity", "cumprod", "cumsum"),
)
"""Operations that autocast computes in fp32 on CUDA, but most of them in the input's dtype on a CPU."""

REDUCED_IN_FP32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "linalg_vector_norm")
"""Operations to which autocast on CUDA passes `dtype=torch.float32`. Their kernels convert in registers (softmax only fp16)."""

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Version of torch; what its kernels allocate depends on it."""

CUBLAS_LT_WORKSPACE = 1 << 20
"""Bytes of the workspace that torch gives to cuBLASLt, which adds a bias in the product's kernel."""

PRODUCTS = (aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default)
BINARY_OPERATORS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add_.Tensor, aten.mul_.Tensor)


def allocation_granularity(hardware: Hardware) -> int:
    """Return the number of bytes to whose multiples the allocator rounds sizes up."""
    return GRANULARITY if hardware.device_type == "cuda" else 1


def cublas_workspace(hardware: Hardware) -> int:
    """Return the bytes of the workspace that torch gives to cuBLAS (documented default sizes)."""
    if hardware.compute_capability is None:  # an AMD GPU has another library
        return 0
    return 32 << 20 if hardware.compute_capability >= (9, 0) else 2 * (4096 << 10) + 8 * (16 << 10)


def kept_workspaces(hardware: Hardware) -> list[int]:
    """Return the bytes of each cuBLAS workspace that torch keeps.

    Before torch 2.15 it keeps one per handle, and each thread has its own handle: one for forward, one for backward. Later
    versions allocate a workspace for each product and free it (pytorch/pytorch#194311).
    """
    size = cublas_workspace(hardware)
    return [size] * 2 if size and TORCH < (2, 15) else []


def expandable_segments() -> bool:
    """Return whether torch's settings ask the CUDA allocator for expandable segments. torch 2.10 cannot report its settings."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        settings = str(torch._C._accelerator_getAllocatorSettings())
    else:
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower()


@contextmanager
def emulated(hardware: Hardware) -> Iterator[None]:
    """Make fake CPU tensors inside the block behave like tensors of `hardware`."""
    if hardware.device_type != "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    for names, kernel in ((AUTOCAST_TO_FP32, in_full_precision), (REDUCED_IN_FP32, with_fp32_result)):
        for name in names:
            packet, _, overload = name.partition(".")
            library.impl(name, partial(kernel, getattr(getattr(aten, packet), overload or "default")), "AutocastCPU")
    library.impl("softmax.int", partial(softmax, aten._softmax.default), "AutogradCPU")
    library.impl("log_softmax.int", partial(softmax, aten._log_softmax.default), "AutogradCPU")
    library.impl("cross_entropy_loss", torch.library.fallthrough_kernel, "AutocastCPU")  # CUDA's autocast does not list it
    functional = torch.nn.functional
    try:
        with (
            mock.patch.object(functional, "scaled_dot_product_attention", partial(attention, hardware)),
            mock.patch.object(functional, "dropout", partial(dropout, functional.dropout)),
            mock.patch.object(torch.autograd.graph, "save_on_cpu", SavedOnHost),
            mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=["cpu"]),
            mock.patch("torch.optim.optimizer._foreach_supported_types", [Tensor, torch.nn.Parameter, FakeTensor]),
        ):
            yield
    finally:
        library._destroy()


def in_full_precision(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return op(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})


def with_fp32_result(op: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `op` with `dtype=torch.float32`, unless a dtype is given or the input is not in half precision."""
    with torch.autocast("cpu", enabled=False):
        has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if has_dtype or input.dtype not in (torch.float16, torch.bfloat16):
            return op(input, *args, **kwargs)
        return op(input, *args, **kwargs | {"dtype": torch.float32})


def softmax(kernel: Any, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax or log-softmax. CUDA's kernel takes fp16 and returns fp32; any other conversion copies the input first."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        return kernel(input, dim, True)
    return kernel(input if dtype is None else input.to(dtype), dim, False)


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu` for fake tensors: a tensor on the meta device stands for one in host memory."""

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            return tensor.device, torch.empty_like(tensor, device="meta")

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor if tensor.device == device else torch.empty_like(tensor, device=device)

        super().__init__(pack, unpack)


def dropout(
    original: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Fused dropout of CUDA, which stores a mask of one byte per element."""
    if not training or not 0 < p < 1:
        return original(input, p, training, inplace)
    out: Tensor = aten.native_dropout(input, p, True)[0]
    return out


def attention(
    hardware: Hardware,
    query: Tensor,  # (batch, heads, length, head size)
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with the kernel that torch would choose on `hardware`."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    kernel = attention_kernel(hardware, query, key, attn_mask is not None, dropout_p)
    if kernel == "flash":
        size = query.shape[-1]
        padded = [torch.nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return _unpadded(out, size)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        additive = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = additive.masked_fill_(attn_mask.logical_not(), -torch.inf)
    if kernel == "efficient":
        if attn_mask is not None:
            if attn_mask.shape[-1] % 16:
                attn_mask = torch.nn.functional.pad(attn_mask, (0, -attn_mask.shape[-1] % 16))[..., : key.shape[-2]]
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        out = aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
        return _unpadded(out[0], value.shape[-1])
    math = aten._scaled_dot_product_attention_math
    out = math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _unpadded(out[0], value.shape[-1])


def _unpadded(out: Tensor, size: int) -> Tensor:
    return out if out.shape[-1] == size else out[..., :size]


def attention_kernel(hardware: Hardware, query: Tensor, key: Tensor, masked: bool, dropout_p: float) -> str:
    """Return the first enabled kernel, in the configured order of preference, that supports the inputs."""
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    size, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    grouped = query.shape[1] != key.shape[1]
    no_wide_heads = hardware.compute_capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    wide = no_wide_heads and query.requires_grad and (192 < size <= 224 or (size > 224 and dropout_p > 0))
    supported = {
        SDPBackend.FLASH_ATTENTION: bool(hardware.can("flash_attention")) and half and not masked and size <= 256 and not wide,
        SDPBackend.EFFICIENT_ATTENTION: bool(hardware.can("efficient_attention")) and (not grouped or TORCH >= (2, 15)),
    }
    names = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient"}
    for backend in _cur_sdpa_kernel_backends(with_priority=True):
        if supported.get(backend, False):
            return names[backend]
        if backend == SDPBackend.MATH:
            break
    return "math"


def repeated_gradients(query: Tensor, key: Tensor) -> list[int]:
    """Return the bytes of the gradients of keys and of values with a head per query head, before they are summed by group."""
    return [key.nbytes * query.shape[1] // key.shape[1]] * 2 if query.shape[1] != key.shape[1] else []


def flash_backward(gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the bytes of the row sums, of the query's fp32 gradient accumulator and of the repeated gradients."""
    rows, heads, length, size = query.shape
    values = rows * heads * ceil(length / 128) * 128
    return [values * 4, values * ceil(size / 32) * 32 * 4, *repeated_gradients(query, key)]


def efficient_backward(gradient: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the bytes of the repeated gradients, of the row sums and of the fp32 gradient accumulators.

    Keys and values have an accumulator only for head sizes above 128. Before torch 2.15 fp32 needs no accumulator. The kernel
    for fp32 takes the row sums from others: of the product of gradient and output.
    """
    rows, heads, length, size = query.shape
    found, sums = repeated_gradients(query, key), rows * heads * length * 4
    found += [sums] if query.dtype != torch.float32 else [gradient.nbytes, sums, sums, -sums, -gradient.nbytes]
    if query.dtype == torch.float32 and TORCH < (2, 15):
        return found
    blocks = rows * heads * ceil(length / 64)
    return [*found, blocks * (64 * size * 4 * (3 if size > 128 else 1) + 16)]


def biased_product(hardware: Hardware, bias: Tensor, one: Tensor, other: Tensor, **factors: float) -> int:
    """Return the bytes of the workspace of `addmm`, which cuBLASLt computes if the bias is one row."""
    with_epilogue = bias.dim() == 1 and bias.is_contiguous() and factors.get("beta", 1) == 1 and min(other.shape) > 1
    return CUBLAS_LT_WORKSPACE if with_epilogue else cublas_workspace(hardware)


def softmax_backward(gradient: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes of the product of gradient and output, which CUDA's kernel reads."""
    return gradient.numel() * gradient.itemsize


def column_sum(x: Tensor, dim: Any = None, *_: Any, **__: Any) -> ColumnSum | int:
    """Return the sum of columns that `x.sum(dim)` computes; 0 if it is another reduction, which needs no workspace."""
    reduced = {number % x.dim() for number in dim or ()}
    if not x.dim() or not x.numel() or reduced != set(range(x.dim() - 1)):
        return 0
    return ColumnSum(x.shape[-1], x.numel() // x.shape[-1])


def promotion_copies(one: Any, other: Any, **_: Any) -> int:
    """Return the bytes of operands copied to the common dtype. CPU kernels copy whole tensors, CUDA kernels use registers."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return 0
    common = torch.result_type(one, other)
    return sum(tensor.numel() * common.itemsize for tensor in (one, other) if tensor.dim() and tensor.dtype != common)


def workspaces(hardware: Hardware) -> Mapping[Any, Workspace]:
    """Return functions for the workspaces that kernels of `hardware` allocate internally, by operator."""
    if hardware.device_type != "cuda":
        return dict.fromkeys(BINARY_OPERATORS, promotion_copies)
    products: dict[Any, Workspace] = {}
    if TORCH >= (2, 15):
        products = dict.fromkeys(PRODUCTS, lambda *_, **__: cublas_workspace(hardware))
        products[aten.addmm.default] = partial(biased_product, hardware)
    return products | {
        aten._softmax_backward_data.default: softmax_backward,
        aten.sum.dim_IntList: column_sum,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    }
