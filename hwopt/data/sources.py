"""Where rows come from: a file, a folder of `datasets` or the hub; and what is wrong with one, before anything is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from hwopt.errors import DataError
from hwopt.system.paths import path_kind, refuse_non_utf8
from hwopt.text import listing, nearest

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt")
ARCHIVES = (".zip", ".gz", ".tgz", ".tar", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4")
MADE_BY_DATASETS = ("dataset_dict.json", "state.json")
"""One of them lies in every folder that save_to_disk() made."""


def locate(source: str, split: str | None = None) -> tuple[Literal["file", "folder", "hub"], Path]:
    """What `source` is, and its path. Raises DataError, with what to give instead, for what can be none of the three."""
    refuse_non_utf8(source, "data:")
    # a job is UTF-8, and so are the names in it, whatever Python takes the file system's for
    path = Path(os.fsdecode(source.encode("utf-8")))
    kind = path_kind(path, "data", DataError)
    if kind == "folder":
        _refuse_other_folders(path)
        return "folder", path
    if kind == "missing" and path.suffix.lower() not in EXTENSIONS and not _looks_like_a_path(source):
        return "hub", path
    if split is not None and kind == "file":
        raise DataError(f"{source}: a split ({split!r}) is for hub names and `datasets` folders; a file is read whole")
    _refuse_other_files(path)
    return "file", path


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~", "\\")) or source.count("/") > 1 or "\\" in source or source.endswith("/")


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not there, or not for everybody's eyes
        return []


def _refuse_other_folders(path: Path) -> None:
    if not any(path_kind(path / name, "data", DataError) == "file" for name in MADE_BY_DATASETS):
        files = sorted(name for name in _names_in(path) if Path(name).suffix.lower() in EXTENSIONS)
        hint = f"; give one of its files: {listing(files)}" if files else ""
        raise DataError(f"{path}: is a folder that save_to_disk() of `datasets` did not make{hint}")


def _refuse_other_files(path: Path) -> None:
    suffix = path.suffix.lower()
    if not path.exists():
        folder = path.parent
        what = "no such file" if folder.is_dir() else f"no such file: there is no folder {str(folder)!r}"
        raise DataError(
            f"{path}: {what}.{nearest(path.name, _names_in(folder))} Give a file ({listing(EXTENSIONS)}) or a hub name"
        )
    if path_kind(path, "data", DataError) != "file":
        raise DataError(f"{path}: is no regular file; give one ({listing(EXTENSIONS)})")
    if suffix in ARCHIVES:
        raise DataError(f"{path}: is an archive, which hwopt does not unpack; unpack it and give a file ({listing(EXTENSIONS)})")
    if suffix not in EXTENSIONS:
        raise DataError(f"{path}: unknown kind of file {suffix!r}; hwopt reads {listing(EXTENSIONS)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; give a file with at least one sample")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
