"""hwopt: you say which card you have; it makes the fine-tuning fit, makes it fast, and proves that every optimization is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwopt.api import execute, plan, resolve
    from hwopt.report.run_files import train

__all__ = ["__version__", "execute", "plan", "resolve", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # on first use: it imports torch
        from hwopt.report import run_files as module
    elif name in ("execute", "plan", "resolve"):
        from hwopt import api as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'hwopt' has no attribute {name!r}")
    return getattr(module, name)
