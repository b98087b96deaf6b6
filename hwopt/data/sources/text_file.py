"""Read the lines of a text file: UTF-8, UTF-16 with a byte order mark, or a given encoding. Invalid bytes stay recognisable."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from hwopt.errors import DataError

INVALID_BYTE = re.compile("[\udc80-\udcff]")
"""Matches a byte that is not valid in the file's encoding, as decoded by the error handler "surrogateescape"."""

OTHER_SCRIPT = "[\u0370-\u07ff\u0e00-\u0e7f]"  # letters of Greek to Arabic, and Thai
SAMPLE_BYTES = 1 << 18  # bytes of lines with other than ASCII characters from which the encoding is guessed


def read_lines(path: Path, encoding: str | None = None) -> Iterator[str]:
    """The lines of a file, with their line ends. Bytes that are not valid in `encoding` match `INVALID_BYTE`.

    Raises DataError for binary files, and for UTF-8 that `encoding` would misread without an error.
    """
    if encoding is None:
        encoding = detect_encoding(path)
    else:
        refuse_misread(path, encoding)
    errors = "strict" if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")) else "surrogateescape"
    try:
        with path.open(encoding=encoding, errors=errors, newline="") as file:
            yield from file
    except UnicodeError as error:
        raise DataError(f"{path}: is not valid {encoding} ({error}). Save it as UTF-8, or set data.encoding") from error


def detect_encoding(path: Path) -> str:
    """UTF-16 if the file starts with its byte order mark, else UTF-8. Raises DataError for binary files."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in start:
        raise DataError(
            f"{path}: contains zero bytes: a binary file such as a workbook of Excel, or UTF-16 without a byte order mark. "
            "Save it as UTF-8, or set data.encoding = 'utf-16-le'"
        )
    return "utf-8-sig"


def undecodable(invalid: re.Match[str], encoding: str | None = None) -> str:
    """The reason why a text is rejected, with the byte that `INVALID_BYTE` found. `encoding`: default UTF-8."""
    return f"is not {encoding or 'UTF-8'} (byte {ord(invalid.group()) - 0xDC00:#04x})"


def refuse_misread(path: Path, encoding: str) -> None:
    """Raise DataError if an encoding of single bytes such as cp1252, in which every file can be read, is given for UTF-8."""
    single_bytes = len(bytes(range(256)).decode(encoding, "replace")) == 256
    unicode = codecs.lookup(encoding).name.startswith("utf")
    if single_bytes and not unicode and (sample := lines_beyond_ascii(path)) and is_utf8(sample):
        raise DataError(
            f"{path}: is UTF-8, but data.encoding is {encoding!r}. Omit data.encoding; for this file alone: "
            "--set data.encoding=utf-8"
        )


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def lines_beyond_ascii(path: Path) -> bytes:
    """The first lines of a file that are not ASCII, as many as decide its encoding."""
    sample = b""
    with path.open("rb") as file:
        for line in file:
            if not line.isascii():
                sample += line
            if len(sample) >= SAMPLE_BYTES:
                break
    return sample


def likely_encoding(path: Path) -> str | None:
    """The likely encoding of a file; None if most lines are UTF-8, if it is UTF-16 with a byte order mark, or if none is likely.

    Encodings of DOS and of old Macs are not guessed: quotes and euro signs of Windows look like letters of theirs.
    """
    import chardet

    sample = lines_beyond_ascii(path)
    lines = sample.splitlines()
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 2 * sum(map(is_utf8, lines)) >= len(lines):
        return None
    guess = chardet.detect(sample, encoding_era=chardet.EncodingEra.MODERN_WEB)["encoding"]
    name = None if guess is None else codecs.lookup(guess).name
    western = sample.decode("cp1252", "replace")
    if name and is_misread(sample, name):
        return None if "\ufffd" in western else "cp1252"
    return "cp1252" if name and sample.decode(name, "replace") == western else name


def is_misread(sample: bytes, encoding: str) -> bool:
    """Whether letters of Greek, Cyrillic, Hebrew, Arabic or Thai stand alone or between Latin ones: "schצn" is "schön"."""
    words = re.findall(rf"[^\W\d_]*{OTHER_SCRIPT}[^\W\d_]*", sample.decode(encoding, "replace"))
    mixed = sum(re.search("[A-Za-z]", word) is not None for word in words)
    return bool(words) and sum(re.fullmatch(f"{OTHER_SCRIPT}{{2,}}", word) is not None for word in words) <= mixed


def encoding_hint(path: Path) -> str:
    """A sentence with the likely encoding of a file that is not UTF-8."""
    name = likely_encoding(path)
    if name is None:
        return "Save the file as UTF-8, or set data.encoding"
    windows = "" if name.startswith("cp125") else ", or 'cp1252' if it comes from Windows in Western Europe"
    return f"The file looks like {name}: set data.encoding = {name!r}{windows}, or save it as UTF-8"
