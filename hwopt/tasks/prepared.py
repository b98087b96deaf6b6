"""The usable rows of the data (Samples), the data as a task prepared it (Prepared), and what predictions need of it (Trained)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts, task_facts
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.chat import Conversations
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import Texts
from hwopt.data.stores.token_store import Store
from hwopt.data.tokenizer import LengthLimit, uses_token_types

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

IGNORED = -100  # the label of a token that the loss ignores, as in transformers


@dataclass(frozen=True)
class Samples:
    """What the model reads of each sample, its label, and its place."""

    places: Places
    bad_rows: BadRows
    columns: Sequence[Sequence[Any]]  # one per column, with a text, a list of words, a conversation or an image for each sample
    labels: list[Any]  # one per sample; empty if labels are tokens
    documents: bool = False  # each sample is a whole text file
    note: str = ""  # a line about other columns that hold samples too

    @classmethod
    def of(cls, rows: Rows, columns: Sequence[Sequence[Any]], labels: list[Any] | None = None) -> Samples:
        """The rows that are not bad. Raises DataError as `Rows.usable` does."""
        return cls(rows.places, rows.bad_rows, columns, labels or [], rows.documents).take(rows.usable())

    def __len__(self) -> int:
        return len(self.places.numbers)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.columns[0], Conversations)

    def take(self, samples: Sequence[int]) -> Samples:
        if samples == range(len(self)):
            return self
        return replace(
            self,
            places=self.places.take(samples),
            columns=[
                column.take(samples) if isinstance(column, Texts | Conversations) else [column[sample] for sample in samples]
                for column in self.columns
            ],
            labels=[self.labels[sample] for sample in samples] if self.labels else [],
        )


@dataclass(frozen=True)
class Named:
    """The names of the label numbers, and lines for the screen about the labels."""

    names: tuple[str, ...] = ()  # empty if labels are tokens
    notes: tuple[str, ...] = ()


class ChatTokens(NamedTuple):
    """Numbers of tokens that the chat template of the job brings."""

    new: tuple[int, ...] = ()
    """Added to the tokenizer: the model gets an embedding for each, which is trained under an adapter too."""
    ends: tuple[int, ...] = ()  # end a generated text, beside those of the model's generation_config
    chat: bool = False  # the samples are conversations


@dataclass(frozen=True)
class Prepared:
    """The tokenised data of a job, its tokenizer and its labels."""

    train: Store
    eval: Store | None
    tokenizer: Any  # has a padding token, and pads on the right; of images, the image processor
    label_names: tuple[str, ...] = ()  # the name of each label number; empty if labels are tokens
    notes: list[str] = field(default_factory=list)  # lines for the screen
    warnings: list[str] = field(default_factory=list)
    """Lines for the screen about data that is not used; shown at the start and again at the end."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    """For each source with bad rows, the content of left_out.json (`BadRows.to_dict`)."""
    test: Store | None = None
    more_eval: Mapping[str, Store] = field(default_factory=dict)  # name -> further data for evaluation
    chat_tokens: ChatTokens = field(default_factory=ChatTokens)
    held_out: Sequence[int] = ()
    """Numbers of the rows of data.train (`Places.numbers`) that data.eval_fraction took for the evaluation."""
    class_weights: tuple[float, ...] | None = None
    """The weight of each label number in the training loss; None: all labels count the same."""

    @classmethod
    def of(cls, parts: Mapping[str, Store], tokenizer: Any, **fields: Any) -> Prepared:
        """From the stores by the names of `parts`, and the other `fields`."""
        more = {name.removeprefix("eval_"): store for name, store in parts.items() if name.startswith("eval_")}
        return cls(parts["train"], parts.get("eval"), tokenizer, test=parts.get("test"), more_eval=more, **fields)

    @property
    def weights(self) -> NDArray[np.float64] | None:
        """The weight of each training sample, float64 (samples,); None without class weights."""
        if self.class_weights is None:
            return None
        import numpy as np

        labels = self.train.array("labels")
        weights: NDArray[np.float64] = np.array([*self.class_weights, 0.0])[np.where(labels == IGNORED, -1, labels)]
        return np.add.reduceat(weights, self.train.array("offsets")[:-1]) if self.train.meta["labels_per_token"] else weights

    @property
    def stores(self) -> list[Store]:
        """The stores that the job has: training, evaluation, test."""
        return list(self.parts.values())

    @property
    def parts(self) -> dict[str, Store]:
        """Name of each part of the data that the job has -> its store."""
        named = {"train": self.train, "eval": self.eval, "test": self.test}
        named |= {f"eval_{name}": store for name, store in self.more_eval.items()}
        return {name: store for name, store in named.items() if store is not None}

    def report_bad_rows(self, *sources: Rows) -> None:
        """Add the notes and warnings of `sources`, and their bad rows to `warnings` and `bad_rows`."""
        for source in sources:
            self.notes.extend(source.notes)
            self.warnings.extend(source.warnings)
            if source.bad_rows.reasons:
                self.warnings.append(source.bad_rows.note())
                self.bad_rows.append(source.bad_rows.to_dict())


@dataclass(frozen=True)
class Trained:
    """What prediction and evaluation need beside the model itself."""

    job: Job
    config: PretrainedConfig
    tokenizer: Any
    label_names: tuple[str, ...]  # the name of each label number; empty if labels are tokens
    max_positions: int | None  # the model's longest input in tokens; None for no limit

    @property
    def facts(self) -> TaskFacts:
        return task_facts(self.job.task.kind)

    @property
    def limit(self) -> LengthLimit:
        """The longest input. Raises InputError if the job's limit exceeds the model's."""
        return LengthLimit(self.job.data.max_length, self.max_positions)

    @property
    def two_types(self) -> bool:
        """Whether the two texts of a pair are marked by token_type_ids."""
        two = len(self.job.data.text) == 2 and "token_type_ids" in self.tokenizer.model_input_names
        return two and uses_token_types(self.config)
