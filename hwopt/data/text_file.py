"""Read the lines of a text file: UTF-8, or UTF-16 with a byte order mark. Invalid bytes stay recognisable."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from hwopt.errors import DataError

INVALID_BYTE = re.compile("[\udc80-\udcff]")
"""Matches a byte that is not UTF-8, as decoded by the error handler "surrogateescape"."""


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file, with their line ends. Bytes that are not UTF-8 match `INVALID_BYTE`."""
    encoding = detect_encoding(path)
    try:
        with path.open(encoding=encoding, errors="surrogateescape" if encoding == "utf-8-sig" else "strict", newline="") as file:
            yield from file
    except UnicodeError as error:
        raise DataError(f"{path}: invalid UTF-16 ({error}); save it as UTF-8") from error


def detect_encoding(path: Path) -> str:
    """UTF-16 if the file starts with its byte order mark, else UTF-8. Raises DataError for binary files."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start:
        raise DataError(f"{path}: contains zero bytes: binary, or UTF-16 without a byte order mark; save it as UTF-8")
    return "utf-8-sig"


def not_utf8(invalid: re.Match[str]) -> str:
    """The reason why a text is rejected, with the byte that `INVALID_BYTE` found."""
    return f"is not UTF-8 (byte {ord(invalid.group()) - 0xDC00:#04x})"
