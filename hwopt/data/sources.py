"""Resolve a data source to a file, a folder made by `datasets` or a hub name, and reject unusable ones before reading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from hwopt.data.conll_reader import CONLL_EXTENSIONS
from hwopt.errors import DataError
from hwopt.system.paths import path_kind, refuse_non_utf8
from hwopt.text import listing, nearest

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt", *CONLL_EXTENSIONS)
ARCHIVES = (".zip", ".gz", ".tgz", ".tar", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4")
DATASETS_FILES = ("dataset_dict.json", "state.json")
"""Every folder made by save_to_disk() has one of these files."""


def locate(source: str, split: str | None = None) -> tuple[Literal["file", "folder", "hub"], Path]:
    """(kind of `source`, its path). Raises DataError, with what to give instead, if it is none of the three kinds."""
    refuse_non_utf8(source, "data:")
    # job files are UTF-8, whatever encoding Python assumes for file names
    path = Path(os.fsdecode(source.encode("utf-8")))
    kind = path_kind(path, "data", DataError)
    if kind == "folder":
        refuse_other_folders(path)
        return "folder", path
    if kind == "missing" and path.suffix.lower() not in EXTENSIONS and not looks_like_a_path(source):
        return "hub", path
    if split is not None and kind == "file":
        raise DataError(f"{source}: a split ({split!r}) applies to hub names and `datasets` folders, not to files")
    refuse_other_files(path)
    return "file", path


def looks_like_a_path(source: str) -> bool:
    """Whether `source` cannot be a hub name."""
    return source.startswith((".", "/", "~", "\\")) or source.count("/") > 1 or "\\" in source or source.endswith("/")


def names_in(folder: Path) -> list[str]:
    """The file names in `folder`; empty if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:  # missing, or no permission
        return []


def refuse_other_folders(path: Path) -> None:
    """Raise DataError for a folder that save_to_disk() did not make."""
    if not any(path_kind(path / name, "data", DataError) == "file" for name in DATASETS_FILES):
        files = sorted(name for name in names_in(path) if Path(name).suffix.lower() in EXTENSIONS)
        hint = f"; give one of its files: {listing(files)}" if files else ""
        raise DataError(f"{path}: is a folder, but not one made by save_to_disk() of `datasets`{hint}")


def refuse_other_files(path: Path) -> None:
    """Raise DataError for a file that is missing, empty, not readable or of another format."""
    suffix = path.suffix.lower()
    if not path.exists():
        folder = path.parent
        what = "no such file" if folder.is_dir() else f"no such file: the folder {str(folder)!r} does not exist"
        raise DataError(
            f"{path}: {what}.{nearest(path.name, names_in(folder))} Give a file ({listing(EXTENSIONS)}) or a hub name"
        )
    if path_kind(path, "data", DataError) != "file":
        raise DataError(f"{path}: is not a regular file; give a file ({listing(EXTENSIONS)})")
    if suffix in ARCHIVES:
        raise DataError(f"{path}: is an archive; unpack it and give a file ({listing(EXTENSIONS)})")
    if suffix not in EXTENSIONS:
        raise DataError(f"{path}: unknown file extension {suffix!r}; hwopt reads {listing(EXTENSIONS)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; give a file with at least one sample")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
