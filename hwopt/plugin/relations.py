"""What a plugin says about other plugins: its relations to them, and the traits of its engine or optimizer.

A conflict names a recipe field, an engine capability or a plugin. A field or a capability also covers unknown third-party
plugins. The planner rejects a conflict before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hwopt.text import truncate

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
"""Capability -> meaning. The core's engines have all of them; a plugin's engine may lack some (`Traits.lacks`)."""


def always(mine: Any, theirs: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """What the plugin that declares the conflict is not used with. Set exactly one of `field`, `lacks` and `plugin`."""

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
            known = ", ".join(CAPABILITIES)
            raise TypeError(f"Conflict(lacks={self.lacks!r}): unknown capability; the capabilities are {known}")


@dataclass(frozen=True, kw_only=True)
class Relations:
    """The plugins that a plugin follows, needs, excludes and replaces."""

    after: tuple[str, ...] = ()
    """Plugins of the same stage that must be applied before this one, if the profile has them."""
    requires: tuple[str, ...] = ()
    """Plugins that this one needs. A plan in which one of them is missing or skipped is an error."""
    conflicts: tuple[Conflict, ...] = ()
    """What this plugin cannot be used with. Only one of the two plugins declares the conflict."""
    replaces: tuple[str, ...] = ()
    """Slots ("optimizer") and keys ("model_kwargs['dtype']") of the recipe that it takes over from another plugin."""
    yields: bool = False
    """Whether the plugin is skipped, not refused, in a conflict (its own or another's) if only an installed profile names it."""
    needless: tuple[Conflict, ...] = ()
    """What leaves this plugin nothing to do. Then it is skipped, also if the user named it; `--strict` accepts this skip."""

    def __post_init__(self) -> None:
        kinds = {"after": str, "requires": str, "conflicts": Conflict, "replaces": str, "needless": Conflict}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not (isinstance(value, tuple) and all(isinstance(item, kind) for item in value)):
                found = truncate(value)
                raise TypeError(f"Relations({name}=…) takes a tuple of {kind.__name__}, got {found}")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the engine, the optimizer or the layers that a plugin brings can and cannot do."""

    lacks: tuple[str, ...] = ()
    """Of an engine: the capabilities (see CAPABILITIES) that it lacks."""
    elementwise: bool = False
    """Of an optimizer: whether it updates each element independently, as AdamW does.

    Only such an optimizer can update the flat partitions or shards of an engine that lacks `whole_parameters`.
    """
    per_parameter: bool = False
    """Of an optimizer: whether it updates each parameter independently, also with one call for each; true if `elementwise`.

    Only such an optimizer can be used with an engine that lacks `single_update`.
    """
    freezes: bool = False
    """Of layers: whether they train instead of the model's own weights, which have no gradients then."""

    def __post_init__(self) -> None:
        if not (isinstance(self.lacks, tuple) and set(self.lacks) <= CAPABILITIES.keys()):
            known = ", ".join(CAPABILITIES)
            raise TypeError(f"Traits(lacks={truncate(self.lacks)}): expected a tuple of {known}")
        if self.elementwise and not self.per_parameter:
            object.__setattr__(self, "per_parameter", True)
