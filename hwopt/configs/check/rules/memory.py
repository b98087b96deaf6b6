"""Settings that save memory that the card has to spare."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import Facts, Finding, rule
from hwopt.configs.check.rules.batch import TRAIN
from hwopt.configs.view import View
from hwopt.hardware.device import GIB

ENOUGH = 0.7
"""Fraction of the card's memory that the estimate without the saving may take. The rest is for the context and for its error."""
WIDTH_PER_LAYER = 43
"""Hidden size per layer of BERT-large. Narrower models than that are rare, and wider ones have smaller activations."""
ACTIVATION_BYTES = 34
"""Per token, layer and unit of the hidden size, in half precision, without attention scores (Korthikanti et al. 2022,
arXiv:2205.05198, equation 2)."""
VOCABULARY, LOGIT_BYTES = 128_000, 10
"""Logits of a causal language model, in half precision and in fp32, with their gradient."""
EIGHT_BIT = ("8bit", "4bit", "paged")


def estimate_gib(view: View, parameters: float, max_length: int) -> float:
    """Memory of a training step in GiB without checkpointing and with 32-bit states, from the number of parameters alone.

    Errs on the high side: the model is taken as narrow, and every sample as long as the longest.
    """
    weight = 0.7 if view.is_on("load_in_4bit") else 1.1 if view.is_on("load_in_8bit") else 6.0  # fp32 and a half-precision copy
    trained = 0.03 * parameters if view.is_on("use_peft") else parameters
    states = parameters * weight + trained * (4 + 8)  # gradients, Adam
    layers = (parameters / (12 * WIDTH_PER_LAYER**2)) ** (1 / 3)
    per_token = ACTIVATION_BYTES * layers * layers * WIDTH_PER_LAYER
    if view.value("task") == "causal-lm":
        per_token += VOCABULARY * LOGIT_BYTES
    half = any(view.is_on(word) for word in ("fp16", "bf16", "pure_bf16"))
    step: float = (states + (view.train_rows or 8) * max_length * per_token * (1 if half else 2)) / GIB
    return step


def spare(view: View, facts: Facts) -> str:
    """A sentence with both sizes if the step fits without the saving; "" if it may not."""
    assert facts.hardware is not None
    assert facts.parameters is not None
    assert facts.max_length is not None
    needed, there = estimate_gib(view, facts.parameters, facts.max_length), facts.hardware.memory_gib
    if facts.hardware.device_type == "cpu" or needed > ENOUGH * there:
        return ""
    return f"Without it a step takes about {needed:.1f} of {there:g} GiB ({facts.parameters / 1e6:,.0f} M parameters)."


@rule(
    "checkpointing-needless",
    "warning",
    words=("gradient_checkpointing",),
    needs=("card", "size"),
    source="notes.md#t4: checkpointing on a T4 for BERT-base",
)
def checkpointing_needless(view: View, facts: Facts) -> Iterator[Finding]:
    """Activation checkpointing although the step fits without it."""
    if TRAIN in view and view.is_on("gradient_checkpointing") and (sizes := spare(view, facts)):
        fix = f"remove [{'.'.join(view.spelled('gradient_checkpointing').split('.')[:2])}]"
        yield Finding(
            "gradient_checkpointing",
            f"Checkpointing saves memory that the card has to spare. {sizes}",
            "It computes the forward pass twice: a step takes 20 to 33 % longer. `hwopt plan` has exact figures.",
            fix if view.is_hwopt else view.line("gradient_checkpointing", False),
        )


@rule(
    "states-needless",
    "warning",
    words=("optim",),
    needs=("card", "size"),
    source="notes.md#rtx-3070-16-or-32-rows: needless with 16 rows",
)
def states_needless(view: View, facts: Facts) -> Iterator[Finding]:
    """Optimizer states in 8 bit, or paged, although states in 32 bit fit."""
    name = str(view.value("optim"))
    if TRAIN in view and any(part in name for part in EIGHT_BIT) and (sizes := spare(view, facts)):
        yield Finding(
            "optim",
            f"{name} saves memory that the card has to spare. {sizes}",
            "Quantized states round each update, and the optimizer waits for the host once a step.",
            view.line("optim", "adamw_torch_fused"),
        )
