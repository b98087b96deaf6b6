"""hwopt: you say which card you have; it makes the fine-tuning fit, makes it fast, and proves that every optimization is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwopt.api import execute, plan, resolve, train
    from hwopt.hosts.trainer import optimized

__all__ = ["__version__", "execute", "optimized", "plan", "resolve", "train"]


def __getattr__(name: str) -> Any:
    if name in ("execute", "plan", "resolve", "train"):  # on first use: they import torch
        from hwopt import api

        return getattr(api, name)
    if name == "optimized":
        from hwopt.hosts.trainer import optimized

        return optimized
    raise AttributeError(f"module 'hwopt' has no attribute {name!r}")
