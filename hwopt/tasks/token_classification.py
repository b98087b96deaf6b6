"""Token classification: a tag for each word, such as the named entities of a text.

The first token of a word has the tag of the word; the other tokens do not count in the loss and in the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.rows import Rows
from hwopt.data.stores.token_store import TokenStore, fingerprint
from hwopt.data.tokenizer import LengthLimit
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError
from hwopt.tasks.base import FORMAT, Metrics
from hwopt.tasks.class_weights import WeightedClasses, with_class_weights
from hwopt.tasks.label_sets import sequence_class_names
from hwopt.tasks.labelled_parts import Named
from hwopt.tasks.labelled_texts import LabelledSamples, LabelledTexts
from hwopt.tasks.labels import label_order, one_label_column
from hwopt.tasks.prediction import Generation, Predictor, Trained
from hwopt.tasks.preparation import add_tokenless_rows
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.recognition import Recognised
from hwopt.tasks.spans import Shown, Span
from hwopt.tasks.tagged_words import encode_words, read_tags, read_words, recognised_columns, tag_column, word_column
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig


class TokenClassification(WeightedClasses, LabelledTexts):
    """Tag words: a CoNLL file, or a column with lists of words and one with lists of tags."""

    facts = TaskFacts(
        "token-classification",
        "AutoModelForTokenClassification",
        target="token",
        adapter="TOKEN_CLS",
        keys=frozenset({"task.class_weights"}),
    )
    pipeline_tag: ClassVar[str] = "token-classification"
    default_metric: ClassVar[str] = "eval_f1"
    metric_directions: ClassVar[dict[str, bool]] = {
        "f1": True,
        "precision": True,
        "recall": True,
        "accuracy": True,
        "loss": False,
    }

    @classmethod
    def check_job(cls, job: Job) -> None:
        """Refuse pairs of texts and several columns of tags."""
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

    def samples(self, rows: Rows, job: Job) -> LabelledSamples:
        """The sentences with one tag for each word."""
        words = read_words(rows, word_column(rows.table, job))
        tags = read_tags(rows, tag_column(rows.table, job), words)
        return LabelledSamples(rows.places, rows.bad_rows, [words], list(tags)).take(rows.usable())

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        """The words of each row."""
        return read_words(rows, word_column(rows.table, job))

    def plain_texts(self, samples: LabelledSamples) -> list[str]:
        """The words of each sentence, joined by spaces."""
        return [" ".join(words) for words in samples.texts[0]]

    def name_labels(self, samples: LabelledSamples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The tags that occur, in the order of the model or the data set, else sorted."""
        column = tag_column(rows.table, job)
        names = label_order([tag for tags in samples.labels for tag in tags], sequence_class_names(rows.table, column), config)
        if len(names) == 1:
            raise DataError(f"{rows.source}: every tag in {column!r} is {names[0]!r}; classification needs at least two")
        return Named(names)

    def only_known(self, samples: LabelledSamples, names: tuple[str, ...]) -> LabelledSamples:
        """The sentences whose tags all occur in the training data; the others become bad rows."""
        known, numbers, usable = set(names), samples.places.numbers, []
        for sample, tags in enumerate(samples.labels):
            if new := next((tag for tag in tags if tag not in known), None):
                samples.bad_rows.add(
                    numbers[sample],
                    f"has a tag that is not in the training data: {truncate(new)}.{nearest(new, names)} "
                    f"Known tags: {listing(names)}",
                )
            else:
                usable.append(sample)
        samples.bad_rows.check([numbers[sample] for sample in usable])
        return samples.take(usable)

    def held_out_notes(self, held_out: LabelledSamples, names: tuple[str, ...]) -> list[str]:
        """The tags that the evaluation data lacks."""
        present = {tag for tags in held_out.labels for tag in tags}
        absent = [truncate(name) for name in names if name not in present]
        return [f"the evaluation data has no word with the tag {listing(absent)}"] if absent else []

    def finish(self, prepared: Prepared, job: Job) -> Prepared:
        """`prepared` with the class weights of the job."""
        if job.task.class_weights is None:
            return prepared
        labels = prepared.train.array("labels")
        return with_class_weights(prepared, job.task.class_weights, labels[labels != IGNORED])

    def store(
        self, samples: LabelledSamples, names: tuple[str, ...], tokenizer: Any, limit: LengthLimit, types: bool, cache: Path
    ) -> TokenStore:
        """The token store of `samples`, from the cache or written now. `types` has no effect."""
        import numpy as np

        words, tags = samples.texts[0], samples.labels
        key = fingerprint([FORMAT, self.kind, limit.max_length], tokenizer_fingerprint(tokenizer), list(names), words, tags)
        numbers = {name: number for number, name in enumerate(names)}

        def make() -> tuple[dict[str, Any], dict[str, Any]]:
            found = encode_words(tokenizer, words, limit, samples.places)
            offsets = np.concatenate([[0], np.cumsum(found.encoded.lengths)])
            kept = [each for sample, each in enumerate(tags) if sample not in found.encoded.skipped]
            labels = np.full(len(found.words), IGNORED, np.int64)
            for sample, own in enumerate(kept):
                part = slice(offsets[sample], offsets[sample + 1])
                first = found.words[part]
                labels[part][first != IGNORED] = [numbers[own[word]] for word in first[first != IGNORED]]
            counted = np.add.reduceat(labels != IGNORED, offsets[:-1], dtype=np.int32)
            arrays = {"input_ids": found.encoded.ids, "offsets": offsets, "labels": labels, "counts": counted}
            meta = {"kind": self.kind, "label_names": list(names), "labels_per_token": True, "max_length": limit.max_length}
            return arrays, meta | found.encoded.meta(tokenizer)

        store = TokenStore.cached(cache / "tokens" / key, make)
        add_tokenless_rows(store, samples.places, samples.bad_rows)
        skipped = {sample for sample, _ in store.meta["left_out"]}
        limit.check(store.lengths, samples.places.take([sample for sample in range(len(words)) if sample not in skipped]))
        return store

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The tokens of the sample; a word that counts in the loss is followed by its tag, except for the tag "O"."""
        names, tokenizer = prepared.label_names or (), prepared.tokenizer
        spans: list[Span] = []
        for token, label in zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True):
            text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            tag = "" if label == IGNORED or names[label] == "O" else f"/{names[label]}"
            spans += [Span(f"{text}{tag}", label != IGNORED), Span(" ", False)]
        return Shown(tuple(spans), tokens_in_loss=int((row["labels"] != IGNORED).sum()))

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> Predictor:
        """Predicts the tag of each word."""
        from hwopt.tasks.tag_predictor import TagPredictor

        return TagPredictor(trained, model)

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the labels that are not -100, their number); targets (batch, length)."""
        return word_loss(outputs, targets)

    @staticmethod
    def weighted_loss(
        outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None, smoothing: float
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """`loss` with class weights and label smoothing as in torch's cross_entropy, and the sum of the weights."""
        return word_loss(outputs, targets, weight, smoothing)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        """loss and accuracy of the words, and precision, recall and f1 of the entities, as seqeval counts them."""
        from hwopt.tasks.entity_metrics import EntityMetrics

        return EntityMetrics(prepared.label_names or (), device)


def word_loss(
    outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None = None, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy summed over the labels that are not -100, their number or the sum of their weights)."""
    from torch.nn import functional

    logits, labels = outputs.logits.float().flatten(0, 1), targets.flatten()  # (batch x length, tags), (batch x length,)
    summed = functional.cross_entropy(
        logits, labels, weight=weight, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
    counted = labels != IGNORED
    return summed, counted.sum() if weight is None else (weight[labels.clamp(min=0)] * counted).sum()
