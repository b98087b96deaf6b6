"""Models whose loss is not a sum over samples. hwopt refuses them: training would depend on the split into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwopt.errors import InputError

if TYPE_CHECKING:
    import torch


def refuse_batch_statistics(model: torch.nn.Module) -> None:
    """Raise InputError for a model with batch normalisation: splitting a step batch would change the training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"model: {name} is a {type(module).__name__}, whose statistics depend on the split into micro-batches. "
                "Choose a model without batch normalisation"
            )
