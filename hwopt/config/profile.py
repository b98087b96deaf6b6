"""Profile: facts about one card, and the plugins chosen for it with their options, in order. TOML, never code.

A profile may extend one parent: options merge per key, lists replace, an inherited table keeps its place, new ones go last,
and `enabled = false` removes one. Every value keeps the file and line that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from hwopt.config.card import Card, Positive, longest_match
from hwopt.config.job_training import Training
from hwopt.config.job_values import Table
from hwopt.config.toml import Document, Key, read_toml, with_assignments
from hwopt.config.validation import validate
from hwopt.errors import InputError, Problems
from hwopt.hardware.device import Hardware
from hwopt.system.paths import path_kind
from hwopt.text import nearest, truncate

MergeOptions = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""(plugin, table of the parent, table of the child or of --set) -> the merged table."""


def update_options(plugin: str, base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The table `base` with the values of `override`: how tables merge unless a plugin declares otherwise."""
    return {**base, **override}


class TunedFor(Table):
    """The model and length for which the batch sizes were chosen."""

    parameters: Positive | None = None
    max_length: int | None = Field(default=None, ge=2)
    config: dict[str, Any] = Field(default_factory=dict)
    """The model, as `model.config` of a job; empty if the source names none and no plan was made."""
    task: str = "text-classification"


class DataDefaults(Table):
    max_length: int | None = Field(default=None, ge=2)


class Content(Table):
    """One profile with its parents merged in."""

    name: str = Field(max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    summary: str = ""
    extends: str | None = None
    card: Card = Card()
    tuned_for: TunedFor = TunedFor()
    data: DataDefaults = DataDefaults()
    training: Training = Training()
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """A profile and the document that it was made from, parents merged in."""

    content: Content
    document: Document
    chosen: frozenset[str] = frozenset()  # the plugins that the user named: in a profile of their own, in the job or with `--set`

    @property
    def name(self) -> str:
        return self.content.name

    @property
    def card(self) -> Card:
        return self.content.card

    def card_of(self, hardware: Hardware) -> Card | None:
        """The card, or the variant of it, that `hardware` has; None for a CPU and for another card."""
        if hardware.device_type != "cuda":
            return None
        if (variant := self.card.variant_named(hardware.name)) is not None:
            return variant
        named = longest_match(self.card.match or (self.name,), hardware.name)
        return self.card if named and self.card.same_memory(hardware) else None

    def plugin_tables(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The enabled plugins with their options, in order."""
        for name, table in self.content.plugins.items():
            if table.get("enabled", True):
                yield name, {key: value for key, value in table.items() if key != "enabled"}

    def place(self, *key: str) -> str:
        return self.document.place(key)


def load_profile(
    spec: str,
    files: Mapping[str, Path],
    assignments: Sequence[str] = (),
    merge: MergeOptions = update_options,
    read: Callable[[Path], Document] = read_toml,
    job_plugins: Document | None = None,
) -> Profile:
    """The profile called `spec`, or the file at the path `spec`, with its parents and what `make_profile` adds.

    Raises InputError if no such profile exists, a parent is missing or extends itself, or the file has problems.
    """
    chain = [*_with_parents(_find(spec, files), files, read)]
    document = chain[-1][1]
    for _, child in reversed(chain[:-1]):
        document = replace(merged_over(document, child, merge), name=child.name, lines=child.lines)
    if {"model", "data"} <= document.data.keys():
        raise InputError(f"--profile {spec}: this is a job; hwopt run {spec} --profile NAME trains it with a profile")
    installed = {path.resolve() for path in files.values()}
    own = (each.data.get("plugins") for path, each in chain if path.resolve() not in installed)
    chosen = [name for tables in own if isinstance(tables, dict) for name in tables]
    return make_profile(document, assignments, merge, job_plugins, chosen)


def merged_over(parent: Document, child: Document, merge: MergeOptions) -> Document:
    """`parent` with the tables and keys of `child` on top. Each key keeps the place that it came from."""
    places = {key: parent.place(key) for key in _keys(parent.data)} | {key: child.place(key) for key in _keys(child.data)}
    merged = replace(parent, data=_merge(parent.data, child.data), places=places)
    return _settled(parent, merged, child.data.get("plugins"), merge)


def make_profile(
    document: Document,
    assignments: Sequence[str] = (),
    merge: MergeOptions = update_options,
    job_plugins: Document | None = None,
    chosen: Iterable[str] = (),
) -> Profile:
    """The profile of `document`, checked, with the plugin tables of a job and then `--set plugins.…` on top.

    `chosen`: the plugins that profiles of the user's own name.
    """
    if job_plugins is not None:
        document = merged_over(document, job_plugins, merge)
    base = document
    document = with_assignments(document, assignments, ("plugins",))
    document = _settled(base, document, _set_options(document), merge)
    problems = Problems()
    content = validate(Content, document, problems=problems)
    tables = document.data.get("plugins")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        if isinstance(table, dict) and not isinstance(table.get("enabled", True), bool):
            where = document.place(("plugins", name, "enabled"))
            problems.add(f"{where}: plugins.{name}.enabled: expected true or false, got {truncate(table['enabled'])}")
    problems.raise_if_any()
    assert content is not None
    in_job = job_plugins.data["plugins"] if job_plugins else {}
    in_set = {key[1] for key, place in document.places.items() if key[0] == "plugins" and key[1:] and place == "--set"}
    return Profile(content, document, frozenset({*chosen, *in_job, *in_set}))


def _find(spec: str, files: Mapping[str, Path]) -> Path:
    path = Path(spec := str(spec))  # scripts give a Path too
    if spec.endswith(".toml") or "/" in spec or "\\" in spec:
        if (kind := path_kind(path, "--profile")) != "file":
            problem = "no such file" if kind == "missing" else "not a regular file; give a TOML file"
            raise InputError(f"--profile {spec}: {problem}")
        return path
    if spec not in files:
        near = nearest(re.sub(r"\W", "", spec).lower(), sorted([*files, "auto"]))  # for example "RTX 3070"
        what = f"--profile {truncate(spec)}: no such profile.{near}"
        raise InputError(f"{what} `hwopt profiles` lists them; the name of a file ends with .toml")
    return files[spec]


def _with_parents(path: Path, files: Mapping[str, Path], read: Callable[[Path], Document]) -> Iterator[tuple[Path, Document]]:
    """The file at `path` and those that it extends, with their documents."""
    children: list[Path] = []
    while True:
        document = read(path)
        yield path, document
        children.append(path)
        if (name := document.data.get("extends")) is None:
            return
        where = document.place(("extends",))
        if not isinstance(name, str):
            raise InputError(f"{where}: extends: expected the name of one profile, got {truncate(name)}")
        beside = path.parent / f"{name}.toml"
        if name not in files and path_kind(beside, f"{where}: extends:") != "file":
            raise InputError(f"{where}: extends: no such profile {truncate(name)}.{nearest(name, files)}")
        path = files.get(name, beside)
        if path in children:
            raise InputError(f"{where}: extends: {name!r} extends itself in a circle")


def _set_options(document: Document) -> dict[str, dict[str, Any]]:
    """Plugin -> the options that `--set` gives; without plugins whose whole table it gives."""
    found: dict[str, dict[str, Any]] = {}
    for key, place in document.places.items():
        if len(key) == 3 and key[0] == "plugins" and place == "--set" and document.places.get(key[:2]) != "--set":
            found.setdefault(key[1], {})[key[2]] = document.data["plugins"][key[1]][key[2]]
    return found


def _settled(base: Document, merged: Document, override: Any, merge: MergeOptions) -> Document:
    """`merged`, in which each plugin has merged its table `override` with the one `base`, if both have it."""
    lower = base.data.get("plugins")
    if not (isinstance(lower, dict) and isinstance(override, dict)):
        return merged
    plugins, places = dict(merged.data["plugins"]), dict(merged.places)
    for name in plugins:
        if isinstance(lower.get(name), dict) and isinstance(override.get(name), dict):
            table = merge(name, lower[name], override[name])
            for key in table:
                if key not in plugins[name] or plugins[name][key] != table[key]:
                    places["plugins", name, key] = f"kept ({base.place(('plugins', name))})"
            plugins[name] = table
    return replace(merged, data=merged.data | {"plugins": plugins}, places=places)


def _merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _keys(data: Mapping[str, Any], above: Key = ()) -> Iterator[Key]:
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _keys(value, (*above, key))
