"""Read delimited text row by row: csv (quoted) and tsv (not quoted). The delimiter of a csv file is guessed from its header."""

from __future__ import annotations

import csv
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.number_format import is_decimal
from hwopt.data.sources.rows import PACK, ReadOptions, Rows
from hwopt.data.sources.spill import Spill
from hwopt.data.sources.text_file import INVALID_BYTE, encoding_hint, undecodable
from hwopt.errors import DataError
from hwopt.text import counted, listing, truncate

if TYPE_CHECKING:
    import pyarrow as pa

Record = tuple[int, list[str] | None, str]  # (number of its first line, cells or None if they cannot be parsed, the raw text)
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "'|'"}
"""Delimiters that are recognised in the header of a csv file, and their names in messages."""
LONGEST_NAME = 40  # letters in a header's cell: prose has longer parts between its commas, and a blank behind them
EXCEL = re.compile(r'"?sep=(.)"?')  # the first line of a csv file that tells Excel the delimiter


def read_delimited(path: Path, lines: Iterator[str], bad_rows: BadRows, options: ReadOptions, quoted: bool = True) -> Rows:
    """The rows of a csv file, or of a tsv file if not `quoted`.

    All cells stay strings: guessed types would change labels such as 01 or NA.
    """
    import pyarrow as pa

    header = "".join(islice(lines, 1))
    delimiter = (options.delimiter or guess_delimiter(header)) if quoted else "\t"
    named = quoted and EXCEL.fullmatch(header.strip())
    if named:
        delimiter, header = options.delimiter or named[1], "\n"  # an empty line keeps the numbers of the others
    lines = chain([header] if header else [], lines)
    separator = DELIMITERS.get(delimiter, repr(delimiter)) + (" (quote a cell that contains one)" if quoted else "")
    records = csv_records(lines, delimiter, blank_follows(header, delimiter)) if quoted else tsv_records(lines)
    names: list[str] = []
    first = 0
    rows: list[list[str]] = []
    packs: list[list[Any]] = []
    spill, numbers = Spill(), array("q")
    for number, cells, raw in records:
        invalid = INVALID_BYTE.search(raw)
        if not names:
            if invalid:
                raise DataError(f"{path}:{number}: the header {undecodable(invalid, options.encoding)}. {encoding_hint(path)}")
            if cells is None:
                raise DataError(f"{path}:{number}: the header has an unclosed quote")
            names, first = cells, number
        elif invalid:
            bad_rows.add(number, undecodable(invalid, options.encoding), partial(encoding_hint, path))
        elif cells is None:
            bad_rows.add(number, f"has an unclosed quote, or a quote inside a cell: {truncate(raw.strip())}")
        elif len(cells) != len(names):
            bad_rows.add(
                number,
                f"has {counted(len(cells), 'column')}, the header has {len(names)}: {truncate(raw.strip())}; "
                f"separate cells by {separator}",
            )
        elif cells == names and len(names) > 1:
            bad_rows.add(number, "repeats the header")
        else:
            rows.append(cells)
            numbers.append(number)
            if len(rows) == PACK:
                packs.append([spill.put(pa.array(column, pa.string())) for column in zip(*rows, strict=True)])
                rows = []
    if not names:
        raise DataError(f"{path}: has no rows; give a file with at least one sample")
    packs.append([pa.array([cells[index] for cells in rows], pa.string()) for index in range(len(names))])
    columns = [pa.chunked_array(list(map(spill.get, column))) for column in zip(*packs, strict=True)]
    table = pa.Table.from_arrays(columns, names=names)
    note = (
        f"{path}:{first}: is read as the names of the columns: {listing(names, 5)}. If it is a sample, add a line of names above"
    )
    warnings = (note,) if any(map(looks_like_a_cell, names, columns)) and not are_numbered(names) else ()
    return Rows(table, Places(str(path), "line", numbers), bad_rows, warnings=warnings)


def looks_like_a_cell(name: str, column: pa.ChunkedArray) -> bool:
    """Whether the `name` of a column looks like one of its cells, as in a file without a header."""
    import pyarrow.compute

    fraction = not name.isdigit() and (is_decimal(name, ".") or is_decimal(name, ","))
    return (
        fraction
        or (len(name) > LONGEST_NAME and not name.rstrip().endswith(("?", ":")))
        or (name != "" and pyarrow.compute.index(column, name).as_py() >= 0)
    )


def are_numbered(names: Sequence[str]) -> bool:
    """Whether the columns are numbered from 0, as pandas does, which may put an index without a name first."""
    return [*filter(None, names)] == [*map(str, range(len([*filter(None, names)])))]


def tsv_records(lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if content := line.rstrip("\r\n"):
            yield number, content.split("\t"), line


def guess_delimiter(header: str) -> str:
    """The delimiter that splits `header` into the most cells; a comma if none splits it."""
    cells = {mark: len(next(csv.reader([header], delimiter=mark), [])) for mark in DELIMITERS}
    return max(cells, key=lambda mark: cells[mark])  # the first one of equals


def blank_follows(header: str, delimiter: str) -> bool:
    """Whether a blank follows each delimiter, as in "text, label", which is then not a part of the cell."""
    cells = next(csv.reader([header], delimiter=delimiter), [])[1:]
    return bool(cells) and all(cell.startswith(" ") for cell in cells)


def csv_records(lines: Iterator[str], delimiter: str = ",", skips_blanks: bool = False) -> Iterator[Record]:
    """One record per csv row, which may span lines. After an unclosed quote, parsing resumes at the next line.

    `skips_blanks`: those behind a delimiter are no part of the cell.
    """
    csv.field_size_limit(sys.maxsize)
    number, remaining = 1, lines
    while (first := next(remaining, None)) is not None:
        if not first.strip("\r\n"):
            number += 1
            continue
        consumed = [first]
        try:
            record = chain([first], recorded(remaining, consumed))
            cells: list[str] | None = next(csv.reader(record, delimiter=delimiter, strict=True, skipinitialspace=skips_blanks))
        except csv.Error:
            cells, remaining = None, chain(consumed[1:], remaining)
            consumed = consumed[:1]
        yield number, cells, "".join(consumed)
        number += len(consumed)


def recorded(lines: Iterator[str], consumed: list[str]) -> Iterator[str]:
    """`lines`; each one is appended to `consumed` before it is yielded."""
    for line in lines:
        consumed.append(line)
        yield line
