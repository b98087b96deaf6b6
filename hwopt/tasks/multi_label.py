"""Multi-label classification: any number of labels for a text or a pair of texts, by the binary cross-entropy of each label."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import EXAMINED, LABELS, MOST_CLASSES, SCORES, is_fact, text_of, type_of, unread_texts
from hwopt.data.sources.number_format import numbers_of
from hwopt.data.sources.rows import Rows, class_names, holds_text, is_list
from hwopt.errors import DataError
from hwopt.tasks.classification import Classes
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.labels import DELIMITERS, is_flag, is_list_of_labels, label_order, parts_of, read_flags, read_sets
from hwopt.tasks.predictors import LabelSetPredictor
from hwopt.tasks.prepared import Named, Prepared, Samples
from hwopt.tasks.recognition import Recognised
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.tasks.metrics import LossMetrics

SETS = ("labels", "label", "tags", "topics", "categories", "genres", "emotions", "classes")
"""Names of columns with several labels a row."""


class MultiLabel(Classes, LabelledTexts):
    """Any number of labels for a text: a column with lists or delimited labels, or one column of 0 and 1 for each label."""

    facts = TaskFacts(
        "multi-label-classification", "AutoModelForSequenceClassification", keys=frozenset({"data.label_delimiter"})
    )
    problem_type = "multi_label_classification"
    several_labels = True
    predicts = LabelSetPredictor
    pipeline_tag: ClassVar[str] = "text-classification"
    default_metric: ClassVar[str] = "eval_f1_micro"
    metric_directions: ClassVar[dict[str, bool]] = {"f1_micro": True, "f1_macro": True, "exact_match": True, "loss": False}

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column of lists, a column with delimited labels, or several columns of 0 and 1, beside a text."""
        names = table.column_names
        named = [name for name in names if name.lower() in SETS]
        others = names if chosen or not named_label(table) else []
        flags = [name for name in others if is_flag(table, name) and not is_fact(name)]
        keys: dict[str, Any] = {}
        lists = [name for name in (*named, *others) if is_list_of_labels(table, name)]
        if lists := [name for name in lists if chosen or name in named or repeats(table, name)]:
            keys, why = {"label": lists[0]}, f"column {lists[0]!r} holds lists of labels"
        elif lists := [each for each in (*named, *others) if holds_written_lists(table, each, chosen or each in named)]:
            keys, why = {"label": lists[0]}, f"column {lists[0]!r} holds lists of labels as texts"
        elif len(flags) > 1:
            keys, why = {"label": flags}, f"columns {listing([repr(name) for name in flags], 6)} hold 0 and 1"
        elif (found := delimited_column(table, named)) is not None:
            column, mark = found
            keys, why = {"label": column, "label_delimiter": mark}, f"column {column!r} holds labels separated by {mark!r}"
        else:
            return "no column looks like several labels; name it in the job with data.label"
        texts = text_of(table, keys["label"] if isinstance(keys["label"], str) else None)
        if not texts:
            return "no column looks like a text for multi-label-classification; name it in the job with data.text"
        known = (*texts, *([keys["label"]] if isinstance(keys["label"], str) else keys["label"]))
        return Recognised({"text": texts, **keys}, tuple(texts), why + unread_texts(table, known), rank=4)

    def read_labels(self, rows: Rows, job: Job) -> list[Any]:
        columns = job.data.label
        return read_flags(rows, columns) if len(columns) > 1 else read_sets(rows, columns[0], job.data.label_delimiter)

    def name_labels(self, samples: Samples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The columns; of one column the labels that occur, in the order of the model or the data set, else sorted."""
        columns = job.data.label
        found = [label for labels in samples.labels for label in labels]
        if not found:
            raise DataError(f"{rows.source}: no row has a label in {listing([repr(name) for name in columns])}")
        if len(columns) > 1:
            return Named(columns)
        if set(found) <= {"0", "1"} and not is_list_of_labels(rows.table, columns[0]):
            raise DataError(
                f"{rows.source}: every label in {columns[0]!r} is 0 or 1. Name the columns of all labels in data.label, or for a "
                "single one set task.kind = 'text-classification'"
            )
        notes = []
        counts = Counter(mark for label in found for mark in DELIMITERS if mark in label)
        if counts and not any(len(labels) > 1 for labels in samples.labels):
            mark = counts.most_common(1)[0][0]
            notes.append(
                f"no row has several labels, and {counts[mark]:,} labels contain {mark!r}: set data.label_delimiter = {mark!r} "
                "if it separates labels"
            )
        return Named(label_order(found, class_names(rows.table, columns[0]), config), tuple(notes))

    def label_array(self, labels: Sequence[Any], names: tuple[str, ...]) -> NDArray[Any]:
        """1 for each label that a sample has, else 0; float32 (samples, labels)."""
        import numpy as np

        numbers = {name: number for number, name in enumerate(names)}
        made = np.zeros((len(labels), len(names)), np.float32)
        for sample, own in enumerate(labels):
            made[sample, [numbers[label] for label in own]] = 1
        return made

    def label_text(self, prepared: Prepared, label: NDArray[Any]) -> str:
        names = prepared.label_names
        return ", ".join(name for name, value in zip(names, label.tolist(), strict=True) if value) or "(none)"

    def loss(self, outputs: Any, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(binary cross-entropy summed over samples and labels, samples x labels); targets (batch, labels).

        With label smoothing s a label of 1 becomes 1 - s / 2, one of 0 becomes s / 2.
        """
        from torch.nn import functional

        smoothed = targets * (1 - smoothing) + smoothing / 2 if smoothing else targets
        return functional.binary_cross_entropy_with_logits(outputs.logits.float(), smoothed, reduction="sum"), targets.numel()

    def guessed_loss(self, prepared: Prepared, vocab_size: int) -> float | None:
        return math.log(2)  # each label is one of two

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.metrics import LabelSetMetrics

        return LabelSetMetrics(prepared.label_names, device)


def named_label(table: pa.Table) -> bool:
    """Whether a column of one class or number a row has the name of a label: other columns say something else."""
    return any(name.lower() in (*LABELS, *SCORES) and not is_list(type_of(table, name)) for name in table.column_names)


def repeats(table: pa.Table, name: str) -> bool:
    """Whether few items occur often in a column of lists: as labels do, and answers to questions do not."""
    if name.lower().partition(".")[0] == "answers":  # the answers of SQuAD; a small file has few different ones
        return False
    cells = table[name].slice(0, EXAMINED).to_pylist()
    items = [item for cell in cells for item in (parts_of(cell, ",") if isinstance(cell, str) else cell) or ()]
    return 2 <= len({*items}) <= min(MOST_CLASSES, len(items) // 2)


def holds_written_lists(table: pa.Table, name: str, named: bool) -> bool:
    """Whether all texts of a column are lists in JSON or Python: "['a', 'b']". Unless it is `named` for labels, items repeat.

    In one with a name of SETS, labels alone may be beside lists.
    """
    cells = [value for value in table[name].slice(0, EXAMINED).to_pylist() if value] if holds_text(type_of(table, name)) else []
    lists = [parts_of(cell, ",") for cell in cells if re.fullmatch(r"\s*\[[^][]*\]\s*", cell)]
    objects = any(found is None or any(isinstance(item, dict) for item in found) for found in lists)
    only = len(lists) == len(cells) or (bool(lists) and name.lower() in SETS)
    return bool(cells) and only and not objects and (named or repeats(table, name))


def delimited_column(table: pa.Table, names: Sequence[str]) -> tuple[str, str] | None:
    """(column, delimiter) of the first of `names` in which a fifth of the cells has several labels of up to 40 letters.

    Most of these labels occur in several combinations: "Smith, John" is one label.
    """
    for name in names:
        cells = [value for value in table[name].slice(0, EXAMINED).to_pylist() if isinstance(value, str)]
        if numbers_of(cells):  # "0,5" is a number with a decimal comma
            continue
        for mark in DELIMITERS:
            parts = [part.strip() for cell in cells for part in cell.split(mark)]
            several = sum(mark in cell for cell in cells)
            combined = Counter(part.strip() for cell in {*cells} for part in {*cell.split(mark)})
            if sum(number > 1 for number in combined.values()) * 2 <= len(combined):
                continue
            if several * 5 >= len(cells) > 0 and len(set(parts)) * 2 <= len(parts) and max(map(len, parts)) <= 40:
                return name, mark
    return None
