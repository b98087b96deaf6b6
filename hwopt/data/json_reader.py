"""Read JSON: one object per line, or one array of objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places
from hwopt.errors import DataError
from hwopt.text import truncate

if TYPE_CHECKING:
    import pyarrow as pa
import json
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from hwopt.data.rows import Rows
from hwopt.data.text_file import ESCAPED, _byte, _first_line


def _to_table(rows: list[dict[str, Any]]) -> tuple[pa.Table, dict[str, dict[int, Any]]]:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays, odd = [], {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowException, OverflowError, UnicodeError):
            # mixed types, huge numbers, lone surrogates: as they are written, since the job may not need the column at all
            arrays.append(pa.array([v if v is None else _as_written(v) for v in values], pa.string()))
            odd[name] = {row: v for row, v in enumerate(values) if not isinstance(v, str | None)}
    return pa.table(dict(zip(names, arrays, strict=True))), odd


def _as_written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(path: Path, lines: Iterator[str], left_out: BadRows) -> Rows:
    """One object a line, or one array of objects. Own reader: pyarrow's names no line and turns dates into timestamps."""
    number, first = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), (1, ""))
    if first.lstrip().startswith("["):
        left_out.unit = "row"
        found = _array(path, "".join(["\n" * (number - 1), first, *lines]), left_out)
    else:
        found = _objects(enumerate(chain([first], lines), number), left_out)
    numbers, rows = [number for number, _ in found], [row for _, row in found]
    table, odd = _to_table(rows)
    return Rows(table, Places(str(path), left_out.unit, numbers), left_out, odd)


def _array(path: Path, text: str, left_out: BadRows) -> list[tuple[int, dict[str, Any]]]:
    if wrong := ESCAPED.search(text):
        line = text.count("\n", 0, wrong.start()) + 1
        raise DataError(f"{path}:{line}: is not UTF-8{_byte(wrong)}; save it as UTF-8")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(f"{path}:{line}: is not valid JSON: {_first_line(error)}") from error
    found = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            found.append((number, row))
        else:
            left_out.add(number, f"is not an object with the columns as keys: {truncate(row)}")
    return found


def _objects(lines: Iterable[tuple[int, str]], left_out: BadRows) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for number, line in lines:
        if not line.strip():
            continue
        if wrong := ESCAPED.search(line):
            left_out.add(number, f"is not UTF-8{_byte(wrong)}")
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            left_out.add(number, "is nested too deeply" if deep else f"is not valid JSON: {_first_line(error)}")
            continue
        if isinstance(row, dict):
            found.append((number, row))
        else:
            left_out.add(number, f"is not an object with the columns as keys: {truncate(row)}")
    return found
