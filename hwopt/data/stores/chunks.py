"""Arrays that are written to disk while their samples are made, so that memory stays flat and a killed run loses little."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from hwopt.errors import StorageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STATE = "state.json"
CHUNK_BYTES = 1 << 22
ABANDONED_SECONDS = 7 * 86_400.0
"""The age from which on chunks are taken for those of a job that will not run again."""


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """A block that writes `folder` of the cache. Raises StorageError if the system refuses."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write the cache ({error.strerror or error}); set HWOPT_CACHE to a folder with room"
        ) from error


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block of the same `folder` of chunks. Remove the folder at the end.

    If the process fails or is killed, the folder stays for the next one. Other folders that are older than `ABANDONED_SECONDS`
    are removed too.
    """
    lock = FileLock(folder.with_suffix(".lock"), is_singleton=False)
    with writing_cache(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
        shutil.rmtree(folder, ignore_errors=True)
        for path in folder.parent.glob("*.chunks"):
            with suppress(OSError):  # another process removed it
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(path)
    finally:
        lock.release()


class Chunks:
    """Named arrays that grow along their first axis, and a `state` of JSON values that belongs to what was added.

    In a `folder`, both are written after each `CHUNK_BYTES`; an object of the same folder continues from there, in the same
    process or in another. Without a folder everything stays in memory. `done` is the number of samples that were added.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {}
        self.done, self._held, self._sizes = 0, 0, dict[str, int]()
        self._pending: dict[str, list[NDArray[Any]]] = {}
        if folder is not None:
            with suppress(OSError, ValueError, KeyError):
                found = json.loads((folder / STATE).read_text(encoding="utf-8"))
                if all((folder / name).stat().st_size >= size for name, size in found["sizes"].items()):
                    self.state, self.done, self._sizes = found["state"], found["done"], found["sizes"]

    def clear(self) -> None:
        """Forget all that was added."""
        self.state.clear()
        self.done, self._held, self._sizes, self._pending = 0, 0, {}, {}

    def add(self, done: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append `arrays`, after which `done` samples are complete. Raises StorageError."""
        self.done = done
        for name, array in arrays.items():
            self._pending.setdefault(name, []).append(array)
            self._held += array.nbytes
        if self.folder is not None and self._held > CHUNK_BYTES:
            self.write()

    def write(self) -> None:
        """Write what was added since the last time; the state comes last, so a file that ends later is cut there."""
        assert self.folder is not None
        with writing_cache(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, arrays in self._pending.items():
                with open(self.folder / name, "ab") as file:
                    file.truncate(self._sizes.get(name, 0))
                    for array in arrays:
                        file.write(array.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                    self._sizes[name] = file.tell()
            self._held, self._pending = 0, {}
            staged = self.folder / f"{STATE}.new"
            staged.write_text(json.dumps({"state": self.state, "done": self.done, "sizes": self._sizes}), encoding="utf-8")
            staged.replace(self.folder / STATE)

    def array(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """All that was added as `name`, of this `dtype`: memory-mapped, or in memory without a folder. Raises StorageError."""
        import numpy as np

        if self.folder is None:
            return np.concatenate([np.empty(0, dtype), *self._pending.get(name, ())]).astype(dtype, copy=False)
        if self._pending:
            self.write()
        if not self._sizes.get(name):
            return np.empty(0, dtype)
        return np.memmap(self.folder / name, dtype, "r", shape=(self._sizes[name] // np.dtype(dtype).itemsize,)).view(np.ndarray)
