"""Register the plugins of examples/plugins as third-party entry points."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hwopt.plugin.registry import Registry

FOLDER = Path(__file__).parents[1] / "examples" / "plugins"
CLASSES = {"lora_plus": "LoraPlus", "ema": "Ema", "muon": "Muon", "gradient_noise": "GradientNoise"}
OPTIONS: dict[str, dict[str, Any]] = {"ema": {"decay": 0.5}, "gradient_noise": {"eta": 1e-4}}
BESIDE: dict[str, dict[str, Any]] = {"lora_plus": {"adapter": {"always": True, "r": 4}}}
"""The tables of plugins that it needs."""


def registry() -> Registry:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    found = Registry()
    for module, name in CLASSES.items():
        found.add(getattr(import_module(module), name))
    return found
