"""Tables: the rows of a file, of a `datasets` folder or of the hub.

Files of lines are read here, since no library names the line of a bad row and goes on behind it; pyarrow and datasets read the
rest. A file that cannot be used at all is a DataError that says in one sentence what is wrong, and where; a row that cannot is
left out, or such an error too (hwopt.data.bad_rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources import EXTENSIONS, locate
from hwopt.errors import DataError, is_gated
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import pyarrow as pa
from hwopt.data.csv_reader import _delimited
from hwopt.data.json_reader import _json
from hwopt.data.rows import Rows
from hwopt.data.text_file import ESCAPED, _byte, _first_line, _lines


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
    return Rows(table, Places(source, "row", range(1, table.num_rows + 1)), BadRows(source, "row", strict))


def text_columns(rows: Rows, names: Sequence[str]) -> list[list[str]]:
    """The text columns `names`, each a list with one string a row; rows without any text are left out, with "" here.

    Raises DataError where a column is missing (with the nearest name) or holds something else than text.
    """
    import pyarrow as pa

    found = []
    for name in names:
        column = find_column(rows.table, name, rows.source)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{rows.source}: column {name!r} holds {kind}, not text; choose another with data.text")
        odd = rows.odd.get(name, {})
        texts = []
        for row, text in enumerate(string_values(column, rows, name)):
            if text is None:
                rows.leave_out(row, f"{name!r} has no value")
            elif row in odd:
                rows.leave_out(row, f"{name!r} is no text: {truncate(odd[row])}")
            texts.append(text or "")
        if texts and not any(text.strip() for text in texts):
            raise DataError(f"{rows.source}: every {name!r} is empty; choose another column with data.text")
        found.append(texts)
    for row, cells in enumerate(zip(*found, strict=True)):
        if not any(cell.strip() for cell in cells):
            rows.leave_out(row, "has no text")
    return found


def string_values(column: pa.ChunkedArray, rows: Rows, name: str) -> list[str | None]:
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


def find_column(table: pa.Table, name: str, source: str) -> pa.ChunkedArray:
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
        left_out = BadRows(str(path), "line", strict)
        lines = _lines(path)
        return _delimited(path, lines, left_out, suffix == ".tsv") if suffix in (".csv", ".tsv") else _json(path, lines, left_out)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> pa.Table:
    """One row, the whole file."""
    import pyarrow as pa

    lines = list(_lines(path))
    for number, line in enumerate(lines, 1):
        if wrong := ESCAPED.search(line):
            raise DataError(f"{path}:{number}: is not UTF-8{_byte(wrong)}; save it as UTF-8")
    text = "".join(lines)
    return pa.table({"text": [text] if text.strip() else pa.array([], pa.string())})


def _parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            return pyarrow.parquet.read_table(file)
    except pa.ArrowException as error:
        raise DataError(f"{path}: is not a whole parquet file: {_first_line(error)}") from error


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
