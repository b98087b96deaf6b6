"""Text classification of single texts and pairs, with encoders and decoders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import Rows
from hwopt.data.tables import find_column, string_values, text_columns
from hwopt.data.token_store import TokenStore, fingerprint, split_by_label
from hwopt.data.tokenizer import LengthLimit, encode, uses_token_types
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError, InputError
from hwopt.model.facts import is_decoder
from hwopt.tasks.base import FORMAT, Generation, LossFunction, Metrics, Predictor, Prepared, Task, Trained, refuse_router
from hwopt.tasks.preparation import add_tokenless_rows, make_prepared, read_sources, tokenizer_for
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


MAX_FRACTIONAL = 0.1
"""Above this share of numbers with a fractional part, a column holds measurements instead of classes."""


@dataclass(frozen=True)
class Samples:
    """Texts and labels, with their places."""

    places: Places
    bad_rows: BadRows
    texts: list[list[str]]
    """One list per column."""
    labels: list[str]

    def take(self, samples: Sequence[int]) -> Samples:
        """Some of the samples."""
        return Samples(
            self.places.take(samples),
            self.bad_rows,
            [[column[sample] for sample in samples] for column in self.texts],
            [self.labels[sample] for sample in samples],
        )


class TextClassification(Task):
    """Classify single texts or pairs of texts."""

    kind: ClassVar[str] = "text-classification"
    pipeline_tag: ClassVar[str] = "text-classification"
    default_metric: ClassVar[str] = "eval_f1"
    metric_directions: ClassVar[dict[str, bool]] = {"f1": True, "f1_binary": True, "accuracy": True, "loss": False}
    _weight: torch.Tensor | None = None
    """The class weights on the device, made once."""

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Prepare the data. Labels are numbered as in the model's config, else in the sorted order of the training labels."""
        refuse_router(config, job)
        limit = LengthLimit(job.data.max_length, max_positions)
        sources = read_sources(job)
        rows = sources.train
        train = _samples(rows, job)
        held_out, test = (None if part is None else _samples(part, job) for part in (sources.eval, sources.test))
        names = label_order(train.labels, class_names(rows.table, job.data.label), config)
        if len(names) == 1:
            raise DataError(f"{rows.source}: every {job.data.label!r} is {names[0]!r}; classification needs at least two classes")
        notes = []
        if len(names) * 2 > len(train.labels) > 8:
            notes.append(f"{len(names):,} labels in {len(train.labels):,} samples: is {job.data.label!r} the right column?")
        test = None if test is None else drop_unknown_labels(test, names)
        if held_out is not None:
            held_out = drop_unknown_labels(held_out, names)
        elif job.data.eval_fraction is not None:
            kept, held = split_by_label(train.labels, job.data.eval_fraction, seed, rows.source)
            train, held_out = train.take(kept.tolist()), train.take(held.tolist())
        if held_out is not None and (absent := set(names).difference(held_out.labels)):
            notes.append(f"the evaluation data has no sample of {listing([truncate(name) for name in names if name in absent])}")
        texts = [text for column in train.texts for text in column]
        decoder = is_decoder(config)
        tokenizer = tokenizer_for(job, config, texts, decoder, cache)
        types = uses_two_types(job, tokenizer, config)
        stores = [
            None if samples is None else _store(samples, names, tokenizer, limit, types, cache)
            for samples in (train, held_out, test)
        ]
        prepared = make_prepared(stores, tokenizer, names, avoid_used=decoder)
        if job.task.class_weights is not None:
            weights = label_weights(job.task.class_weights, names, prepared.train.array("labels"))
            prepared = replace(prepared, class_weights=weights)
            shown = [f"{truncate(name)} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
            notes.append(f"class weights: {listing(shown)}")
        prepared.notes.extend(notes)
        prepared.report_bad_rows(sources.train, sources.eval, sources.test)
        return prepared

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        """A tuple of texts for each row."""
        return list(zip(*text_columns(rows, job.data.text), strict=True))

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> Predictor:
        """Predicts the most probable label."""
        from hwopt.tasks.class_predictor import ClassPredictor

        types = uses_two_types(trained.job, trained.tokenizer, trained.config)
        return ClassPredictor(trained, model, types)

    def evaluation_store(self, trained: Trained, rows: Rows, cache: Path) -> TokenStore:
        """The samples with a label that the model knows."""
        job, tokenizer = trained.job, trained.tokenizer
        samples = drop_unknown_labels(_samples(rows, job), trained.label_names)
        limit = LengthLimit(job.data.max_length, trained.max_positions)
        return _store(samples, trained.label_names, tokenizer, limit, uses_two_types(job, tokenizer, trained.config), cache)

    def head_config(self, prepared: Prepared) -> dict[str, Any]:
        """The label names, and the kind of classification."""
        names = prepared.label_names or ()
        return {
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the samples, number of samples); targets (batch,)."""
        from torch.nn import functional

        return functional.cross_entropy(outputs.logits.float(), targets, reduction="sum"), targets.numel()

    def training_loss(self, prepared: Prepared, device: torch.device | str) -> LossFunction:
        """The weighted and smoothed cross-entropy of torch.nn.functional.cross_entropy, with the sum of the weights."""
        import torch

        smoothing, weights = self.options.label_smoothing, prepared.class_weights
        if weights is None and not smoothing:
            return self.loss
        if self._weight is None and weights is not None:
            self._weight = torch.tensor(weights, device=device)
        return partial(weighted_loss, weight=self._weight, smoothing=smoothing)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        """loss, accuracy, f1 (macro), and for two labels f1_binary (for label 1)."""
        from hwopt.tasks.metrics import ClassMetrics

        names = prepared.label_names or ()
        return ClassMetrics(len(names), device, names)


def weighted_loss(
    outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None, smoothing: float
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """(cross-entropy summed with the weight of each target, sum of these weights), with label smoothing."""
    from torch.nn import functional

    logits = outputs.logits.float()
    summed = functional.cross_entropy(logits, targets, weight=weight, reduction="sum", label_smoothing=smoothing)
    return summed, targets.numel() if weight is None else weight[targets].sum()


def label_weights(
    wanted: Literal["balanced"] | Mapping[str, float], names: tuple[str, ...], labels: NDArray[np.int64]
) -> tuple[float, ...]:
    """The weight of each label number. "balanced": samples / (classes x samples of the class), as in scikit-learn.

    A label that a table omits has weight 1. Raises InputError for a label that is not in the training data.
    """
    import numpy as np

    if wanted == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        return tuple((len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))).tolist())
    assert not isinstance(wanted, str)
    for label in wanted:
        if label not in names:
            raise InputError(
                f"task.class_weights: the training data has no label {truncate(label)}.{nearest(label, names)} "
                f"It has: {listing(names)}"
            )
    return tuple(float(wanted.get(name, 1.0)) for name in names)


def uses_two_types(job: Job, tokenizer: Any, config: PretrainedConfig) -> bool:
    """Whether the two texts of a pair are marked by token_type_ids."""
    return len(job.data.text) == 2 and "token_type_ids" in tokenizer.model_input_names and uses_token_types(config)


def read_labels(rows: Rows, name: str) -> list[str]:
    """The label of each row, as a string. Integers have one form, however they are written (1, 1.0, "1").

    Rows without a label are marked as bad, with "" here. Raises DataError for measurements (0.37).
    """
    import pyarrow as pa

    table, source = rows.table, rows.source
    column = find_column(table, name, source)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    known = text or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if not known:
        raise DataError(f"{source}: column {name!r} holds {kind}; labels must be strings or integers")
    classes = class_names(table, name)
    values: list[Any] = list(string_values(column, rows, name)) if text else column.to_pylist()
    for row, value in enumerate(values):
        original = rows.non_strings.get(name, {}).get(row)
        if value is None or value == "" or value != value or (classes and not 0 <= value < len(classes)):
            rows.mark_bad(row, f"{name!r} has no label ({truncate(value)})")
            values[row] = None
        elif isinstance(original, list | dict):
            rows.mark_bad(row, f"{name!r} is not a label: {truncate(original)}")
            values[row] = None
    present = [value for value in values if value is not None]
    if classes:
        return ["" if value is None else classes[value] for value in values]
    if pa.types.is_floating(kind) or (text and all(map(NUMBER.fullmatch, present))):
        fractional = [row for row, value in enumerate(values) if value is not None and float(value) % 1]
        for row in fractional:
            if len(fractional) > MAX_FRACTIONAL * len(present) or rows.bad_rows.strict:
                raise DataError(
                    f"{rows.places.at(row)}: {name!r} is {truncate(values[row])}, a measurement; expected classes. "
                    "Choose another column with data.label"
                )
            rows.mark_bad(row, f"{name!r} is a measurement, not a class: {truncate(values[row])}")
            values[row] = None
        return ["" if value is None else integer_text(value) for value in values]
    return ["" if value is None else str(value) for value in values]


def integer_text(value: Any) -> str:
    """The integer `value`, given as a number or a string, in its shortest form."""
    return str(int(value) if isinstance(value, str) and INTEGER.fullmatch(value) else int(float(value)))


def class_names(table: pa.Table, name: str) -> list[str] | None:
    """The class names of a ClassLabel column of `datasets`, by number; None for other columns."""
    if b"huggingface" not in (table.schema.metadata or {}) or name not in table.column_names:
        return None
    import datasets

    feature = datasets.Features.from_arrow_schema(table.schema).get(name)
    return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def label_order(labels: list[str], classes: list[str] | None, config: PretrainedConfig) -> tuple[str, ...]:
    """The labels that occur, by number: in the order of the model or the data set, else sorted (integers by value)."""
    found = set(labels)
    own = [name for _, name in sorted((getattr(config, "id2label", None) or {}).items())]
    if len(own) == len(found) and set(own) == found:
        return tuple(own)
    if classes:
        return tuple(name for name in classes if name in found)
    if all(map(INTEGER.fullmatch, found)):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _samples(rows: Rows, job: Job) -> Samples:
    """The rows that have a text and a label. Raises DataError if a label occurs in bad rows only, unless the job allows it."""
    texts, labels = text_columns(rows, job.data.text), read_labels(rows, job.data.label)
    usable = rows.usable()
    if rows.bad_rows.max_fraction is None:
        refuse_lost_labels(rows, job.data.label, labels, usable)
    return Samples(rows.places, rows.bad_rows, texts, labels).take(usable)


def refuse_lost_labels(rows: Rows, name: str, labels: Sequence[str], usable: Sequence[int]) -> None:
    """Raise DataError if a label of the column `name` occurs only in rows that cannot be used. `labels`: one per table row."""
    used = set(usable)
    known = {labels[row] for row in used}
    lost = Counter(label for row, label in enumerate(labels) if row not in used and label and label not in known)
    undecodable = Counter(str(cells[name]) for cells in rows.bad_rows.cells.values() if cells.get(name) not in (None, ""))
    # one damaged byte in a label makes a label that is no class; the same damage in two rows is the encoding
    lost += Counter({label: n for label, n in undecodable.items() if label not in known and (n > 1 or "\ufffd" not in label)})
    if lost:
        found = listing([f"{truncate(label)} ({count:,} x)" for label, count in sorted(lost.items())])
        raise DataError(
            f"{rows.source}: {'this label occurs' if len(lost) == 1 else 'these labels occur'} only in rows that cannot be used: "
            f"{found}; {rows.bad_rows.summary()}. {rows.bad_rows.advice('Fix or remove these rows')}. "
            "To train without them, set data.max_bad_rows"
        )


def drop_unknown_labels(samples: Samples, names: tuple[str, ...]) -> Samples:
    """The samples whose label occurs in the training data; the others become bad rows."""
    known = set(names)
    numbers = samples.places.numbers
    for number, label in zip(numbers, samples.labels, strict=True):
        if label not in known:
            samples.bad_rows.add(
                number,
                f"has a label that is not in the training data: {truncate(label)}.{nearest(label, names)} "
                f"Known labels: {listing(names)}",
            )
    usable = [sample for sample, label in enumerate(samples.labels) if label in known]
    samples.bad_rows.check([numbers[sample] for sample in usable])
    return samples.take(usable)


def _store(samples: Samples, names: tuple[str, ...], tokenizer: Any, limit: LengthLimit, types: bool, cache: Path) -> TokenStore:
    """The token store of `samples`, from the cache or written now."""
    import numpy as np

    numbers = {name: number for number, name in enumerate(names)}
    settings = [FORMAT, TextClassification.kind, types, limit.max_length, len(samples.texts)]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), list(names), *samples.texts, samples.labels)

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        found = encode(tokenizer, samples.texts, limit, samples.places, types)
        labels = [label for sample, label in enumerate(samples.labels) if sample not in found.skipped]
        arrays = {
            "input_ids": found.ids,
            "offsets": np.concatenate([[0], np.cumsum(found.lengths)]),
            "labels": np.array([numbers[label] for label in labels], np.int64),
            "counts": np.ones(len(labels), np.int32),
        }
        if found.types is not None:
            arrays["token_type_ids"] = found.types
        return arrays, {
            "kind": TextClassification.kind,
            "label_names": list(names),
            "labels_per_token": False,
            "max_length": limit.max_length,
            **found.meta(tokenizer),
        }

    store = TokenStore.cached(cache / "tokens" / key, make)
    add_tokenless_rows(store, samples.places, samples.bad_rows)
    skipped = {sample for sample, _ in store.meta["left_out"]}
    places = samples.places.take([sample for sample in range(len(samples.labels)) if sample not in skipped])
    limit.check(store.lengths, places)  # the store may come from a run with another model
    return store
