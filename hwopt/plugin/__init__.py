"""The plugin contract: everything that a plugin imports (`from hwopt.plugin import …`).

Names are imported on first use, so that `hwopt plugins` can list entry points without importing pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwopt.plugin.contract import *  # noqa: F403


def __getattr__(name: str) -> Any:
    contract = import_module("hwopt.plugin.contract")
    if name not in contract.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(contract, name)
