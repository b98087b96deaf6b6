"""Read a source of unknown format and encoding, and name the keys of a job that read it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS, looks_like_conll
from hwopt.data.sources.csv_reader import DELIMITERS, guess_delimiter
from hwopt.data.sources.location import EXTENSIONS, expand, locate
from hwopt.data.sources.reading import read_all
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import flattened
from hwopt.data.sources.text_file import detect_encoding, likely_encoding, read_lines
from hwopt.errors import DataError
from hwopt.text import listing


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
        table = path.suffix.lower() == ".txt" or path.suffix.lower() not in EXTENSIONS
        return table_format(list(islice(read_lines(path), EXAMINED))) if table else None
    except (DataError, OSError):  # binary, missing or not readable
        return None


EXAMINED = 200  # lines whose cells are counted
LONGEST_NAME = 40  # letters in a header's cell: prose has longer parts between its commas, and a blank behind them
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
    encodings = {encoding} if encoding else {detect_encoding(path).removesuffix("-sig").upper() for path in files}
    if encodings:
        notes.append(listing(sorted(encodings)))
    headers = [next(read_lines(path, encoding), "") for path in files if path.suffix.lower() == ".csv"]
    if marks := set(map(guess_delimiter, headers)):
        notes.append("cells separated by " + listing([name for mark, name in DELIMITERS.items() if mark in marks]))
    return notes
