"""The labelled samples of a job by part: training, evaluation and test, with the same label numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from hwopt.config.job import Job
from hwopt.data.sources.rows import Rows
from hwopt.tasks.preparation import Sources

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Named:
    """The names of the label numbers, and lines for the screen about the labels."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Takeable(Protocol):
    """Samples of which a part can be taken."""

    def take(self, samples: Sequence[int]) -> Self:
        """Some of the samples."""
        ...


class Labelling(Protocol):
    """What a task says about its labels; see LabelledTexts."""

    def name_labels(self, samples: Any, rows: Rows, job: Job, config: PretrainedConfig) -> Named: ...

    def only_known(self, samples: Any, names: tuple[str, ...]) -> Any: ...

    def split(self, samples: Any, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

    def held_out_notes(self, held_out: Any, names: tuple[str, ...]) -> list[str]: ...


AnyPart = TypeVar("AnyPart", bound=Takeable)


@dataclass
class LabelledParts(Generic[AnyPart]):
    """The samples of each part, None for one that the job lacks, and the names of their labels."""

    train: AnyPart
    eval: AnyPart | None
    test: AnyPart | None
    names: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    """Lines for the screen about the labels."""

    @classmethod
    def read(cls, sources: Sources, samples: Callable[[Rows], AnyPart]) -> LabelledParts[AnyPart]:
        """The parts that have a source; `samples` reads one."""
        train = samples(sources.train)
        held_out, test = (None if rows is None else samples(rows) for rows in (sources.eval, sources.test))
        return cls(train, held_out, test)

    def label(self, task: Labelling, train: Rows, job: Job, config: PretrainedConfig, seed: int) -> None:
        """Name the labels of the training data, drop unknown ones elsewhere, and split for data.eval_fraction.

        `train`: the rows of the training samples.
        """
        named = task.name_labels(self.train, train, job, config)
        self.names, self.notes = named.names, list(named.notes)
        if self.test is not None:
            self.test = task.only_known(self.test, self.names)
        if self.eval is not None:
            self.eval = task.only_known(self.eval, self.names)
        elif job.data.eval_fraction is not None:
            kept, held = task.split(self.train, job.data.eval_fraction, seed)
            self.train, self.eval = self.train.take(kept.tolist()), self.train.take(held.tolist())
        if self.eval is not None:
            self.notes += task.held_out_notes(self.eval, self.names)
