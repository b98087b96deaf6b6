"""Read a folder of images with one folder per class, as torchvision's ImageFolder and `datasets` do.

`photos/cat/1.jpg` is an image of the class "cat". If the folder has the folders of a split instead (`train`, `validation`,
`test`), each of them has the folders of the classes. Images without such folders have no label: they can be predicted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.text_file import INVALID_BYTE
from hwopt.errors import DataError
from hwopt.text import listing, nearest, truncate

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # file names that are taken for images
SPLITS = {"train": ("train", "training"), "eval": ("validation", "valid", "val", "dev", "eval"), "test": ("test", "testing")}
"""Part of the data -> names of its folder."""
SYSTEM_FILES = ("thumbs.db", "desktop.ini")


def is_image(name: str) -> bool:
    """Whether a file is taken for an image, by its name. Hidden files, such as those of macOS, are not."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def names_in(folder: Path) -> list[str]:
    """The names of the files and folders in `folder` that are not hidden, sorted; empty if it cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:  # missing, or no permission
        return []


def is_image_folder(folder: Path) -> bool:
    """Whether `folder` has images, directly or in the folders of classes or splits."""
    return any(map(is_image, names_in(folder))) or any(map(has_classes, (folder, *split_folders(folder).values())))


def has_classes(folder: Path) -> bool:
    return any(is_image(name) for each in folders_in(folder) for name in names_in(each))


def folders_in(folder: Path) -> list[Path]:
    return [folder / name for name in names_in(folder) if (folder / name).is_dir()]


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the splits in `folder`, by the part of the data: train, eval or test."""
    by_name = {each.name.lower(): each for each in folders_in(folder)}
    named = {part: next((by_name[name] for name in names if name in by_name), None) for part, names in SPLITS.items()}
    return {part: found for part, found in named.items() if found is not None and has_classes(found)}


def part_of(folder: Path, split: str | None) -> Path:
    """The folder of `split`, by default that of training; without splits, `folder` itself."""
    if split is None:
        return split_folders(folder).get("train", folder)
    found = {each.name: each for each in folders_in(folder)}
    if split not in found:
        names = f": {listing(list(found))}" if found else " no folders"
        raise DataError(f"{folder}: has no folder {split!r}.{nearest(split, found)} It has{names}")
    return found[split]


def files_below(folder: Path) -> Iterator[str]:
    """The paths of the files below `folder`, relative to it and sorted; without hidden ones and those of the system."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and name.lower() not in SYSTEM_FILES:
                yield os.path.relpath(os.path.join(parent, name), folder)


def read_image_folder(folder: Path, split: str | None, options: ReadOptions) -> Rows:
    """A row for each image: `image`, its path in the folder, and `label`, the name of its class's folder, if it has one.

    Files that are not images become bad rows. Raises DataError if there is no image.
    """
    import pyarrow as pa

    root = part_of(folder, split)
    files = list(files_below(root))
    reasons = {file: "is not an image, by its extension" for file in files if not is_image(Path(file).name)}
    reasons |= {file: "has a name that is not UTF-8" for file in files if INVALID_BYTE.search(file)}
    images = [file for file in files if file not in reasons]
    bad_rows = BadRows(str(root), "row", options.strict, options.max_bad_rows)
    for number, file in enumerate(sorted(reasons), len(images) + 1):
        bad_rows.add(number, f"{reasons[file]}: {truncate(file)}")
    if not images:
        raise DataError(f"{root}: has no image ({listing(EXTENSIONS)}); expected one folder of images per class")
    columns = {"image": images}
    if has_classes(root):
        columns["label"] = [Path(image).parts[0] if len(Path(image).parts) > 1 else "" for image in images]
    return Rows(pa.table(columns), Places(str(root), "row", range(1, len(images) + 1)), bad_rows)
