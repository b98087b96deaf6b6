"""Read delimited text row by row: csv (quoted) and tsv (not quoted)."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import Rows
from hwopt.data.text_file import INVALID_BYTE, not_utf8
from hwopt.errors import DataError
from hwopt.text import truncate

Record = tuple[int, list[str] | None, str]
"""(number of its first line, cells or None if they cannot be parsed, the raw text)"""


def read_delimited(path: Path, lines: Iterator[str], bad_rows: BadRows, tabs: bool) -> Rows:
    """The rows of a csv or tsv file. All cells stay strings: guessed types would change labels such as 01 or NA."""
    import pyarrow as pa

    separator = "tabs" if tabs else "commas (quote a cell that contains one)"
    records = tsv_records(lines) if tabs else csv_records(lines)
    names: list[str] = []
    rows: list[list[str]] = []
    numbers: list[int] = []
    for number, cells, raw in records:
        invalid = INVALID_BYTE.search(raw)
        if not names:
            if invalid or cells is None:
                raise DataError(f"{path}:{number}: the header {not_utf8(invalid) if invalid else 'has an unclosed quote'}")
            names = cells
        elif invalid:
            bad_rows.add(number, not_utf8(invalid))
        elif cells is None:
            bad_rows.add(number, f"has an unclosed quote, or a quote inside a cell: {truncate(raw.strip())}")
        elif len(cells) != len(names):
            bad_rows.add(
                number,
                f"has {len(cells)} columns, the header has {len(names)}: {truncate(raw.strip())}; separate cells by {separator}",
            )
        else:
            rows.append(cells)
            numbers.append(number)
    if not names:
        raise DataError(f"{path}: has no rows; give a file with at least one sample")
    columns = [pa.array([cells[index] for cells in rows], pa.string()) for index in range(len(names))]
    return Rows(pa.Table.from_arrays(columns, names=names), Places(str(path), "line", numbers), bad_rows)


def tsv_records(lines: Iterator[str]) -> Iterator[Record]:
    """One record per line that is not empty."""
    for number, line in enumerate(lines, 1):
        if content := line.rstrip("\r\n"):
            yield number, content.split("\t"), line


def csv_records(lines: Iterator[str]) -> Iterator[Record]:
    """One record per csv row, which may span lines. After an unclosed quote, parsing resumes at the next line."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        number, remaining = 1, lines
        while (first := next(remaining, None)) is not None:
            if not first.strip("\r\n"):
                number += 1
                continue
            consumed = [first]
            try:
                cells: list[str] | None = next(csv.reader(chain([first], recorded(remaining, consumed)), strict=True))
            except csv.Error:
                cells, remaining = None, chain(consumed[1:], remaining)
                consumed = consumed[:1]
            yield number, cells, "".join(consumed)
            number += len(consumed)
    finally:
        csv.field_size_limit(limit)


def recorded(lines: Iterator[str], consumed: list[str]) -> Iterator[str]:
    """`lines`; each one is appended to `consumed` before it is yielded."""
    for line in lines:
        consumed.append(line)
        yield line
