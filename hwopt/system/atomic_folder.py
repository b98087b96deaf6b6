"""Write folders atomically: into a temporary sibling folder, with a manifest, renamed after fsync.

A folder is valid if its manifest lists exactly the files in it, with their sizes and SHA-256. If the process is killed or the
disk is full, the previous folder stays; `repair_interrupted_write` removes the leftovers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hwopt.errors import StorageError, is_disk_full
from hwopt.system.paths import writing

MANIFEST = "manifest.json"
FORMAT = 1  # format of the manifest; other formats are rejected
GIB = 2**30
OS_FILES = ("Thumbs.db", "desktop.ini")  # ignored, like hidden files such as .DS_Store


@contextmanager
def staged(target: Path, needed_bytes: float) -> Iterator[Path]:
    """A temporary folder to write into. It becomes `target` if the block succeeds and is deleted if the block raises.

    The previous `target` is deleted only after the new one is complete and in place. Raises StorageError if writing fails; the
    message shows `needed_bytes`.
    """
    staging, old = temporary_siblings(target)
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
        raise StorageError(write_error_message(target, error, needed_bytes, folder_bytes(staging))) from error
    finally:
        with suppress(OSError):  # the next run tries again
            repair_interrupted_write(target)


def temporary_siblings(target: Path) -> tuple[Path, Path]:
    """(folder that `target` is written into, folder that the previous `target` is moved to)."""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.old")


def repair_interrupted_write(target: Path) -> None:
    """Restore the previous `target` and delete temporary folders after a process was killed while writing `target`."""
    staging, old = temporary_siblings(target)
    if old.exists() and not target.exists():
        old.rename(target)
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Write the manifest of `folder`, then fsync all its files and folders."""
    paths, manifest = files_in(folder), folder / MANIFEST
    files = {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    for path in (*paths, manifest, *sorted({path.parent for path in paths} | {folder})):
        fsync(path)


def find_corruption(folder: Path) -> str:
    """The first defect of a folder that `staged` wrote, or "" if the folder is valid."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest["files"].items()}
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}; this version of hwopt reads format {FORMAT}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    try:
        found = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
        for name in sorted(listed.keys() ^ found.keys()):
            return f"{name} is {f'not listed in {MANIFEST}' if name in found else 'missing'}"
        for name, (size, checksum) in listed.items():
            if found[name].stat().st_size != size:
                return f"{name} has {found[name].stat().st_size:,} bytes instead of {size:,}"
            if sha256(found[name]) != checksum:
                return f"{name} does not match its SHA-256 in {MANIFEST}"
    except OSError as error:
        return f"the folder cannot be read ({error})"
    return ""


def files_in(folder: Path) -> list[Path]:
    """All files in `folder` and its subfolders, sorted, except the manifest. Hidden files and OS_FILES are ignored."""
    found = (path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)
    hidden = re.compile(r"(^|/)\.")
    return sorted(p for p in found if not hidden.search(p.relative_to(folder).as_posix()) and p.name not in OS_FILES)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder) if path.is_file()) if folder.is_dir() else 0


def write_error_message(path: Path, error: Exception, needed: float, written: int) -> str:
    """The message for a write that failed after `written` of `needed` bytes."""
    message = f"{path} could not be written: {getattr(error, 'strerror', None) or error}"
    if is_disk_full(error):
        free = shutil.disk_usage(path.parent).free
        message += f" (needs {needed / GIB:.3f} GiB, {written / GIB:.3f} GiB were written, {free / GIB:.3f} GiB are free)"
        if free > needed > 0:
            return f"{message}. A limit on the number of files (df -i) or a disk quota is reached. Raise it and run again."
    return f"{message}. Free some space and run again."


def write_json(path: Path, content: Any) -> None:
    """Write `content` to the file `path` atomically. Raises StorageError."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")  # ranks may write at the same time
    with writing(path):
        try:
            with open(staging, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2, default=str)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        except OSError:
            with suppress(OSError):
                staging.unlink()
            raise
