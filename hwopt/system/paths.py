"""What lies at a path that somebody chose: a regular file, a folder, something else, or nothing.

A pipe would be waited for and a device read for ever, so that only regular files are opened.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Literal

from hwopt.errors import HwoptError, InputError
from hwopt.text import truncate


def refuse_non_utf8(name: str, what: str) -> None:
    """Raises InputError for a file name that is not UTF-8: libraries in Rust and C++ cannot open it, nor can JSON hold it."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        ascii_only = sys.getfilesystemencoding() != "utf-8"
        how = "set PYTHONUTF8=1, or leave out what makes Python take names for ASCII" if ascii_only else "give it another name"
        raise InputError(f"{what} {truncate(name)}: is not a name in UTF-8; {how}") from error


Kind = Literal["file", "folder", "special", "nothing"]


def path_kind(path: Path, where: str = "", error: type[HwoptError] = InputError) -> Kind:
    """Raises `error`, with the place that asked, where nobody can tell: a name that is too long, links in a circle."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except (OSError, ValueError) as problem:  # ValueError: a NUL, or what is no Unicode
        said = getattr(problem, "strerror", None) or problem
        raise error(f"{where + ' ' if where else ''}{truncate(str(path))}: cannot be looked at: {said}") from problem
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"


def read_regular_file(path: Path, most: int, where: str = "", error: type[HwoptError] = InputError) -> bytes:
    """The bytes of a regular file of at most `most`. Raises `error` for anything else."""
    if (kind := path_kind(path, where, error)) != "file":
        what = {"nothing": "no such file", "folder": "is a folder; give a file"}.get(kind, "is no regular file; give one")
        raise error(f"{where + ' ' if where else ''}{path}: {what}")
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    if len(raw) > most:
        raise error(f"{path}: {max(len(raw), path.stat().st_size):,} bytes are too many (at most {most:,})")
    return raw
