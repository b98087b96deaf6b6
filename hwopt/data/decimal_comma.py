"""Numbers with a decimal comma, as Excel writes them in most of Europe: "4,5" and "1.234,5"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

PLAIN = re.compile(r"[+-]?[0-9]{1,300}(,[0-9]{1,300})?")
GROUPED = re.compile(r"[+-]?[0-9]{1,3}(\.[0-9]{3}){1,100}(,[0-9]{1,300})?")
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+")
"""What an English number with commas between the thousands looks like."""


def with_points(values: Iterable[Any]) -> list[Any]:
    """`values` with a decimal point in each string, if the column has decimal commas; otherwise unchanged.

    It has them if all strings are such numbers, and one of them cannot be an English number: "1,234" alone could be one.
    """
    values = list(values)
    texts = [value for value in values if isinstance(value, str) and value != ""]
    certain = any("," in text and not THOUSANDS.fullmatch(text) for text in texts)
    if not certain or not all(PLAIN.fullmatch(text) or GROUPED.fullmatch(text) for text in texts):
        return values
    return [value.replace(".", "").replace(",", ".") if isinstance(value, str) else value for value in values]
