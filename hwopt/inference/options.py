"""InferenceOptions: how a trained model is used, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hwopt.tasks.prediction import Generation


def say_nothing(message: str) -> None:
    """The default `warn`."""


def show_nothing(done: int, rows: int) -> None:
    """The default `progress`."""


@dataclass(frozen=True)
class InferenceOptions:
    """Options of a prediction or an evaluation."""

    assignments: Sequence[str] = ()
    """"data.KEY=VALUE": changes of how the job reads its data."""
    batch_size: int | None = None
    """None: that of the run's evaluation."""
    generation: Generation | None = None
    """For tasks that generate text; None: the defaults."""
    overwrite: bool = False
    """Replace an output file that exists."""
    warn: Callable[[str], None] = say_nothing
    """Gets messages for the user."""
    progress: Callable[[int, int], None] = show_nothing
    """Gets the rows that are done, and all rows."""
