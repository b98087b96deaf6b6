"""Folders that are whole or not there: written beside their place, listed, renamed once everything is on the disk.

A folder is whole when its manifest lists exactly the files that lie in it, with their sizes and SHA-256. A process that is killed
at any moment, or a disk that is full, leaves the folder that was there before; what is left half-done `repair_interrupted_write` puts away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hwopt.errors import StorageError, is_disk_full

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest; a reader refuses one that it does not know."""
GIB = 2**30
OS_FILES = ("Thumbs.db", "desktop.ini")
"""And files whose names begin with a dot. None is ever read."""


@contextmanager
def staged(target: Path, needs: float) -> Iterator[Path]:
    """A folder to write into that becomes `target` when the block ends well, and vanishes when it does not.

    What `target` was before goes only when the new one is whole and in its place. Raises StorageError where it cannot be written,
    which says the bytes that it `needs`.
    """
    staging, old = beside(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        write_manifest(staging)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        staging.rename(target)
        fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        if not (isinstance(error, OSError | SafetensorError) or is_disk_full(error)):
            raise
        raise StorageError(said(target, error, needs, folder_bytes(staging))) from error
    finally:
        with suppress(OSError):  # as the next run does
            repair_interrupted_write(target)


def beside(target: Path) -> tuple[Path, Path]:
    """(where `target` is written, where what it was before goes)"""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")


def repair_interrupted_write(target: Path) -> None:
    """Put away what a process that was killed while it wrote `target` has left behind."""
    staging, old = beside(target)
    if old.exists() and not target.exists():
        old.rename(target)
    for left in (staging, old):
        shutil.rmtree(left, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Write the manifest of `folder`, with everything in it on the disk."""
    files = {}
    for path in files_in(folder):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        fsync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    fsync(manifest)
    for place in sorted({path.parent for path in files_in(folder)} | {folder}):
        fsync(place)


def find_corruption(folder: Path) -> str:
    """What is wrong with a folder that `staged` has written; "" where it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest["files"].items()}
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} is of format {manifest['format']}, and this version reads {FORMAT}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    try:
        found = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
        for name in sorted(listed.keys() | found.keys()):
            if name not in found:
                return f"{name} is missing"
            if name not in listed:
                return f"{name} is not listed in its {MANIFEST}"
            size, checksum = listed[name]
            if found[name].stat().st_size != size:
                return f"{name} has {found[name].stat().st_size:,} bytes instead of {size:,}"
            if sha256(found[name]) != checksum:
                return f"{name} was changed"
    except OSError as error:
        return f"it cannot be read ({error})"
    return ""


def files_in(folder: Path) -> list[Path]:
    """All files below `folder` but its manifest, and what desktops, tools and network file systems leave where somebody looks."""
    found = (path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)
    return sorted(path for path in found if not hidden(path.relative_to(folder)) and path.name not in OS_FILES)


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; Windows cannot be asked about folders."""
    if path.is_dir() and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder) if path.is_file()) if folder.is_dir() else 0


def said(path: Path, error: Exception, needs: float, written: int) -> str:
    """The message of a write that failed after so many bytes of those that it needs."""
    message = f"{path} could not be written: {getattr(error, 'strerror', None) or error}"
    if is_disk_full(error):
        free = shutil.disk_usage(path.parent).free
        message += f" (it needs {needs / GIB:.3f} GiB, {written / GIB:.3f} of them were written; {free / GIB:.3f} GiB are free)"
        if free > needs > 0:
            return f"{message}. There is room: what is used up is the number of files (df -i) or a quota. Raise it and run again."
    if getattr(error, "errno", None) == errno.EFBIG:
        return f"{message}. Raise the limit on the size of a file (ulimit -f), and run again."
    return f"{message}. Free some space and run again."


def write_json(path: Path, content: Any) -> None:
    """Write `content` whole or not at all."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")  # ranks may write at the same time
    try:
        with open(staging, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, default=str)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
