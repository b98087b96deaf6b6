"""Mutations of a part of a model: of one module, half of them, all but one, or only after the first step.

Each patches what the layers call, for some of the modules in the order in which they are called first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mutations.model import unfused_attention

Chosen = Callable[[int], bool]
"""Whether the mutation holds for the module of this number."""
LAYERS = 4
"""Of the tests' model: attention is called once in each."""
PARTS: dict[str, Chosen] = {
    "one": lambda number: number == 0,
    "half": lambda number: number % 2 == 0,
    "all but one": lambda number: number > 0,
}


class Numbers:
    """Numbers objects in the order in which they are seen first."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def of(self, key: int) -> int:
        return self.seen.setdefault(key, len(self.seen))


def linear_in_fp32(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """Some linear layers compute in fp32, outside of autocast."""
    numbers, real = Numbers(), nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not chosen(numbers.of(id(self))):
            return real(self, x)
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    patch.setattr(nn.Linear, "forward", forward)


def linear_in_fp32_with_half_output(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """The same layers cast their output to bf16."""
    linear_in_fp32(patch, chosen)
    in_fp32 = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: in_fp32(self, x).to(torch.bfloat16))


def layers_not_recomputed(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """torch's `checkpoint` stores the activations of some layers."""
    import torch.utils.checkpoint

    numbers, real = Numbers(), torch.utils.checkpoint.checkpoint

    def checkpoint(function: Any, *inputs: Any, **options: Any) -> Any:
        layer = getattr(getattr(function, "func", function), "__self__", function)
        return function(*inputs) if chosen(numbers.of(id(layer))) else real(function, *inputs, **options)

    patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)


def attention_unfused(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """Some calls of attention run without a fused kernel."""
    calls, real = [0], nn.functional.scaled_dot_product_attention

    def attention(*inputs: Any, **options: Any) -> Any:
        calls[0] += 1
        return (unfused_attention if chosen((calls[0] - 1) % LAYERS) else real)(*inputs, **options)

    patch.setattr(nn.functional, "scaled_dot_product_attention", attention)


def attention_in_math(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """Some calls of attention run in the math kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    calls, real = [0], nn.functional.scaled_dot_product_attention

    def attention(*inputs: Any, **options: Any) -> Any:
        calls[0] += 1
        if not chosen((calls[0] - 1) % LAYERS):
            return real(*inputs, **options)
        with sdpa_kernel([SDPBackend.MATH]):
            return real(*inputs, **options)

    patch.setattr(nn.functional, "scaled_dot_product_attention", attention)


PARTIAL = {
    "linear layers in fp32": ("precision", {"dtype": "bf16"}, linear_in_fp32),
    "linear layers in fp32, half output": ("precision", {"dtype": "bf16"}, linear_in_fp32_with_half_output),
    "layers not recomputed": ("checkpointing", {}, layers_not_recomputed),
    "attention unfused": ("sdpa", {}, attention_unfused),
    "attention in the math kernel": ("sdpa", {}, attention_in_math),
}
"""What -> (plugin, options, function that patches a library for the chosen modules)."""
