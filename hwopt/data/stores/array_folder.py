"""ArrayFolder: numpy arrays with metadata in a folder of the cache, opened by path in every process that needs them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hwopt.errors import StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def write_cache_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` atomically by a temporary sibling folder that `write` fills.

    Two processes may do this at the same time, because both write the same content. Raises StorageError if writing fails.
    """
    try:
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
    """Arrays in .npy files and their meta.json, opened on first use; pickled as the folder's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, NDArray[Any]] = {}
        self._meta: dict[str, Any] | None = None

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]

    @property
    def meta(self) -> dict[str, Any]:
        """The `meta` given to `cached`, and `bytes`: the size of each file."""
        if self._meta is None:
            self._meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        return self._meta

    def array(self, name: str) -> NDArray[Any]:
        """One of the arrays, memory-mapped."""
        if name not in self._arrays:
            import numpy as np

            # plain ndarray views: indexing a memmap object costs several times as much
            self._arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
        return self._arrays[name]

    def has(self, name: str) -> bool:
        """Whether this array is stored."""
        return f"{name}.npy" in self.meta["bytes"]

    def is_complete(self) -> bool:
        """Whether every file in meta.json exists with its full size."""
        try:
            sizes = self.meta["bytes"]
            return bool(sizes) and all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._meta = None
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
