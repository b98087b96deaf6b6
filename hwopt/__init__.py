"""hwopt: you say which card you have; it makes the fine-tuning fit, makes it fast, and proves that every optimization is on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwopt.api import execute, plan, resolve
    from hwopt.report.run_files import optimized, train

PLACES = {
    "execute": "hwopt.api",
    "optimized": "hwopt.report.run_files",
    "plan": "hwopt.api",
    "resolve": "hwopt.api",
    "train": "hwopt.report.run_files",
}
"""Public function -> its module, imported on first use: most import torch."""

__all__ = ["__version__", "execute", "optimized", "plan", "resolve", "train"]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module 'hwopt' has no attribute {name!r}")
