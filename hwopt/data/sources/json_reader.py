"""Read JSON: one object per line, or one array of objects."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import PACK, JsonValues, Rows, holds_objects, parsed_json
from hwopt.data.sources.spill import Spill
from hwopt.data.sources.text_file import INVALID_BYTE, encoding_hint, undecodable
from hwopt.errors import DataError
from hwopt.text import first_line, truncate

if TYPE_CHECKING:
    import pyarrow as pa


def read_json(path: Path, lines: Iterator[str], bad_rows: BadRows) -> Rows:
    """The rows of a json or jsonl file. pyarrow's reader is not used: it names no line, and parses dates into timestamps."""
    number, first = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), (1, ""))
    if first.lstrip().startswith("["):
        bad_rows.unit = "row"
        found = read_array(path, "".join(["\n" * (number - 1), first, *lines]), bad_rows)
    else:
        start = [first, *islice(lines, 1)]
        if len(start) == 1 or isinstance(json_object(first), str):
            start += lines
            refuse_whole_object(path, "".join(start))
        found = read_objects(path, enumerate(chain(start, lines), number), bad_rows)
    numbers = array("q")  # a list takes 36 bytes a row

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in found:
            numbers.append(number)
            yield row

    table, non_strings = to_table(rows())
    return Rows(table, Places(str(path), bad_rows.unit, numbers), bad_rows, non_strings)


def read_array(path: Path, text: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, row) of each object in one JSON array. Raises DataError if `text` is not valid JSON."""
    if invalid := INVALID_BYTE.search(text):
        line = text.count("\n", 0, invalid.start()) + 1
        raise DataError(f"{path}:{line}: {undecodable(invalid)}. {encoding_hint(path)}")
    try:
        rows = parsed_json(text)
    except ValueError as error:
        raise DataError(f"{path}:{getattr(error, 'lineno', 1)}: is not valid JSON: {first_line(error)}") from error
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            yield number, row
        else:
            bad_rows.add(number, not_an_object(row))


def read_objects(path: Path, lines: Iterable[tuple[int, str]], bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of each object of a file with one JSON object per line."""
    for number, line in lines:
        if not line.strip():
            continue
        if invalid := INVALID_BYTE.search(line):
            bad_rows.add(number, undecodable(invalid), partial(encoding_hint, path))
        elif isinstance(row := json_object(line), str):
            bad_rows.add(number, row)
        else:
            yield number, row


def refuse_whole_object(path: Path, text: str) -> None:
    """Raise DataError if `text` is one JSON object over several lines, or holds the rows or the columns of a table."""
    whole = json_object(text)
    if isinstance(whole, dict) and ("\n" in text.strip() or is_table(whole)):
        raise DataError(
            f"{path}: is one object; hwopt reads a list of objects, or one object per line. Save the rows as such a file; with "
            'pandas: to_json(orient="records", lines=True)'
        )


def is_table(row: Mapping[str, Any]) -> bool:
    """Whether an object holds all rows under "data", or for each column the cells by row, as pandas writes a table."""
    cells = [value for value in row.values() if isinstance(value, dict) and "0" in value]
    rows = row.get("data")
    return 0 < len(cells) == len(row) or (isinstance(rows, list) and all(isinstance(each, dict | list) for each in rows))


def json_object(text: str) -> dict[str, Any] | str:
    """The JSON object in `text`, or why there is none."""
    try:
        row = parsed_json(text)
    except ValueError as error:
        return f"is not valid JSON: {first_line(error)}"
    return row if isinstance(row, dict) else not_an_object(row)


def not_an_object(row: Any) -> str:
    return f"is not an object with the columns as keys: {truncate(row)}"


def to_table(rows: Iterable[dict[str, Any]]) -> tuple[pa.Table, dict[str, Mapping[int, Any]]]:
    """(table, for columns with mixed types or objects: column -> row -> value that is not a string)."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    packs: dict[str, list[Pack]] = {}
    spill, number = Spill(), 0
    for number, row in enumerate(rows):
        if number % PACK == 0:
            for name, values in columns.items():
                packs[name].append(packed(values, spill))
                columns[name] = []
        for name in row:
            if name not in columns:
                columns[name], packs[name] = [None] * (number % PACK), [(pa.nulls(number - number % PACK), None)]
        for name, values in columns.items():
            values.append(row.get(name))
    arrays, non_strings = [], {}
    for name, put in packs.items():
        own = [(spill.get(values), spill.get(texts)) for values, texts in (*put, packed(columns[name]))]
        column, originals = joined_packs(own)
        arrays.append(column)
        if originals is not None:
            non_strings[name] = originals
    return pa.table(dict(zip(packs, arrays, strict=True))), non_strings


Pack = tuple[Any, Any]
"""Some values of a column: an Arrow array, its place on disk or a list, and beside objects their JSON texts; else None."""


def packed(values: list[Any], spill: Spill | None = None) -> Pack:
    """`values` as an Arrow array, if that or the JSON texts give back the same values, on disk or in a third of the memory."""
    import pyarrow as pa

    put = (lambda array: array) if spill is None else spill.put
    with suppress(pa.ArrowException, OverflowError, UnicodeError, RecursionError):
        array = pa.array(values)
        if pa.types.is_string(array.type) or (pa.types.is_int64(array.type) and bool not in map(type, values)):
            return put(array), None
        if holds_objects(array.type):
            return put(array), put(pa.array([None if value is None else json.dumps(value) for value in values], pa.string()))
    return values, None


def joined_packs(packs: list[Pack]) -> tuple[Any, Mapping[int, Any] | None]:
    """(column of all `packs`, row -> value that is not a string where the column cannot hold it)."""
    import pyarrow as pa

    if (whole := same_type([values for values, _ in packs])) is not None:
        if all(texts is None for _, texts in packs):
            return whole, None
        texts = [pa.nulls(len(values), pa.string()) if texts is None else texts for values, texts in packs]
        return whole, JsonValues(pa.chunked_array(texts))
    values = [value for pack in packs for value in pack_values(*pack)]
    try:
        array = pa.array(values)
        if pa.types.is_floating(array.type):
            if bool in map(type, values):
                raise pa.ArrowInvalid("pyarrow reads true beside 0.5 as 1.0")
            if all(value.is_integer() for value in values if type(value) is float and value == value):
                floats = {value for value in values if type(value) is float}  # 2 is the label "2", beside 2.0 that of 2.0
                return array, {row: value for row, value in enumerate(values) if type(value) is int and value not in floats}
        if not holds_objects(array.type):
            return array, None
    except (pa.ArrowException, OverflowError, UnicodeError):
        # mixed types, huge numbers or lone surrogates: stored as JSON text, since the job may not need the column
        array = pa.array([v if v is None else json_text(v) for v in values], pa.string())
    return array, {row: v for row, v in enumerate(values) if not isinstance(v, str | None)}


def pack_values(values: Any, texts: Any) -> list[Any]:
    if texts is not None:
        return [None if text is None else json.loads(text) for text in texts.to_pylist()]
    return list(values) if isinstance(values, list) else list(values.to_pylist())


def same_type(packs: list[Any]) -> pa.ChunkedArray | None:
    """All `packs` as one column, if they are arrays of one type, of objects with other keys, or of nulls."""
    import pyarrow as pa

    if any(isinstance(pack, list) for pack in packs):
        return None
    kinds = {pack.type for pack in packs} - {pa.null()}
    if len(kinds) == 1 or all(map(holds_objects, kinds)):
        with suppress(pa.ArrowException):
            tables = [pa.table([pack], [""]) for pack in packs]
            return pa.concat_tables(tables, promote_options="permissive").column(0)
    return None


def json_text(value: Any) -> str:
    """`value` itself if it is a string, else its JSON; lone surrogates become "?"."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")
