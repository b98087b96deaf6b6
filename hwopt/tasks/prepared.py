"""Prepared: the data of a job as a task prepared it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hwopt.data.sources.rows import Rows
from hwopt.data.stores.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IGNORED = -100
"""The label of a token that the loss ignores, as in transformers."""


class ChatTokens(NamedTuple):
    """Numbers of tokens that the chat template of the job brings."""

    new: tuple[int, ...] = ()
    """Added to the tokenizer: the model gets an embedding for each, which is trained under an adapter too."""
    ends: tuple[int, ...] = ()
    """End a generated text, beside those of the model's generation_config."""


@dataclass(frozen=True)
class Prepared:
    """The tokenised data of a job, its tokenizer and its labels."""

    train: Store
    eval: Store | None
    tokenizer: Any
    """Has a padding token, and pads on the right; of images, the image processor."""
    label_names: tuple[str, ...] | None
    """The name of each label number; None if labels are tokens."""
    notes: list[str] = field(default_factory=list)
    """Lines for the screen."""
    warnings: list[str] = field(default_factory=list)
    """Lines for the screen about data that is not used; shown at the start and again at the end."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    """For each source with bad rows, the content of left_out.json (`BadRows.to_dict`)."""
    test: Store | None = None
    chat_tokens: ChatTokens = field(default_factory=ChatTokens)
    class_weights: tuple[float, ...] | None = None
    """The weight of each label number in the training loss; None: all labels count the same."""

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
        return [store for store in (self.train, self.eval, self.test) if store is not None]

    def report_bad_rows(self, *sources: Rows | None) -> None:
        """Add the notes of `sources` to `notes`, and their bad rows to `warnings` and `bad_rows`."""
        for source in sources:
            self.notes.extend(() if source is None else source.notes)
            if source is not None and source.bad_rows.reasons:
                self.warnings.append(source.bad_rows.note())
                self.bad_rows.append(source.bad_rows.to_dict())
