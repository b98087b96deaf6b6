"""Conflict: what a plugin cannot be used with, named by recipe field, by capability of the engine, or by plugin.

A field or a capability covers plugins that the author does not know. The planner refuses a conflict before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CAPABILITIES = {
    "whole_gradients": "each rank holds whole gradients between the backward pass and the update",
    "whole_parameters": "the optimizer steps on whole tensors, not on flat partitions or shards",
    "whole_weights": "every weight is whole during the whole step, not only while its module runs",
    "whole_graph": "the model's forward pass can be compiled as one graph",
    "packed_weights": "frozen weights may be packed bytes",
    "device_update": "the update runs on the device",
    "retry": "a step that ran out of memory can be run again",
}
"""What the core's engines can do. The plugin of another engine lists in `lacks` what that engine cannot do."""


def always(mine: Any, theirs: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """What this plugin cannot be used with. Exactly one of `field`, `lacks` and `plugin` is given."""

    why: str
    """The reason, and what to do about it."""
    field: str | None = None
    """Every other plugin that writes this recipe field, or this key of it ("batch['widths']")."""
    lacks: str | None = None
    """Every plugin whose engine lacks this capability."""
    plugin: str | None = None
    """The plugin of this name; only for two methods that exclude each other."""
    when: Callable[[Any, Any], bool] = always
    """(this plugin's options, the other plugin's options), both as applied -> whether the two conflict."""

    def __post_init__(self) -> None:
        if sum(target is not None for target in (self.field, self.lacks, self.plugin)) != 1:
            raise TypeError("Conflict() takes exactly one of field=, lacks= and plugin=")
        if self.lacks is not None and self.lacks not in CAPABILITIES:
            raise TypeError(f"Conflict(lacks={self.lacks!r}): the capabilities are {', '.join(CAPABILITIES)}")
