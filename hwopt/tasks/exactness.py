"""Models whose loss is not a sum over samples. hwopt refuses them: training would depend on the split into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwopt.config.job import Job
from hwopt.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def refuse_inexact(model: torch.nn.Module, job: Job) -> None:
    """Raise InputError for a model whose loss is not a sum over samples: splitting a step batch would change the training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    refuse_router(getattr(model, "config", None), job)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"model: {name} is a {type(module).__name__}, whose statistics depend on the split into micro-batches. "
                "Choose a model without batch normalisation"
            )


def refuse_router(config: PretrainedConfig | None, job: Job) -> None:
    """Raise InputError for a mixture of experts, unless the job sets task.ignore_router_loss."""
    if config is None or job.task.ignore_router_loss:
        return
    text = config.get_text_config()
    values = [getattr(text, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = max((int(number) for number in values if isinstance(number, int)), default=0)
    if experts > 1 or (experts == 0 and getattr(text, "router_aux_loss_coef", None)):
        raise InputError(
            f"model: {config.model_type} is a mixture of {experts or 'several'} experts, whose load-balancing loss is not exact "
            "over micro-batches. Set task.ignore_router_loss = true to train without that loss, or choose a dense model"
        )
