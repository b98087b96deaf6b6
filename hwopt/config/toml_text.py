"""Parts of TOML files that hwopt writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hwopt.text import printable


def plain(text: str) -> str:
    """`text` on one line, as a comment must be."""
    return printable(text).replace("\n", "\\n")


def profile_name(path: Path) -> str:
    """The name of the file without its ending, in the letters that a profile's name may have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).strip("_.-")[:80] or "imported"


def inline(value: Any) -> Any:
    """`value` as an item of TOML; a table on one line."""
    if isinstance(value, Mapping):
        found = tomlkit.inline_table()
        found.update({key: inline(part) for key, part in value.items()})
        return found
    return tomlkit.item(list(value) if isinstance(value, tuple) else value)


def text_of(document: tomlkit.TOMLDocument) -> str:
    return tomlkit.dumps(document).rstrip("\n") + "\n"
