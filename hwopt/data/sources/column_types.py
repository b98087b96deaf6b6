"""What the type of a column of a table says: texts, or lists."""

from __future__ import annotations

from typing import Any


def holds_text(kind: Any) -> bool:
    """Whether a column of type `kind` holds strings. Polars writes large ones and views."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: Any) -> bool:
    """Whether a column of type `kind` holds lists."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def holds_objects(kind: Any) -> bool:
    """Whether a column of type `kind` holds objects, or lists of them. Arrow gives each object the keys of all."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) or (is_list(kind) and holds_objects(kind.value_type))
