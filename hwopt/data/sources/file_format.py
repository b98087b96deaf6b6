"""Read a source of unknown format and encoding, and name the keys of a job that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS, looks_like_conll
from hwopt.data.sources.csv_reader import DELIMITERS, guess_delimiter
from hwopt.data.sources.location import expand, locate
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
    keys: dict[str, Any] = {"format": "conll"} if all(map(is_hidden_conll, expand(source))) else {}
    located = (locate(path, format=keys.get("format")) for path in expand(source))
    files = [path for kind, path in located if kind == "file" and path.suffix.lower() != ".parquet"]
    if encoding := next(filter(None, map(likely_encoding, files)), None):
        keys["encoding"] = encoding
    rows = read_all(source, None, ReadOptions(strict=False, **keys))
    rows.usable()
    return replace(rows, table=flattened(rows.table)), keys


def is_hidden_conll(source: str) -> bool:
    """Whether `source` is a CoNLL file with the extension of another format, or with an unknown one."""
    try:
        kind, path = locate(source, format="conll")
        return kind == "file" and path.suffix.lower() not in CONLL_EXTENSIONS and looks_like_conll(read_lines(path))
    except (DataError, OSError):  # binary, missing or not readable
        return False


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
