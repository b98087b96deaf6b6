"""Read with `datasets`: a data set of the hub, a clone of one, or a folder made with save_to_disk()."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.sources.location import EXTENSIONS, configured
from hwopt.data.sources.rows import ReadOptions
from hwopt.errors import DataError, is_gated
from hwopt.system.hub import hub_is_out_of_reach, offline_clients
from hwopt.text import cut, first_line, listing, nearest

if TYPE_CHECKING:
    import pyarrow as pa


def read_saved(path: Path, split: str | None) -> pa.Table:
    """A data set saved with save_to_disk(), or one split of it."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a corrupt folder fails in arrow, json or the file system
        raise DataError(f"{path}: cannot be read as a `datasets` folder: {first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = split or "train"
        if name not in loaded:
            raise DataError(f"{path}: has no split {name!r}.{nearest(name, loaded)} It has: {listing(list(loaded))}")
        return to_arrow(loaded[name])
    if split is not None:
        raise DataError(f"{path}: has no splits; omit data.split = {split!r}")
    return to_arrow(loaded)


def read_dataset(source: str, split: str, options: ReadOptions) -> pa.Table:
    """One split of a data set: of the hub, or of a folder with the same content. `source` is NAME or NAME:CONFIGURATION."""
    import datasets

    name, configuration = configured(source)
    local = Path(name).is_dir()
    # `datasets` does not notice that a local file changed, so its copy of a folder is made again
    again: dict[str, Any] = {}
    if local and not options.streaming:
        again = {"download_mode": datasets.DownloadMode.REUSE_CACHE_IF_EXISTS, "verification_mode": "no_checks"}
    try:
        with offline_clients(not local and hub_is_out_of_reach()):
            found = datasets.load_dataset(name, configuration, split=split, streaming=options.streaming, **again)
            return first_streamed(found, options.max_rows) if options.streaming else to_arrow(found)
    except Exception as error:  # the hub client, the network and datasets each raise their own
        if is_gated(error):
            raise DataError(
                f"{source}: is gated. Accept its terms on its hub page, then log in: `hf auth login` (or set HF_TOKEN)."
            ) from error
        if local or isinstance(error, ValueError):  # a ValueError names the known configurations or splits
            said = cut(" ".join(str(error.__cause__ or error).split()), 300)
            raise DataError(
                f"{source}: `datasets` cannot read it (split {split!r}): {said}. Name a configuration as NAME:CONFIGURATION, and "
                "a split with data.split, data.eval_split or data.test_split"
            ) from error
        near = nearest(source, [file.name for file in Path().iterdir()])
        raise DataError(
            f"{source}: no such file or folder, and no such hub data set (split {split!r}): "
            f"{first_line(error)}.{near} Give a file ({listing(EXTENSIONS)}), a `datasets` folder or a hub name"
        ) from error


def first_streamed(dataset: Any, rows: int | None) -> pa.Table:
    """The first `rows` rows of an IterableDataset. Files after them are not opened."""
    import datasets

    found = list(islice(iter(dataset), rows))  # `take` reads one row more
    return to_arrow(datasets.Dataset.from_list(found, features=dataset.features))


def to_arrow(dataset: Any) -> pa.Table:
    """The rows of a `datasets` data set, with its column types."""
    return dataset.with_format("arrow")[:] if len(dataset) else dataset.data.table.slice(0, 0)
