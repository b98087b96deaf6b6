"""The profile that `hwopt tune` writes: it extends the one that was tuned, with what was measured in comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from hwopt.config.profile import Profile
from hwopt.config.toml import parse_assignment
from hwopt.config.toml_text import inline, plain, profile_name, text_of
from hwopt.errors import InputError
from hwopt.system.paths import OR_FORCE, refuse_output


@dataclass(frozen=True)
class Parent:
    """The profile that is tuned."""

    name: str | None  # what `extends` calls it; None for a profile without a file, whose tables are copied
    file: Path | None  # its file, if it is not an installed profile: `extends` finds it only beside
    profile: Profile

    @classmethod
    def of(cls, spec: str, profile: Profile, files: Mapping[str, Path]) -> Parent:
        """The profile that the user called `spec`; `files` are the installed ones."""
        if spec.endswith(".toml") or "/" in spec or "\\" in spec:
            path = Path(spec)
            return cls(path.stem, None if files.get(path.stem) == path else path, profile)
        return cls(profile.name if profile.name in files else None, None, profile)

    @property
    def label(self) -> str:
        return self.name or self.profile.name


def output_file(given: Path | None, parent: Parent, job: Path | None, force: bool) -> Path:
    """The file to write: `given`, else a new one beside the job (or beside a parent that is a file).

    Raises InputError if it exists and `force` is not set, or if it could not find its parent; else as `refuse_output` does.
    """
    if given is None:
        beside = parent.file or job
        stem = (beside.parent if beside else Path()) / f"{parent.label}_tuned"
        names = (f"{stem}{more}.toml" for more in ("", *(f"-{number}" for number in range(2, 1_000))))
        given = next(path for path in map(Path, names) if not path.exists())
    if given.suffix != ".toml":
        raise InputError(f"--output {given}: a profile ends with .toml: {given.name}.toml")
    refuse_output(given, "--output", "" if force else OR_FORCE, [parent.file, job or Path("job.toml")])
    if parent.file is not None:
        folder = parent.file.parent
        if given.parent.resolve() != folder.resolve():
            raise InputError(f"--output {given}: extends = {parent.name!r} needs both files in one folder; write into {folder}")
    return given


@dataclass(frozen=True)
class Tuned:
    """What a search found, for the comments of the profile."""

    tables: Mapping[str, Mapping[str, Any]]  # plugin -> the options that the best setting changes
    gains: Mapping[str, str]  # plugin -> what the trials say of its options
    header: Sequence[str]
    skipped: frozenset[str] = frozenset()
    """Plugins that the plan skips; a copied parent loses them: the copy would ask for them by name (`Context.chosen`)."""


def tuned_profile_text(path: Path, parent: Parent, tuned: Tuned, assignments: Sequence[str]) -> str:
    """The text of the profile for the file `path`. `assignments`: those of `--set` with which everything was measured."""
    document = tomlkit.document()
    for line in tuned.header:
        document.add(tomlkit.comment(plain(line)))
    document.add(tomlkit.nl())
    document.add("name", tomlkit.item(profile_name(path)))
    document.add("summary", tomlkit.item(f"{parent.label}, tuned by hwopt tune"))
    own = {} if parent.name else parent.profile.document.data
    if parent.name:
        document.add("extends", tomlkit.item(parent.name))
    for key in ("card", "tuned_for", "data", "training"):
        if isinstance(own.get(key), Mapping):
            document.add(tomlkit.nl())
            document.add(key, toml_table(own[key]))
    plugins = tomlkit.table(is_super_table=True)
    kept = {name: table for name, table in own.get("plugins", {}).items() if name not in tuned.skipped}
    for name, (table, comment) in plugin_tables(kept, tuned, assignments).items():
        plugins.add(name, toml_table(table, comment))
    document.add(tomlkit.nl())
    document.add("plugins", plugins)
    return text_of(document)


def plugin_tables(
    own: Mapping[str, Mapping[str, Any]], tuned: Tuned, assignments: Sequence[str]
) -> dict[str, tuple[dict[str, Any], str]]:
    """Plugin -> (its options, a comment): those of a copied parent, of `--set`, and of the best setting."""
    found: dict[str, tuple[dict[str, Any], str]] = {name: (dict(table), "") for name, table in own.items()}
    for key, value in map(parse_assignment, assignments):
        if key[0] == "plugins" and len(key) == 3:
            found.setdefault(key[1], ({}, "--set of the command"))[0][key[2]] = value
    for name, changed in tuned.tables.items():
        table = found.get(name, ({}, ""))[0]
        if "gradient_accumulation_steps" in changed:
            table.pop("effective", None)
        found[name] = (table | dict(changed), tuned.gains.get(name, ""))
    return found


def toml_table(values: Mapping[str, Any], comment: str = "") -> Table:
    table = tomlkit.table()
    if comment:
        table.add(tomlkit.comment(plain(comment)))
    for key, value in values.items():
        table.add(key, inline(value))
    return table


def job_assignments(assignments: Sequence[str]) -> list[str]:
    """Those of `assignments` that belong to the job, and not to the profile."""
    return [text for text in assignments if not re.match(r"\s*plugins\s*\.", text)]
