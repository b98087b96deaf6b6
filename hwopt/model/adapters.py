"""LoRA layers of PEFT whose cast of the input changes no bit under autocast.

They cast their input to the fp32 of the adapter, and autocast casts it back to the half precision that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def casting_layers(model: torch.nn.Module) -> list[Any]:
    """The LoRA layers inside `model`. Not those of DoRA and other variants, which compute in the dtype of the input."""
    return [module for module in model.modules() if not getattr(module, "lora_variant", True)]


class Outside:
    """The value of a layer's flag: true outside of autocast on `device_type`. Copied and saved as True, PEFT's default."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)

    def __reduce__(self) -> Any:
        return bool, (True,)


@contextmanager
def casts_outside_autocast(model: torch.nn.Module, device_type: str) -> Iterator[None]:
    """A block in which LoRA layers cast no input under autocast, except before dropout, whose numbers depend on the dtype."""
    casting = (layer for layer in casting_layers(model) if layer.cast_input_dtype_enabled is True)
    layers = [layer for layer in casting if not any(getattr(each, "p", 0) for each in layer.lora_dropout.values())]
    for layer in layers:
        layer.cast_input_dtype_enabled = Outside(device_type)
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True
