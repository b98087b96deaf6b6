"""Resolve a data source to files, a folder made by `datasets` or a hub name, and reject unusable ones before reading."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from pathlib import Path
from typing import Literal

from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS
from hwopt.data.sources.image_folder import is_image, is_image_folder, names_in
from hwopt.errors import DataError
from hwopt.system.paths import path_kind
from hwopt.text import counted, listing, nearest

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt", *CONLL_EXTENSIONS)
REFUSED = {
    (".zip", ".gz", ".tgz", ".tar", ".bz2", ".xz", ".zst", ".7z", ".rar"): "is an archive; unpack it, and give the file in it",
    (".xlsx", ".xlsm", ".xls", ".ods", ".numbers"): (
        "is a spreadsheet; save the sheet as 'CSV UTF-8' in Excel, LibreOffice or Numbers, and give that file"
    ),
}
DATASETS_FILES = ("dataset_dict.json", "state.json")  # every folder made by save_to_disk() has one of these files
GLOB = re.compile(r"[*?\[]")
Kind = Literal["file", "saved", "images", "dataset"]
"""A file; a folder made with save_to_disk(); a folder of images; or what load_dataset() opens: a hub name, or a clone of one."""


class MissingFileError(DataError):
    """There is no such file."""


def path_of(source: str) -> Path:
    """The path that `source` names: job files are UTF-8, whatever encoding Python assumes for file names."""
    return Path(os.fsdecode(source.encode("utf-8", "replace")))


def has_glob(source: str) -> bool:
    return GLOB.search(source) is not None


def expand(source: str) -> list[str]:
    """The files that match `source` if it is a glob (with ** for subfolders), sorted; else `source` itself.

    Hidden files and folders are left out. Raises DataError if no file matches.
    """
    if not has_glob(source) or os.path.lexists(path_of(source)):
        return [source]
    found = sorted(path for path in glob.glob(os.path.expanduser(source), recursive=True) if not os.path.isdir(path))
    if not found:
        folder = Path(os.path.dirname(GLOB.split(source)[0]))
        has = f"has: {listing(names)}" if (names := names_in(folder)) else "is empty or does not exist"
        raise DataError(f"{source}: no file matches; the folder {str(folder)!r} {has}")
    return found


def locate(source: str, split: str | None = None, format: str | None = None) -> tuple[Kind, Path]:
    """(kind of `source`, its path). `format`: of a file, whatever its extension.

    Raises DataError, with what to give instead, if `source` is of no kind.
    """
    path = path_of(source)
    kind = path_kind(path, "data", DataError)
    folder = path if kind == "folder" else path_of(configured(source)[0])
    if is_clone(folder):
        return "dataset", folder
    if kind == "folder":
        if is_image_folder(path):
            return "images", path
        refuse_other_folders(path)
        return "saved", path
    no_hub_name = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source or source.endswith("/")
    if kind == "missing" and path.suffix.lower() not in EXTENSIONS and not no_hub_name:
        return "dataset", path
    if split is not None and kind == "file":
        raise DataError(f"{source}: a split ({split!r}) applies to hub names and `datasets` folders, not to files")
    refuse_other_files(path, format)
    return "file", path


def extension(path: Path, format: str | None) -> str:
    """The extension of the files of a `format`; None: that of `path`, in lower case."""
    return path.suffix.lower() if format is None else f".{format}"


def configured(source: str) -> tuple[str, str | None]:
    """(name or folder, configuration) of "NAME:CONFIGURATION"; (source, None) without one."""
    name, colon, configuration = source.rpartition(":")
    if not colon or len(name) == 1 or os.path.lexists(path_of(source)):  # one letter: a drive of Windows
        return source, None
    return name, configuration or None


def is_clone(folder: Path) -> bool:
    """Whether `folder` is a clone of a data set of the hub: its README.md has a header that names configurations or features."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    header = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    return header is not None and re.search(r"^(configs|dataset_info):", header[1], re.MULTILINE) is not None


def refuse_other_folders(path: Path) -> None:
    """Raise DataError for a folder that save_to_disk() did not make."""
    # path_kind names a folder without permission, which names_in takes for an empty one
    if not any(path_kind(path / name, "data", DataError) == "file" for name in DATASETS_FILES):
        if not names_in(path):
            raise DataError(f"{path}: is an empty folder; give one with the data in it")
        raise DataError(
            f"{path}: is a folder, but not one made by save_to_disk() of `datasets`, nor one with a folder of images per class"
            f"{files_hint(path)}"
        )


def files_hint(folder: Path) -> str:
    """What to give instead of `folder`: the globs of its files, by extension."""
    suffixes = Counter(path.suffix for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    globs = [f"{str(folder / '**' / f'*{suffix}')!r} ({counted(n, 'file')})" for suffix, n in suffixes.most_common(3)]
    return "; give its files: " + " or ".join(globs) if globs else ""


def refuse_other_files(path: Path, format: str | None = None) -> None:
    """Raise DataError for a file that is missing, empty, not readable or, without a `format`, of another format."""
    suffix = path.suffix.lower()
    if not path.exists():
        folder = path.parent
        what = "no such file" if folder.is_dir() else f"no such file: the folder {str(folder)!r} does not exist"
        raise MissingFileError(
            f"{path}: {what}.{nearest(path.name, names_in(folder))} Give a file ({listing(EXTENSIONS)}) or a hub name"
        )
    if path_kind(path, "data", DataError) != "file":
        raise DataError(f"{path}: is not a regular file; give a file ({listing(EXTENSIONS)})")
    for suffixes, why in REFUSED.items():
        if suffix in suffixes:
            raise DataError(f"{path}: {why}")
    if format is None and is_image(path.name):
        raise DataError(f"{path}: is one image; give a folder of images, or a table with their paths")
    if format is None and suffix not in EXTENSIONS:
        raise DataError(
            f"{path}: unknown file extension {suffix!r}; hwopt reads {listing(EXTENSIONS)}. "
            "If the file has one of these formats, set data.format, such as data.format = 'csv'"
        )
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; give a file with at least one sample")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
