"""Classes: names as labels, one or several for each sample or word. What the tasks of classification share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.data.sources.number_format import MISSING, numbers_of
from hwopt.data.sources.rows import Rows, class_names
from hwopt.data.stores.token_store import split_by_label
from hwopt.errors import DataError
from hwopt.tasks.base import Task
from hwopt.tasks.labels import (
    TypedLabel,
    imbalance,
    in_the_spelling_of,
    label_order,
    label_weights,
    one_label_column,
    read_labels,
    similar_labels,
)
from hwopt.tasks.prepared import IGNORED, Named, Prepared, Samples, Trained
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.tasks.metrics import LossMetrics


class Classes(Task):
    """Unknown labels, missing labels, the head's names, and class weights."""

    noun: ClassVar[str] = "label"  # what a message calls a name
    absent: ClassVar[str] = "sample of"  # what the evaluation data lacks of a label, for a message

    def names_in(self, label: Any) -> Sequence[str]:
        """The names in the label of a sample."""
        names: Sequence[str] = label
        return names

    def only_known(self, samples: Samples, names: tuple[str, ...]) -> Samples:
        known, numbers, usable = set(names), samples.places.numbers, []
        for sample, label in enumerate(samples.labels):
            new = next((name for name in self.names_in(label) if name not in known), None)
            if new is None:
                usable.append(sample)
                continue
            samples.bad_rows.add(
                numbers[sample],
                f"has a {self.noun} that is not in the training data: {truncate(new)}.{nearest(new, names)} "
                f"Known {self.noun}s: {listing(names)}",
            )
        samples.bad_rows.check([numbers[sample] for sample in usable])
        return samples.take(usable)

    def notes(self, parts: Mapping[str, Samples], trained: Trained, prepared: Prepared) -> list[str]:
        found = [*similar_labels(trained.label_names), *super().notes(parts, trained, prepared)]
        if "eval" in parts:
            present = {name for label in parts["eval"].labels for name in self.names_in(label)}
            absent = [truncate(name) for name in trained.label_names if name not in present]
            found[:0] = [f"the evaluation data has no {self.absent} {listing(absent)}"] if absent else []
        return found

    def guessed_loss(self, prepared: Prepared, vocab_size: int) -> float | None:
        return math.log(max(len(prepared.label_names), 2))

    def with_class_weights(self, prepared: Prepared, job: Job) -> Prepared:
        labels, names = prepared.train.array("labels"), prepared.label_names
        if job.task.class_weights is None:
            if labels.ndim == 1 and not prepared.train.meta["labels_per_token"]:
                prepared.warnings.extend(imbalance(names, labels))
            return prepared
        weights = label_weights(job.task.class_weights, names, labels[labels != IGNORED])
        shown = [f"{truncate(name)} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
        prepared.notes.append(f"class weights: {listing(shown)}")
        return replace(prepared, class_weights=weights)


class Classification(Classes):
    """Predict the class of each sample."""

    problem_type = "single_label_classification"
    default_metric: ClassVar[str] = "eval_f1"
    metric_directions: ClassVar[dict[str, bool]] = {"f1": True, "f1_binary": True, "accuracy": True, "loss": False}

    @classmethod
    def check_job(cls, job: Job) -> None:
        one_label_column(job)

    def read_labels(self, rows: Rows, job: Job) -> list[Any]:
        """The class of each row. Raises DataError if a label occurs in bad rows only, unless the job allows it."""
        name = one_label_column(job)
        labels = read_labels(rows, name)
        if rows.bad_rows.max_fraction is None:
            refuse_lost_labels(rows, labels, rows.usable())
        return labels

    def name_labels(self, samples: Samples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The classes, in the order of the model or the data set, else sorted."""
        column = one_label_column(job)
        names = label_order(samples.labels, class_names(rows.table, column), config)
        if len(names) == 1:
            raise DataError(f"{rows.source}: every {column!r} is {names[0]!r}; classification needs at least two classes")
        many = len(names) * 2 > len(samples.labels) > 8
        note = f"{len(names):,} labels in {len(samples.labels):,} samples: is {column!r} the right column?"
        notes = [note] if many else []
        if missing := sorted(MISSING.intersection(names)):
            notes.append(
                f"labels that pandas reads as missing values: {listing([*map(repr, missing)])}. hwopt trains each as a class; "
                "remove its rows if they have no label"
            )
        if {"-1", "0", "1", "2"} <= {*names}:
            notes.append("'-1' is trained as a class; data sets of the hub write it for a missing label: remove such rows")
        typed = {str(label) for label in samples.labels if isinstance(label, TypedLabel)}
        if both := sorted(typed.intersection(label for label in samples.labels if not isinstance(label, TypedLabel))):
            notes.append(f"{column!r} holds {listing(both)} as numbers in some rows and as texts in others: one class for both")
        if any(not number.is_integer() for number in numbers_of(names) or ()):
            way = "to predict numbers set task.kind = 'regression'"
            notes.append(f"every label of {column!r} is a number, such as {names[-1]!r}: {way}")
        return Named(names, tuple(notes))

    def only_known(self, samples: Samples, names: tuple[str, ...]) -> Samples:
        """As for all classes. Typed values get the spelling of the training data."""
        labels = [in_the_spelling_of(names, label) for label in samples.labels]
        return super().only_known(replace(samples, labels=labels), names)

    def label_array(self, labels: Sequence[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """The class number of each sample, int64 (samples,)."""
        import numpy as np

        numbers = {name: number for number, name in enumerate(names)}
        return np.fromiter((numbers[label] for label in labels), np.int64, len(labels))

    def names_in(self, label: Any) -> Sequence[str]:
        return (label,)

    def split(self, samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
        kept, held = split_by_label(samples.labels, fraction, seed, samples.places.source)
        return samples.take(kept.tolist()), samples.take(held.tolist())

    def loss(
        self, outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None = None, smoothing: float = 0.0
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the samples, their number or the sum of their weights); targets (batch,)."""
        from torch.nn import functional

        logits = outputs.logits.float()
        summed = functional.cross_entropy(logits, targets, weight=weight, reduction="sum", label_smoothing=smoothing)
        return summed, targets.numel() if weight is None else weight[targets].sum()

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.metrics import ClassMetrics

        return ClassMetrics(prepared.label_names, device)


def refuse_lost_labels(rows: Rows, labels: Sequence[str], usable: Sequence[int]) -> None:
    """Raise DataError if a label occurs only in rows that cannot be used. `labels`: one per table row."""
    if len(usable) == len(labels):
        return
    used = set(usable)
    known = {labels[row] for row in used}
    lost = Counter(label for row, label in enumerate(labels) if row not in used and label and label not in known)
    if lost:
        found = listing([f"{truncate(label)} ({count:,} x)" for label, count in sorted(lost.items())])
        raise DataError(
            f"{rows.source}: {'this label occurs' if len(lost) == 1 else 'these labels occur'} only in rows that cannot be used: "
            f"{found}; {rows.bad_rows.summary()}. {rows.bad_rows.advice('Fix or remove these rows')}. "
            "To train without them, set data.max_bad_rows"
        )
