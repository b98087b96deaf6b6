"""What the type of a column of a table says: texts, lists, or numbers of classes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def values_type(kind: Any) -> Any:
    """The type of the values in a column of type `kind`: of a categorical one the type of its categories."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def holds_text(kind: Any) -> bool:
    """Whether a column of type `kind` holds strings. Polars writes large ones and views."""
    import pyarrow as pa

    kind = values_type(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


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
