"""SavableRun: what this package needs of a run, which is built above this layer; and the state of the run's parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import RunView
from hwopt.saving.reader import Checkpoint


class SavableRun(RunView, Protocol):
    """A run whose weights and training state can be written to its folder; `hwopt.training.run.Run` says what the rest means."""

    folder: Path
    engine: Any  # the engine, which also copies, gathers and loads its state
    skeleton: Any  # the model without tensors; `save_pretrained` is called on it while the model trains
    prepared: Any  # the tokenised data, with the tokenizer that is saved beside the model
    task: Any
    checkpoint: Checkpoint | None  # the checkpoint that the run resumes from; None for a new run

    @property
    def recipe(self) -> Recipe: ...
    @property
    def progress(self) -> Any: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def heartbeat(self) -> None: ...
    def was_saved(self, folder: Path) -> None: ...


class Stateful(Protocol):
    """A part of the training loop, or of a plugin, that checkpoints hold."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def named_by_class(parts: Iterable[Any]) -> dict[str, Stateful]:
    """`parts` by name: "plugins/<module>.<class>/<number>". It stays the same when the profile's other plugins change."""
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
