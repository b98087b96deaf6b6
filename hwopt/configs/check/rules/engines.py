"""Quantized weights, DeepSpeed and Accelerate's files: combinations that stop or that train nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
from hwopt.configs.check.rules.card import is_small
from hwopt.configs.view import View

ADAPTER_NAMES = ("lora", "peft", "adapter", "dora")
OFFLOADS = ("zero_offload", "deepspeed.zero_optimization.offload_optimizer.device", "deepspeed")


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
    keys = [each.key for each in (*view.settings.values(), *view.unread)]
    full = "finetuning_type" in keys  # LLaMA-Factory trains an adapter unless the file says otherwise
    named = any(part in key for key in keys for part in ADAPTER_NAMES)
    if word and view.lacks("use_peft") and (full if view.tool == "llama-factory" else not named):
        yield Finding(
            word,
            f"{view.spelled(word)} is true, and the file has no adapter.",
            "transformers stops: quantized weights get no gradients, so that there is nothing to train.",
            "pass the Trainer get_peft_model(model, LoraConfig(…)), or give SFTTrainer peft_config"
            if view.language == "Python"
            else view.line("use_peft", True)
            if view.tool == "transformers"
            else f"remove {view.spelled(word)}, or train LoRA",
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
    name, (zero, device, file) = str(view.value("optim")), OFFLOADS
    asked = {word: view.value(word) not in (None, "none", False) for word in (zero, device)}
    asked[file] = "offload" in str(view.value(file)).lower()
    offload = next((word for word, found in asked.items() if found), None)
    if offload and is_small(name):
        yield Finding(
            "optim",
            f"{name} with {view.spelled(offload)} = {view.value(offload)}.",
            "DeepSpeed stops (ZeRORuntimeException): it offloads the states of its own CPU Adam, not those of another optimizer.",
            view.line("optim", "adamw_torch"),
        )


@rule("offload-stage", "error", words=("zero_offload",), source="DeepSpeed: offload_param needs stage 3")
def offload_stage(view: View, facts: Facts) -> Iterator[Finding]:
    """Offloading that the ZeRO stage does not support."""
    stage, what = view.number("zero_stage"), view.value("zero_offload")
    least = {"parameters": 3, "optimizer": 1}.get(str(what), 0)
    if stage is not None and stage < least:
        yield Finding(
            "zero_offload",
            f"The {what} are offloaded with ZeRO stage {stage:g}; stage {least} is needed.",
            "DeepSpeed ignores the setting or stops.",
            view.line("zero_stage", least),
        )


@rule("precision-twice", "error", words=("deepspeed",), source="accelerate: deepspeed_config_file", tools=("accelerate",))
def precision_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings beside a DeepSpeed file that has them too."""
    for word in ("mixed_precision", "zero_stage", "zero_offload", "max_grad_norm", "gradient_accumulation_steps"):
        if word in view:
            key, why = view.spelled(word), "Accelerate stops: the file of DeepSpeed must be the only place for it."
            yield Finding(word, f"{key} is given beside a DeepSpeed file.", why, f"remove {key}")
