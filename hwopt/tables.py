"""Tables: the rows of a file, of a `datasets` folder or of the hub.

Files of lines are read here, since no library names the line of a bad row and goes on behind it; pyarrow and datasets read the
rest. A file that cannot be used at all is a DataError that says in one sentence what is wrong, and where; a row that cannot is
left out, or such an error too (hwopt.rows).
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import DataError, is_gated, listing, nearest, shorten
from hwopt.rows import LeftOut, Places
from hwopt.sources import EXTENSIONS, locate

if TYPE_CHECKING:
    import pyarrow as pa

ESCAPED = re.compile("[\udc80-\udcff]")
"""What bytes that are not UTF-8 are decoded to (surrogateescape)."""


@dataclass(frozen=True)
class Rows:
    """The rows of a source that could be read, where each comes from, and those that could not be."""

    table: pa.Table
    places: Places
    left_out: LeftOut
    odd: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Of columns that hold several types: row of the table -> the value that is no string."""

    @property
    def source(self) -> str:
        return self.places.source

    def leave_out(self, row: int, why: str) -> None:
        self.left_out.add(self.places.numbers[row], why)

    def kept(self) -> list[int]:
        """The rows of the table that nobody has left out. Raises DataError where too many are."""
        kept = [row for row, number in enumerate(self.places.numbers) if number not in self.left_out.whys]
        self.left_out.check([self.places.numbers[row] for row in kept])
        return kept


def read_rows(source: str, split: str | None = None, strict: bool = True, name: str | None = None) -> Rows:
    """The rows of `source`, which messages call `name`; `strict`: a row that cannot be read is an error.

    `source` is a csv (quoted, as Excel writes it), tsv (no quoting, as GLUE's), jsonl, json, parquet or txt file (one row, whose
    column "text" holds the whole file), a folder made with `datasets`' save_to_disk(), or a hub name, "owner/name" or
    "owner/name:configuration". Cells of csv and tsv stay strings. `split` (default train) is for the last two.
    Raises DataError, with the line where there is one.
    """
    kind, path = locate(source, split)
    if kind == "file":
        rows = _file(path, strict)
    else:
        table = _folder(path, split) if kind == "folder" else _hub(source, split or "train")
        rows = _numbered(table, name or source, strict)
    if rows.table.num_rows == 0:
        rows.left_out.check([])
        raise DataError(f"{source}: has no rows; give a file with at least one sample")
    return rows


def _numbered(table: pa.Table, source: str, strict: bool) -> Rows:
    return Rows(table, Places(source, "row", range(1, table.num_rows + 1)), LeftOut(source, "row", strict))


def columns(rows: Rows, names: Sequence[str]) -> list[list[str]]:
    """The text columns `names`, each a list with one string a row; rows without any text are left out, with "" here.

    Raises DataError where a column is missing (with the nearest name) or holds something else than text.
    """
    import pyarrow as pa

    found = []
    for name in names:
        column = column_of(rows.table, name, rows.source)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{rows.source}: column {name!r} holds {kind}, not text; choose another with data.text")
        odd = rows.odd.get(name, {})
        texts = []
        for row, text in enumerate(strings(column, rows, name)):
            if text is None:
                rows.leave_out(row, f"{name!r} has no value")
            elif row in odd:
                rows.leave_out(row, f"{name!r} is no text: {shorten(odd[row])}")
            texts.append(text or "")
        if texts and not any(text.strip() for text in texts):
            raise DataError(f"{rows.source}: every {name!r} is empty; choose another column with data.text")
        found.append(texts)
    for row, cells in enumerate(zip(*found, strict=True)):
        if not any(cell.strip() for cell in cells):
            rows.leave_out(row, "has no text")
    return found


def strings(column: pa.ChunkedArray, rows: Rows, name: str) -> list[str | None]:
    """The values of a column of strings; parquet does not promise that they are UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        found: list[str | None] = []
        for row, raw in enumerate(column.cast(pa.large_binary()).to_pylist()):
            text = None if raw is None else raw.decode("utf-8", "surrogateescape")
            if text is not None and (wrong := ESCAPED.search(text)):
                rows.leave_out(row, f"{name!r} is not UTF-8{_byte(wrong)}")
                text = ""
            found.append(text)
        return found


def column_of(table: pa.Table, name: str, source: str) -> pa.ChunkedArray:
    """One column. Raises DataError with the columns that there are, and the nearest one."""
    if table.column_names.count(name) > 1:
        raise DataError(f"{source}: has {table.column_names.count(name)} columns named {name!r}; rename all but one")
    if name not in table.column_names:
        only = table.column_names[0] if table.num_columns == 1 else ""
        if separator := next((mark for mark in (";", "\t", "|") if mark in only), None):
            raise DataError(
                f"{source}: its cells seem to be separated by {separator!r}; save it with commas, or with tabs as .tsv"
            )
        raise DataError(
            f"{source}: has no column {name!r}.{nearest(name, table.column_names)} It has: {listing(table.column_names, 30)}"
        )
    return table[name]


def _file(path: Path, strict: bool) -> Rows:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            return _numbered(_parquet(path), str(path), strict)
        if suffix == ".txt":
            return _numbered(_text(path), str(path), strict)
        left_out = LeftOut(str(path), "line", strict)
        lines = _lines(path)
        return _delimited(path, lines, left_out, suffix == ".tsv") if suffix in (".csv", ".tsv") else _json(path, lines, left_out)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _encoding(path: Path) -> str:
    """UTF-8, or UTF-16 where the file begins with its mark. Raises DataError for what is neither, nor text at all."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start:
        raise DataError(f"{path}: has zero bytes: it is binary, or UTF-16 without a byte order mark; save it as UTF-8")
    return "utf-8-sig"


def _lines(path: Path) -> Iterator[str]:
    """The lines with their ends; bytes that are not UTF-8 become what `ESCAPED` finds."""
    encoding = _encoding(path)
    try:
        with path.open(encoding=encoding, errors="surrogateescape" if encoding == "utf-8-sig" else "strict", newline="") as file:
            yield from file
    except UnicodeError as error:
        raise DataError(f"{path}: is not whole UTF-16 ({error}); save it as UTF-8") from error


def _text(path: Path) -> pa.Table:
    """One row, the whole file."""
    import pyarrow as pa

    lines = list(_lines(path))
    for number, line in enumerate(lines, 1):
        if wrong := ESCAPED.search(line):
            raise DataError(f"{path}:{number}: is not UTF-8{_byte(wrong)}; save it as UTF-8")
    text = "".join(lines)
    return pa.table({"text": [text] if text.strip() else pa.array([], pa.string())})


def _byte(wrong: re.Match[str]) -> str:
    return f" (byte {ord(wrong.group()) - 0xDC00:#04x})"


def _parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            return pyarrow.parquet.read_table(file)
    except pa.ArrowException as error:
        raise DataError(f"{path}: is not a whole parquet file: {_first_line(error)}") from error


def _delimited(path: Path, lines: Iterator[str], left_out: LeftOut, tabs: bool) -> Rows:
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
            left_out.add(number, f"a quote is not closed, or stands inside of a cell: {shorten(raw.strip())}")
        elif len(cells) != len(names):
            left_out.add(
                number,
                f"has {len(cells)} columns, the header has {len(names)}: {shorten(raw.strip())}; cells are separated by {how}",
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


def _json(path: Path, lines: Iterator[str], left_out: LeftOut) -> Rows:
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


def _array(path: Path, text: str, left_out: LeftOut) -> list[tuple[int, dict[str, Any]]]:
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
            left_out.add(number, f"is not an object with the columns as keys: {shorten(row)}")
    return found


def _objects(lines: Iterable[tuple[int, str]], left_out: LeftOut) -> list[tuple[int, dict[str, Any]]]:
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
            left_out.add(number, f"is not an object with the columns as keys: {shorten(row)}")
    return found


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


def _folder(path: Path, split: str | None) -> pa.Table:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged folder fails in arrow, json or the file system
        raise DataError(f"{path}: cannot be read as a `datasets` folder: {_first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = split or "train"
        if name not in loaded:
            raise DataError(f"{path}: has no split {name!r}.{nearest(name, loaded)} It has: {listing(list(loaded))}")
        return _arrow(loaded[name])
    if split is not None:
        raise DataError(f"{path}: is one data set without splits, and data.split = {split!r}; leave it out")
    return _arrow(loaded)


def _hub(source: str, split: str) -> pa.Table:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        return _arrow(datasets.load_dataset(name, configuration or None, split=split))
    except Exception as error:  # the hub client, the network and datasets each raise their own
        if is_gated(error):
            raise DataError(
                f"{source}: is gated. Accept its terms on its hub page, then log in: `hf auth login` (or set HF_TOKEN)."
            ) from error
        near = nearest(source, [file.name for file in Path().iterdir()])
        raise DataError(
            f"{source}: no such file or folder, and as a hub data set (split {split!r}) it cannot be loaded: "
            f"{_first_line(error)}.{near} Give a file ({listing(EXTENSIONS)}), a `datasets` folder or a hub name"
        ) from error


def _arrow(dataset: Any) -> pa.Table:
    return dataset.with_format("arrow")[:] if len(dataset) else dataset.data.table.slice(0, 0)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shorten(lines[0], 200)[1:-1]
