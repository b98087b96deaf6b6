"""Text classification of single texts and pairs, with encoders and decoders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.columns import classes, label_column, text_of
from hwopt.data.rows import Rows
from hwopt.data.tables import text_columns
from hwopt.data.token_store import TokenStore, fingerprint, split_by_label
from hwopt.data.tokenizer import LengthLimit, encode, uses_token_types
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError
from hwopt.model.facts import is_decoder
from hwopt.tasks.base import FORMAT, LossFunction, Metrics, Prepared, Task, refuse_router
from hwopt.tasks.labels import class_names, label_order, label_weights, read_labels
from hwopt.tasks.prediction import Generation, Predictor, Trained
from hwopt.tasks.preparation import add_tokenless_rows, make_prepared, read_sources, tokenizer_for
from hwopt.tasks.recognition import Recognised
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from transformers import PretrainedConfig


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

    facts = TaskFacts("text-classification", "AutoModelForSequenceClassification", keys=frozenset({"task.class_weights"}))
    pipeline_tag: ClassVar[str] = "text-classification"
    default_metric: ClassVar[str] = "eval_f1"
    metric_directions: ClassVar[dict[str, bool]] = {"f1": True, "f1_binary": True, "accuracy": True, "loss": False}
    _weight: torch.Tensor | None = None
    """The class weights on the device, made once."""

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column of classes beside a text or a pair of texts."""
        label = label_column(table, named=not chosen)
        if label is None:
            return "no column looks like a label for text-classification; name it in the job with data.label"
        texts = text_of(table, label)
        if not texts:
            return "no column looks like a text for text-classification; name it in the job with data.text"
        why = f"column {label!r} has {classes(table, label):,} values"
        return Recognised({"text": texts, "label": label}, tuple(texts), why, rank=2)

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


def uses_two_types(job: Job, tokenizer: Any, config: PretrainedConfig) -> bool:
    """Whether the two texts of a pair are marked by token_type_ids."""
    return len(job.data.text) == 2 and "token_type_ids" in tokenizer.model_input_names and uses_token_types(config)


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
    settings = [FORMAT, TextClassification.facts.kind, types, limit.max_length, len(samples.texts)]
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
            "kind": TextClassification.facts.kind,
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
