"""Mutations of what plugins change in engines: DeepSpeed's ZeRO, and torch's FSDP, which needs CUDA devices."""

from __future__ import annotations

from typing import Any

import pytest

from mutations import Mutation


def deepspeed_without_zero(patch: pytest.MonkeyPatch) -> None:
    """Accelerate prepares the model and the optimizer without DeepSpeed, as it does under ACCELERATE_USE_CPU."""
    import hwopt_plugins.zero

    patch.setattr(hwopt_plugins.zero.Zero, "apply", lambda self, recipe, context: None)


def lower_stage(patch: pytest.MonkeyPatch) -> None:
    """DeepSpeed uses stage 1, although its configuration asks for stage 2."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    real = DeepSpeedZeroOptimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **{**kwargs, "partition_grads": False})

    patch.setattr(DeepSpeedZeroOptimizer, "__init__", init)


TWO: dict[str, Any] = {"stage": 2, "offload": "none"}
ZERO = (
    Mutation("zero", "Accelerate does not use DeepSpeed", deepspeed_without_zero, "expected stage 2, found 0", TWO),
    Mutation("zero", "DeepSpeed uses another stage", lower_stage, "expected stage 2, found 1", TWO),
)
