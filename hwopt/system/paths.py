"""Check paths that a user gives: a regular file, a folder, a special file, or missing; and write files.

Only regular files are opened: reading a pipe may block, and reading a device may never end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hwopt.errors import HwoptError, InputError, StorageError
from hwopt.text import truncate

PathKind = Literal["file", "folder", "special", "missing"]


def path_kind(path: Path, where: str = "", error: type[HwoptError] = InputError) -> PathKind:
    """What exists at `path`. Raises `error`, prefixed with `where`, if the system cannot tell (permissions, a loop of links)."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as problem:  # ValueError: a NUL byte, or a lone surrogate
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{where + ' ' if where else ''}{truncate(str(path))}: cannot access: {reason}") from problem
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file of at most `max_bytes`. Raises InputError for anything else."""
    if (kind := path_kind(path)) != "file":
        what = {"missing": "no such file", "folder": "is a folder; give a file"}.get(kind, "is not a regular file")
        raise InputError(f"{path}: {what}")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as problem:
        raise InputError(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    if len(raw) > max_bytes:
        raise InputError(f"{path}: {max(len(raw), path.stat().st_size):,} bytes, more than the limit of {max_bytes:,}")
    return raw


OR_FORCE = "give another name, or --force to overwrite it"  # what to do about an existing file, of commands that have --force


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes `path`, a file or a folder. Raises StorageError if the system refuses."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error


def refuse_output(path: Path, option: str, exists: str = "", reads: Iterable[Path | None] = ()) -> None:
    """Check, before the work, that `option` names a file that can be written. `exists`: what to do about an existing file.

    Raises InputError for a folder, for one of the files that the command `reads`, and for an existing file unless `exists` is
    ""; StorageError if its folder does not exist, or without the permission to write.
    """
    if (kind := path_kind(path, option)) == "folder":
        raise InputError(f"{option} {path}: is a folder; give the name of a file in it")
    if path_kind(path.parent, option) != "folder":
        raise StorageError(f"{option} {path}: there is no folder {str(path.parent)!r}; make it, or give another name")
    if any(os.path.samefile(path, file) for file in reads if file and kind == "file" and os.path.exists(file)):
        raise InputError(f"{option} {path}: is a file that the command reads; give another name")
    if exists and kind != "missing":
        raise InputError(f"{option} {path}: exists; {exists}")
    if not os.access(path.parent if kind == "missing" else path, os.W_OK):
        raise StorageError(f"{option} {path}: no permission to write; give another name")


def write_text(path: Path, text: str, new: bool = False) -> None:
    """Write a text file, which must not exist if `new`. Raises StorageError if it cannot be written."""
    with writing(path), path.open("x" if new else "w", encoding="utf-8") as file:
        file.write(text)
