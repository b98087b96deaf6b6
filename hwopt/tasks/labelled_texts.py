"""Tasks in which a text, or a pair of texts, has labels of its own: a class, several ones, numbers, or a tag for each word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import text_columns
from hwopt.data.stores.token_store import TokenStore, fingerprint, split_rows
from hwopt.data.tokenizer import LengthLimit, encode, uses_token_types
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.model.facts import is_decoder
from hwopt.tasks.base import FORMAT, Task
from hwopt.tasks.exactness import refuse_router
from hwopt.tasks.labelled_parts import LabelledParts, Named
from hwopt.tasks.prediction import Trained
from hwopt.tasks.preparation import add_tokenless_rows, make_prepared, read_sources, tokenizer_for
from hwopt.tasks.prepared import Prepared
from hwopt.text import truncate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LabelledSamples:
    """Texts and labels, with their places."""

    places: Places
    bad_rows: BadRows
    texts: list[list[Any]]
    """One list per column, of strings or of lists of words."""
    labels: list[Any]

    def take(self, samples: Sequence[int]) -> LabelledSamples:
        """Some of the samples."""
        return LabelledSamples(
            self.places.take(samples),
            self.bad_rows,
            [[column[sample] for sample in samples] for column in self.texts],
            [self.labels[sample] for sample in samples],
        )


class LabelledTexts(Task):
    """A subclass says what the label of a row is, and how labels become an array."""

    def read_labels(self, rows: Rows, job: Job) -> list[Any]:
        """The label of each row; rows without a label are marked as bad. Raises DataError for an unsuitable column."""
        raise NotImplementedError

    def name_labels(self, samples: LabelledSamples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The names of the labels of the training data, by number. Raises DataError if they cannot be trained."""
        raise NotImplementedError

    def label_array(self, labels: Sequence[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """The labels of the samples as an array (samples, …)."""
        raise NotImplementedError

    def only_known(self, samples: LabelledSamples, names: tuple[str, ...]) -> LabelledSamples:
        """The samples with labels that are in `names`; the others become bad rows."""
        return samples

    def split(self, samples: LabelledSamples, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(training, evaluation) samples for data.eval_fraction."""
        return split_rows(len(samples.labels), fraction, seed, samples.places.source)

    def held_out_notes(self, held_out: LabelledSamples, names: tuple[str, ...]) -> list[str]:
        """Lines for the screen about the evaluation data."""
        return []

    def finish(self, prepared: Prepared, job: Job) -> Prepared:
        """`prepared`, with what the task adds."""
        return prepared

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Prepare the data. Label numbers follow the order of `name_labels` on the training data."""
        refuse_router(config, job)
        limit = LengthLimit(job.data.max_length, max_positions)
        sources = read_sources(job)
        parts = LabelledParts.read(sources, lambda rows: self.samples(rows, job))
        parts.label(self, sources.train, job, config, seed)
        decoder = is_decoder(config)
        tokenizer = tokenizer_for(job, config, self.plain_texts(parts.train), decoder, cache)
        types = uses_two_types(job, tokenizer, config)
        stores = [
            None if samples is None else self.store(samples, parts.names, tokenizer, limit, types, cache)
            for samples in (parts.train, parts.eval, parts.test)
        ]
        prepared = self.finish(make_prepared(stores, tokenizer, parts.names, avoid_used=decoder), job)
        prepared.notes.extend(parts.notes)
        prepared.notes.extend(shared_rows(parts.train.texts, {"evaluation": parts.eval, "test": parts.test}))
        prepared.report_bad_rows(sources.train, sources.eval, sources.test)
        return prepared

    def plain_texts(self, samples: LabelledSamples) -> list[str]:
        """The texts to train a tokenizer on."""
        return [text for column in samples.texts for text in column]

    def samples(self, rows: Rows, job: Job) -> LabelledSamples:
        """The rows that have a text and a label."""
        texts, labels = text_columns(rows, job.data.text), self.read_labels(rows, job)
        usable = rows.usable()
        return LabelledSamples(rows.places, rows.bad_rows, texts, labels).take(usable)

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        """A tuple of texts for each row."""
        return list(zip(*text_columns(rows, job.data.text), strict=True))

    def evaluation_store(self, trained: Trained, rows: Rows, cache: Path) -> TokenStore:
        """The samples with a label that the model knows."""
        job, tokenizer = trained.job, trained.tokenizer
        samples = self.only_known(self.samples(rows, job), trained.label_names)
        limit = LengthLimit(job.data.max_length, trained.max_positions)
        return self.store(samples, trained.label_names, tokenizer, limit, uses_two_types(job, tokenizer, trained.config), cache)

    def store(
        self, samples: LabelledSamples, names: tuple[str, ...], tokenizer: Any, limit: LengthLimit, types: bool, cache: Path
    ) -> TokenStore:
        """The token store of `samples`, from the cache or written now."""
        import numpy as np

        settings = [FORMAT, self.kind, types, limit.max_length, len(samples.texts)]
        labels = samples.labels
        key = fingerprint(settings, tokenizer_fingerprint(tokenizer), list(names), *samples.texts, labels)

        def make() -> tuple[dict[str, Any], dict[str, Any]]:
            found = encode(tokenizer, samples.texts, limit, samples.places, types)
            made = self.label_array([label for sample, label in enumerate(labels) if sample not in found.skipped], names)
            arrays = {
                "input_ids": found.ids,
                "offsets": np.concatenate([[0], np.cumsum(found.lengths)]),
                "labels": made,
                "counts": np.full(len(made), made[0].size, np.int32),
            }
            if found.types is not None:
                arrays["token_type_ids"] = found.types
            return arrays, {
                "kind": self.kind,
                "label_names": list(names),
                "labels_per_token": False,
                "max_length": limit.max_length,
                **found.meta(tokenizer),
            }

        store = TokenStore.cached(cache / "tokens" / key, make)
        add_tokenless_rows(store, samples.places, samples.bad_rows)
        skipped = {sample for sample, _ in store.meta["left_out"]}
        places = samples.places.take([sample for sample in range(len(labels)) if sample not in skipped])
        limit.check(store.lengths, places)  # the store may come from a run with another model
        return store

    def head_config(self, prepared: Prepared) -> dict[str, Any]:
        """The names of the labels."""
        names = prepared.label_names or ()
        return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def shared_rows(train: Sequence[Sequence[Any]], parts: Mapping[str, LabelledSamples | None]) -> list[str]:
    """A line for each part with texts that the training data has too, with their number and an example."""
    held_out = {part: list(zip(*samples.texts, strict=True)) for part, samples in parts.items() if samples is not None}
    asked = {str(texts) for rows in held_out.values() for texts in rows}
    known = {text for texts in zip(*train, strict=True) if asked and (text := str(texts)) in asked}
    found = []
    for part, rows in held_out.items():
        shared = [texts for texts in rows if str(texts) in known]
        if shared:
            found.append(
                f"{len(shared):,} of {len(rows):,} {part} samples have a text that is also in the training data, such as "
                f"{truncate(shared[0][0])}: metrics on them do not show how the model does on new texts"
            )
    return found


def uses_two_types(job: Job, tokenizer: Any, config: PretrainedConfig) -> bool:
    """Whether the two texts of a pair are marked by token_type_ids."""
    return len(job.data.text) == 2 and "token_type_ids" in tokenizer.model_input_names and uses_token_types(config)
