"""Read CoNLL files: one word per line with its tags, and a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.text_file import INVALID_BYTE, undecodable
from hwopt.text import truncate

CONLL_EXTENSIONS = (".conll", ".iob", ".iob2", ".bio")
WORDS, TAGS = "tokens", "tags"
"""The columns of the first and of the last cell of a line. Cells between them are `column_2`, `column_3`, …"""


TAG = re.compile(r"O|[BIESLU](-\S+)?")
"""A tag of IOB or BIOES."""
EXAMINED = 1_000
"""Lines that decide whether a file is CoNLL."""


@dataclass
class Sentence:
    """The lines of one sentence."""

    line: int
    """Number of its first line."""
    cells: list[list[str]] = field(default_factory=list)
    problem: str = ""


def read_conll(path: Path, lines: Iterator[str], bad_rows: BadRows) -> Rows:
    """The sentences of a CoNLL file, one row each, with the lists `tokens` and `tags`. Cells are separated by tabs or spaces.

    A line "-DOCSTART-" and comments before a sentence ("# id = 3") are skipped. A file of words alone has no column `tags`.
    """
    import pyarrow as pa

    kept: list[Sentence] = []
    width = 0
    for sentence in sentences(lines):
        width = width or len(sentence.cells[0])
        wrong = next((number for number, cells in enumerate(sentence.cells) if len(cells) != width), None)
        if wrong is not None and not sentence.problem:
            line = " ".join(sentence.cells[wrong])
            sentence.problem = (
                f"line {sentence.line + wrong} has {len(sentence.cells[wrong])} columns, the first line {width}: {truncate(line)}"
            )
        if sentence.problem:
            bad_rows.add(sentence.line, sentence.problem)
        else:
            kept.append(sentence)
    names = [WORDS, *(f"column_{number}" for number in range(2, width)), TAGS][: max(width, 1)]
    columns = {
        name: pa.array([[cells[index] for cells in sentence.cells] for sentence in kept], pa.list_(pa.string()))
        for index, name in enumerate(names)
    }
    return Rows(pa.table(columns), Places(str(path), "line", [sentence.line for sentence in kept]), bad_rows)


def looks_like_conll(lines: Iterator[str]) -> bool:
    """Whether the first lines are words with tags of IOB or BIOES: as many cells in each line, and a tag in the last one."""
    found = [cells for sentence in sentences(islice(lines, EXAMINED)) for cells in sentence.cells]
    tags = {cells[-1] for cells in found}
    same = len({len(cells) for cells in found}) == 1 and len(found[0]) > 1
    return same and "O" in tags and all(map(TAG.fullmatch, tags))


def sentences(lines: Iterator[str]) -> Iterator[Sentence]:
    """The sentences of the file; a sentence with a byte that cannot be decoded has a problem."""
    current: Sentence | None = None
    for number, line in enumerate(lines, 1):
        cells = line.split("\t") if "\t" in line else line.split()
        cells = [cell.strip() for cell in cells]
        if not any(cells) or cells[0] == "-DOCSTART-":
            if current is not None:
                yield current
            current = None
            continue
        if current is None and line.startswith("# ") and len(cells) != 2:
            continue
        current = current or Sentence(number)
        current.cells.append(cells)
        if (invalid := INVALID_BYTE.search(line)) and not current.problem:
            current.problem = f"line {number} {undecodable(invalid)}"
    if current is not None:
        yield current
