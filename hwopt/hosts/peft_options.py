"""The options of plugins that do what a script asks of PEFT and of a quantization config, for its forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hwopt.config.aliases import plugin_of
from hwopt.plugin.imports import options_from
from hwopt.plugin.registry import Registry

LORA, QUANTIZED = "lora_r", "load_in_4bit"
"""Words that name the plugins of adapters and of quantized weights."""
LORA_WORDS = {"r": "lora_r", "target_modules": "lora_target_modules"}
LORA_WORDS |= {word: word for word in ("lora_alpha", "lora_dropout", "modules_to_save", "layers_to_transform", "use_rslora")}
"""Field of LoraConfig -> the word that a plugin knows for it."""
NO_MEMORY = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("exclude_modules", "fan_in_fan_out", "init_lora_weights", "alpha_pattern", "loftq_config", "runtime_config"),
)
"""Fields that change no tensor's size, or only which few modules have none."""


def adapter_options(config: Any, registry: Registry) -> tuple[dict[str, Any], str]:
    """The options of the plugin that adds LoRA for `config` of PEFT, and why they do not describe it, else ""."""
    if getattr(config, "use_dora", None) is None:
        return {}, f"{type(config).__name__} is not a LoraConfig"
    modules, default = config.target_modules, type(config)()
    names = {field.name for field in dataclasses.fields(config)}.difference(LORA_WORDS, NO_MEMORY, ["use_dora"])
    unknown = sorted(name for name in names if getattr(config, name) != getattr(default, name))
    if isinstance(modules, str) and modules != "all-linear":
        unknown.append("target_modules as a regular expression")
    words = {word: getattr(config, name) for name, word in LORA_WORDS.items()}
    words["lora_target_modules"] = "default" if modules is None else modules if isinstance(modules, str) else sorted(modules)
    options = options_of(plugin_of(LORA), words, registry) | {"kind": "dora" if config.use_dora else "lora"}
    return options | {"always": True}, f"{', '.join(unknown)} of {type(config).__name__} is not known" if unknown else ""


def quantize_options(config: Any, registry: Registry) -> tuple[dict[str, Any], str]:
    """The options of the plugin that quantizes for a `quantization_config`, and why they do not describe it, else ""."""
    words = config if isinstance(config, Mapping) else config.to_dict()
    options = options_of(plugin_of(QUANTIZED), words, registry)
    return options, "" if "bits" in options else f"quant_method {words.get('quant_method')} is not known"


def options_of(plugin: str, words: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """The options of `plugin` for those of `words` that it knows."""
    aliases, found = registry.plugin(plugin).aliases, dict[str, Any]()
    for word, value in words.items():
        if word in aliases:
            found |= options_from(aliases[word], value) or {}
    return found
