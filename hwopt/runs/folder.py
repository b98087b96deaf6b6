"""The folder of a run: its name, the lock of the process that trains in it, and the folder in which a resumed run continues."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from hwopt.errors import FolderInUseError, InputError, StorageError
from hwopt.records.run_files import STATUS, read_object
from hwopt.saving.reader import checkpoint_in, list_checkpoints, quarantine, read_metadata
from hwopt.system.atomic_folder import write_json
from hwopt.system.paths import path_kind
from hwopt.text import truncate

LOCK = ".lock"
OWNER = ".owner.json"


class Target:
    """Where a run writes, and what it resumes. `require_usable` reports mistakes before anything slow."""

    def __init__(
        self,
        output_dir: Path | str = "runs",
        name: str | None = None,
        resume: bool | Path | str | None = False,
        fresh: bool = False,
    ) -> None:
        """`name`: of the folder below `output_dir`; None: named after job and profile.

        `resume`: True: from the newest valid checkpoint of the folder, if there is one; a path: from this checkpoint.
        `fresh`: start over in an existing folder; the old run is kept beside it.
        """
        self.output_dir, self.name, self.fresh = Path(output_dir), name, fresh
        self.resume: bool | Path = Path(resume) if resume and isinstance(resume, str) else resume or False

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to resume from, if the user names one. Raises StorageError if it is not valid."""
        return checkpoint_in(self.resume) if isinstance(self.resume, Path) else None

    def require_usable(self) -> None:
        """Raise InputError, FolderInUseError or StorageError for a folder or a checkpoint that cannot be used."""
        if self.resume and self.fresh:
            raise InputError("A run cannot both resume and start fresh; give one of the two")
        run_folder(self.output_dir, self.name, "", resume=bool(self.resume), fresh=self.fresh)
        _ = self.checkpoint

    def folder(self, default: str) -> Path:
        """The folder of the run. `default`: its name if the user gave none."""
        if (checkpoint := self.checkpoint) is not None:
            return folder_for_resume(checkpoint, self.output_dir, self.name, default)
        return run_folder(self.output_dir, self.name, default, resume=bool(self.resume), fresh=self.fresh)

    def next_folder(self, default: str) -> Callable[[], Path] | None:
        """What finds another folder if a process takes the first one meanwhile; None if the user chose the folder."""
        chosen = self.name is not None or self.resume or self.fresh
        return None if chosen else partial(run_folder, self.output_dir, None, default)

    def saved(self, default: str | None = None) -> Mapping[str, Any]:
        """The metadata of the checkpoint to resume from; {} without one, or if its folder needs a `default` to be known."""
        if (checkpoint := self.checkpoint) is not None:
            return read_metadata(checkpoint)
        if not self.resume or (self.name is None and default is None):
            return {}
        return read_metadata(self.output_dir / self.name if self.name is not None else self.folder(default or ""))


def run_folder(output_dir: Path, name: str | None, default: str, *, resume: bool = False, fresh: bool = False) -> Path:
    """The folder of a run, without creating it. Raises an error for a folder that cannot be used.

    Without a name, a new run gets the first free name of `default`, `default-2` …, and a resumed or fresh run the last used one.
    """
    if not (existing := nearest_existing(output_dir)).is_dir():
        raise InputError(f"--output-dir {output_dir}: {existing} is a file; give a folder")
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", default).strip("-.") or "run"
        names = [stem, *(f"{stem}-{number}" for number in range(2, 100_000))]
        free = next(index for index, each in enumerate(names) if not os.path.lexists(output_dir / each))
        return require_creatable(output_dir / names[max(0, free - 1) if resume or fresh else free])
    if not re.fullmatch(r"\w([\w .-]{0,118}\w)?", name):
        raise InputError(
            f"--name {truncate(name)}: not a valid folder name. Use letters, digits, '-', '_' and '.', without '/' or '..'"
        )
    folder = output_dir / name
    if folder.exists() and in_use_on_this_host(folder):
        raise folder_in_use_error(folder)
    if os.path.lexists(folder) and not (resume or (fresh and folder.is_dir())):
        raise folder_exists_error(folder)
    return require_creatable(folder)


def nearest_existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if path_kind(each, "--output-dir") != "missing")


def require_creatable(folder: Path) -> Path:
    """`folder`. Raises StorageError if it does not exist and cannot be created, before any work is lost."""
    existing = nearest_existing(folder)
    if existing != folder and not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"{folder} cannot be created: no permission to write in {existing}. Give another --output-dir")
    return folder


def folder_for_resume(checkpoint: Path, output_dir: Path, name: str | None, default: str) -> Path:
    """The folder in which a run from `checkpoint` continues: its own if it is the newest one there, else a new folder."""
    own = checkpoint.absolute().parent
    if name is None and list_checkpoints(own)[:1] == [checkpoint.absolute()]:
        return own
    folder = run_folder(output_dir, name, default, resume=name is not None)
    if folder.exists() and folder.absolute() != own:
        raise folder_exists_error(folder)
    return folder


def folder_exists_error(folder: Path) -> InputError:
    content = " with checkpoints" if list_checkpoints(folder) else ""
    return InputError(
        f"--name {folder.name}: {folder} exists{content}. Continue its run with --resume, or give another --name. "
        "Or start again with --fresh, which keeps the old folder under another name"
    )


@contextmanager
def lock_run_folder(folder: Path, *, resume: bool = False, fresh: bool = False) -> Iterator[Path]:
    """Create `folder` and keep other processes from training in it, until the block or the process ends.

    With `fresh`, an existing folder is renamed first. Raises FolderInUseError if another process trains in the folder, InputError
    if a new run would overwrite an old one, StorageError if the folder cannot be created.
    """
    if fresh and folder.exists():
        with locked(folder):
            quarantine(folder, "old")
    with locked(folder):
        try:
            if not resume and not set(os.listdir(folder)) <= {LOCK}:
                raise folder_exists_error(folder)
            owner = {"pid": os.getpid(), "host": platform.node(), "began": psutil.Process().create_time()}
            write_json(folder / OWNER, owner | {"folder": os.path.realpath(folder)})
            yield folder
        finally:
            with suppress(OSError):
                (folder / OWNER).unlink(missing_ok=True)
                (folder / LOCK).unlink()
                folder.rmdir()  # only if the run wrote nothing


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create `folder` and hold its lock. The system releases the lock when the process ends, even if it is killed."""
    lock = FileLock(folder / LOCK, timeout=0, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise folder_in_use_error(folder) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield
    finally:
        lock.release()


def in_use_on_this_host(folder: Path) -> bool:
    """Whether a process of this host trains in `folder`. Does not take the lock, which would block other processes."""
    owner = read_owner(folder)
    if owner.get("host") != platform.node() or owner.get("folder") != os.path.realpath(folder):  # a copied folder
        return False
    with suppress(psutil.Error):
        process = psutil.Process(int(owner["pid"]))  # in a container a killed one may stay as a zombie, which holds nothing
        return bool(process.create_time() == owner["began"]) and process.status() != psutil.STATUS_ZOMBIE
    return False


def read_owner(folder: Path) -> dict[str, Any]:
    """pid, host and start time of the process that trains in `folder`; {} without a readable file."""
    return read_object(folder / OWNER)


def folder_in_use_error(folder: Path) -> FolderInUseError:
    owner = read_owner(folder)
    trainer = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
    return FolderInUseError(
        f"{folder} is in use: {trainer} trains there. Wait until it ends, stop it (`kill` once: it saves), or give another --name"
    )


def write_status(folder: Path, exit_code: int | None, message: str) -> None:
    """Write `status.json`. `exit_code` is None while the run trains. Launchers lose the exit code; this file keeps it."""
    write_json(folder / STATUS, {"exit_code": exit_code, "message": message})
