"""hwopt: you say which card you have; it makes the fine-tuning fit, makes it fast, and proves that every optimization is on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwopt.api import execute, plan, resolve
    from hwopt.hosts.accelerate import Accelerator
    from hwopt.hosts.apply import apply
    from hwopt.hosts.evidence_callback import Evidence
    from hwopt.hosts.forecast import fits
    from hwopt.hosts.pieces import model_kwargs, optimizer, training_arguments
    from hwopt.hosts.torch import session
    from hwopt.report.script_hosts import optimized, train

PLACES = {
    "Accelerator": "hwopt.hosts.accelerate",
    "Evidence": "hwopt.hosts.evidence_callback",
    "apply": "hwopt.hosts.apply",
    "execute": "hwopt.api",
    "fits": "hwopt.hosts.forecast",
    "model_kwargs": "hwopt.hosts.pieces",
    "optimized": "hwopt.report.script_hosts",
    "optimizer": "hwopt.hosts.pieces",
    "plan": "hwopt.api",
    "resolve": "hwopt.api",
    "session": "hwopt.hosts.torch",
    "train": "hwopt.report.script_hosts",
    "training_arguments": "hwopt.hosts.pieces",
}
"""Public name -> its module, imported on first use: most import torch."""

__all__ = [
    "Accelerator",
    "Evidence",
    "__version__",
    "apply",
    "execute",
    "fits",
    "model_kwargs",
    "optimized",
    "optimizer",
    "plan",
    "resolve",
    "session",
    "train",
    "training_arguments",
]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module 'hwopt' has no attribute {name!r}")
