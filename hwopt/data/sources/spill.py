"""Columns of a file that wait on disk while the rest is read, so that memory does not grow with the texts."""

from __future__ import annotations

import tempfile
import weakref
from contextlib import suppress
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from hwopt.data.stores.chunks import writing_cache
from hwopt.system.cache import cache_folder

if TYPE_CHECKING:
    import pyarrow as pa

LEAST_BYTES = 1 << 14  # of an array that goes to disk; smaller ones have more pages than bytes


class Spill:
    """Arrow arrays in a file of the cache without a name, which goes with the process. First `put` all, then `get` them."""

    @cached_property
    def file(self) -> Any:
        """None if the cache cannot be written, which `hwopt init` does not need: the arrays stay in memory."""
        with suppress(OSError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115
            weakref.finalize(self, close, file)
            return file
        return None

    def put(self, array: pa.Array) -> pa.Array | range:
        """`array` if it is small, else where it is in the file. Raises StorageError for a full disk."""
        import pyarrow as pa

        if array.get_total_buffer_size() < LEAST_BYTES or self.file is None:
            return array
        with writing_cache(cache_folder()):
            start = self.file.tell()
            with pa.ipc.new_stream(self.file, pa.schema([("", array.type)])) as stream:
                stream.write_batch(pa.record_batch([array], [""]))
            end = self.file.tell()
            self.file.write(bytes(-end % 64))  # Arrow reads arrays in place from such addresses
            self.file.flush()
        return range(start, end)

    def get(self, place: pa.Array | range | list[Any]) -> Any:
        """The array for which `put` returned this. Its bytes are mapped: the system may drop them, and read them again."""
        import pyarrow as pa

        if not isinstance(place, range):
            return place
        return pa.ipc.open_stream(self._mapped.slice(place.start, len(place))).read_next_batch().column(0)

    @cached_property
    def _mapped(self) -> pa.Buffer:
        import pyarrow as pa

        with pa.memory_map(f"/dev/fd/{self.file.fileno()}") as mapped:  # keeps no file descriptor, as Python's mmap does
            return mapped.read_buffer()


def close(file: IO[bytes]) -> None:
    with suppress(OSError):  # a full disk, of which `put` told
        file.close()
