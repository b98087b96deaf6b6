"""Tables: the rows of a file, of a `datasets` folder or of the hub.

pyarrow and datasets read; this module says in one sentence what is wrong with a file that they refuse, and where.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hwopt.errors import DataError, listing, nearest, shorten

if TYPE_CHECKING:
    import pyarrow as pa

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt")
BLOCK_BYTES = 1 << 20


def read_table(source: str, split: str | None = None) -> pa.Table:
    """The rows of `source` as a table.

    `source` is a csv (quoted, as Excel writes it), tsv (no quoting, as GLUE's), jsonl, json, parquet or txt file (one row, whose
    column "text" holds the whole file), a folder made with `datasets`' save_to_disk(), or a hub name, "owner/name" or
    "owner/name:configuration". Cells of csv and tsv stay strings. `split` (default train) is for the last two.
    Raises DataError, with the line where there is one.
    """
    path = Path(source)
    if path.is_dir():
        table = _folder(path, split)
    elif path.exists() or path.suffix.lower() in EXTENSIONS or _looks_like_a_path(source):
        if split is not None and path.is_file():
            raise DataError(f"{source}: a split ({split!r}) is for hub names and `datasets` folders; a file is read whole")
        table = _file(path)
    else:
        table = _hub(source, split or "train")
    if table.num_rows == 0:
        raise DataError(f"{source}: has no rows; give a file with at least one sample")
    return table


def columns(table: pa.Table, names: Sequence[str], source: str) -> list[list[str]]:
    """The text columns `names` of `table`, each a list with one string a row.

    Raises DataError where a column is missing (with the nearest name) or holds something else than text, or a text is null.
    """
    import pyarrow as pa

    found = []
    for name in names:
        column = column_of(table, name, source)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if column.null_count:
            row = column.is_null().to_pylist().index(True) + 1
            raise DataError(f"{source}: row {row}: {name!r} has no value; remove the row or fill it in")
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{source}: column {name!r} holds {kind}, not text; choose another with data.text")
        found.append(column.to_pylist())
        if table.num_rows and not any(text.strip() for text in found[-1]):
            raise DataError(f"{source}: every {name!r} is empty; choose another column with data.text")
    return found


def empty_texts(texts: Sequence[Sequence[str]]) -> int:
    """How many rows have no text in any of the columns `texts`."""
    return sum(not any(text.strip() for text in row) for row in zip(*texts, strict=True))


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


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~", "\\")) or source.count("/") > 1 or "\\" in source or source.endswith("/")


def _file(path: Path) -> pa.Table:
    suffix = path.suffix.lower()
    if not path.exists():
        folder = path.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        what = "no such file" if folder.is_dir() else f"no such file: there is no folder {str(folder)!r}"
        raise DataError(f"{path}: {what}.{nearest(path.name, names)} Give a file ({listing(EXTENSIONS)}) or a hub name")
    if suffix not in EXTENSIONS:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; hwopt reads {listing(EXTENSIONS)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; give a file with at least one sample")
        if suffix == ".parquet":
            return _parquet(path)
        _check_utf8(path)
        if suffix == ".txt":
            import pyarrow as pa

            text = path.read_bytes().decode("utf-8-sig")
            return pa.table({"text": [text] if text.strip() else pa.array([], pa.string())})
        return _delimited(path, suffix == ".tsv") if suffix in (".csv", ".tsv") else _json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_utf8(path: Path) -> None:
    """Raises DataError with line and byte of the first sequence that is not UTF-8."""
    line = 1
    with path.open("rb") as file:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            whole = rest + block
            try:
                whole.decode("utf-8")
                rest = b""
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    _not_utf8(path, whole, error, line)
                rest = whole[error.start :]
                whole = whole[: error.start]
            line += whole.count(b"\n")
        if rest:
            _not_utf8(path, rest, UnicodeDecodeError("utf-8", rest, 0, 1, "unexpected end of data"), line)


def _not_utf8(path: Path, raw: bytes, error: UnicodeDecodeError, line: int) -> None:
    line += raw[: error.start].count(b"\n")
    raise DataError(f"{path}:{line}: is not UTF-8 (byte {raw[error.start]:#04x}); save it as UTF-8") from error


def _parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: is not a whole parquet file: {_first_line(error)}") from error


def _delimited(path: Path, tabs: bool) -> pa.Table:
    """A csv or tsv file, every cell a string: guessed types would turn labels like 01 or NA into something else."""
    import pyarrow as pa
    from pyarrow import csv

    wrong: list[Any] = []

    def note(row: Any) -> str:
        wrong.append(row)
        return "error"

    quoting = {"delimiter": "\t", "quote_char": False, "double_quote": False} if tabs else {"newlines_in_values": True}
    parsing = csv.ParseOptions(invalid_row_handler=note, **quoting)
    # one block: a row may be as long as it likes; one thread: a bad row has its number
    reading = csv.ReadOptions(use_threads=False, block_size=min(max(path.stat().st_size, BLOCK_BYTES), 2**31 - 1))
    try:
        with csv.open_csv(path, reading, parsing) as reader:
            names = reader.schema.names
        return csv.read_csv(path, reading, parsing, csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())))
    except pa.ArrowException as error:
        if wrong:
            row = wrong[0]
            number = f"row {row.number - 1}" if row.number else "a row"
            how = "a tab" if tabs else "a comma (quote a cell that holds one)"
            raise DataError(
                f"{path}: {number} has {row.actual_columns} columns, the header has {row.expected_columns}: "
                f"{shorten(row.text)}; cells are separated by {how}"
            ) from error
        raise DataError(f"{path}: cannot be read as {'tsv' if tabs else 'csv'}: {_first_line(error)}") from error


def _json(path: Path) -> pa.Table:
    """One object a line, or one array of objects. Own reader: pyarrow's names no line and turns dates into timestamps."""
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(BLOCK_BYTES).lstrip()[:1]
        file.seek(0)
        rows = _array(path, file) if start == "[" else _lines(path, file)
    return _to_table(rows)


def _array(path: Path, file: TextIO) -> list[dict[str, Any]]:
    try:
        rows = json.load(file)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(f"{path}:{line}: is not valid JSON: {_first_line(error)}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: element {number} is {shorten(row)}, not an object with the columns as keys")
    return list(rows)


def _lines(path: Path, lines: Iterable[str]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {_first_line(error)}"
            raise DataError(f"{path}:{number}: {why}; one whole object a line is expected") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: is {shorten(row)}, not an object with the columns as keys")
        rows.append(row)
    return rows


def _to_table(rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowException, OverflowError, UnicodeError):
            # mixed types, huge numbers, lone surrogates: as they are written, since the job may not need the column at all
            arrays.append(pa.array([v if v is None else _as_written(v) for v in values], pa.string()))
    return pa.table(dict(zip(names, arrays, strict=True)))


def _as_written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _folder(path: Path, split: str | None) -> pa.Table:
    import datasets

    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() in EXTENSIONS)
        hint = f"; give one of its files: {listing(files)}" if files else ""
        raise DataError(f"{path}: is a folder that save_to_disk() of `datasets` did not make{hint}")
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
        text = f"{type(error).__name__}: {error}"
        if "gated" in text.lower() or "401" in text or "403" in text:
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
