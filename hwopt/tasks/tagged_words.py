"""Samples of token classification: lists of words with a tag each, and how their tokens get the tags."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import Places
from hwopt.data.sources.column_types import class_names, holds_text, is_list
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import find_column
from hwopt.data.tokenizer import CHUNK, LengthLimit
from hwopt.errors import DataError, InputError
from hwopt.tasks.labels import is_list_of_labels, label_name
from hwopt.tasks.next_token import SampleArrays
from hwopt.tasks.preparation import Encoding
from hwopt.tasks.prepared import IGNORED
from hwopt.text import truncate

if TYPE_CHECKING:
    import pyarrow as pa

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
    tokenizer: Any, sentences: Sequence[Sequence[str]], tags: Sequence[Sequence[int]], limit: LengthLimit, places: Places
) -> Encoding:
    """The arrays of sentences, whose words are joined by spaces. The first token of a word has the number of its tag as label.

    Sentences without a token for a word are skipped. Raises InputError as `refuse_slow` does.
    """
    refuse_slow(tokenizer, limit.max_length)
    found = SampleArrays(places, limit)
    for start in range(0, len(sentences), CHUNK):
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
