"""The paths in a job's file: relative to the folder of that file, else to the working directory."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.config.toml import Document

PATHS = {
    "data": ("train", "eval", "test", "more_eval", "chat_template"),
    "model": ("name", "tokenizer"),
}
"""Table -> its keys whose values may be paths."""


def with_paths_from(folder: Path, document: Document) -> Document:
    """`document` with each relative path that exists in `folder` as a path from the working directory.

    Names of the hub and paths that `folder` does not have stay as they are.
    """
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
