"""Read the rows of a file, of a `datasets` folder or of a hub data set.

hwopt has its own readers for text formats, because no library names the line of a bad row and continues after it. pyarrow and
datasets read the other formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS, read_conll
from hwopt.data.sources.csv_reader import read_delimited
from hwopt.data.sources.image_folder import read_image_folder
from hwopt.data.sources.json_reader import read_json
from hwopt.data.sources.location import EXTENSIONS, configured, extension, locate
from hwopt.data.sources.rows import PACK, ReadOptions, Rows, holds_text, is_blank, values_type
from hwopt.data.sources.spill import Spill
from hwopt.data.sources.text_file import INVALID_BYTE, encoding_hint, read_lines, undecodable
from hwopt.errors import DataError, is_gated
from hwopt.system.hub import hub_is_out_of_reach, offline_clients
from hwopt.text import cut, first_line, listing, nearest, truncate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


def read_rows(source: str, split: str | None = None, options: ReadOptions | None = None, name: str | None = None) -> Rows:
    """The rows of `source`. `name` is the name of the source in messages.

    `source` is one of:

    * a csv (quoted, as Excel writes it), tsv (not quoted, as in GLUE), jsonl, json, parquet, CoNLL or txt file; a txt file is
      one row with the column "text".
    * a folder with a folder of images per class, `split` being the name of a folder in it.
    * a folder made with save_to_disk() of `datasets`, with `split` (default train).
    * a hub name, "owner/name" or "owner/name:configuration", or a clone of a data set of the hub, likewise.

    Raises DataError, with the line if there is one.
    """
    options = options or ReadOptions()
    kind, path = locate(source, split, options.format)
    if kind == "file":
        rows = read_file(path, options)
    elif kind == "images":
        rows = read_image_folder(path, split, options)
    else:
        table = read_saved(path, split) if kind == "saved" else read_dataset(source, split or "train", options)
        rows = numbered_rows(table, name or source, options)
    if rows.table.num_rows == 0:
        rows.bad_rows.check([])
        raise DataError(f"{source}: has no rows; give a file with at least one sample")
    return rows if options.max_rows is None else rows.first(options.max_rows)


def numbered_rows(table: pa.Table, source: str, options: ReadOptions) -> Rows:
    """`table` with its rows numbered from 1."""
    bad_rows = BadRows(source, "row", options.strict, options.max_bad_rows)
    return Rows(table, Places(source, "row", range(1, table.num_rows + 1)), bad_rows)


class Texts(Sequence[str]):
    """Rows of a column of strings, which are made when they are read: Python objects take twice the memory. Null is ""."""

    def __init__(self, column: pa.ChunkedArray, rows: NDArray[np.int64] | None = None) -> None:
        """`rows`: ascending; default: all."""
        self.column, self.rows = column, rows

    def __len__(self) -> int:
        return len(self.column if self.rows is None else self.rows)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            at = range(len(self))[at]
            return self[at : at + 1][0]
        start, stop, _ = at.indices(len(self))
        if stop <= start:
            return []
        if self.rows is None:
            found = self.column.slice(start, stop - start)
        else:  # take() copies the whole of a column in parts
            rows = self.rows[start:stop]
            first = rows.min()
            found = self.column.slice(first, rows.max() + 1 - first).take(rows - first)
        return [text or "" for text in found.to_pylist()]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 1_000):
            yield from self[start : start + 1_000]

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> Texts:
        import numpy as np

        chosen = np.asarray(samples, np.int64)
        return Texts(self.column, chosen if self.rows is None else self.rows[chosen])


def text_columns(rows: Rows, names: Sequence[str], key: str = "data.text") -> list[Texts]:
    """The columns `names`, one string per row. Bad rows (no text) are marked and have "" here.

    Raises DataError if a column is missing (with the nearest name) or does not hold text.
    """
    import numpy as np
    import pyarrow as pa

    found = []
    for name in names:
        column = find_column(rows.table, name, rows.source, key)
        if not holds_text(column.type):
            raise DataError(
                f"{rows.source}: column {name!r} holds {values_type(column.type)}, not text; choose another with {key}"
            )
        non_strings = rows.non_strings.get(name, {})
        empty = set(np.flatnonzero(column.is_null()).tolist()) if column.null_count else set()
        for row in sorted({*empty, *non_strings}):
            rows.mark_bad(
                row, f"{name!r} has no value" if row in empty else f"{name!r} is not text: {truncate(non_strings[row])}"
            )
        if pa.types.is_string_view(column.type):  # Arrow cannot take() from views
            column = column.cast(pa.large_string())
        texts = Texts(column)
        if len(texts) and all(map(is_blank, texts)):
            raise DataError(f"{rows.source}: column {name!r} is empty in every row; choose another column with {key}")
        found.append(texts)
    for row, cells in enumerate(zip(*found, strict=True)):
        if all(map(is_blank, cells)):
            rows.mark_bad(row, "has no text")
    return found


def find_column(table: pa.Table, name: str, source: str, key: str = "data.text") -> pa.ChunkedArray:
    """The column `name`, or the field "COLUMN.FIELD" of a nested one. `key` of the job names it: "data.label".

    Raises DataError, with the nearest name, all names and the key, if it is missing or not unique.
    """
    if table.column_names.count(name) > 1:
        raise DataError(f"{source}: has {table.column_names.count(name)} columns named {name!r}; rename all but one")
    if name in table.column_names:
        return table[name]
    fields = flattened(table)
    if fields.column_names.count(name) == 1:
        return fields[name]
    raise DataError(
        f"{source}: has no column {name!r}.{nearest(name, fields.column_names)} It has: {listing(fields.column_names, 30)}. "
        f"Set {key} to one of them, in the job or by --set {key}=COLUMN"
    )


def flattened(table: pa.Table) -> pa.Table:
    """`table` with the fields of nested columns as columns of their own: "review.body"."""
    import pyarrow as pa

    while any(map(pa.types.is_struct, table.schema.types)):
        table = table.flatten()
    return table


def read_file(path: Path, options: ReadOptions) -> Rows:
    """The rows of a file, by the reader for its format."""
    suffix = extension(path, options.format)
    try:
        if suffix == ".parquet":
            return numbered_rows(read_parquet(path), str(path), options)
        if suffix == ".txt":
            return read_document(path, options)
        bad_rows = BadRows(str(path), "line", options.strict, options.max_bad_rows)
        lines = read_lines(path, options.encoding)
        if suffix in (".csv", ".tsv"):
            return read_delimited(path, lines, bad_rows, options, quoted=suffix == ".csv" or options.delimiter is not None)
        if suffix in CONLL_EXTENSIONS:
            return read_conll(path, lines, bad_rows)
        return read_json(path, lines, bad_rows)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_document(path: Path, options: ReadOptions) -> Rows:
    """A text file as one row with the column "text"; a bad row if it has no text or cannot be decoded."""
    import pyarrow as pa

    bad_rows = BadRows(str(path), "row", options.strict, options.max_bad_rows)
    text = "".join(read_lines(path, options.encoding)) if path.stat().st_size else ""
    if invalid := INVALID_BYTE.search(text):
        line = text.count("\n", 0, invalid.start()) + 1
        bad_rows.add(1, f"{undecodable(invalid, options.encoding)}: line {line}", partial(encoding_hint, path))
    elif is_blank(text):
        bad_rows.add(1, "has no text")
    texts = [] if bad_rows.reasons else [text]
    table = pa.table({"text": pa.array(texts, pa.string())})
    return Rows(table, Places(str(path), "row", [1] * len(texts)), bad_rows, documents=True)


def read_parquet(path: Path) -> pa.Table:
    """The table in a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            parquet, spill = pyarrow.parquet.ParquetFile(file), Spill()
            packs = [[*map(spill.put, batch.columns)] for batch in parquet.iter_batches(PACK)]
        schema = parquet.schema_arrow
        batches = [pa.record_batch([*map(spill.get, pack)], schema=schema) for pack in packs]
        table = pa.Table.from_batches(batches, schema)
        table.validate(full=True)  # finds strings that are not UTF-8
        return table
    except pa.ArrowException as error:
        raise DataError(f"{path}: is not a valid parquet file: {first_line(error)}") from error


def read_saved(path: Path, split: str | None) -> pa.Table:
    """A data set saved with save_to_disk(), or one split of it."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a corrupt folder fails in arrow, json or the file system
        raise DataError(f"{path}: cannot be read as a `datasets` folder: {first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = split or "train"
        if name not in loaded:
            raise DataError(f"{path}: has no split {name!r}.{nearest(name, loaded)} It has: {listing(list(loaded))}")
        return to_arrow(loaded[name])
    if split is not None:
        raise DataError(f"{path}: has no splits; omit data.split = {split!r}")
    return to_arrow(loaded)


def read_dataset(source: str, split: str, options: ReadOptions) -> pa.Table:
    """One split of a data set: of the hub, or of a folder with the same content. `source` is NAME or NAME:CONFIGURATION."""
    import datasets

    name, configuration = configured(source)
    local = Path(name).is_dir()
    # `datasets` does not notice that a local file changed, so its copy of a folder is made again
    again: dict[str, Any] = {}
    if local and not options.streaming:
        again = {"download_mode": datasets.DownloadMode.REUSE_CACHE_IF_EXISTS, "verification_mode": "no_checks"}
    try:
        with offline_clients(not local and hub_is_out_of_reach()):
            found = datasets.load_dataset(name, configuration, split=split, streaming=options.streaming, **again)
            if options.streaming:  # files after these rows are not opened; `take` reads one row more
                found = datasets.Dataset.from_list(list(islice(found, options.max_rows)), features=found.features)
            return to_arrow(found)
    except Exception as error:  # the hub client, the network and datasets each raise their own
        if is_gated(error):
            raise DataError(
                f"{source}: is gated. Accept its terms on its hub page, then log in: `hf auth login` (or set HF_TOKEN)."
            ) from error
        if local or isinstance(error, ValueError):  # a ValueError names the known configurations or splits
            said = cut(" ".join(str(error.__cause__ or error).split()), 300)
            raise DataError(
                f"{source}: `datasets` cannot read it (split {split!r}): {said}. Name a configuration as NAME:CONFIGURATION, and "
                "a split with data.split, data.eval_split or data.test_split"
            ) from error
        near = nearest(source, [file.name for file in Path().iterdir()])
        raise DataError(
            f"{source}: no such file or folder, and no such hub data set (split {split!r}): "
            f"{first_line(error)}.{near} Give a file ({listing(EXTENSIONS)}), a `datasets` folder or a hub name"
        ) from error


def to_arrow(dataset: Any) -> pa.Table:
    """The rows of a `datasets` data set, with its column types."""
    return dataset.with_format("arrow")[:] if len(dataset) else dataset.data.table.slice(0, 0)
