"""The state that plugins put into `recipe.state`, under names that stay the same when the profile's other plugins change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hwopt.saving.savable_run import SavableRun


class Stateful(Protocol):
    """A part of the training loop, or of a plugin, that checkpoints hold."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def named_by_class(parts: Iterable[Any]) -> dict[str, Stateful]:
    """`parts` by name: "plugins/<module>.<class>/<number>"; the number counts parts of the same class."""
    named: dict[str, Stateful] = {}
    for part in parts:
        kind = f"plugins/{type(part).__module__}.{type(part).__qualname__}"
        named[f"{kind}/{sum(name.startswith(f'{kind}/') for name in named)}"] = part
    return named


def restore_parts(parts: Mapping[str, Stateful], ranks: Sequence[Mapping[str, Any]], run: SavableRun) -> None:
    """Load into `parts` what this rank saved; with another number of ranks what the first one saved."""
    own = ranks[run.rank] if len(ranks) == run.world_size else ranks[0]
    for name, part in parts.items():
        if name in own:
            part.load_state_dict(own[name])
