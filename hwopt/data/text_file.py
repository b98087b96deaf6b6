"""The lines of a text file, decoded; bytes that are not UTF-8 stay recognisable."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from hwopt.errors import DataError
from hwopt.text import truncate

ESCAPED = re.compile("[\udc80-\udcff]")
"""What bytes that are not UTF-8 are decoded to (surrogateescape)."""


def _encoding(path: Path) -> str:
    """UTF-8, or UTF-16 where the file begins with its mark. Raises DataError for what is neither, nor text at all."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start:
        raise DataError(f"{path}: has zero bytes: it is binary, or UTF-16 without a byte order mark; save it as UTF-8")
    return "utf-8-sig"


def _lines(path: Path) -> Iterator[str]:
    """The lines with their ends; bytes that are not UTF-8 become what `ESCAPED` finds."""
    encoding = _encoding(path)
    try:
        with path.open(encoding=encoding, errors="surrogateescape" if encoding == "utf-8-sig" else "strict", newline="") as file:
            yield from file
    except UnicodeError as error:
        raise DataError(f"{path}: is not whole UTF-16 ({error}); save it as UTF-8") from error


def _byte(wrong: re.Match[str]) -> str:
    return f" (byte {ord(wrong.group()) - 0xDC00:#04x})"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return truncate(lines[0], 200)[1:-1]
