"""The folder of a run: its name, who owns it while it is trained, and where a run goes on."""

from __future__ import annotations

import json
import os
import platform
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from hwopt.errors import FolderInUseError, InputError, StorageError
from hwopt.saving.reader import in_folder, quarantine
from hwopt.system.atomic_folder import write_json
from hwopt.system.paths import path_kind, refuse_non_utf8
from hwopt.text import truncate

LOCK = ".lock"
OWNER = ".owner.json"
RESERVED = re.compile(r"CON|PRN|AUX|NUL|COM\d|LPT\d", re.IGNORECASE)
"""Names that Windows keeps for devices."""


def run_folder(output_dir: Path, name: str | None, default: str, *, resume: bool = False, fresh: bool = False) -> Path:
    """The folder of a run, not made yet unless it goes on there.

    Without a name a new run takes the first free number behind `default`, and one that goes on the last one taken. Raises
    InputError for a name that leaves `output_dir` or is taken, FolderInUseError where another process trains in it, StorageError
    where nothing can be written.
    """
    refuse_non_utf8(str(output_dir), "--output-dir")
    if not (there := nearest_there(output_dir)).is_dir():
        raise InputError(f"--output-dir {output_dir}: {there} is a file; give a folder")
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", default).strip("-.") or "run"
        names = [stem, *(f"{stem}-{number}" for number in range(2, 100_000))]
        free = next(number for number, each in enumerate(names) if not os.path.lexists(output_dir / each))
        return writable(output_dir / names[max(0, free - 1) if resume or fresh else free])
    plain = unicodedata.normalize("NFKC", name)  # some systems take a wide "／" for a slash
    fit = plain.isprintable() and not re.search(r'[<>:"/\\|?*]', plain) and plain.strip(" .") == plain
    fit = fit and name.isprintable() and 0 < len(name.encode()) <= 120
    if not fit or plain.startswith(("-", "~")) or RESERVED.fullmatch(plain.split(".")[0].strip()):
        raise InputError(
            f"--name {truncate(name)}: is no plain folder name; use letters, digits, '-', '_' and '.', without '/' or '..'"
        )
    folder = output_dir / name
    if folder.exists() and trained_here(folder):
        raise in_use(folder)
    if os.path.lexists(folder) and not (resume or (fresh and folder.is_dir())):
        raise taken(folder)
    return writable(folder)


def nearest_there(path: Path) -> Path:
    """`path`, or the first of the folders above it that is there."""
    return next(each for each in (path, *path.absolute().parents) if path_kind(each, "--output-dir") != "missing")


def writable(folder: Path) -> Path:
    """`folder`. Raises StorageError where it is not there and cannot be made, before the work that would be lost."""
    there = nearest_there(folder)
    if there != folder and not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{folder} cannot be made: nothing can be written in {there}; give another --output-dir")
    return folder


def folder_to_go_on_in(checkpoint: Path, output_dir: Path, name: str | None, default: str) -> Path:
    """Where a run from `checkpoint` goes on: in its own folder if it is the newest there, else in one of its own."""
    own = checkpoint.absolute().parent
    if name is None and in_folder(own)[:1] == [checkpoint.absolute()]:
        return own
    folder = run_folder(output_dir, name, default, resume=True) if name else run_folder(output_dir, None, default)
    if folder.exists() and folder.absolute() != own:
        raise taken(folder)
    return folder


def taken(folder: Path) -> InputError:
    if in_folder(folder):
        return InputError(
            f"--name {folder.name}: {folder} holds checkpoints. To go on from the newest: --resume; to begin anew and keep the "
            "old folder beside it: --fresh; or give another --name"
        )
    return InputError(f"--name {folder.name}: {folder} exists; give another name, go on in it with --resume, or use --fresh")


@contextmanager
def owned(folder: Path, *, resume: bool = False, fresh: bool = False) -> Iterator[Path]:
    """`folder`, made where it is not there, and this process's own until the block or the process ends.

    A `fresh` run leaves what was in it under another name beside it. Raises FolderInUseError where another process has it,
    InputError where a new run would overwrite an old one, StorageError where it cannot be made.
    """
    if fresh and folder.exists():
        with locked(folder):
            quarantine(folder, "old")
    with locked(folder):
        try:
            if not resume and not set(os.listdir(folder)) <= {LOCK}:
                raise taken(folder)
            began = psutil.Process().create_time()
            who = {"pid": os.getpid(), "host": platform.node(), "began": began}
            write_json(folder / OWNER, who | {"folder": os.path.realpath(folder)})
            yield folder
        finally:
            with suppress(OSError):
                (folder / OWNER).unlink(missing_ok=True)
                (folder / LOCK).unlink()  # whoever waits for it takes another; Windows keeps it
            with suppress(OSError):
                folder.rmdir()  # where it was never begun


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock is the system's, and so ends with the process that holds it, however that ends."""
    lock = FileLock(folder / LOCK, timeout=0, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise in_use(folder) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield
    finally:
        lock.release()


def trained_here(folder: Path) -> bool:
    """Whether a process of this machine trains in `folder`, without plugin_hook for the lock, which would keep others from it."""
    owner = owner_of(folder)
    if owner.get("host") != platform.node() or owner.get("folder") != os.path.realpath(folder):  # a copy of the folder
        return False
    with suppress(psutil.Error, ValueError, TypeError):
        return bool(psutil.Process(int(owner["pid"])).create_time() == owner["began"])
    return False


def owner_of(folder: Path) -> dict[str, Any]:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) and {"pid", "host", "began"} <= owner.keys() else {}


def in_use(folder: Path) -> FolderInUseError:
    owner = owner_of(folder)
    who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
    return FolderInUseError(
        f"{folder} is in use: {who} trains there. Wait until it has ended, end it (kill, once: it saves), or give another --name"
    )
