"""Text classification of single texts and pairs, with encoders and decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import classes, has_many_classes, label_column, text_of
from hwopt.tasks.classification import Classification
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.labels import similar_labels
from hwopt.tasks.recognition import Recognised

if TYPE_CHECKING:
    import pyarrow as pa


class TextClassification(Classification, LabelledTexts):
    """Classify single texts or pairs of texts. Labels are numbered as in the model's config, else in sorted order."""

    facts = TaskFacts("text-classification", "AutoModelForSequenceClassification", keys=frozenset({"task.class_weights"}))
    pipeline_tag: ClassVar[str] = "text-classification"

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
        if has_many_classes(table, label):
            why += f" in {table.num_rows:,} rows: if it is not the label, name another column in data.label"
        why = "; ".join([why, *similar_labels(map(str, table[label].unique().drop_null().to_pylist()))])
        return Recognised({"text": texts, "label": label}, tuple(texts), why, rank=2)
