"""The sources of a job: one file, glob or hub name, a list of them, or a mixture with weights; the paths in a job's file."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from hwopt.config.job_values import Source, Table
from hwopt.config.toml import Document
from hwopt.text import listing, truncate

ONE, SEVERAL, MIXED = "(source)", "(sources)", "(mixture)"
"""Tags of the forms. hwopt.config.validation leaves parts in parentheses out of the key in a message."""


class MixedSource(Table):
    path: Source = Field(min_length=1, description="A file, a glob, a `datasets` folder or a hub name.")
    weight: float = Field(gt=0, description="The samples of an epoch are drawn in proportion to the weights.")
    split: str | None = Field(default=None, description="Split of a hub name or `datasets` folder; default: data.split.")


def _shape(value: Any, mixtures: bool) -> Any:
    """`value`, a list as a tuple. Raises ValueError if it is not a path, a list of paths or a list of tables (`mixtures`)."""
    table = '{ path = "…", weight = 1.0 }'
    forms = f"a path, a list of paths, or a list of tables {table}" if mixtures else "a path, or a list of paths"
    if value == "" or value == []:
        raise ValueError(f"is empty; expected {forms}")
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list | tuple) else ()
    kinds = {dict if isinstance(each, MixedSource) else type(each) for each in parts}
    if kinds not in ({str}, {dict}) or (kinds == {dict} and not mixtures):
        raise ValueError(f"expected {forms}, got {truncate(value)}")
    if kinds == {dict} and len(value) == 1:
        raise ValueError('a mixture needs two sources; give the only one as data.train = "…"')
    return tuple(value)


def _form(value: Any) -> str:
    """The tag of the form that `value` has."""
    if isinstance(value, str):
        return ONE
    return SEVERAL if isinstance(value[0], str) else MIXED


One = Annotated[Source, Field(min_length=1)]
Several = Annotated[tuple[One, ...], Field(json_schema_extra={"minItems": 1}), Tag(SEVERAL)]
Mixture = Annotated[tuple[MixedSource, ...], Field(json_schema_extra={"minItems": 2}), Tag(MIXED)]

Sources = Annotated[Annotated[One, Tag(ONE)] | Several, Discriminator(_form), BeforeValidator(partial(_shape, mixtures=False))]
"""A source, or a list of sources with the same columns."""
TrainingSources = Annotated[
    Annotated[One, Tag(ONE)] | Several | Mixture, Discriminator(_form), BeforeValidator(partial(_shape, mixtures=True))
]
"""`Sources`, or tables with the path and the weight of each source."""


def paths_of(sources: str | Sequence[str | MixedSource]) -> tuple[str, ...]:
    """The paths and hub names in the value of data.train, data.eval or data.test."""
    if isinstance(sources, str):
        return (sources,)
    return tuple(each.path if isinstance(each, MixedSource) else each for each in sources)


def shares_of(sources: TrainingSources) -> tuple[float, ...]:
    """The share of an epoch's samples that each source of a mixture has; empty if `sources` is not a mixture."""
    weights = [part.weight for part in sources if isinstance(part, MixedSource)]
    return tuple(weight / sum(weights) for weight in weights)


def described(sources: TrainingSources, name: Callable[[str], str] = str) -> str:
    """`sources` for the screen: "a.csv, b.csv", or "75.0% chat.jsonl, 25.0% web.jsonl". `name` shortens a path."""
    names = [name(path) for path in paths_of(sources)]
    shares = shares_of(sources)
    return listing([f"{share:.1%} {each}" for share, each in zip(shares, names, strict=True)] if shares else names)


PATHS = {"data": ("train", "eval", "test", "more_eval", "chat_template"), "model": ("name", "tokenizer")}
"""Table -> its keys whose values may be paths."""


def with_paths_from(folder: Path, document: Document) -> Document:
    """`document` with each relative path that exists in `folder` as a path from the working directory; the rest unchanged."""
    if folder.resolve() == Path.cwd():
        return document
    data = dict(document.data)
    for name, keys in PATHS.items():
        if isinstance(table := data.get(name), dict):
            data[name] = table | {key: from_folder(folder, table[key]) for key in keys if key in table}
    return replace(document, data=data)


def from_folder(folder: Path, value: Any) -> Any:
    """The value of a key of `PATHS`: a path, a list of paths, a list of tables with a path, or a table of paths."""
    if isinstance(value, list):
        return [from_folder(folder, each) for each in value]
    if isinstance(value, dict):
        paths = {"path"} & value.keys() or value.keys()
        return value | {key: from_folder(folder, value[key]) for key in paths}
    if not isinstance(value, str) or not value or "\0" in value or os.path.isabs(os.path.expanduser(value)):
        return value
    there = os.path.join(folder, value)
    return there if os.path.lexists(there) or glob.glob(value, root_dir=folder, recursive=True) else value
