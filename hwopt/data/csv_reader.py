"""Read delimited text: csv and tsv, quoted or not, row by row."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import Rows
from hwopt.data.text_file import ESCAPED, _byte
from hwopt.errors import DataError
from hwopt.text import truncate


def _delimited(path: Path, lines: Iterator[str], left_out: BadRows, tabs: bool) -> Rows:
    """A csv or tsv file, every cell a string: guessed types would turn labels like 01 or NA into something else."""
    import pyarrow as pa

    how = "a tab" if tabs else "a comma (quote a cell that holds one)"
    records = _tabbed(lines) if tabs else _quoted(lines)
    names: list[str] = []
    found: list[list[str]] = []
    numbers: list[int] = []
    for number, cells, raw in records:
        wrong = ESCAPED.search(raw)
        if not names:
            if wrong or cells is None:
                raise DataError(f"{path}:{number}: its header {'is not UTF-8' + _byte(wrong) if wrong else 'ends in a quote'}")
            names = cells
        elif wrong:
            left_out.add(number, f"is not UTF-8{_byte(wrong)}")
        elif cells is None:
            left_out.add(number, f"a quote is not closed, or stands inside of a cell: {truncate(raw.strip())}")
        elif len(cells) != len(names):
            left_out.add(
                number,
                f"has {len(cells)} columns, the header has {len(names)}: {truncate(raw.strip())}; cells are separated by {how}",
            )
        else:
            found.append(cells)
            numbers.append(number)
    if not names:
        raise DataError(f"{path}: has no rows; give a file with at least one sample")
    table = pa.Table.from_arrays(
        [pa.array([cells[place] for cells in found], pa.string()) for place in range(len(names))], names=names
    )
    return Rows(table, Places(str(path), "line", numbers), left_out)


Record = tuple[int, list[str] | None, str]
"""(number of its first line, cells or None where it cannot be read, its first line)"""


def _tabbed(lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if content := line.rstrip("\r\n"):
            yield number, content.split("\t"), line


def _quoted(lines: Iterator[str]) -> Iterator[Record]:
    """A quote that nobody closes takes only its own line with it: reading goes on behind that."""
    limit = csv.field_size_limit(sys.maxsize)  # a cell may be as long as it likes
    try:
        number, waiting = 1, lines
        while (first := next(waiting, None)) is not None:
            if not first.strip("\r\n"):
                number += 1
                continue
            taken = [first]
            try:
                cells: list[str] | None = next(csv.reader(chain([first], _kept(waiting, taken)), strict=True))
            except csv.Error:
                cells, waiting = None, chain(taken[1:], waiting)
                taken = taken[:1]
            yield number, cells, "".join(taken)
            number += len(taken)
    finally:
        csv.field_size_limit(limit)


def _kept(lines: Iterator[str], taken: list[str]) -> Iterator[str]:
    """`lines`, which are also put into `taken` as they go."""
    for line in lines:
        taken.append(line)
        yield line
