"""Mutations of what plugins change in the model: its precision, attention, layers, weights and loss."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mutations import Mutation

ADAPTER = {"adapter": {"always": True, "r": 4}}


def no_autocast(patch: pytest.MonkeyPatch) -> None:
    import accelerate.accelerator

    def disabled(*_: Any, **__: Any) -> Any:
        return torch.autocast("cpu", enabled=False)

    patch.setattr(accelerate.accelerator, "get_mixed_precision_context_manager", disabled)


def no_half_weights(patch: pytest.MonkeyPatch) -> None:
    """`tensor.to(torch.bfloat16)` returns the tensor as it is."""
    real = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if args == (torch.bfloat16,) else real(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "to", to)


def no_half_model(patch: pytest.MonkeyPatch) -> None:
    """transformers also makes the model in fp32."""
    no_half_weights(patch)
    patch.setattr(torch, "set_default_dtype", lambda dtype: None)


def unfused_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """`scaled_dot_product_attention` in single operations."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value


def no_fused_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.functional, "scaled_dot_product_attention", unfused_attention)


def no_kernel_order(patch: pytest.MonkeyPatch) -> None:
    """`sdpa_kernel` allows the math kernel only, whatever it is asked for."""
    import torch.nn.attention as attention

    real = attention.sdpa_kernel
    patch.setattr(attention, "sdpa_kernel", lambda backends, **_: real([attention.SDPBackend.MATH]))


def no_recomputation(patch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint

    patch.setattr(torch.utils.checkpoint, "checkpoint", lambda function, *inputs, **_: function(*inputs))


def adapters_without_effect(patch: pytest.MonkeyPatch) -> None:
    """PEFT's layers compute the frozen layer alone."""
    from peft.tuners.lora.layer import Linear

    patch.setattr(Linear, "forward", lambda self, x, *args, **kwargs: self.base_layer(x))


def weights_never_packed(patch: pytest.MonkeyPatch) -> None:
    """bitsandbytes moves the weights of its layers to the device without packing them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    patch.setattr(Params4bit, "to", lambda self, device: nn.Parameter(self.data, requires_grad=False))
    patch.setattr(Linear4bit, "forward", lambda self, x: nn.functional.linear(x, self.weight.to(x.dtype), self.bias))


def loss_of_whole_logits(patch: pytest.MonkeyPatch) -> None:
    import hwopt_plugins.fused_loss as fused_loss

    def plain(hidden: Any, weight: Any, bias: Any, targets: Any, **_: Any) -> Any:
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias).float(), targets, reduction="sum")

    patch.setattr(fused_loss, "linear_cross_entropy", plain)


def head_computes_logits(patch: pytest.MonkeyPatch) -> None:
    """The output layer keeps its own forward method: assigning an attribute of that name has no effect."""
    import hwopt_plugins.fused_loss as fused_loss

    def loss(self: Any, outputs: Any, targets: Any) -> Any:
        flat = nn.functional.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return flat, (targets != -100).sum()

    def attach(self: Any, model: Any, run: Any) -> Any:
        layer = model.get_output_embeddings()
        vars(layer)["forward"] = layer.forward
        self.layer = weakref.ref(layer)
        return model

    patch.setattr(fused_loss.FusedHead, "attach", attach)
    patch.setattr(fused_loss.FusedHead, "loss", loss)


MODEL = (
    Mutation("precision", "autocast has no effect", no_autocast, "expected bf16_matmuls True", {"dtype": "bf16"}),
    Mutation(
        "precision", "weights stay in fp32", no_half_weights, "expected half_weights True", {"dtype": "bf16", "level": "O2"}
    ),
    Mutation(
        "precision",
        "the model stays in fp32",
        no_half_model,
        "expected updated bfloat16",
        {"dtype": "bf16", "level": "pure"},
    ),
    Mutation("sdpa", "torch has no fused attention", no_fused_attention, "found eager"),
    Mutation("sdpa", "the order of kernels has no effect", no_kernel_order, "found math"),
    Mutation("checkpointing", "layers are not recomputed", no_recomputation, "without recomputation"),
    Mutation(
        "checkpointing",
        "layers are not recomputed (selective)",
        no_recomputation,
        "without recomputation",
        {"layers": "selective"},
    ),
    Mutation(
        "adapter", "the adapter adds nothing", adapters_without_effect, "tensors in the optimizer received", ADAPTER["adapter"]
    ),
    Mutation(
        "quantize", "weights are not packed", weights_never_packed, "expected bits 4", {"dtype": "fp32"}, ADAPTER, "causal-lm"
    ),
    Mutation("fused_loss", "the loss takes whole logits", loss_of_whole_logits, "on whole logits", kind="causal-lm"),
    Mutation(
        "fused_loss", "the output layer computes logits", head_computes_logits, "still computes the logits", kind="causal-lm"
    ),
)
