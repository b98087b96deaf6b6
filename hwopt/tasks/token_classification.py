"""Token classification: a tag for each word, such as the named entities of a text.

The first token of a word has the tag of the word; the other tokens do not count in the loss and in the metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.bad_rows import Places
from hwopt.data.sources.number_format import numbers_of
from hwopt.data.sources.rows import Rows, class_names, holds_text, is_list
from hwopt.data.sources.tables import find_column
from hwopt.data.stores.chunks import Chunks
from hwopt.data.stores.token_store import TokenStore
from hwopt.data.tokenizer import CHUNK, Encoding, LengthLimit
from hwopt.errors import DataError, InputError
from hwopt.tasks.classification import Classes
from hwopt.tasks.labelled_texts import LabelledTexts
from hwopt.tasks.labels import is_list_of_labels, label_name, label_order, one_label_column
from hwopt.tasks.next_token import SampleArrays, token_loss
from hwopt.tasks.predictors import ModelInput, TextPredictor
from hwopt.tasks.preparation import token_store
from hwopt.tasks.prepared import IGNORED, Named, Prepared, Samples, Trained
from hwopt.tasks.preview import Shown, Span
from hwopt.tasks.recognition import Recognised
from hwopt.text import truncate

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.tasks.metrics import LossMetrics

WORDS, COUNT = "words", "word_count"
"""Inputs that do not go into the model: the word that each token begins, and the number of words in the first place."""


class TagPredictor(TextPredictor):
    """The most probable tag of each word; None for a word without a token, or behind data.max_length."""

    columns: Mapping[str, type] = {"predicted_tags": list}

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each sentence as in training; each token also has the word that it begins, from 1, or 0."""
        refuse_slow(self.tokenizer, self.max_length)
        if not inputs:
            return []
        found: list[ModelInput | str] = []
        encoded = tokens_of_words(self.tokenizer, inputs, self.max_length)
        for sentence, (tokens, words, _) in zip(inputs, encoded, strict=True):
            begins = [0 if word == IGNORED else word + 1 for word in words]
            found.append(self.checked({"input_ids": list(tokens), WORDS: begins, COUNT: [len(sentence)]}))
        return found

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        words, counts = inputs.pop(WORDS).tolist(), inputs.pop(COUNT)[:, 0].tolist()
        numbers = self.model(**inputs).logits.argmax(-1).tolist()
        found = []
        for own, tags, count in zip(words, numbers, counts, strict=True):
            of_word = {word - 1: self.labels[tag] for word, tag in zip(own, tags, strict=True) if word}
            found.append(([of_word.get(word) for word in range(count)],))
        return found


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
        from hwopt.tasks.entity_metrics import misplaced_tags

        column = present(rows.table, job.data.label[0], TAG_COLUMNS)
        names = label_order([tag for tags in samples.labels for tag in tags], class_names(rows.table, column), config)
        if len(names) == 1:
            raise DataError(f"{rows.source}: every tag in {column!r} is {names[0]!r}; classification needs at least two")
        numbers = (
            f"every tag of {column!r} is a number: the metrics count each as an entity. Write 'O' for the tag of other words"
        )
        return Named(names, (numbers,) if numbers_of(names) else tuple(misplaced_tags(samples.labels, samples.places.at)))

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> TokenStore:
        words, tags, names, limit = samples.columns[0], samples.labels, trained.label_names, trained.limit
        numbers = {name: number for number, name in enumerate(names)}
        numbered = [[numbers[tag] for tag in own] for own in tags]
        encode = partial(encode_words, trained.tokenizer, words, numbered, limit, samples.places)
        settings = [self.kind, limit.max_length]
        return token_store(TokenStore, samples, trained, cache, settings, [list(names), words, tags], encode)

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The tokens of the sample; a word that counts in the loss is followed by its tag, except for the tag "O"."""
        names, tokenizer = prepared.label_names, prepared.tokenizer
        spans: list[Span] = []
        for token, label in zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True):
            text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            tag = "" if label == IGNORED or names[label] == "O" else f"/{names[label]}"
            spans += [Span(f"{text}{tag}", label != IGNORED), Span(" ", False)]
        return Shown(tuple(spans), tokens_in_loss=int((row["labels"] != IGNORED).sum()))

    loss = staticmethod(token_loss)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.entity_metrics import EntityMetrics

        return EntityMetrics(prepared.label_names, device)


WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "labels", "ner", "pos_tags", "pos", "chunk_tags")


def present(table: pa.Table, name: str, usual: Sequence[str]) -> str:
    """`name` if the table has it, else the first of the `usual` names that it has, else `name`."""
    names = table.column_names
    return name if name in names else next((each for each in usual if each in names), name)


def read_words(rows: Rows, name: str) -> list[list[str]]:
    """The words of each row. Rows without words are marked as bad. Raises DataError for a column of another type."""
    found = []
    for row, items in enumerate(list_column(rows, name, "words", "data.text")):
        if not items or not all(isinstance(item, str) for item in items):
            rows.mark_bad(row, f"{name!r} has no words" if not items else f"{name!r} is not a list of words: {truncate(items)}")
            items = []
        found.append(list(items))
    return found


def read_tags(rows: Rows, name: str, words: Sequence[Sequence[str]]) -> list[list[str]]:
    """The tags of each row. Rows without one tag for each word are marked as bad."""
    classes = class_names(rows.table, name)
    found = []
    for row, (items, own) in enumerate(zip(list_column(rows, name, "tags", "data.label"), words, strict=True)):
        tags = [label_name(item, classes) or "" for item in items or ()]
        if own and len(tags) != len(own):
            rows.mark_bad(row, f"{name!r} has {len(tags):,} tags for {len(own):,} words")
        elif own and not all(tags):
            rows.mark_bad(row, f"{name!r} has an item that is not a tag: {truncate((items or ())[tags.index('')])}")
        found.append(tags)
    return found


def list_column(rows: Rows, name: str, what: str, key: str) -> list[list[Any] | None]:
    """The lists in the column `name`; None for null."""
    try:
        column = find_column(rows.table, name, rows.source, key)
    except DataError as error:
        raise DataError(f"{error}. For a CoNLL file set data.format = 'conll'") from error
    original = rows.non_strings.get(name, {})
    if not is_list(column.type) and not (original and holds_text(column.type)):  # of mixed types
        raise DataError(
            f"{rows.source}: column {name!r} holds {column.type}; token-classification needs a list of {what} in each row, "
            "or a CoNLL file (.conll, .iob, .bio; for another extension set data.format = 'conll')"
        )
    values = (original.get(row, value) for row, value in enumerate(column.to_pylist()))
    return [value if isinstance(value, list) else None for value in values]


def recognised_columns(table: pa.Table) -> tuple[str, str] | None:
    """(column of words, column of tags) of a table with two columns of lists; None without them."""
    lists = [name for name in table.column_names if is_list_of_labels(table, name)]
    words = next((name for name in WORD_COLUMNS if name in lists), None)
    tags = next((name for name in TAG_COLUMNS if name in lists and name != words), None)
    return None if words is None or tags is None else (words, tags)


def encode_words(
    tokenizer: Any,
    sentences: Sequence[Sequence[str]],
    tags: Sequence[Sequence[int]],
    limit: LengthLimit,
    places: Places,
    chunks: Chunks,
) -> Encoding:
    """The arrays of sentences, whose words are joined by spaces. The first token of a word has the number of its tag as label.

    Sentences without a token for a word are skipped. Raises InputError as `refuse_slow` does.
    """
    refuse_slow(tokenizer, limit.max_length)
    found = SampleArrays(places, limit, chunks)
    for start in found.starts(len(sentences)):
        chunk = sentences[start : start + CHUNK]
        for sample, (tokens, words, cut) in enumerate(tokens_of_words(tokenizer, chunk, limit.max_length), start):
            labels = [IGNORED if word == IGNORED else tags[sample][word] for word in words]
            found.add(sample, tokens, labels, "has no tokens", cut)
    return found.encoding()


def tokens_of_words(
    tokenizer: Any, sentences: Sequence[Sequence[str]], max_length: int | None
) -> list[tuple[list[int], list[int], bool]]:
    """(tokens, for each token the word that begins with it or -100, whether the sentence was truncated) of each sentence."""
    texts = [" ".join(words) for words in sentences]
    options = {"return_attention_mask": False, "return_token_type_ids": False, "return_offsets_mapping": True, "verbose": False}
    found = tokenizer(texts, **options)
    made = []
    for words, text, tokens, offsets in zip(sentences, texts, found["input_ids"], found["offset_mapping"], strict=True):
        long = max_length is not None and len(tokens) > max_length
        if long:
            shortened = tokenizer(text, truncation=True, max_length=max_length, **options)
            tokens, offsets = shortened["input_ids"], shortened["offset_mapping"]
        made.append((tokens, first_tokens(words, offsets), long))
    return made


def refuse_slow(tokenizer: Any, max_length: int | None) -> None:
    """Raise InputError for a tokenizer without positions, or a maximum length without room for a word."""
    if not tokenizer.is_fast:
        raise InputError(
            f"model.tokenizer: {type(tokenizer).__name__} does not say which characters a token stands for, which "
            "token-classification needs; give a folder with a tokenizer.json"
        )
    special = tokenizer.num_special_tokens_to_add()
    if max_length is not None and max_length <= special:
        raise InputError(f"data.max_length: {max_length} leaves no room for text: {special} special tokens are added")


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """For each token the word that begins with it, else -100. `offsets`: (begin, end) in the words joined by spaces."""
    starts = [0, *accumulate(len(word) + 1 for word in words)]
    found, labelled = [], -1
    for begin, end in offsets:
        word = bisect_left(starts, end) - 1  # the last word that starts before the end of the token
        inside = begin < end and word > labelled and begin < starts[word] + len(words[word])
        found.append(word if inside else IGNORED)
        labelled = word if inside else labelled
    return found
