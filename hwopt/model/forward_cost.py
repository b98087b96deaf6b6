"""The cost of a forward pass, counted on the meta device: operations, arithmetic and memory traffic. Needs no weights."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hwopt.model.packing import skip_packed_row_search

TOKENS = 64  # length of the counted input: long enough that what does not depend on the length is a small part


class ForwardCost(NamedTuple):
    operations: int  # operations that launch a kernel: views and allocations do not
    flops_per_token: float  # floating-point operations of matrix products and attention
    values_per_token: float  # elements that all other operations read and write, without parameters


def flops_of(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of a matrix product or of attention; 0 for other operators.

    torch 2.11 refuses to count attention in which several query heads share a head of keys, so each query head gets its own here.
    """
    count = flop_registry.get(packet)
    if count is None:
        return 0
    if "scaled_dot_product" in str(packet):
        shapes = [value.shape if isinstance(value, Tensor) else value for value in args]
        heads = max(shape[1] for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4)
        args = [(shape[0], heads, *shape[2:]) if isinstance(shape, torch.Size) and len(shape) == 4 else shape for shape in shapes]
    return int(count(*args, **kwargs, out_val=out))


class Counter(TorchDispatchMode):
    """Counts the operations that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.flops, self.values = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or any(part in func.name() for part in ("empty", "_unsafe_view", "detach")):
            return out
        self.operations += 1
        if flops := flops_of(func.overloadpacket, args, kwargs, out):
            self.flops += flops
        else:
            tensors = (each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
            self.values += sum(each.numel() for each in tensors if not isinstance(each, torch.nn.Parameter))
        return out


def forward_cost(model: Any, max_tokens: int | None) -> ForwardCost | None:
    """The cost of a forward pass of `model`, on the meta device; None if the model needs values, which meta tensors lack."""
    tokens = min(TOKENS, max_tokens or TOKENS)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), skip_packed_row_search(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Counter() as counter:
                model(input_ids=ids)
        except Exception:  # every architecture raises its own errors
            return None
    return ForwardCost(counter.operations, counter.flops / tokens, counter.values / tokens)
