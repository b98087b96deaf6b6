"""What a tool does where its file says nothing, for settings that hwopt has another default for.

TRL 1.16: https://github.com/huggingface/trl/blob/main/trl/trainer/sft_config.py and trainer/model_config.py
PEFT: https://huggingface.co/docs/peft/package_reference/lora
axolotl: https://docs.axolotl.ai/docs/config-reference.html
LLaMA-Factory: https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/hparams
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwopt.configs.view import ConfigSetting, View

Defaults = Mapping[str, Any]
"""Word -> value."""
TRAINING_ARGUMENTS: Defaults = {"per_device_train_batch_size": 8, "seed": 42}
SFT_CONFIG: Defaults = {
    **TRAINING_ARGUMENTS,
    "learning_rate": 2e-5,
    "max_length": 1024,
    "bf16": True,
    "assistant_only_loss": False,
}
AXOLOTL: Defaults = {
    "per_device_train_batch_size": 1,
    "seed": 42,
    "num_train_epochs": 1,
    "max_length": 512,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
}
LLAMA_FACTORY: Defaults = {**TRAINING_ARGUMENTS, "max_length": 2048}
LORA_CONFIG: Defaults = {"lora_r": 8, "lora_alpha": 8, "lora_target_modules": "default"}
MODEL_CONFIG: Defaults = {"lora_dropout": 0.05, "lora_target_modules": "default"}
"""TRL's ModelConfig, which its command line reads; its rank and alpha are hwopt's."""
LAST_WEIGHTS: Defaults = {"load_best_model_at_end": False}
"""Where a file has data for evaluation."""
ONCE_QUANTIZED: Defaults = {"bnb_4bit_use_double_quant": False}
SAME = {
    "per_device_train_batch_size": ("effective_batch_size",),
    "num_train_epochs": ("max_steps",),
    "warmup_ratio": ("warmup_steps",),
    "bf16": View.HALF,
}
"""Word -> others that say the same thing."""


def defaults_of(view: View) -> Iterator[tuple[str, Defaults]]:
    """(whose, defaults) of the tool that reads the file of `view`; nothing for a script's own words."""
    adapter = view.is_on("use_peft")
    if not view.tool.startswith("hwopt") and ("validation_file" in view or view.number("eval_fraction")):
        yield "transformers", LAST_WEIGHTS
    if view.tool == "axolotl":
        yield "axolotl", AXOLOTL
    elif view.tool == "llama-factory":
        rank = view.value("lora_r", 8)
        yield "LLaMA-Factory", {**LLAMA_FACTORY, **({"lora_r": rank, "lora_alpha": 2 * rank} if adapter else {})}
    elif view.tool == "transformers":
        if view.value("task") == "causal-lm":
            yield "SFTConfig", SFT_CONFIG
        elif view.source.calls or "output_dir" in view:
            yield "TrainingArguments", TRAINING_ARGUMENTS
        if view.is_on("load_in_4bit"):
            yield ("BitsAndBytesConfig" if view.source.calls else "ModelConfig"), ONCE_QUANTIZED
        if adapter:
            yield ("LoraConfig", LORA_CONFIG) if view.source.calls else ("ModelConfig", MODEL_CONFIG)


def add_defaults(view: View) -> None:
    """Add to `view` the values that its tool takes for words that the file does not give."""
    for whose, defaults in list(defaults_of(view)):
        for word, value in defaults.items():
            if view.lacks(word, *SAME.get(word, ())):
                said = f"the default of {whose}"
                view.settings[word] = ConfigSetting((view.spelling(word),), value, 0, said, said, word=word)
