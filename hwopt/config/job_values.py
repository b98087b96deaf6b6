"""The base of a job's tables, and the types of their values with the checks of a single value."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from hwopt.text import truncate


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def as_tuple(value: Any) -> Any:
    """A list or a single string as a tuple; other values unchanged."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def typed_path(path: str) -> str:
    """`path`. Raises ValueError if an escape changed it: TOML reads "D:\\train" with a tab."""
    if any(ord(letter) < 32 for letter in path):
        raise ValueError(
            f"{truncate(path)} contains a control character; in double quotes a backslash starts an escape: "
            "put a path into single quotes, or write it with '/'"
        )
    return path


def known_encoding(name: str) -> str:
    """`name`. Raises ValueError if Python has no text encoding of that name."""
    try:
        "".encode(name)
    except (LookupError, ValueError):
        raise ValueError(f"{truncate(name)} is not a text encoding of Python. Common: utf-8, cp1252, latin-1, utf-16") from None
    return name


Source = Annotated[str, AfterValidator(typed_path)]
Encoding = Annotated[str, AfterValidator(known_encoding)]

TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}]}
Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=2), WithJsonSchema(TEXT_SCHEMA)]

COLUMNS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Columns = Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1), WithJsonSchema(COLUMNS_SCHEMA)]
