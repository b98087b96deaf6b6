"""The cross-entropy of a linear layer, chunk by chunk in plain torch or with the kernels of Liger."""

from __future__ import annotations

from typing import Any

import torch

IGNORED = -100
"""The label of tokens that the loss ignores."""


def chunked_cross_entropy(
    hidden: Any,  # (tokens, hidden)
    weight: Any,  # (vocabulary, hidden)
    bias: Any | None,  # (vocabulary,)
    targets: Any,  # (tokens,)
    *,
    chunks: int,
    dtype: Any,
    needs_grad: tuple[bool, ...],
    on_card: bool,
) -> tuple[Any, Any, Any, Any]:
    """(summed cross-entropy, gradient of hidden, of weight, of bias) in fp32, or in fp64 for fp64 inputs.

    `needs_grad`: whether to compute each gradient; the others are None. `dtype`: the dtype of the matrix products.
    `on_card`: compute the products for the weight gradient in half precision, as tensor cores do. A CPU computes them in fp32,
    because adding half to fp32 there would copy the whole gradient.
    """
    full = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=full, device=hidden.device)
    hidden_grad = torch.empty_like(hidden, dtype=full) if needs_grad[0] else None
    weight_grad = torch.zeros_like(weight, dtype=full) if needs_grad[1] else None
    bias_grad = torch.zeros_like(bias, dtype=full) if bias is not None and needs_grad[2] else None
    low, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def add_chunk(states: Any, labels: Any, states_grad: Any | None) -> None:
        states, ignored, index = states.to(dtype), (labels == IGNORED)[:, None], labels.clamp(min=0)[:, None]
        low_logits = torch.nn.functional.linear(states, low, low_bias)  # (chunk, vocabulary)
        logits = low_logits.to(full)
        logits.sub_(logits.amax(1, keepdim=True))
        label_logits = logits.gather(1, index)
        exponentials = logits.exp_()
        total = exponentials.sum(1, keepdim=True)
        loss.add_((total.log() - label_logits).masked_fill_(ignored, 0).sum())
        if not any(needs_grad):
            return
        # gradient of the logits: softmax, minus 1 at the label; 0 for ignored tokens
        logits_grad = exponentials.div_(total.masked_fill_(ignored, torch.inf)).scatter_add_(1, index, ignored.to(full) - 1)
        if bias_grad is not None:
            bias_grad.add_(logits_grad.sum(0))
        low_grad = logits_grad if dtype == full else low_logits.copy_(logits_grad)
        if states_grad is not None:
            states_grad.copy_(low_grad @ low)
        if weight_grad is not None and on_card and dtype != full:
            scale = 1 << max(0, len(states).bit_length() - 6)  # sums over more than about 64 tokens can overflow fp16
            weight_grad.add_(low_grad.t() @ (states / scale), alpha=scale)
        elif weight_grad is not None:
            weight_grad.addmm_(logits_grad.t(), states.to(full))

    # the number of chunks does not depend on the number of tokens: the memory planner extrapolates from one size to others
    grad_chunks = [None] * chunks if hidden_grad is None else hidden_grad.tensor_split(chunks)
    for states, labels, states_grad in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), grad_chunks, strict=True):
        add_chunk(states, labels, states_grad)
    return loss, hidden_grad, weight_grad, bias_grad


class FusedLinearCrossEntropy(torch.autograd.Function):
    """`chunked_cross_entropy` with its gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, settings: dict[str, Any]) -> Any:
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        loss, *ctx.gradients = chunked_cross_entropy(
            hidden, weight, bias, targets, needs_grad=ctx.needs_input_grad[:3], **settings
        )
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so they can be used once only
        assert gradients is not None, "backward() was called twice"
        scaled = [None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None


def linear_cross_entropy(
    hidden: Any, weight: Any, bias: Any | None, targets: Any, *, chunks: int, dtype: Any = None, on_card: bool = False
) -> Any:
    """The cross-entropy of `hidden @ weight.T + bias`, summed over the targets that are not -100; backward works once.

    hidden (tokens, hidden), weight (vocabulary, hidden), bias (vocabulary,) or None, targets (tokens,). The tokens are processed
    in `chunks` equal parts. `dtype`: the dtype of the matrix products, default the dtype of the weight.
    """
    settings = {"chunks": chunks, "dtype": dtype or weight.dtype, "on_card": on_card}
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled():
            return FusedLinearCrossEntropy.apply(hidden, weight, bias, targets, settings)
        return chunked_cross_entropy(hidden, weight, bias, targets, needs_grad=(False, False, False), **settings)[0]


def liger_cross_entropy(hidden: Any, weight: Any, bias: Any | None, targets: Any, *, dtype: Any) -> Any:
    """`linear_cross_entropy` with Liger's kernels, on a CUDA device. The weight gradient is accumulated in fp32."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        return loss(weight.to(dtype), hidden.to(dtype), targets, None if bias is None else bias.to(dtype))
