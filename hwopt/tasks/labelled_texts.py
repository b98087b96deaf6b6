"""Tasks in which a text, or a pair of texts, has labels of its own: a class, several ones, numbers, or a tag for each word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import text_columns
from hwopt.data.stores.chunks import Chunks
from hwopt.data.stores.token_store import TokenStore
from hwopt.data.tokenizer import Encoding, encode
from hwopt.errors import InputError
from hwopt.tasks.base import Task
from hwopt.tasks.generators import Generation
from hwopt.tasks.predictors import ClassPredictor, TextPredictor
from hwopt.tasks.preparation import described, token_store
from hwopt.tasks.prepared import Prepared, Samples, Trained
from hwopt.text import truncate

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LabelledTexts(Task):
    """A subclass says what the label of a row is, and how labels become an array."""

    predicts: ClassVar[type[TextPredictor]] = ClassPredictor

    def read_labels(self, rows: Rows, job: Job) -> list[Any]:
        """The label of each row; rows without a label are marked as bad. Raises DataError for an unsuitable column."""
        raise NotImplementedError

    def label_array(self, labels: Sequence[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """The labels of the samples as an array (samples, …)."""
        raise NotImplementedError

    def samples(self, rows: Rows, job: Job) -> Samples:
        if both := [name for name in job.data.text if name in job.data.label]:
            raise InputError(f"data.text and data.label both name the column {both[0]!r}: the model would read its own answer")
        texts = text_columns(rows, job.data.text)
        return Samples.of(rows, texts, self.read_labels(rows, job))

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        return list(zip(*text_columns(rows, job.data.text), strict=True))

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> TextPredictor:
        return self.predicts(trained, model)

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> TokenStore:
        import numpy as np

        labels, names = samples.labels, trained.label_names

        def encoded(chunks: Chunks) -> Encoding:
            arrays, meta = encode(trained.tokenizer, samples.columns, trained.limit, samples.places, trained.two_types, chunks)
            skipped = {sample for sample, _ in meta["left_out"]}
            made = self.label_array([label for sample, label in enumerate(labels) if sample not in skipped], names)
            return arrays | {"labels": made, "counts": np.full(len(made), made[0].size, np.int32)}, meta

        settings = [self.kind, trained.two_types, trained.limit.max_length, len(samples.columns)]
        return token_store(TokenStore, samples, trained, cache, settings, [list(names), *samples.columns, labels], encoded)

    def notes(self, parts: Mapping[str, Samples], trained: Trained, prepared: Prepared) -> list[str]:
        """A line for each part with texts that the training data has too, with their number and an example."""
        import numpy as np

        def hashes(part: str) -> NDArray[np.int64]:
            return np.fromiter((hash(str(texts)) for texts in zip(*parts[part].columns, strict=True)), np.int64)

        held_out = [part for part in parts if part != "train"]
        known = np.unique(hashes("train") if held_out else np.empty(0, np.int64))
        found = []
        for part in held_out:
            shared, rows = np.flatnonzero(np.isin(hashes(part), known)).tolist(), parts[part]
            if shared:
                found.append(
                    f"{len(shared):,} of {len(rows):,} {described(part)} samples have a text that is also in the training data, "
                    f"such as {truncate(rows.columns[0][shared[0]])}: metrics on them do not show how the model does on new texts"
                )
        return found
