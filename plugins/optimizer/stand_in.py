"""An optimizer that only allocates, for the memory planner: fake tensors cannot run kernels of torchao and of paged states."""

from __future__ import annotations

from typing import Any

SMALL = 4_096
"""Tensors with fewer elements keep states that are not quantized."""
TORCHAO_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}
TORCHAO_BLOCKS = {8: 256, 4: 128}
"""Bits of a state -> elements that share a scale, by default."""


def reserving_optimizer(state_bytes: float, torchao_bits: int | None, on_card: bool, groups: list[dict[str, Any]]) -> Any:
    """An optimizer that allocates `state_bytes` per parameter, or what torchao's AdamW of `torchao_bits` allocates.

    `on_card`: on a CUDA device instead of a CPU.
    """
    import torch

    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    one_kernel = torchao_bits == 8 and on_card and torch_version >= (2, 15)

    class Reserving(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state, temporary = torchao_bytes(p, torchao_bits) if torchao_bits else (plain_bytes(p, state_bytes), ())
                temporary = () if one_kernel else temporary
                if not self.state[p]:
                    self.state[p] = {f"reserved {number}": part for number, part in enumerate(self.reserve(p, state))}
                self.reserve(p, temporary)

        def reserve(self, like: Any, sizes: tuple[float, ...]) -> list[Any]:
            return [torch.empty(int(size), dtype=torch.uint8, device=like.device) for size in sizes]

    class Early(Reserving):
        def create_state(self) -> None:
            """As the optimizers of bitsandbytes here; the planner makes the state itself."""

    return (Reserving if torchao_bits else Early)(groups, {})


def plain_bytes(parameter: Any, state_bytes: float) -> tuple[float, ...]:
    """The bytes of the state of `parameter`; small tensors have 8 per element, unless the states are paged."""
    return (parameter.numel() * (8 if state_bytes > 0 and parameter.numel() < SMALL else state_bytes),)


def torchao_bytes(parameter: Any, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes of the tensors of the two states, bytes of the temporaries of the compiled update) of torchao's AdamW.

    A quantized state has packed codes, a 32-bit scale per block and a 32-bit table of code values. The compiled update stores
    both states in fp32, and in 4 bit their codes as int64, before it packs them; Inductor of torch 2.15 makes one kernel of the
    update in 8 bit on a CUDA device, which stores nothing (torch 2.11 and 2.15, as their allocators report).
    Which tensors are quantized: torchao/optim/adam.py, `_new_buffer`.
    """
    count, scale = parameter.numel(), 4 * parameter.numel() / TORCHAO_BLOCKS[bits]
    if count < SMALL or count % TORCHAO_BLOCKS[bits]:
        return (count * parameter.element_size(),) * 2, ()
    temporary = (4 * count, scale, *((8 * count,) if bits == 4 else ()))
    return (count * bits / 8, scale, 4 * 2**bits) * 2, temporary * 2
