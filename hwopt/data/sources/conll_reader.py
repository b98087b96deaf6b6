"""Read CoNLL files: one word per line with its tags, and a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.text_file import INVALID_BYTE, undecodable
from hwopt.errors import DataError
from hwopt.text import counted, truncate

CONLL_EXTENSIONS = (".conll", ".iob", ".iob2", ".bio")
TAG = re.compile(r"O|[BIESLU](-\S+)?")  # A tag of IOB or BIOES
EXAMINED = 1_000  # lines that decide whether a file is CoNLL


def read_conll(path: Path, lines: Iterator[str], bad_rows: BadRows) -> Rows:
    """The sentences of a CoNLL file, one row each: the first cell of each line in the list `tokens`, the last one in `tags`.

    Cells between them are `column_2`, `column_3`, …; they are separated by tabs or spaces. A line "-DOCSTART-" and comments
    before a sentence ("# id = 3") are skipped. A file of words alone has no column `tags`. Raises DataError for CoNLL-U.
    """
    import pyarrow as pa

    kept: dict[int, list[list[str]]] = {}
    width = 0
    for first, found, problem in sentences(lines):
        width = width or len(found[0])
        wrong = next((number for number, cells in enumerate(found) if len(cells) != width), None)
        if wrong is not None and not problem:
            line = truncate(" ".join(found[wrong]))
            problem = f"line {first + wrong} has {counted(len(found[wrong]), 'column')}, the first line {width}: {line}"
        if problem:
            bad_rows.add(first, problem)
        else:
            kept[first] = found
    if width == 10 and kept and all(re.fullmatch(r"1(-\d+)?|0\.\d+", found[0][0]) for found in kept.values()):
        raise DataError(f"{path}: is CoNLL-U, which hwopt does not read. Write lines of a word, a tab and its tag")
    names = ["tokens", *(f"column_{number}" for number in range(2, width)), "tags"][: max(width, 1)]
    columns = {
        name: pa.array([[cells[index] for cells in found] for found in kept.values()], pa.list_(pa.string()))
        for index, name in enumerate(names)
    }
    return Rows(pa.table(columns), Places(str(path), "line", list(kept)), bad_rows)


def looks_like_conll(lines: Iterator[str]) -> bool:
    """Whether the first lines are words with tags of IOB or BIOES: as many cells in each line, and a tag in the last one."""
    found = [cells for _, sentence, _ in sentences(islice(lines, EXAMINED)) for cells in sentence]
    tags = {cells[-1] for cells in found}
    same = len({len(cells) for cells in found}) == 1 and len(found[0]) > 1
    return same and "O" in tags and all(map(TAG.fullmatch, tags))


def sentences(lines: Iterator[str]) -> Iterator[tuple[int, list[list[str]], str]]:
    """(number of its first line, the cells of its lines, a line that cannot be decoded or "") of each sentence."""
    first, found, problem = 0, list[list[str]](), ""
    for number, line in enumerate(chain(lines, [""]), 1):
        cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else line.split())]
        if not any(cells) or cells[0] == "-DOCSTART-":
            if found:
                yield first, found, problem
            first, found, problem = 0, [], ""
        elif found or not line.startswith("# ") or len(cells) == 2:
            first = first or number
            found.append(cells)
            if (invalid := INVALID_BYTE.search(line)) and not problem:
                problem = f"line {number} {undecodable(invalid)}"
