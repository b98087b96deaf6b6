"""Selective checkpointing: the forward pass stores matrix products and attention, and the recomputation reuses them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class Recomputation(TorchDispatchMode):
    """torch's mode wants every operator of the forward pass again, this one only the stored ones.

    Stage 3 of ZeRO gathers weights in other places than in the forward pass.
    """

    def __init__(self, reuse: Any, stored: list[Any]) -> None:
        """`reuse`: torch's mode, which returns the results of the `stored` operators."""
        super().__init__()
        self.reuse, self.stored = reuse, stored

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in self.stored:
            return self.reuse.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))


def keep_products() -> tuple[Any, Recomputation]:
    """The two contexts for `checkpoint(context_fn=…)`: of the forward pass, and of the recomputation."""
    aten = torch.ops.aten
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    stored = [aten.mm.default, aten.addmm.default, *(getattr(aten, f"_scaled_dot_product_{name}").default for name in attention)]
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):  # the product with a 4-bit weight of bitsandbytes 0.50
        stored.append(torch.ops.bitsandbytes.gemm_4bit.default)
    store, reuse = create_selective_checkpoint_contexts(stored)
    return store, Recomputation(reuse, stored)
