"""Classes: what tasks share whose labels are names, one or several for each sample or for each word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hwopt.config.job import Job
from hwopt.tasks.base import Task
from hwopt.tasks.labels import imbalance, label_weights
from hwopt.tasks.prediction import Trained
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.samples import Samples
from hwopt.text import listing, nearest, truncate


class Classes(Task):
    """Unknown labels, missing labels, the head's names, and class weights."""

    noun: ClassVar[str] = "label"
    """What a message calls a name."""
    absent: ClassVar[str] = "sample of"
    """What the evaluation data lacks of a label, for a message."""

    def names_in(self, label: Any) -> Sequence[str]:
        """The names in the label of a sample."""
        names: Sequence[str] = label
        return names

    def only_known(self, samples: Samples, names: tuple[str, ...]) -> Samples:
        """The samples whose labels all occur in the training data; the others become bad rows."""
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
        """The labels that the evaluation data lacks."""
        found = super().notes(parts, trained, prepared)
        if "eval" in parts:
            present = {name for label in parts["eval"].labels for name in self.names_in(label)}
            absent = [truncate(name) for name in trained.label_names if name not in present]
            found[:0] = [f"the evaluation data has no {self.absent} {listing(absent)}"] if absent else []
        return found

    def with_class_weights(self, prepared: Prepared, job: Job) -> Prepared:
        """`prepared` with the class weights of the job, or with a warning if the classes of samples are imbalanced."""
        labels, names = prepared.train.array("labels"), prepared.label_names or ()
        if job.task.class_weights is None:
            if labels.ndim == 1 and not prepared.train.meta["labels_per_token"]:
                prepared.warnings.extend(imbalance(names, labels))
            return prepared
        weights = label_weights(job.task.class_weights, names, labels[labels != IGNORED])
        shown = [f"{truncate(name)} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
        prepared.notes.append(f"class weights: {listing(shown)}")
        return replace(prepared, class_weights=weights)
