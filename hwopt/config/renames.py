"""Renamed keys: the old name of an option keeps working for two minor versions, with a note that gives the new name.

A rename maps a whole key to its present one and changes its last part only: ("plugins", "dataloader", "workers") ->
("plugins", "dataloader", "num_workers"). Keys of jobs stand here; plugins declare those of their own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwopt.config.toml import Document, Key, override, parse_assignment
from hwopt.errors import InputError

REMOVED_IN = "0.4"
"""The version that no longer accepts the old names."""
RENAMED: Mapping[Key, Key] = {("training", "nonfinite_share"): ("training", "nonfinite_fraction")}
DEPTH = 3
"""Parts of the longest key that can be renamed: plugins.NAME.OPTION."""

Rename = Callable[[Key], Key]


def job_key(key: Key) -> Key:
    """The present key of a job or of a profile's [training]."""
    return RENAMED.get(key, key)


def replaced(name: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The table `below` with the values of `above`: how tables merge unless a plugin declares otherwise."""
    return {**below, **above}


@dataclass(frozen=True)
class TableRules:
    """What plugins declare about their tables in a profile."""

    rename: Rename = job_key
    merge: Callable[[str, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = replaced
    """(plugin, table of the parent, table of the child or of --set) -> the merged table."""


def present(key: Key, rename: Rename) -> Key:
    """`key` with every renamed part replaced."""
    found: Key = ()
    for part in key[:DEPTH]:
        found = rename((*found, part))
    return (*found, *key[DEPTH:])


def note(place: str, old: Key, new: Key) -> str:
    return f"{place}: {'.'.join(old)} is now {'.'.join(new)}; hwopt {REMOVED_IN} removes the old name"


def renamed(document: Document, rename: Rename) -> Document:
    """`document` with present names only, and a note for each old one. Raises InputError if a table has both names."""
    notes: list[str] = []

    def walk(table: Mapping[str, Any], above: Key, given_above: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word, value in table.items():
            old, given = (*above, word), (*given_above, word)
            new = rename(old)
            if new != old:
                place = document.place(given)
                if new[-1] in table:
                    raise InputError(f"{place}: {'.'.join(old)} is the old name of {'.'.join(new)}; give only the new one")
                notes.append(note(place, old, new))
            found[new[-1]] = walk(value, new, given) if isinstance(value, dict) and len(new) < DEPTH else value
        return found

    data = walk(document.data, (), ())
    if not notes:
        return document
    lines = {present(key, rename): line for key, line in document.lines.items()}
    places = {present(key, rename): place for key, place in document.places.items()}
    return replace(document, data=data, lines=lines, places=places, notes=(*document.notes, *notes))


def with_assignments(document: Document, assignments: Sequence[str], tables: Sequence[str], rename: Rename) -> Document:
    """`document` with the `--set` texts whose first key is in `tables`. Old names are accepted in both."""
    document = renamed(document, rename)
    changes, notes = [], list(document.notes)
    for text in assignments:
        old, value = parse_assignment(text)
        if old[0] in tables:
            new = present(old, rename)
            if new != old:
                notes.append(note("--set", old, new))
            changes.append((new, value))
    return renamed(replace(override(document, changes), notes=tuple(notes)), rename)  # once more: a value may be a table
