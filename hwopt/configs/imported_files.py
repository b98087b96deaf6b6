"""The profile.toml and job.toml of an imported configuration, with its comments, and the list of what they do not hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from hwopt.config.card import Card
from hwopt.config.job import make_job
from hwopt.config.toml import parse_assignment, parse_toml
from hwopt.config.toml_text import inline, plain, profile_name, text_of
from hwopt.configs.recognise import read_view
from hwopt.configs.translation import Left, Taken, Translation, translate
from hwopt.configs.view import TOOL_NAMES, View
from hwopt.errors import InputError, StorageError
from hwopt.planning.inputs import Inputs
from hwopt.system.paths import path_kind
from hwopt.text import cut, truncate

BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
}
NO_MODEL = 'The file names no model. This is BERT-base with random weights, to plan with: give name = "…" before a run'
NO_DATA = "The file names no data: give a file or a hub name before a run"
JOB_TABLES = ("model", "task", "data", "training")


@dataclass(frozen=True)
class Imported:
    """The texts of both files, and what they do not hold."""

    profile: str
    job: str
    translation: Translation
    missing: tuple[str, ...]
    """Keys of the job that the file does not give and that were filled with a placeholder."""

    def summary(self, folder: Path) -> list[tuple[str, list[str]]]:
        """Titles with lines: what was written, what is to be filled in, what changes, and what has no equivalent."""
        view, left = self.translation.view, self.translation.left
        job, profile = folder / "job.toml", folder / "profile.toml"
        keys = "1 setting" if len(self.translation.taken) == 1 else f"{len(self.translation.taken)} settings"
        notes = [f"{each.setting.place}: {each.setting.key}: {each.note}" for each in self.translation.taken if each.note]
        return [
            (f"{view.name}: {TOOL_NAMES[view.tool]} (by {view.recognised_by})", [f"{keys} in {profile} and {job}"]),
            ("fill in before a run:", [f"{job}: {key}: the file does not say it" for key in self.missing]),
            ("changes:", notes),
            ("without an equivalent in hwopt:", [described(each) for each in left if each.kind == "no equivalent"]),
            ("left out on purpose:", [described(each) for each in left if each.kind == "ignored"]),
            ("next:", [f"hwopt check {profile}", f"hwopt plan {job} --profile {profile}"]),
        ]


def shown(value: Any, limit: int) -> str:
    """`value` as JSON, on one line of at most `limit` characters."""
    return cut(json.dumps(value, ensure_ascii=False, default=str), limit)


def described(left: Left) -> str:
    return f"{left.place}: {left.key} = {shown(left.value, 40)}: {left.reason}"


def import_file(
    path: Path,
    inputs: Inputs,
    name: str | None = None,
    card: tuple[str, Card] | None = None,
    assignments: Sequence[str] = (),
) -> Imported:
    """The files for the configuration at `path`. Raises InputError if it is of no other tool or cannot be read."""
    view = read_view(path, inputs)
    if view.is_hwopt:
        raise InputError(f"{path}: is a {TOOL_NAMES[view.tool]} already; `hwopt check {path}` checks it")
    return imported(translate(view, inputs.registry), name or profile_name(path), card, assignments)


def imported(
    translation: Translation, name: str, card: tuple[str, Card] | None = None, assignments: Sequence[str] = ()
) -> Imported:
    """The files for a translation. `card`: the card's facts for the profile, and the profile that they come from.

    `assignments`: keys of the job as for `--set`, instead of those of the file. Raises InputError if the job is not valid with
    them.
    """
    job, missing = job_text(translation, assignments)
    make_job(parse_toml(job.encode(), "the new job.toml"))
    return Imported(profile_text(translation, name, card), job, translation, missing)


def write_imported(files: Imported, folder: Path) -> None:
    """Write profile.toml and job.toml to `folder`. Raises InputError if one exists, StorageError if they cannot be written."""
    paths = {folder / "profile.toml": files.profile, folder / "job.toml": files.job}
    if path_kind(folder, "-o") not in ("folder", "missing"):
        raise InputError(f"-o {folder}: is not a folder; give another name")
    if taken := [str(path) for path in paths if path_kind(path, "-o") != "missing"]:
        raise InputError(f"{' and '.join(taken)}: exists; hwopt import overwrites no file. Give another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise StorageError(f"{folder}: the files could not be written: {error.strerror or error}") from error


def profile_text(translation: Translation, name: str, card: tuple[str, Card] | None) -> str:
    document = tomlkit.document()
    header(document, translation.view, "Profile")
    document.add("name", tomlkit.item(name))
    document.add("summary", tomlkit.item(f"imported from {Path(translation.view.name).name}"))
    if card is not None:
        source, facts = card
        table = tomlkit.table()
        table.comment(f"the figures of profile {source}")
        for key, value in facts.model_dump(exclude_none=True, exclude_unset=True).items():
            table.add(key, inline(value))
        document.add(tomlkit.nl())
        document.add("card", table)
    plugins: dict[str, list[Taken]] = {}
    for taken in translation.tables("profile").values():
        plugins.setdefault(taken.key[1], []).append(taken)
    parent = tomlkit.table(is_super_table=True)
    for plugin, options in plugins.items():
        parent.add(plugin, table_of(options))
    if plugins:
        document.add(tomlkit.nl())
        document.add("plugins", parent)
    return text_of(document) + remainder(translation.left)


def job_text(translation: Translation, assignments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The text of the job, and the keys that have a placeholder."""
    given: dict[str, list[Taken]] = {}
    for taken in translation.tables("job").values():
        given.setdefault(taken.key[0], []).append(taken)
    chosen: dict[str, dict[str, Any]] = {}
    for path, value in map(parse_assignment, assignments):
        if path[0] not in JOB_TABLES or len(path) != 2:
            raise InputError(f"--set {truncate('.'.join(path))}: expected a key of a job, such as model.name or data.train")
        chosen.setdefault(path[0], {})[path[1]] = value
    document = tomlkit.document()
    header(document, translation.view, "Job")
    missing = []
    for name in JOB_TABLES:
        table = table_of([each for each in given.get(name, []) if each.key[1] not in chosen.get(name, {})])
        for key, value in chosen.get(name, {}).items():
            table.add(key, inline(value))
        if name == "model" and not {"name", "config"} & table.keys():
            missing.append("model.name")
            table.add(tomlkit.comment(NO_MODEL))
            table.add("config", inline(BERT_BASE))
        if name == "data" and "train" not in table:
            missing.append("data.train")
            table.add(tomlkit.comment(NO_DATA))
            table.add("train", tomlkit.item("train.csv"))
        if table:
            document.add(tomlkit.nl())
            document.add(name, table)
    return text_of(document), tuple(missing)


def header(document: tomlkit.TOMLDocument, view: View, what: str) -> None:
    document.add(tomlkit.comment(f"{what} of {Path(view.name).name} ({TOOL_NAMES[view.tool]}), by hwopt import."))
    for line in view.loose if what == "Profile" else ():
        document.add(tomlkit.comment(plain(line)))


def table_of(options: Iterable[Taken]) -> Table:
    """A table with the keys of `options` and the comments that they had."""
    table = tomlkit.table()
    for taken in options:
        setting, key = taken.setting, taken.key[-1]
        for line in setting.above:
            table.add(tomlkit.comment(plain(line)))
        if taken.note:
            table.add(tomlkit.comment(f"{setting.place}: {taken.note}"))
        value = inline(taken.value)
        if setting.comment:
            value.comment(plain(setting.comment))
        table.add(key, value)
        for line in setting.below:
            table.add(tomlkit.comment(plain(line)))
    return table


def remainder(left: Sequence[Left]) -> str:
    """The keys that no file holds, with their comments and the reasons, as comments."""
    titles = {"no equivalent": "Without an equivalent in hwopt:", "ignored": "Left out on purpose:"}
    lines: list[str] = []
    for kind, title in titles.items():
        if found := [each for each in left if each.kind == kind]:
            lines += ["", f"# {title}"]
            for each in found:
                lines += [f"#   # {plain(comment)}" for comment in each.comments]
                lines.append(f"#   {plain(each.key)}: {plain(shown(each.value, 100))}: {plain(each.reason)}")
    return "\n".join([*lines, ""]) if lines else ""
