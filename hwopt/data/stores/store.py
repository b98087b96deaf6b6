"""Stores: the prepared samples of one part of the data, arrays in a folder of the cache that each process opens by path."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from hwopt.errors import StorageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hwopt.data.mixture import Mixture


class Store(Protocol):
    """Samples that data-loading workers read by index. Pickling one sends paths and settings, not the samples."""

    @property
    def folder(self) -> Path:
        """The folder in the cache; its name identifies the samples."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was found when the store was written: `left_out`, samples with the reason, and facts of the kind of store."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Size of each sample by which it is grouped and padded, int32 (samples,): its tokens; 1 for an image."""

    @property
    def counts(self) -> NDArray[np.int32]:
        """Labels of each sample that the loss counts, int32 (samples,)."""

    @property
    def mixture(self) -> Mixture | None:
        """The sources of the samples, if the data is a mixture; not stored, and not pickled."""

    def __len__(self) -> int: ...

    def array(self, name: str) -> NDArray[Any]:
        """One of the stored arrays, such as "labels"."""

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """The arrays of sample `index`, with its labels. `epoch` changes a sample that is augmented."""


def write_cache_folder(folder: Path, write: Callable[[Path], None], done: str | None = None) -> None:
    """Replace `folder` atomically by a temporary sibling folder that `write` fills, unless it has the file `done`.

    Two processes may do this at the same time, because both write the same content. Raises StorageError if writing fails.
    """
    try:
        if done is not None and (folder / done).is_file():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            staged = Path(scratch) / "new"
            staged.mkdir()
            write(staged)
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / "old")  # incomplete, or written by another process meanwhile
            try:
                staged.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write the cache ({error.strerror or error}); set HWOPT_CACHE to a folder with room"
        ) from error


class ArrayFolder:
    """Arrays in .npy files and their meta.json, opened on first use; pickled without them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mixture: Mixture | None = None
        self._arrays: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key != "meta"}
        return {**state, "mixture": None, "_arrays": {}}

    def __len__(self) -> int:
        return len(self.array("offsets")) - 1

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The `meta` given to `cached`, and `bytes`: the size of each file."""
        found: dict[str, Any] = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        return found

    def array(self, name: str) -> NDArray[Any]:
        """One of the arrays, memory-mapped."""
        if name not in self._arrays:
            import numpy as np

            # plain ndarray views: indexing a memmap object costs several times as much
            self._arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
        return self._arrays[name]

    def has(self, name: str) -> bool:
        return f"{name}.npy" in self.meta["bytes"]

    def is_complete(self) -> bool:
        """Whether every file in meta.json exists with its full size."""
        try:
            return all((self.folder / name).stat().st_size == size for name, size in self.meta["bytes"].items())
        except (OSError, ValueError, KeyError):
            return False

    @classmethod
    def cached(cls, folder: Path, make: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Self:
        """Those in `folder` if it is complete, else new ones written from `make()`: (arrays by name, meta)."""
        found = cls(folder)
        if found.is_complete():
            return found
        arrays, meta = make()

        def write(staged: Path) -> None:
            import numpy as np

            for name, array in arrays.items():
                np.save(staged / f"{name}.npy", array)
            sizes = {file.name: file.stat().st_size for file in sorted(staged.iterdir())}
            (staged / "meta.json").write_text(json.dumps({**meta, "bytes": sizes}, indent=1), encoding="utf-8")

        write_cache_folder(folder, write)
        return cls(folder)
