"""Optimizers that only allocate, for the memory planner: fake tensors cannot run the kernels of torchao and of paged states."""

from __future__ import annotations

from typing import Any

SMALL = 4_096
"""Tensors with fewer elements keep states that are not quantized."""
TORCHAO_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}
TORCHAO_BLOCKS = {8: 256, 4: 128}
"""Bits of a state -> elements that share a scale, by default."""


def reserving_optimizer(state_bytes: float, groups: list[dict[str, Any]]) -> Any:
    """An optimizer that only allocates its state: `state_bytes` per parameter, 8 for small tensors. For the memory planner."""
    import torch

    class Reserving(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                if not self.state[parameter]:
                    size = parameter.numel() * (8 if state_bytes > 0 and parameter.numel() < SMALL else state_bytes)
                    self.state[parameter]["reserved"] = torch.empty(int(size), dtype=torch.uint8, device=parameter.device)

    return Reserving(groups, {})


def reserving_torchao(bits: int, groups: list[dict[str, Any]]) -> Any:
    """An optimizer that only allocates what torchao's AdamW allocates: states, and temporaries of its compiled update.

    A quantized state has packed codes, a 32-bit scale per block and a 32-bit table of code values. For a matrix the compiled
    update stores both states in fp32, and in 4 bit their codes as int64, before it packs them (torch 2.13, Inductor).
    """
    import torch

    def reserve(like: Any, *sizes: float) -> list[Any]:
        return [torch.empty(int(size), dtype=torch.uint8, device=like.device) for size in sizes]

    class Reserving(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                count, scale = p.numel(), 4 * p.numel() / TORCHAO_BLOCKS[bits]
                quantized = is_quantized_by_torchao(p, bits)
                if not self.state[p]:
                    parts = (count * bits / 8, scale, 4 * 2**bits) if quantized else (count * p.element_size(),)
                    self.state[p] = {f"reserved {number}": part for number, part in enumerate(reserve(p, *parts, *parts))}
                if quantized and p.ndim > 1:
                    temporary = (4 * count, scale, *((8 * count,) if bits == 4 else ()))
                    reserve(p, *temporary, *temporary)

    return Reserving(groups, {})


def is_quantized_by_torchao(parameter: Any, bits: int) -> bool:
    """Whether torchao quantizes the states of `parameter` (torchao/optim/adam.py, `_new_buffer`)."""
    count: int = parameter.numel()
    return count >= SMALL and count % TORCHAO_BLOCKS[bits] == 0
