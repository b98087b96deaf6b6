"""Which layers have an adapter that trains, found by the names and the classes that PEFT gives them."""

from __future__ import annotations

from typing import Any

from hwopt.plugin import RunView


def layers_without_adapter(model: Any) -> list[str]:
    """The names of the frozen layers without an adapter that have the name and the class of one with an adapter."""
    named, end = dict(model.named_modules()), ".base_layer"
    kinds = {name: (name.removesuffix(end).rsplit(".", 1)[-1], type(module)) for name, module in named.items()}
    adapted = {kind for name, kind in kinds.items() if name.endswith(end) and not hasattr(named[name], "lora_B")}
    plain = [name for name, kind in kinds.items() if kind in adapted and not name.endswith(end) and "original_module" not in name]
    return [name for name in plain if not named[name].weight.requires_grad]


def idle_adapters(run: RunView) -> list[str]:
    """The adapted layers that run without their adapter, as far as PEFT calls it, or whose adapter is frozen or merged."""
    model, calls = run.inner_model, run.observation.forward_calls
    parts = {name.split(".lora_B.")[0]: name for name, _ in model.named_modules() if ".lora_B." in name}
    off = {name.split(".lora_")[0] for name, p in model.named_parameters() if ".lora_" in name and not p.requires_grad}
    off |= {layer for layer in parts if (module := model.get_submodule(layer)).disable_adapters or module.merged}
    silent = {layer for layer, part in parts.items() if calls.get(layer, 0) and not calls.get(part, 0)}
    # PEFT adds the adapter of experts to their weights, and calls no part of it
    off |= {layer for layer in silent if not hasattr(model.get_submodule(layer), "parameter_name")}
    return [layer for layer in parts if layer in off]
