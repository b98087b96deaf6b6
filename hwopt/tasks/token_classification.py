"""Token classification: a tag for each word, such as the named entities of a text.

The first token of a word has the tag of the word; the other tokens do not count in the loss and in the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.column_types import class_names
from hwopt.data.sources.number_format import numbers_of
from hwopt.data.sources.rows import Rows
from hwopt.data.stores.token_store import TokenStore
from hwopt.errors import DataError
from hwopt.tasks.classification import Classes
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.labels import label_order, one_label_column
from hwopt.tasks.next_token import token_loss
from hwopt.tasks.predictors import TagPredictor
from hwopt.tasks.preparation import token_store
from hwopt.tasks.prepared import IGNORED, Named, Prepared, Samples, Trained
from hwopt.tasks.preview import Shown, Span
from hwopt.tasks.recognition import Recognised
from hwopt.tasks.tagged_words import TAG_COLUMNS, WORD_COLUMNS, encode_words, present, read_tags, read_words, recognised_columns

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.tasks.metrics import LossMetrics


class TokenClassification(Classes, LabelledTexts):
    """Tag words: a CoNLL file, or a column with lists of words and one with lists of tags."""

    facts = TaskFacts(
        "token-classification",
        "AutoModelForTokenClassification",
        target="token",
        adapter="TOKEN_CLS",
        keys=frozenset({"task.class_weights"}),
    )
    noun: ClassVar[str] = "tag"
    absent: ClassVar[str] = "word with the tag"
    predicts = TagPredictor
    pipeline_tag: ClassVar[str] = "token-classification"
    default_metric: ClassVar[str] = "eval_f1"
    metric_directions: ClassVar[dict[str, bool]] = dict.fromkeys(("f1", "precision", "recall", "accuracy"), True) | {
        "loss": False
    }

    @classmethod
    def check_job(cls, job: Job) -> None:
        one_label_column(job)
        if len(job.data.text) > 1:
            raise ValueError("data.text: token-classification takes one column with lists of words")

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column with lists of words and one with lists of tags, as a CoNLL file has."""
        found = recognised_columns(table)
        if found is None:
            return "no columns look like lists of words and of tags; name them in the job with data.text and data.label"
        words, tags = found
        why = f"columns {words!r} and {tags!r} hold words with their tags"
        return Recognised({"text": [words], "label": tags}, (words,), why, rank=5)

    def samples(self, rows: Rows, job: Job) -> Samples:
        words = read_words(rows, present(rows.table, job.data.text[0], WORD_COLUMNS))
        tags = read_tags(rows, present(rows.table, job.data.label[0], TAG_COLUMNS), words)
        return Samples.of(rows, [words], list(tags))

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        return read_words(rows, present(rows.table, job.data.text[0], WORD_COLUMNS))

    def plain_texts(self, samples: Samples) -> list[str]:
        return [" ".join(words) for words in samples.columns[0]]

    def name_labels(self, samples: Samples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The tags that occur, in the order of the model or the data set, else sorted."""
        column = present(rows.table, job.data.label[0], TAG_COLUMNS)
        names = label_order([tag for tags in samples.labels for tag in tags], class_names(rows.table, column), config)
        if len(names) == 1:
            raise DataError(f"{rows.source}: every tag in {column!r} is {names[0]!r}; classification needs at least two")
        numbers = (
            f"every tag of {column!r} is a number: the metrics count each as an entity. Write 'O' for the tag of other words"
        )
        return Named(names, (numbers,) if numbers_of(names) else ())

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> TokenStore:
        words, tags, names, limit = samples.columns[0], samples.labels, trained.label_names, trained.limit
        numbers = {name: number for number, name in enumerate(names)}
        numbered = [[numbers[tag] for tag in own] for own in tags]
        encode = partial(encode_words, trained.tokenizer, words, numbered, limit, samples.places)
        settings = [self.kind, limit.max_length]
        return token_store(TokenStore, samples, trained, cache, settings, [list(names), words, tags], encode)

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The tokens of the sample; a word that counts in the loss is followed by its tag, except for the tag "O"."""
        names, tokenizer = prepared.label_names or (), prepared.tokenizer
        spans: list[Span] = []
        for token, label in zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True):
            text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            tag = "" if label == IGNORED or names[label] == "O" else f"/{names[label]}"
            spans += [Span(f"{text}{tag}", label != IGNORED), Span(" ", False)]
        return Shown(tuple(spans), tokens_in_loss=int((row["labels"] != IGNORED).sum()))

    def loss(
        self, outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None = None, smoothing: float = 0.0
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the labels that are not -100, their number or the sum of their weights)."""
        return token_loss(outputs, targets, weight, smoothing)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.entity_metrics import EntityMetrics

        return EntityMetrics(prepared.label_names or (), device)
