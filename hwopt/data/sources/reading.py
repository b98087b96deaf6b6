"""Read the value of data.train, data.eval or data.test: one source, a glob, a list of sources, or a mixture with weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwopt.config.job_sources import MixedSource, Sources, TrainingSources, paths_of
from hwopt.data.mixture import Mixture
from hwopt.data.sources.joined_rows import joined
from hwopt.data.sources.location import expand, extension, locate, path_of
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import read_document, read_rows
from hwopt.errors import DataError
from hwopt.text import listing

if TYPE_CHECKING:
    from hwopt.config.job import Data


@dataclass(frozen=True)
class Leaf:
    """One file, `datasets` folder or hub data set."""

    path: str
    split: str | None
    group: int
    """The index in the job of the source that it belongs to."""


def leaves(sources: Sources | TrainingSources, split: str | None = None) -> list[Leaf]:
    """The files and data sets of `sources`, in order. Raises DataError for a glob without files and for a file given twice."""
    found: dict[tuple[str, str | None], Leaf] = {}
    parts: tuple[str | MixedSource, ...] = (sources,) if isinstance(sources, str) else sources
    for group, part in enumerate(parts):
        given, own = (part, None) if isinstance(part, str) else (part.path, part.split)
        own = own or split
        for path in expand(given):
            if (path, own) in found:
                raise DataError(f"{path}: is given twice, as {listing(paths_of(sources), 3)}; give it once")
            found[path, own] = Leaf(path, own, group)
    return list(found.values())


def read_options(data: Data) -> ReadOptions:
    """How the job reads its data."""
    names = ("max_bad_rows", "encoding", "delimiter", "max_rows", "streaming", "format")
    return ReadOptions(strict=data.on_bad_row == "stop", **{name: getattr(data, name) for name in names})


def refuse_missing(data: Data) -> None:
    """Raise DataError if a source of `data` does not exist, or if training reads a file of the evaluation or the test."""
    train = leaves(data.train, data.split)
    held_out = leaves(data.eval, data.eval_split) if data.eval else []
    held_out += leaves(data.test, data.test_split) if data.test else []
    kinds = {located(leaf, data.format, several=len(train) > 1) for leaf in train}
    for leaf in held_out:
        located(leaf, data.format, several=len(held_out) > 1)
    if data.streaming and "dataset" not in kinds:
        raise DataError("data.streaming: applies to data sets of the hub, and data.train has files only; omit it")
    files = {path_of(leaf.path).resolve() for leaf in held_out if path_of(leaf.path).is_file()}
    for leaf in train if len(train) > 1 else ():
        if path_of(leaf.path).resolve() in files:
            raise DataError(
                f"{leaf.path}: data.train has this file, and data.eval or data.test too; a model must not train on what "
                "evaluates it. Move the file to another folder, or list the files of data.train"
            )


def on_disk(data: Data) -> bool:
    """Whether all files and folders of `data` exist on this machine."""
    try:
        found = [leaf for sources in (data.train, data.eval, data.test) if sources for leaf in leaves(sources)]
    except DataError:  # a glob without files
        return False
    return all(path_of(leaf.path).exists() for leaf in found)


def located(leaf: Leaf, format: str | None, several: bool) -> str:
    """The kind of `leaf`. Raises DataError as `locate` does. An empty document is not an error if there are `several`."""
    return "file" if several and is_document(leaf, format) else locate(leaf.path, leaf.split, format)[0]


def is_document(leaf: Leaf, format: str | None) -> bool:
    """Whether `leaf` is a text file, which is one row."""
    return extension(Path(leaf.path), format) == ".txt" and path_of(leaf.path).is_file()


def read_all(sources: Sources | TrainingSources, split: str | None, options: ReadOptions, suffix: str = "") -> Rows:
    """The rows of all `sources`. `suffix` follows the name of a data set in messages. Raises DataError as `read_rows` does."""
    import numpy as np

    found = leaves(sources, split)
    mixed = [part for part in sources if isinstance(part, MixedSource)]
    if len(found) == 1 and not mixed:
        return read_rows(found[0].path, found[0].split, options, found[0].path + suffix)
    # a text file without text is a bad row instead of an error
    parts = [
        read_document(Path(leaf.path), options)
        if is_document(leaf, options.format)
        else read_rows(leaf.path, leaf.split, options, leaf.path + suffix)
        for leaf in found
    ]
    names = paths_of(sources)
    weights = tuple(part.weight for part in mixed)
    mixture = Mixture(tuple(names), weights, np.array([leaf.group for leaf in found])) if mixed else None
    rows = joined(parts, listing(names, 3) + suffix, mixture)
    if not rows.table.num_rows:
        rows.bad_rows.check([])
    return rows
