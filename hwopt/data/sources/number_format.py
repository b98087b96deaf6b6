"""Numbers written as text: one format for all files of a job, a decimal point or a decimal comma (`data.decimal`).

Nothing is guessed when a run reads its data: "1,500" and "1.500" mean different numbers in different countries.
`hwopt init` proposes the format that it sees, and writes it into the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from hwopt.text import truncate

Decimal = Literal[".", ","]

MISSING = {"NA", "N/A", "n/a", "nan", "NaN", "NULL", "null", "None", "<NA>", "#N/A"}
"""Texts that pandas reads as missing values."""
EMPTY = {"", *map(str.lower, MISSING)}

NUMBER = re.compile(r"[+-]?([0-9]{1,300}(\.[0-9]{0,300})?|\.[0-9]{1,300})([eE][+-]?[0-9]{1,3})?")
MINUS = "\u2212"  # the minus sign of Unicode, as word processors write it
OTHER_FORMAT = re.compile(rf"[+{MINUS}-]?([0-9][0-9.,']*[0-9]|[0-9]{{1,3}}([\s_’][0-9]{{3}})+([.,][0-9]*)?|[0-9])")
"""Digits with separators: a number in another format than that of the job. Blanks and underscores only between thousands."""
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}([.,][0-9]{3})+")
"""Also a number with commas (English) or points (German) between the thousands."""

UNIT = "[%‰°€$£¥]|USD|EUR|GBP"
WITH_UNIT = re.compile(rf"(?:-?(?:{UNIT}))?\s*[+{MINUS}-]?[0-9]+([.,'’\s][0-9]{{3}})*([.,][0-9]+)?\s*(?:{UNIT}|,-)?")
"""A number with a unit, with separators between thousands, or with a decimal point or comma; no date and no version."""
MEASURE = re.compile(rf"[+{MINUS}-]?[0-9]+(?:[.,][0-9]+)?\s*([a-zA-Zµ°]{{1,4}}(?:/[a-z]{{1,3}})?[²³]?)")
"""A number with any short unit, such as "8.4 kg". Only cells of one and the same unit are surely measurements."""


def is_decimal(text: str, decimal: Decimal) -> bool:
    """Whether `text` is a number with this decimal separator and without others."""
    if decimal == ",":
        return "." not in text and NUMBER.fullmatch(text.strip().replace(",", ".", 1)) is not None
    return NUMBER.fullmatch(text.strip()) is not None


def number_of(text: str, decimal: Decimal) -> float:
    """The number that `text` holds. Raises ValueError if it is not a number of this format."""
    if not is_decimal(text, decimal):
        raise ValueError(f"{truncate(text)} is not a number with a decimal {NAMES[decimal]}")
    return float(text.strip().replace(",", "."))


NAMES: dict[Decimal, str] = {".": "point", ",": "comma"}


def wrong_format(text: str, decimal: Decimal) -> str:
    """What to set if `text` is a number in another format than `decimal`; "" if it is not a number in any format."""
    if not OTHER_FORMAT.fullmatch(text.strip()):
        return ""
    if text.strip().startswith(MINUS):
        return 'Write the minus sign as "-"'
    other: Decimal = "," if decimal == "." else "."
    if not is_decimal(text, other):
        return "Remove the separators between the thousands"
    or_else = f"; remove the {NAMES[other]} if it separates thousands" if THOUSANDS.fullmatch(text.strip()) else ""
    return f'Set data.decimal = "{other}" if all files of the job have a decimal {NAMES[other]}{or_else}'


def decimal_of(values: Iterable[Any]) -> Decimal | None:
    """The decimal separator of a column in which all texts are numbers of one format; None for other columns.

    A column with commas that could all separate thousands is not recognised.
    """
    texts = [value for value in values if isinstance(value, str) and not is_missing(value)]
    if all(is_decimal(text, ".") for text in texts):
        return "."
    certain = any("," in text and not THOUSANDS.fullmatch(text.strip()) for text in texts)
    return "," if certain and all(is_decimal(text, ",") for text in texts) else None


def unread_number(values: Iterable[Any]) -> str | None:
    """The first text that is not a number with a decimal point, if all texts are numbers as people write them: "12,5 %"."""
    texts = [value for value in values if isinstance(value, str) and not is_missing(value)]
    units = {found and found[1] for found in (MEASURE.fullmatch(text.strip()) for text in texts)}
    measured = (len(units) == 1 and all(units)) or all(WITH_UNIT.fullmatch(text.strip()) for text in texts)
    if not texts or decimal_of(texts) or not measured:
        return None
    return next(text for text in texts if not is_decimal(text, "."))


def is_missing(value: Any) -> bool:
    """Whether a cell of numbers is empty: also NaN, which pandas writes for a missing number, and NA, which R writes."""
    return value is None or value != value or (isinstance(value, str) and value.strip().lower() in EMPTY)


def numbers_of(values: Iterable[Any]) -> list[float] | None:
    """The numbers of a column, without missing ones; None if a value is not a number."""
    given = [value for value in values if not is_missing(value)]
    decimal = decimal_of(given)
    if decimal is None:
        return None
    try:
        return [number_of(value, decimal) if isinstance(value, str) else float(value) for value in given]
    except (TypeError, ValueError, OverflowError):
        return None
