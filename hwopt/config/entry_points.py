"""What packages register in a group of entry points, and which package registered it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

from hwopt.errors import PluginError
from hwopt.text import truncate


def by_name(entries: Iterable[EntryPoint], what: str) -> dict[str, EntryPoint]:
    """Name -> entry point, sorted by name. Raises PluginError if two packages register the same name. `what`: "plugin"."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entries, key=lambda each: each.name):
        first = found.setdefault(entry.name, entry)
        if first.value != entry.value:
            raise registered_twice(f"{what} {truncate(entry.name)}", origin(first), origin(entry))
    return found


def install_command() -> str:
    """The command that renews the metadata of hwopt, which a source folder does not renew itself."""
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").exists():
        return f"`pip install -e {shlex.quote(str(source))}`"
    return "`pip install --force-reinstall --no-deps .` in the folder of hwopt's source"


def registered_twice(what: str, first: str, again: str) -> PluginError:
    return PluginError(f"{what} is registered by {first} and again by {again}; uninstall one of them")


def origin(entry: EntryPoint) -> str:
    return f"{distribution_of(entry)} ({entry.value})"


def distribution_of(entry: EntryPoint) -> str:
    """Name and version of the distribution of `entry`; "this process" for a class added with `Registry.add`."""
    return label(entry.dist) if entry.dist else "this process"


@cache
def label(distribution: Distribution) -> str:
    """Name and version. Reading them takes milliseconds, and the entry points of one distribution share it."""
    return f"{distribution.name} {distribution.version}"
