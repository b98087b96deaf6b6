"""The profile.toml and job.toml of an imported configuration, with its comments, and the list of what they do not hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from hwopt.config.card import Card
from hwopt.config.job import make_job
from hwopt.config.toml import parse_assignment, parse_toml
from hwopt.config.toml_text import inline, plain, profile_name, text_of
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.translation import Taken, Translation, translate
from hwopt.configs.view import TOOL_NAMES, ConfigSetting
from hwopt.errors import InputError
from hwopt.planning.inputs import Inputs
from hwopt.system.paths import path_kind, write_text, writing
from hwopt.text import counted, cut, truncate

NO_MODEL = 'The file names no model. This is BERT-base with random weights, to plan with: give name = "…" before a run'
NO_DATA = "The file names no data: give a file or a hub name before a run"
OTHER_METHOD = "trains preferences or rewards; the job is supervised training. Keep your trainer, with hwopt.optimized"
JOB_TABLES = ("model", "task", "data", "training")


@dataclass(frozen=True)
class Imported:
    """The texts of both files, and what they do not hold."""

    profile: str
    job: str
    translation: Translation
    missing: tuple[str, ...]
    """Keys of the job that have a placeholder."""

    def summary(self, folder: Path) -> Iterator[tuple[str, list[str]]]:
        """Titles with lines: what was written, what is to be filled in, what changes, and what has no equivalent."""
        view, taken = self.translation.view, self.translation.taken
        job, profile = folder / "job.toml", folder / "profile.toml"
        keys = counted(len(taken), "setting")
        yield f"{view.source.name}: {TOOL_NAMES[view.tool]} (by {view.recognised_by})", [f"{keys} in {profile} and {job}"]
        yield "fill in before a run:", [f"{job}: {key}: the file does not say it" for key in self.missing]
        changes = [f"{each.setting.place}: {each.setting.key}: {each.note}" for each in taken if each.note]
        yield "changes:", [f"{view.preferences}: {OTHER_METHOD}"] * bool(view.preferences) + changes
        for title, left in self.translation.lists():
            yield title[0].lower() + title[1:], [f"{each.place}: {described(each, 40)}" for each in left]
        yield "next:", [f"hwopt check {profile}", f"hwopt plan {job} --profile {profile}"]


def described(left: ConfigSetting, limit: int) -> str:
    """The key, the value as JSON of at most `limit` characters, and the reason."""
    return f"{left.key} = {cut(json.dumps(left.value, ensure_ascii=False, default=str), limit)}: {left.reason}"


def import_file(
    path: Path, inputs: Inputs, name: str | None = None, card: tuple[str, Card] | None = None, assignments: Sequence[str] = ()
) -> Imported:
    """The files for the configuration at `path`. `card`: a card for the profile, and the profile that it comes from.

    `assignments`: keys of the job as for `--set`, instead of those of the file. Raises InputError if the file is of no other
    tool or cannot be read, or if the job is not valid.
    """
    view = view_of(read_source(path), inputs)
    if view.is_hwopt:
        raise InputError(f"{path}: is a {TOOL_NAMES[view.tool]} already; `hwopt check {path}` checks it")
    kind = next((value for path, value in map(parse_assignment, assignments) if path == ("task", "kind")), None)
    translation = translate(view, inputs.registry, kind)
    job, missing = job_text(translation, assignments)
    make_job(parse_toml(job.encode(), "the new job.toml"))
    return Imported(profile_text(translation, name or profile_name(path), card), job, translation, missing)


def write_imported(files: Imported, folder: Path) -> None:
    """Write profile.toml and job.toml to `folder`. Raises InputError if one exists, StorageError if they cannot be written."""
    paths = {folder / "profile.toml": files.profile, folder / "job.toml": files.job}
    if path_kind(folder, "-o") not in ("folder", "missing"):
        raise InputError(f"-o {folder}: is not a folder; give another name")
    if taken := [path.name for path in paths if path_kind(path, "-o") != "missing"]:
        raise InputError(
            f"{' and '.join(taken)}: exist{'s' * (len(taken) == 1)}; hwopt import overwrites no file. Give another folder with -o"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            write_text(path, text)


def profile_text(translation: Translation, name: str, card: tuple[str, Card] | None) -> str:
    document = new_document(translation, "Profile", translation.view.source.loose)
    document.add("name", tomlkit.item(name))
    document.add("summary", tomlkit.item(f"imported from {Path(translation.view.source.name).name}"))
    if card is not None:
        table = tomlkit.table()
        table.comment(f"the figures of profile {card[0]}")
        table.update({key: inline(value) for key, value in card[1].model_dump(exclude_none=True, exclude_unset=True).items()})
        document.add(tomlkit.nl())
        document.add("card", table)
    plugins = tomlkit.table(is_super_table=True)
    for plugin, options in groupby(translation.tables("profile").values(), lambda each: each.key[1]):
        plugins.add(plugin, table_of(options))
    if plugins:
        document.add(tomlkit.nl())
        document.add("plugins", plugins)
    lines = []
    for title, left in translation.lists():
        lines += ["", f"# {title}"] if left else []
        for each in left:
            lines += [f"#   # {plain(comment)}" for comment in each.comments]
            lines.append(f"#   {plain(described(each, 100))}")
    return text_of(document) + "".join(f"{line}\n" for line in lines)


def job_text(translation: Translation, assignments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The text of the job, and the keys that have a placeholder."""
    chosen: dict[str, dict[str, Any]] = {table: {} for table in JOB_TABLES}
    for path, value in map(parse_assignment, assignments):
        if path[0] not in JOB_TABLES or len(path) != 2:
            raise InputError(f"--set {truncate('.'.join(path))}: expected a key of a job, such as model.name or data.train")
        chosen[path[0]][path[1]] = value
    given = translation.tables("job").values()
    document, missing = new_document(translation, "Job"), []
    for name in JOB_TABLES:
        table = table_of(each for each in given if each.key[0] == name and each.key[1] not in chosen[name])
        table.update({key: inline(value) for key, value in chosen[name].items()})
        if name == "model" and not {"name", "config"} & table.keys():
            missing.append("model.name")
            table.add(tomlkit.comment(NO_MODEL))
            table.add("config", inline({"model_type": "bert"}))  # the defaults of BertConfig are BERT-base
        if name == "data" and "train" not in table:
            missing.append("data.train")
            table.add(tomlkit.comment(NO_DATA))
            table.add("train", tomlkit.item("train.csv"))
        if table:
            document.add(tomlkit.nl())
            document.add(name, table)
    return text_of(document), tuple(missing)


def new_document(translation: Translation, what: str, comments: Iterable[str] = ()) -> tomlkit.TOMLDocument:
    document, view = tomlkit.document(), translation.view
    for line in (f"{what} of {Path(view.source.name).name} ({TOOL_NAMES[view.tool]}), by hwopt import.", *comments):
        document.add(tomlkit.comment(plain(line)))
    return document


def table_of(options: Iterable[Taken]) -> Table:
    table = tomlkit.table()
    for taken in options:
        setting, value = taken.setting, inline(taken.value)
        for line in (*setting.above, *([f"{setting.place}: {taken.note}"] if taken.note else [])):
            table.add(tomlkit.comment(plain(line)))
        if setting.comment:
            value.comment(plain(setting.comment))
        table.add(taken.key[-1], value)
        for line in setting.below:
            table.add(tomlkit.comment(plain(line)))
    return table
