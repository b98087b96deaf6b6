"""What the states of an optimizer are: in which dtype, quantized, paged. For the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_QUANTIZED, LEAST_PAGED = 4096, 100_000
"""Elements of the smallest tensor whose states bitsandbytes and torchao quantize, and bitsandbytes pages."""


def moments_of(state: Mapping[str, Any]) -> list[Any]:
    """The tensors of a parameter's state with an entry for each weight, without the map of 8-bit values."""
    found = (value for key, value in state.items() if getattr(value, "ndim", 0) > 0 and not key.startswith(("qmap", "absmax")))
    return [getattr(value, "_local_tensor", value) for value in found]  # of a sharded tensor, what this rank has


def kind_of(state: Any) -> str:
    """The dtype of a state, or the class of a quantized one of torchao."""
    name = type(state).__name__
    return name if "OptimState" in name else str(state.dtype).removeprefix("torch.")


def is_quantized(moments: Sequence[Any]) -> bool:
    return all(kind == "uint8" or "OptimState" in kind for kind in map(kind_of, moments))


def quantizable(moments: Sequence[Any], optimizer: Any) -> bool:
    """Whether the states are large enough; torchao's have whole blocks too."""
    elements = moments[0].numel()
    return bool(elements >= LEAST_QUANTIZED and elements % getattr(optimizer, "block_size", 1) == 0)


def is_paged(moments: Sequence[Any]) -> bool:
    return all(getattr(moment, "is_paged", False) for moment in moments)


def bf16_weights(optimizer: Any) -> int:
    """The number of bf16 values among the weights that are updated."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(p.numel() for p in parameters if str(p.dtype) == "torch.bfloat16")
