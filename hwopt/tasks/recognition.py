"""Recognise what the columns of a data file are for: each installed task says which columns it would read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwopt.config.task_kinds import task_class, task_kinds
from hwopt.data.sources.columns import EXAMINED, files_beside, preferences
from hwopt.data.sources.file_format import read_any, reading_notes
from hwopt.errors import DataError
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Recognised:
    """The columns of a table that a task would read."""

    keys: Mapping[str, Any]  # key of the job's table `data` -> value: text, label, prompt, completion or messages
    read: tuple[str, ...]  # the columns that the model reads
    why: str
    rank: int = 0
    """The task with the highest rank is proposed: 0 for a text alone, higher the fewer other tasks could read the columns."""
    chat: bool = False  # the rows are conversations
    joined: bool = False  # the texts are joined and split into blocks, so that the length of a row does not matter


@dataclass(frozen=True)
class DataColumns:
    """The columns of a data source, and how to read it."""

    source: str
    rows: int
    names: tuple[str, ...]
    kind: str  # of the task
    keys: Mapping[str, Any]
    """`Recognised.keys`, and the keys to read the source: format and encoding, if they are not the usual ones."""
    why: str  # how the source is read, and how its columns were recognised
    lengths: tuple[int, ...] = ()  # characters of the first rows, over all columns that the model reads
    ascii: bool = True  # almost all letters are ASCII, as in English
    chat: bool = False
    joined: bool = False
    held_out: Mapping[str, str] = field(default_factory=dict)  # keys eval and test -> a file beside the source with that name


def recognise(source: str, kind: str | None = None) -> DataColumns:
    """The columns of `source`, for the task `kind`; None: the task is recognised too.

    Raises DataError if the source cannot be read, or has no columns for the task.
    """
    rows, reading = read_any(source)
    table = rows.table
    names = tuple(table.column_names)
    chosen, found = choose_columns(table, kind, source)
    first = table.slice(0, EXAMINED)
    cells = [[str(value or "") for value in first[name].to_pylist()] for name in found.read if name in names]
    texts = [" ".join(row) for row in zip(*cells, strict=True)]
    letters = sum(map(len, texts))
    return DataColumns(
        source,
        table.num_rows,
        names,
        chosen,
        {**found.keys, **reading},
        "; ".join(filter(None, (", ".join(reading_notes(source, reading)), found.why))),
        tuple(map(len, texts)),
        sum(len(text.encode()) for text in texts) <= 1.02 * letters,
        chat=found.chat,
        joined=found.joined,
        held_out=files_beside(source),
    )


def choose_columns(table: pa.Table, kind: str | None, source: str) -> tuple[str, Recognised]:
    """(task, its columns). Raises DataError, with what is missing, if there is none."""
    if kind is not None:
        found = task_class(kind).recognise(table, True)
        if isinstance(found, Recognised):
            return kind, found
        raise DataError(f"{source}: {found}. It has: {listing(table.column_names, 30)}")
    if reason := preferences(table):
        raise DataError(f"{source}: {reason}")
    answers = {each: task_class(each).recognise(table, False) for each in task_kinds()}
    recognised = {each: answer for each, answer in answers.items() if isinstance(answer, Recognised)}
    if recognised:
        best = max(recognised, key=lambda each: recognised[each].rank)  # the first one of equals
        return best, recognised[best]
    raise DataError(f"{source}: no column holds text. It has: {listing(table.column_names, 30)}")
