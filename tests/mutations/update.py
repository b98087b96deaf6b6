"""Mutations of what plugins change in the update of the weights."""

from __future__ import annotations

import pytest
import torch

from mutations import Mutation


def unfused_adamw(patch: pytest.MonkeyPatch) -> None:
    """torch's AdamW ignores `fused`."""
    real = torch.optim.AdamW.__init__

    def init(self: torch.optim.AdamW, *args: object, fused: bool = False, **kwargs: object) -> None:
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    patch.setattr(torch.optim.AdamW, "__init__", init)


def states_in_32_bit(patch: pytest.MonkeyPatch) -> None:
    """bitsandbytes creates states in 32 bit for every tensor."""
    from bitsandbytes.optim.optimizer import Optimizer2State

    real = Optimizer2State.__init__

    def init(self: Optimizer2State, *args: object, **kwargs: object) -> None:
        real(self, *args, **kwargs)
        self.args.min_8bit_size = 1 << 40

    patch.setattr(Optimizer2State, "__init__", init)


def states_are_not_paged(patch: pytest.MonkeyPatch) -> None:
    """bitsandbytes allocates states that should be paged in the memory of the device."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    patch.setattr(Optimizer8bit, "get_state_buffer", lambda self, p, dtype=torch.float32: torch.zeros_like(p, dtype=dtype))


def torchao_states_in_32_bit(patch: pytest.MonkeyPatch) -> None:
    from torchao.optim import AdamW8bit

    patch.setattr(AdamW8bit, "_subclass_zeros", staticmethod(lambda tensor, *_: torch.zeros_like(tensor)))


def no_hooks(patch: pytest.MonkeyPatch) -> None:
    """torch never calls the hooks of a complete gradient."""
    patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", lambda self, hook: None)


UPDATE = (
    Mutation("optimizer", "AdamW is not fused", unfused_adamw, "expected fused True"),
    Mutation("optimizer", "states stay in 32 bit", states_in_32_bit, "expected quantized True", {"name": "adamw_bnb_8bit"}),
    Mutation(
        "optimizer",
        "torchao quantizes nothing",
        torchao_states_in_32_bit,
        "expected quantized True",
        {"name": "adamw_torch_8bit"},
        compiles=True,
    ),
    Mutation(
        "optimizer_in_backward",
        "the hooks are never called",
        no_hooks,
        "0 of",
        {"clipping": "off"},
        {"batch": {"train": 8}},
    ),
)
