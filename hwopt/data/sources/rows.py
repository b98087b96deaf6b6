"""The rows that were read from one source, the place of each row and the bad rows; and what the type of a column says."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import BadRows, Places

if TYPE_CHECKING:
    import pyarrow as pa

PACK = 2_000  # rows whose values are held as Python objects


@dataclass(frozen=True)
class ReadOptions:
    """How to read a source."""

    strict: bool = True  # the first bad row is an error
    max_bad_rows: float | None = None  # allowed fraction of bad rows; None: the default of `BadRows`
    encoding: str | None = None  # of a text file; None: UTF-8, or UTF-16 with a byte order mark
    delimiter: str | None = None  # of a csv or tsv file; None: guessed from the header of a csv file, a tab in a tsv file
    max_rows: int | None = None  # read the first rows of each source only
    streaming: bool = False  # read hub data sets without downloading all of their files; goes with `max_rows`
    format: str | None = None  # of files, such as "conll"; None: by the extension


class JsonValues(Mapping[int, Any]):
    """Row -> its value, which is made when it is read: Python objects take many times the memory of their JSON text."""

    def __init__(self, texts: pa.ChunkedArray) -> None:
        """`texts`: the JSON of each row, null for one without a value."""
        self.texts = texts

    def __getitem__(self, row: int) -> Any:
        if (text := self.texts[row].as_py()) is None:
            raise KeyError(row)
        return json.loads(text)

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        return iter(np.flatnonzero(self.texts.is_valid()).tolist())

    def __len__(self) -> int:
        return len(self.texts) - int(self.texts.null_count)


@dataclass(frozen=True)
class Rows:
    """The rows of a source that could be read, with their places, and the bad rows."""

    table: pa.Table
    places: Places
    bad_rows: BadRows
    non_strings: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Column of JSON -> table row -> the value in the file, where the table holds another one.

    That is in columns with mixed types, stored as strings, and in those with objects, stored with the keys of all rows.
    """
    documents: bool = False  # each row is a whole text file
    notes: tuple[str, ...] = ()  # lines for the screen
    warnings: tuple[str, ...] = ()  # the same, about what is not used

    @property
    def source(self) -> str:
        return self.places.source

    def mark_bad(self, row: int, reason: str) -> None:
        """Record that a row of the table cannot be used."""
        self.bad_rows.add(self.places.numbers[row], reason)

    def usable(self) -> Sequence[int]:
        """The rows of the table that are not bad. Raises DataError as `BadRows.check` does."""
        if not self.bad_rows.reasons:
            self.bad_rows.check(self.places.numbers)
            return range(len(self.places.numbers))
        usable = [row for row, number in enumerate(self.places.numbers) if number not in self.bad_rows.reasons]
        self.bad_rows.check([self.places.numbers[row] for row in usable])
        return usable

    def take(self, rows: Sequence[int]) -> Rows:
        """These `rows` of the table, in ascending order."""
        import numpy as np
        import pyarrow as pa

        mask = np.isin(np.arange(self.table.num_rows), rows)
        return replace(
            self,
            table=self.table.filter(pa.array(mask)),  # take() would copy whole columns
            places=self.places.take(rows),
            non_strings={
                name: {place: values[row] for place, row in enumerate(rows) if row in values}
                for name, values in self.non_strings.items()
            },
        )

    def first(self, number: int) -> Rows:
        """The first `number` rows, with the bad rows before the last of them, and a note; all rows if there are no more."""
        total = self.table.num_rows
        if total <= number:
            return self
        numbers = self.places.numbers[:number]
        self.bad_rows.forget_after(numbers[-1])
        return replace(
            self,
            table=self.table.slice(0, number),
            places=replace(self.places, numbers=numbers),
            non_strings={
                name: JsonValues(values.texts.slice(0, number))
                if isinstance(values, JsonValues)
                else {row: value for row, value in values.items() if row < number}
                for name, values in self.non_strings.items()
            },
            notes=(*self.notes, f"{self.source}: the first {number:,} of {total:,} rows are read (data.max_rows)"),
        )


def values_type(kind: Any) -> Any:
    """The type of the values in a column of type `kind`: of a categorical one the type of its categories."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def holds_text(kind: Any) -> bool:
    """Whether a column of type `kind` holds strings. Polars writes large ones and views."""
    import pyarrow as pa

    kind = values_type(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def parsed_json(text: str) -> Any:
    """The JSON value in `text`. Lone surrogates, which no tokenizer takes, become "?". Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "\\ud" not in text and "\\uD" not in text:
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def is_blank(text: str) -> bool:
    """Whether `text` has nothing to see: blanks, control characters and zero-width characters only."""
    return not text[:1].isalnum() and all(unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Zs") for letter in text)


def is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def holds_objects(kind: Any) -> bool:
    """Whether a column of type `kind` holds objects, or lists of them. Arrow gives each object the keys of all."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) or (is_list(kind) and holds_objects(kind.value_type))


def without_nulls(value: Any) -> Any:
    """`value` without keys that are null, which Arrow adds to objects."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def class_names(table: pa.Table, name: str) -> list[str] | None:
    """The class names of a column of ClassLabel of `datasets`, or of lists of it, by number; None for other columns."""
    features = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features") or {}
    kind = features.get(name)
    kind = kind[0] if isinstance(kind, list) else (kind or {}).get("feature", kind)  # a list, as older versions write it
    return kind.get("names") if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" else None
