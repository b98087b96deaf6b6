"""SavableRun: what the modules of this package need of a run, which is built above this layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import RunView

if TYPE_CHECKING:
    from torch import Tensor

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
