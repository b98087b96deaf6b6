"""Settings that save memory that the card has to spare."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
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
OFFLOADS = ("zero_offload", "deepspeed.zero_optimization.offload_optimizer.device")


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


ADAPTER_NAMES = ("lora", "peft", "adapter", "dora")


@rule(
    "quantized-training",
    "error",
    words=("load_in_4bit", "load_in_8bit"),
    source="transformers, Trainer: purely quantized models cannot be fine-tuned",
    tools=TRAINERS,
)
def quantized_training(view: View, facts: Facts) -> Iterator[Finding]:
    """Quantized weights without an adapter, which leaves nothing to train."""
    word = next((word for word in ("load_in_4bit", "load_in_8bit") if view.is_on(word)), None)
    keys = [setting.key for setting in view.settings.values()] + [each.key for each in view.unread]
    full = "finetuning_type" in keys  # LLaMA-Factory trains an adapter unless the file says otherwise
    named = any(part in key for key in keys for part in ADAPTER_NAMES)
    if word and view.lacks("use_peft") and (full if view.tool == "llama-factory" else not named):
        yield Finding(
            word,
            f"{view.spelled(word)} is true, and the file has no adapter.",
            "transformers stops: quantized weights get no gradients, so that there is nothing to train.",
            view.line("use_peft", True) if view.tool == "transformers" else f"{view.spelled(word)}: false, or train LoRA",
        )


@rule(
    "states-offload",
    "error",
    words=("optim",),
    source="DeepSpeed#7524: ZeRO-Offload with a client provided optimizer",
    tools=TRAINERS,
)
def states_offload(view: View, facts: Facts) -> Iterator[Finding]:
    """An optimizer with states in 8 bit under ZeRO's offload."""
    name = str(view.value("optim"))
    offload = next((word for word in OFFLOADS if view.value(word) not in (None, "none", False)), None)
    if offload is None and "offload" in str(view.value("deepspeed")).lower():
        offload = "deepspeed"
    if offload and any(part in name for part in EIGHT_BIT):
        yield Finding(
            "optim",
            f"{name} with {view.spelled(offload)} = {view.value(offload)}.",
            "DeepSpeed stops (ZeRORuntimeException): it offloads the states of its own CPU Adam, not those of another optimizer.",
            view.line("optim", "adamw_torch"),
        )


VOCABULARIES = {r"llama-?3": 128_256, r"qwen-?(1\.5|2|3)": 151_936, r"gemma": 256_000, r"mistral-nemo|pixtral": 131_072}
"""Model name -> size of its vocabulary, by the config.json of the models."""


@rule(
    "eval-logits",
    "warning",
    words=("model_name_or_path",),
    source="transformers, eval_accumulation_steps; transformers#15466",
    tools=("transformers",),
)
def eval_logits(view: View, facts: Facts) -> Iterator[Finding]:
    """Metrics of a language model whose logits are all kept on the GPU."""
    name = str(view.value("model_name_or_path"))
    size = next((size for part, size in VOCABULARIES.items() if re.search(part, name, re.IGNORECASE)), 0)
    metric = str(view.value("metric_for_best_model", "loss")).removeprefix("eval_")
    metrics = metric != "loss" or view.value("prediction_loss_only") is False or "include_for_metrics" in view
    task = view.value("task", "causal-lm")
    if size and metrics and task == "causal-lm" and view.lacks("eval_accumulation_steps", "batch_eval_metrics"):
        if view.value("eval_strategy", "no") == "no" or view.is_on("prediction_loss_only"):
            return
        mib = size * 4 * (int(view.number("max_length") or 0) or facts.max_length or 512) / 2**20
        yield Finding(
            "model_name_or_path",
            f"Metrics are computed, the vocabulary has {size:,} words, and {view.spelled('eval_accumulation_steps')} is not set.",
            f"The GPU keeps the logits of all evaluation rows, about {mib:,.0f} MiB each, until the end of the evaluation.",
            f"{view.line('eval_accumulation_steps', 1)}, and preprocess_logits_for_metrics that keeps the arg max",
        )
