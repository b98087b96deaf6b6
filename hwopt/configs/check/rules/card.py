"""What the card lacks, and settings that save memory that the card has to spare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hwopt.configs.check import TRAINERS, Facts, Finding, rule
from hwopt.configs.check.rules.combinations import FLASH
from hwopt.configs.view import View
from hwopt.hardware.device import GIB, Feature

FEATURES: Mapping[Feature, tuple[Mapping[str, Any], str]] = {
    "bf16": ({"bf16": True, "pure_bf16": True, "mixed_precision": "bf16"}, "torch emulates bf16 there, which is slow."),
    "fp16": ({"fp16": True, "mixed_precision": "fp16"}, "The step gets no faster, and gradients can underflow."),
    "tf32": ({"tf32": True}, "transformers stops; other tools train on without it."),
    "flash_attention": ({"attn_implementation": lambda name: name in FLASH}, "The first step stops."),
}
"""Feature of a card -> the settings that ask for it, and what happens without it."""
ASKING = tuple({word for settings, _ in FEATURES.values() for word in settings})
ENOUGH = 0.7
"""Fraction of the card's memory that the estimate without the saving may take. The rest is for the context and for its error."""
WIDTH_PER_LAYER = 43
"""Hidden size per layer of BERT-large. Narrower models than that are rare, and wider ones have smaller activations."""
ACTIVATION_BYTES = 34
"""Per token, layer and unit of the hidden size, in half precision, without attention scores (Korthikanti et al. 2022,
arXiv:2205.05198, equation 2)."""
VOCABULARY, LOGIT_BYTES = 128_000, 10
"""Logits of a causal language model, in half precision and in fp32, with their gradient."""
VOCABULARIES = {r"llama-?3": 128_256, r"qwen-?(1\.5|2|3)": 151_936, r"gemma": 256_000, r"mistral-nemo|pixtral": 131_072}
"""Model name -> size of its vocabulary, by the config.json of the models."""


@rule("card-feature", "error", words=ASKING, needs=("card",), source="notes.md#t4; CUDA C++ Programming Guide; flash-attn")
def card_feature(view: View, facts: Facts) -> Iterator[Finding]:
    """A data type or an attention kernel that the card lacks: bf16, TF32 and flash attention on T4 and V100."""
    assert facts.hardware is not None  # the rule needs a card
    for feature, (asking, effect) in FEATURES.items():
        word = next((word for word, asked in asking.items() if view.meets(word, asked)), None)
        if word is None or (support := facts.hardware.can(feature)):
            continue
        fix = f"remove {view.spelled(word)}"
        if feature == "bf16":
            fix = view.half_precision("fp16", word)
        elif feature == "flash_attention":
            fix = view.line(word, "sdpa")
        what = f"{feature.replace('_', ' ')} {support.reason}."
        why = "hwopt falls back or skips it, and shows the reason." if view.is_hwopt else effect
        yield Finding(word, what, why, fix, "warning" if view.is_hwopt or feature == "fp16" else None)


@rule("compute-type", "warning", words=("load_in_4bit",), source="bitsandbytes, Linear4bit.forward", tools=TRAINERS)
def compute_type(view: View, facts: Facts) -> Iterator[Finding]:
    """Products of 4-bit layers in fp32, the default of BitsAndBytesConfig, beside half precision."""
    key, half = "bnb_4bit_compute_dtype", {"bf16": "bfloat16", "fp16": "float16"}
    word = next(filter(view.is_on, half), None)
    default = "float32" if "BitsAndBytesConfig" in view.source.calls and view.lacks(key) else None
    dtype = str(view.value(key, default)).removeprefix("torch.")
    if word and view.is_on("load_in_4bit") and dtype in ("float32", "fp32", "float"):
        what = f"{view.spelled(key)} is {'fp32' if key in view else 'not given'} beside {view.spelled(word)} = true."
        why = "bitsandbytes casts the input of each 4-bit layer to fp32: its products run in fp32, at a fraction of the speed."
        yield Finding(key if key in view else "load_in_4bit", what, why, view.line(key, half[word]))


@rule("flash-fp32", "error", words=("attn_implementation",), source="transformers, Flash Attention", tools=TRAINERS)
def flash_fp32(view: View, facts: Facts) -> Iterator[Finding]:
    """Flash attention on weights in fp32 without mixed precision."""
    half = any(view.value(word) not in (False, "no") and not view.lacks(word) for word in view.HALF)
    trl = view.tool == "transformers" and view.lacks("bf16") and (view.value("task") == "causal-lm" or view.preferences)
    name, dtype = view.value("attn_implementation"), str(view.value("torch_dtype")).removeprefix("torch.")
    weights = dtype in ("float32", "fp32", "float")
    unknown = view.tool == "transformers" and view.lacks("torch_dtype")
    if name in FLASH and not (half or trl) and (weights or unknown):  # TRL trains in bf16 by default
        what = f"{name} on weights in {'fp32' if weights else 'no given type'}, without half precision."
        why = "Flash attention takes tensors in half precision only: with weights in fp32 the first step stops."
        yield Finding("attn_implementation", what, why, view.line("bf16", True), None if weights else "warning")


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
    half = any(view.is_on(word) for word in view.HALF)
    step: float = (states + (view.train_rows or 8) * max_length * per_token * (1 if half else 2)) / GIB
    return step


@rule("saving-needless", "warning", words=("gradient_checkpointing", "optim"), needs=("card", "size"), source="notes.md#t4")
def saving_needless(view: View, facts: Facts) -> Iterator[Finding]:
    """Activation checkpointing, or optimizer states in 8 bit or paged, although the step fits without them."""
    assert facts.hardware is not None
    assert facts.parameters is not None
    assert facts.max_length is not None
    needed, there = estimate_gib(view, facts.parameters, facts.max_length), facts.hardware.memory_gib
    if view.train_rows is None or needed > ENOUGH * there:
        return
    sizes = f"Without it a step takes about {needed:.1f} of {there:g} GiB ({facts.parameters / 1e6:,.0f} M parameters)."
    if view.is_on("gradient_checkpointing"):
        table = ".".join(view.spelled("gradient_checkpointing").split(".")[:2])
        what = f"Checkpointing saves memory that the card has to spare. {sizes}"
        why = "It computes the forward pass twice: a step takes 20 to 33 % longer. `hwopt plan` has exact figures."
        fix = f"remove [{table}]" if view.is_hwopt else view.line("gradient_checkpointing", False)
        yield Finding("gradient_checkpointing", what, why, fix)
    if is_small(name := str(view.value("optim"))):
        what = f"{name} saves memory that the card has to spare. {sizes}"
        why = "Quantized states round each update, and the optimizer waits for the host once a step."
        yield Finding("optim", what, why, view.line("optim", "adamw_torch_fused"))


def is_small(optimizer: str) -> bool:
    return any(part in optimizer for part in ("8bit", "4bit", "paged"))


@rule("eval-logits", "warning", words=("model_name_or_path",), source="transformers#15466", tools=("transformers",))
def eval_logits(view: View, facts: Facts) -> Iterator[Finding]:
    """Metrics of a language model whose logits are all kept on the GPU."""
    name = str(view.value("model_name_or_path"))
    size = next((size for part, size in VOCABULARIES.items() if re.search(part, name, re.IGNORECASE)), 0)
    metric = str(view.value("metric_for_best_model", "loss")).removeprefix("eval_")
    metrics = metric != "loss" or view.value("prediction_loss_only") is False or "include_for_metrics" in view
    evaluated = view.value("eval_strategy", "no") != "no" and view.value("task", "causal-lm") == "causal-lm"
    if size and metrics and evaluated and view.lacks("eval_accumulation_steps", "batch_eval_metrics"):
        mib = size * 4 * (int(view.number("max_length") or 0) or facts.max_length or 512) / 2**20
        key = view.spelled("eval_accumulation_steps")
        what = f"Metrics are computed, the vocabulary has {size:,} words, and {key} is not set."
        why = f"The GPU keeps the logits of all evaluation rows, about {mib:,.0f} MiB each, until the end of the evaluation."
        fix = f"{view.line('eval_accumulation_steps', 1)}, and preprocess_logits_for_metrics that keeps the arg max"
        yield Finding("model_name_or_path", what, why, fix)


@rule("workers-cores", "warning", words=("dataloader_num_workers",), needs=("cores",), source="notes.md#rtx-3070-48-rows")
def workers_cores(view: View, facts: Facts) -> Iterator[Finding]:
    """More data-loading workers than CPU cores."""
    workers, ranks = view.number("dataloader_num_workers"), view.ranks
    assert facts.cores is not None
    if workers is not None and workers * ranks > facts.cores:
        all_ranks = f" on {ranks} ranks" if ranks > 1 else ""
        what = f"{workers:g} workers{all_ranks} for {facts.cores} CPU cores."
        why = "Workers that share a core with the training process delay its launches."
        yield Finding("dataloader_num_workers", what, why, view.line("dataloader_num_workers", max(1, facts.cores // ranks - 1)))
