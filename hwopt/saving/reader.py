"""Find, verify and read the checkpoints of a run folder."""

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
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{1,12})")


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint-<step>/` of a run folder: a model that `from_pretrained` opens, with the training state beside it."""

    folder: Path
    content: Mapping[str, Any]  # the content of its training_state.json

    @property
    def step(self) -> int:
        return int(self.content["step"])

    @property
    def state(self) -> Any:
        """The training state with its tensors, in host memory. Raises StorageError if they cannot be read."""
        from hwopt.tensor_tree import unflatten  # imports torch, which the command line does without

        with ExitStack() as stack:
            find = tensors_of(self.folder, stack)
            try:
                return unflatten(self.content["state"], find)
            except (KeyError, OSError, SafetensorError) as error:
                raise StorageError(f"{self.folder}: the tensors of the training state cannot be read ({error})") from error


def tensors_of(folder: Path, stack: ExitStack) -> Callable[[str], Tensor]:
    """A function name -> tensor (or KeyError) over the files of `folder`, open until `stack` closes: the training state first."""
    from safetensors import safe_open

    paths = sorted(folder.glob("[!.]*.safetensors"), key=lambda path: (path.name != TENSORS, path.name))
    files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    places = {name: file for file in reversed(files) for name in file.keys()}  # noqa: SIM118

    def find(name: str) -> Tensor:
        name = name if name in places else name.removeprefix("engine/parameters/")
        tensor: Tensor = places[name].get_tensor(name)
        return tensor

    return find


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, newest first, valid or corrupt."""
    found = numbered(folder, "checkpoint")
    return [found[step] for step in sorted(found, reverse=True) if path_kind(found[step]) == "folder"]


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """Step -> `<name>-<step>` in `folder`."""
    matches = {path: re.fullmatch(rf"{name}-(\d{{1,12}})", path.name) for path in folder.glob(f"{name}-*")}
    return {int(match[1]): path for path, match in matches.items() if match}


def best_folder(folder: Path, step: int) -> Path:
    return folder / f"best-{step}"


def load_checkpoint(folder: Path, verify: bool = True) -> Checkpoint:
    """The checkpoint in `folder`. Raises StorageError if it is missing, corrupt, or of another format."""
    if not folder.is_dir():
        raise StorageError(f"{folder}: no such checkpoint. On several nodes, all nodes must see the run folder")
    if verify and (reason := find_corruption(folder)):
        raise StorageError(f"{folder} is corrupt: {reason}")
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise StorageError(f"{folder} has format {content['format']}, this version reads format {FORMAT}")
    except FileNotFoundError as error:
        raise StorageError(f"{folder} has a model, but no {STATE} to resume from") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / STATE} cannot be read ({error})") from error
    return Checkpoint(folder, content)


def latest_valid(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint of a run folder; None if it has no checkpoints.

    Corrupt ones are renamed, with a warning. Raises StorageError if all are corrupt, or were found corrupt earlier.
    """
    left = (re.fullmatch(r"\.((?:checkpoint|best)-\d{1,12}|final)\.(?:partial|old)", path.name) for path in folder.glob(".*"))
    for name in sorted({match[1] for match in left if match}):  # what a killed process was writing
        repair_interrupted_write(folder / name)
    last_reason = ""
    for path in list_checkpoints(folder):
        reason = find_corruption(path)
        if not reason:
            return load_checkpoint(path, verify=False)
        last_reason = f" (the last: {reason})"
        warn(f"{path} is corrupt: {reason}. Renamed it to {quarantine(path).name}. Trying the previous checkpoint")
    if damaged := sorted(path.name for path in folder.glob("checkpoint-*.damaged*")):
        raise StorageError(
            f"all checkpoints in {folder} are corrupt, renamed to: {listing(damaged)}{last_reason}. "
            "Start over with --fresh, which keeps the old folder"
        )
    return None


def copy_best(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the best weights that `checkpoint` refers to into `folder`, for a run that resumes there. Skips corrupt ones."""
    step = checkpoint.content["best_step"]
    source = best_folder(checkpoint.folder.parent, step)
    if source.is_dir() and not find_corruption(source):
        with staged(best_folder(folder, step), folder_bytes(source)) as copy:
            shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))


def quarantine(path: Path, mark: str = "damaged") -> Path:
    """Rename a folder to `<name>.<mark>`, or `<name>.<mark>-2` and so on. Returns the new path; deletes nothing."""
    names = (path.with_name(f"{path.name}.{mark}{number}") for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    target = next(name for name in names if not name.exists())
    try:
        path.rename(target)
    except OSError as error:
        raise StorageError(f"{path} could not be renamed to {target.name}: {error.strerror or error}") from error
    return target


def checkpoint_in(path: Path) -> Path:
    """The checkpoint that `--resume-from path` means: `path`, or the newest of a run folder. Raises InputError without one."""
    is_folder = path_kind(path, "--resume-from") == "folder"
    if is_folder and CHECKPOINT_NAME.fullmatch(path.name):
        return path
    if is_folder and (checkpoints := list_checkpoints(path)):
        return checkpoints[0]
    raise InputError(
        f"--resume-from {path}: is not a checkpoint. Give a folder such as runs/NAME/checkpoint-500, or a run folder that has one"
    )


def read_metadata(folder: Path) -> Mapping[str, Any]:
    """The training_state.json of a checkpoint, or of the newest readable one of a run folder; {} if there is none.

    It is not verified: planning needs it before the run is built, and `load_checkpoint` verifies it later.
    """
    for path in [folder, *list_checkpoints(folder)] if path_kind(folder) == "folder" else []:
        try:
            content: Mapping[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
            if content.get("format") == FORMAT:
                return content
        except (OSError, ValueError, AttributeError):
            continue
    return {}
