"""Write the rows of a table with further columns to a csv, jsonl or parquet file, part by part."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from hwopt.errors import HwoptError, InputError
from hwopt.system.paths import refuse_output, writing
from hwopt.text import listing

Columns = Mapping[str, Sequence[Any]]  # name of a new column -> a value for each row; None for a row without a value
Originals = Mapping[str, Mapping[int, Any]]
"""`Rows.non_strings`: column -> row of the table -> the value in the file, where the table holds another one."""


class Writer:
    """Writes one part of the rows after another. A subclass is one format."""

    def __init__(self, path: Path, new: Mapping[str, type]) -> None:
        """`new`: name and type of each new column."""
        self.file: IO[bytes] = path.open("wb")
        self.new = new

    @property
    def started(self) -> bool:
        """Whether rows were written."""
        return self.file.tell() > 0

    def write(self, table: pa.Table, columns: Columns, originals: Originals) -> None:
        """Append the rows of `table`, with the new `columns`. Only JSON has a place for `originals`."""
        raise NotImplementedError

    def close(self) -> None:
        self.file.close()


def refuse_table_output(path: Path, overwrite: bool, reads: Sequence[Path]) -> None:
    """Raise InputError if `path` has no extension of WRITERS, exists or is of `reads`, StorageError if it cannot be written."""
    if path.suffix.lower() not in WRITERS:
        raise InputError(f"--output {path}: unknown extension {path.suffix!r}; give a file that ends with {listing([*WRITERS])}")
    refuse_output(path, "--output", "" if overwrite else "give another name, or --overwrite to replace it", reads)
    refuse_output(staging(path), f"--output {path}, first written as", reads=reads)


def staging(path: Path) -> Path:
    """The file that gets the rows until all of them are done."""
    return path.with_name(f"{path.stem}.partial{path.suffix}")


@contextmanager
def replacing(path: Path, new: Mapping[str, type]) -> Iterator[Writer]:
    """A writer of a file that replaces `path` when the block succeeds. `new`: name and type of each new column.

    The rows go into NAME.partial.EXTENSION, which stays if the block fails after the first rows. Raises StorageError.
    """
    partial_file = staging(path)
    with writing(path):
        writer = WRITERS[path.suffix.lower()](partial_file, new)
        try:
            yield writer
        except BaseException as error:
            started = writer.started
            with suppress(OSError):
                writer.close()
                if not started:
                    partial_file.unlink()
            if started and isinstance(error, HwoptError | KeyboardInterrupt):
                error.args = (f"{str(error) or 'interrupted'}. The rows until then are in {partial_file}",)
            raise
        writer.close()
        partial_file.replace(path)


as_json = partial(json.dumps, ensure_ascii=False, default=lambda value: None if isinstance(value, bytes) else str(value))


class CsvWriter(Writer):
    """Comma-separated UTF-8. Missing values and bytes are empty, nested ones and booleans are JSON."""

    def write(self, table: pa.Table, columns: Columns, originals: Originals) -> None:
        # csv quotes the characters of its line end: with the default one also a lone "\r", which would end the row
        rows = csv.writer(SimpleNamespace(write=lambda row: self.file.write(f"{row[:-2]}\n".encode())))
        if not self.started:
            rows.writerow([*table.column_names, *columns])
        values = [*(column.to_pylist() for column in table.columns), *columns.values()]
        rows.writerows(zip(*(map(self.cell, column) for column in values), strict=True))
        self.file.flush()

    def cell(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return None
        return as_json(value) if isinstance(value, dict | list | bool) else value  # booleans as hwopt spells labels


class JsonWriter(Writer):
    """One JSON object per line, UTF-8. Bytes are null."""

    def write(self, table: pa.Table, columns: Columns, originals: Originals) -> None:
        rows = table.to_pylist()
        for name, values in originals.items():
            for number, value in values.items():
                rows[number][name] = value
        for row, *new in zip(rows, *columns.values(), strict=True):
            self.file.write(f"{as_json(row | dict(zip(columns, new, strict=True)))}\n".encode())
        self.file.flush()


class ParquetWriter(Writer):
    """Parquet with the column types of the input."""

    parquet: Any = None

    def write(self, table: pa.Table, columns: Columns, originals: Originals) -> None:
        types = {str: pa.string(), float: pa.float64(), int: pa.int64(), list: pa.list_(pa.string())}
        table = table.replace_schema_metadata(None)  # the features of `datasets` would lack the new columns
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values, types[self.new[name]]))
        self.parquet = self.parquet or pyarrow.parquet.ParquetWriter(self.file, table.schema)
        self.parquet.write_table(table)

    def close(self) -> None:
        if self.parquet is not None:
            self.parquet.close()
        super().close()


WRITERS: Mapping[str, type[Writer]] = {".csv": CsvWriter, ".jsonl": JsonWriter, ".parquet": ParquetWriter}


def free_names(wanted: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Each wanted name -> itself, or with a number behind it ("_2") that makes it differ from all `taken` names."""
    found: dict[str, str] = {}
    for name in wanted:
        numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        found[name] = next(each for each in numbered if each not in {*taken, *found.values()})
    return found
