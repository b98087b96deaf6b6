"""Recognise a data file: its format, its encoding, and what its columns are for. Each task says which columns it would read."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.task_kinds import task_class, task_kinds
from hwopt.data.sources.chat import EXTRAS
from hwopt.data.sources.columns import EXAMINED, files_beside, preferences, unread_numbers, unusable, written_lists
from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS, looks_like_conll
from hwopt.data.sources.csv_reader import DELIMITERS, LONGEST_NAME, guess_delimiter
from hwopt.data.sources.location import EXTENSIONS, expand, locate
from hwopt.data.sources.reading import read_all
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import flattened
from hwopt.data.sources.text_file import detect_encoding, likely_encoding, lines_beyond_ascii, read_lines
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
    names = tuple(rows.table.column_names)
    table = rows.table.select([place for place, name in enumerate(names) if names.count(name) == 1])
    twice = listing([repr(name) for name in dict.fromkeys(names) if name and names.count(name) > 1])
    unread = twice and f"several columns named {twice} are not read: rename all but one"
    chosen, found = choose_columns(table, kind, source)
    first = table.slice(0, EXAMINED)
    read = {*found.read, *(EXTRAS if found.chat else ())}  # a template writes the tools, too
    cells = [[str(value or "") for value in first[name].to_pylist()] for name in table.column_names if name in read]
    texts = [" ".join(row) for row in zip(*cells, strict=True)]
    letters = sum(map(len, texts))
    said = (", ".join(reading_notes(source, reading)), found.why, unread, unread_numbers(table), *rows.warnings)
    if rows.bad_rows.reasons:
        said = (*said, rows.bad_rows.note())
    return DataColumns(
        source,
        table.num_rows,
        names,
        chosen,
        {**found.keys, **reading},
        "; ".join(filter(None, said)),
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
    if reason := preferences(table) or written_lists(table):
        raise DataError(f"{source}: {reason}")
    answers = {each: task_class(each).recognise(table, False) for each in task_kinds()}
    recognised = {each: answer for each, answer in answers.items() if isinstance(answer, Recognised)}
    if recognised:
        best = max(recognised, key=lambda each: recognised[each].rank)  # the first one of equals
        return best, recognised[best]
    raise DataError(f"{source}: {unusable(table) or 'no column holds text'}. It has: {listing(table.column_names, 30)}")


def read_any(source: str) -> tuple[Rows, dict[str, Any]]:
    """The rows of `source`, and the keys of `data` that read it: the format if the extension is not that of the content, and
    the encoding if it is not UTF-8.

    The fields of nested columns are columns of the table. Raises DataError if the source cannot be read.
    """
    formats = set(map(hidden_format, expand(source)))
    keys: dict[str, Any] = {"format": formats.pop()} if len(formats) == 1 and None not in formats else {}
    located = (locate(path, format=keys.get("format")) for path in expand(source))
    files = [path for kind, path in located if kind == "file" and path.suffix.lower() != ".parquet"]
    if encoding := next(filter(None, map(likely_encoding, files)), None):
        keys["encoding"] = encoding
    rows = read_all(source, None, ReadOptions(strict=False, **keys))
    rows.usable()
    return replace(rows, table=flattened(rows.table)), keys


def hidden_format(source: str) -> str | None:
    """The format of a CoNLL file or a table with the extension of another format, or an unknown one; None for other files."""
    try:
        kind, path = locate(source, format="conll")
        if kind != "file" or path.suffix.lower() in CONLL_EXTENSIONS:
            return None
        if looks_like_conll(read_lines(path)):
            return "conll"
        lines = list(islice(read_lines(path), EXAMINED_LINES))
        if path.suffix.lower() == ".tsv":  # Excel and pandas quote cells, and double the quotes in them
            return "csv" if any('""' in line for line in lines) and table_format(lines) == "csv" else None
        return table_format(lines) if path.suffix.lower() == ".txt" or path.suffix.lower() not in EXTENSIONS else None
    except (DataError, OSError):  # binary, missing or not readable
        return None


EXAMINED_LINES = 200  # lines whose cells are counted
FEWEST_ROWS = {"\t": 3, ",": 10, ";": 10, "|": 10}
"""Delimiter -> lines that prose is unlikely to have with equally many of them in each."""


def table_format(lines: Sequence[str]) -> str | None:
    """ "csv" or, for tabs without quotes, "tsv" if the lines have equally many cells below a header of short names."""
    mark = guess_delimiter("".join(lines[:1]))
    with suppress(csv.Error):
        rows = [row for row in csv.reader(lines, delimiter=mark, strict=True) if row]
        names = rows[0] if len(rows) >= FEWEST_ROWS[mark] else []
        short = all(len(name) <= LONGEST_NAME and name == name.strip() for name in names)
        if len(names) > 1 and short and {len(row) for row in rows} == {len(names)}:
            return "tsv" if mark == "\t" and not any('"' in line for line in lines) else "csv"
    return None


def reading_notes(source: str, keys: Mapping[str, Any]) -> list[str]:
    """How the files of `source` are read: a format that is not that of the extension, the encoding if it is not UTF-8 or if the
    files are tables, and the delimiter of csv files. `keys`: as `read_any` returns them."""
    format, encoding = keys.get("format"), keys.get("encoding")
    located = (locate(path, format=format) for path in expand(source))
    files = [path for kind, path in located if kind == "file" and path.suffix.lower() in (".csv", ".tsv") and format is None]
    notes = [] if format is None else [f"{format} by its content"]
    if encoding:  # a guess: letters tell whether it is right
        text = b"".join(lines_beyond_ascii(Path(path)) for path in expand(source)).decode(encoding, "replace")
        word = re.search(r"\w*[^\W\x00-\x7f]\w*", text) or re.search(r"\w*[^\x00-\x7f]\w*", text)
        notes.append(encoding + (f", such as {word[0]!r}" if word else ""))
    elif encodings := {detect_encoding(path).removesuffix("-sig").upper() for path in files}:
        notes.append(listing(sorted(encodings)))
    headers = [next(read_lines(path, encoding), "") for path in files if path.suffix.lower() == ".csv"]
    if marks := set(map(guess_delimiter, headers)):
        notes.append("cells separated by " + listing([name for mark, name in DELIMITERS.items() if mark in marks]))
    return notes
