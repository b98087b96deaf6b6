"""Writes models with their training state beside the training: in one thread, one folder after the other."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwopt.errors import StorageError
from hwopt.saving.model_files import write_model
from hwopt.saving.reader import FORMAT, STATE, TENSORS, tensors_of
from hwopt.saving.tensor_tree import HostCopies, flatten
from hwopt.system.atomic_folder import GIB, staged

if TYPE_CHECKING:
    from torch import Tensor

    from hwopt.saving.savable_run import SavableRun


SPARE = 1.02
"""Of the bytes of the tensors: configs, the tokenizer, the file system's own."""
BEAT = 0.5
"""Seconds after which whoever waits for the disk says that the run is alive."""


class Writer:
    """The loop waits for copies into the host's memory alone. What goes wrong in the thread is raised by the next call."""

    def __init__(self, run: SavableRun) -> None:
        self.run = run
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="hwopt-writer")
        self.last: Future[None] | None = None
        self.seconds = 0.0
        """That the last write took."""

    def begin(
        self,
        target: Path,
        content: Mapping[str, Any],
        state: Any,
        weights: Mapping[str, Tensor],
        kept: HostCopies,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write `target`: a model of `weights` that `from_pretrained` opens, `content` and `state`; `then` old folders go.

        Nothing else may be being written: `wait` first. Raises StorageError where the disk has not enough room.
        """
        copies = {name: kept(weight) for name, weight in weights.items()}
        require_space(target.parent, kept.bytes, target.name)

        def write() -> None:
            with staged(target, kept.bytes * SPARE) as folder:
                write_model(self.run, self.run.skeleton, copies, folder)
                write_state(folder, content, state)
            then()

        self.submit(write)

    def submit(self, write: Callable[[], None]) -> None:
        """Begin what writes, in the thread."""

        def timed() -> None:
            began = time.monotonic()
            write()
            self.seconds = time.monotonic() - began

        self.last = self.pool.submit(timed)

    def wait(self, all_ranks: bool = True) -> None:
        """Until everything is written. All ranks call it, so that a slow disk is a hang to none of them.

        Raises StorageError where it went wrong, on the rank that writes.
        """
        while self.run.engine.all_reduce_max(self.busy()) if all_ranks else self.busy():
            self.run.heartbeat()
        self.run.heartbeat()
        last, self.last = self.last, None
        if last is not None:
            last.result()

    def busy(self) -> int:
        """1 where something is still being written after BEAT seconds, else 0, as soon as it is."""
        return int(self.last is not None and not wait([self.last], timeout=BEAT).done)

    def check(self) -> None:
        """Raise what went wrong, without waiting."""
        if self.last is not None and self.last.done():
            self.last.result()

    def close(self) -> None:
        self.pool.shutdown(wait=True)


def require_space(place: Path, bytes_: float, what: str) -> None:
    """Raise StorageError where the disk has less room than `what` takes."""
    free = shutil.disk_usage(place).free
    if bytes_ * SPARE > free:
        raise StorageError(
            f"{place}: {what} needs {bytes_ * SPARE / GIB:.3f} GiB, and {free / GIB:.3f} GiB are free. "
            "Free some space, lower training.save_total_limit, or give another --output-dir"
        )


def write_state(folder: Path, content: Mapping[str, Any], state: Any) -> None:
    """The training state beside a model's files; what those hold bit for bit is not written twice."""
    from safetensors.torch import save_file

    tree, tensors = flatten(state)
    with ExitStack() as stack:
        find = tensors_of(folder, stack)
        for name in [name for name in tensors if name.startswith("engine/parameters/")]:
            try:
                written = find(name)
            except KeyError:  # an adapter's, or a tied one's second name
                continue
            if written.dtype == tensors[name].dtype and torch.equal(written, tensors[name]):
                del tensors[name]
    save_file(unshared(tensors), folder / TENSORS)
    text = json.dumps({"format": FORMAT, **content, "state": tree}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, none of which lies in the memory of another: safetensors refuses those."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found
