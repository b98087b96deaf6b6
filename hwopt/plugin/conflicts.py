"""Conflict: what a plugin cannot be used with, given as a recipe field, an engine capability or a plugin name.

A field or a capability also covers unknown third-party plugins. The planner rejects a conflict before anything is built.
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
    "single_update": "one call of the optimizer updates all parameters",
    "accumulation": "a step may have several micro-batches",
    "clipping": "the gradient is clipped by the norm of all parameters (training.max_grad_norm)",
}
"""Capability -> meaning. The core's engines have all of them. A plugin with its own engine lists in `lacks` what it lacks."""


def always(mine: Any, theirs: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """What the plugin that declares the conflict cannot be used with. Set exactly one of `field`, `lacks` and `plugin`."""

    why: str
    """The reason, and what the user can do."""
    field: str | None = None
    """Conflicts with every other plugin that writes this recipe field or key ("batch['widths']")."""
    lacks: str | None = None
    """Conflicts with every plugin whose engine lacks this capability."""
    plugin: str | None = None
    """Conflicts with the plugin of this name; only for two methods that exclude each other."""
    when: Callable[[Any, Any], bool] = always
    """(options of this plugin, options of the other plugin), both as applied -> whether the two conflict."""

    def __post_init__(self) -> None:
        if sum(target is not None for target in (self.field, self.lacks, self.plugin)) != 1:
            raise TypeError("Conflict() takes exactly one of field=, lacks= and plugin=")
        if self.lacks is not None and self.lacks not in CAPABILITIES:
            raise TypeError(f"Conflict(lacks={self.lacks!r}): unknown capability; the capabilities are {', '.join(CAPABILITIES)}")
