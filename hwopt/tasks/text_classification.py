"""Text classification of single texts and pairs, with encoders and decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import SCORES, has_many_classes, is_fact, label_columns, text_of, unread_texts, values_of
from hwopt.data.sources.number_format import numbers_of
from hwopt.tasks.classification import Classification
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.labels import label_text, similar_labels, sorted_labels
from hwopt.tasks.recognition import Recognised
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa


class TextClassification(Classification, LabelledTexts):
    """Classify single texts or pairs of texts. Labels are numbered as in the model's config, else in sorted order."""

    facts = TaskFacts("text-classification", "AutoModelForSequenceClassification", keys=frozenset({"task.class_weights"}))
    pipeline_tag: ClassVar[str] = "text-classification"

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column of classes beside a text or a pair of texts."""
        labels = label_columns(table, named=not chosen)
        if not labels:
            return "no column looks like a label for text-classification; name it in the job with data.label"
        label, *others = labels
        texts = text_of(table, label)
        if not texts:
            return "no column looks like a text for text-classification; name it in the job with data.text"
        values = [*map(label_text, values_of(table, label))]
        why = f"column {label!r} has {len(values):,} values: {listing(sorted_labels(values), 5)}"
        if others:
            why += f"; {listing([*map(repr, others)])} may also be the label: name one in data.label"
        if has_many_classes(table, label) or is_fact(label):
            why += f" in {table.num_rows:,} rows: if it is not the label, name another column in data.label"
        numbers = numbers_of(values) or ()
        if (numbers and label.lower() in SCORES) or any(not number.is_integer() for number in numbers):
            why += "; to predict them as numbers set task.kind = 'regression'"
        if "O" in values and any(value.startswith(("B-", "I-")) for value in values):
            why += "; for tags of words set task.kind = 'token-classification', which reads lists of words and of tags, or CoNLL"
        why = "; ".join([why + unread_texts(table, (*texts, label)), *similar_labels(values)])
        return Recognised({"text": texts, "label": label}, tuple(texts), why, rank=2)
