"""Checkpoints on disk, read: which one is whole and newest, what it holds, and whether it belongs to this run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hwopt.errors import InputError, StorageError
from hwopt.system.atomic_folder import MANIFEST, find_corruption, folder_bytes, repair_interrupted_write, staged
from hwopt.system.paths import path_kind
from hwopt.text import listing

if TYPE_CHECKING:
    from torch import Tensor


STATE = "training_state.json"
TENSORS = "training_state.safetensors"
FORMAT = 1
NAME = re.compile(r"checkpoint-(\d{1,12})")


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint-<step>/` of a run folder: a model that `from_pretrained` opens, and all that the next step depends on."""

    folder: Path
    content: Mapping[str, Any]
    """What its training_state.json holds."""

    @property
    def step(self) -> int:
        return int(self.content["step"])

    @property
    def state(self) -> Any:
        """The state with its tensors, in the host's memory. Raises StorageError where they cannot be read."""
        from hwopt.saving.tensor_tree import unflatten  # torch; the command line looks at folders without it

        with ExitStack() as stack:
            find = tensors_of(self.folder, stack)
            try:
                return unflatten(self.content["state"], find)
            except (KeyError, OSError, SafetensorError) as error:
                raise StorageError(f"{self.folder}: its tensors cannot be read ({error})") from error


def tensors_of(folder: Path, stack: ExitStack) -> Callable[[str], Tensor]:
    """Finds tensors by name in the files of `folder`: those of the training state, else the model's own weights."""
    from safetensors import safe_open

    files = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)]
    places = {name: file for file in reversed(files) for name in file.keys()}  # noqa: SIM118

    def find(name: str) -> Tensor:
        name = name if name in places else name.removeprefix("engine/parameters/")
        found: Tensor = places[name].get_tensor(name)
        return found

    return find


def weight_files(folder: Path) -> list[Path]:
    """Those of the training state first."""
    found = (path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    return sorted(found, key=lambda path: (path.name != TENSORS, path.name))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest first, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name) and path_kind(path) == "folder"]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}"


def best_folder(folder: Path, step: int) -> Path:
    return folder / f"best-{step}"


def best_folders(folder: Path) -> dict[int, Path]:
    """By step."""
    found = {path: re.fullmatch(r"best-(\d{1,12})", path.name) for path in folder.glob("best-*")}
    return {int(match[1]): path for path, match in found.items() if match}


def interrupted_writes(folder: Path) -> list[Path]:
    """The folders of a run folder whose writing a process did not survive; `storage.repair_interrupted_write` puts them right."""
    left = (re.fullmatch(r"\.((checkpoint|best)-\d{1,12}|final)\.(partial|old)", path.name) for path in folder.glob(".*"))
    return [folder / name for name in sorted({match[1] for match in left if match})]


def load_checkpoint(folder: Path, verify: bool = True) -> Checkpoint:
    """The checkpoint in `folder`. Raises StorageError where it is not whole, or of another version."""
    if not folder.is_dir():
        raise StorageError(f"{folder}: there is no such checkpoint; where several nodes train, all must see the run folder")
    if verify and (wrong := find_corruption(folder)):
        raise StorageError(f"{folder} is not whole: {wrong}")
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise StorageError(f"{folder} is of format {content['format']}, and this version reads {FORMAT}")
        if (match := NAME.fullmatch(folder.name)) and Checkpoint(folder, content).step != int(match[1]):
            raise StorageError(f"{folder} says that it is of step {content['step']}")
    except FileNotFoundError as error:
        raise StorageError(f"{folder} holds a model, but no {STATE} to go on from") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{folder / STATE} cannot be read ({error})") from error
    return Checkpoint(folder, content)


def latest_valid(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder; None where there is none at all.

    One that is not whole is set aside, loudly. Raises StorageError where there are some and none is whole, now or before.
    """
    for target in interrupted_writes(folder):
        repair_interrupted_write(target)
    why = ""
    for path in list_checkpoints(folder):
        wrong = find_corruption(path)
        if not wrong:
            return load_checkpoint(path, verify=False)
        why = f" (the last: {wrong})"
        warn(f"{path} is not whole: {wrong}; it lies in {quarantine(path).name} now. The one before it is taken, if there is one")
    if damaged := sorted(path.name for path in folder.glob("checkpoint-*.damaged*")):
        raise StorageError(
            f"no checkpoint in {folder} is whole; set aside as damaged: {listing(damaged)}{why}. "
            "To begin anew: --fresh, which keeps the old folder"
        )
    return None


def copy_best(checkpoint: Checkpoint, folder: Path) -> None:
    """The best weights that a checkpoint speaks of come along, whole or not at all, where a run goes on in another folder."""
    step = checkpoint.content.get("best_step")
    if not isinstance(step, int):
        return
    source = best_folder(checkpoint.folder.parent, step)
    if source.is_dir() and not find_corruption(source):
        with staged(best_folder(folder, step), folder_bytes(source)) as copy:
            shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))


def quarantine(path: Path, mark: str = "damaged") -> Path:
    """Rename a folder out of the way; nothing is deleted."""
    names = (path.with_name(f"{path.name}.{mark}{number}") for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    target = next(name for name in names if not name.exists())
    try:
        path.rename(target)
    except OSError as error:
        raise StorageError(f"{path} could not be renamed to {target.name}: {error.strerror or error}") from error
    return target


def checkpoint_in(path: Path) -> Path:
    """The checkpoint that `--resume-from path` means: itself, or the newest of a run folder. Raises InputError otherwise."""
    is_folder = path_kind(path, "--resume-from") == "folder"
    if is_folder and NAME.fullmatch(path.name):
        return path
    if is_folder and (found := list_checkpoints(path)):
        return found[0]
    raise InputError(
        f"--resume-from {path}: is no checkpoint; give a folder such as runs/NAME/checkpoint-500, or a run folder that holds one"
    )


def read_metadata(folder: Path) -> Mapping[str, Any]:
    """What the newest readable checkpoint of a run folder, or a checkpoint itself, says, unverified; {} where there is none.

    For what must be known before anything is built; whoever trains verifies it.
    """
    for path in [folder, *list_checkpoints(folder)] if path_kind(folder) == "folder" else []:
        try:
            content = json.loads((path / STATE).read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("format") == FORMAT and isinstance(content.get("decided", {}), dict):
                return content
        except (OSError, ValueError, RecursionError):
            continue
    return {}
